#define _GNU_SOURCE /* memmem */

/* Replacements for entries of the PJRT function table; see plugin.py.

   They are C because torch_tpu calls them from its own threads while a Python thread may hold the
   interpreter lock and wait for those threads: a callback into Python would deadlock.  Layouts of PJRT's
   structs come from Python as byte offsets, so that no header is needed. */

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef void *(*function)(void *args); /* every PJRT function: arguments struct to error, or NULL */

#define ALIGNMENT 64
#define MAX_OUTPUTS 65536
#define NAME_PREFIX "tt_jit_" /* of every module that torch_tpu builds */
#define NAME_LENGTH 96
#define NAMES_KEPT 32

struct configuration {
  function client_create, addressable_devices, compile, num_outputs; /* the plugin's own */
  void *create_option;       /* PJRT_NamedValue that replaces the caller's options */
  int64_t rank;              /* device that this process owns */
  size_t create_options, create_num_options;
  size_t addressable_list, addressable_count;
  size_t num_outputs_size, num_outputs_executable, num_outputs_result;
  size_t kinds_executable, kinds_count, kinds_names, kinds_sizes;
  size_t compile_program, program_code, program_code_size;
};

static struct configuration config;
static const char *kind_names[MAX_OUTPUTS];
static size_t kind_sizes[MAX_OUTPUTS];

atomic_long compilations;
char program_names[NAMES_KEPT][NAME_LENGTH]; /* of compilation n at n % NAMES_KEPT */

#define FIELD(type, args, offset) (*(type *)((char *)(args) + (offset)))

void configure(const struct configuration *given) {
  config = *given;
  for (size_t i = 0; i < MAX_OUTPUTS; i++) {
    kind_names[i] = "device";
    kind_sizes[i] = sizeof("device") - 1;
  }
}

void *client_create(void *args) {
  FIELD(void *, args, config.create_options) = config.create_option;
  FIELD(size_t, args, config.create_num_options) = 1;
  return config.client_create(args);
}

void *addressable_devices(void *args) {
  void *error = config.addressable_devices(args);
  if (error != NULL) return error;
  FIELD(void **, args, config.addressable_list) += config.rank;
  FIELD(size_t, args, config.addressable_count) = 1;
  return NULL;
}

/* The name of a module in MLIR text or bytecode; empty if it has none that we know. */
static void copy_name(char *name, const char *code, size_t size) {
  const char *found = memmem(code, size, NAME_PREFIX, sizeof(NAME_PREFIX) - 1);
  size_t length = 0;
  if (found != NULL) {
    found += sizeof(NAME_PREFIX) - 1;
    while (found + length < code + size && length < NAME_LENGTH - 1 && found[length] > ' ') length++;
    memcpy(name, found, length);
  }
  name[length] = 0;
}

void *compile(void *args) {
  void *program = FIELD(void *, args, config.compile_program);
  copy_name(program_names[atomic_fetch_add(&compilations, 1) % NAMES_KEPT],
            FIELD(const char *, program, config.program_code),
            FIELD(size_t, program, config.program_code_size));
  return config.compile(args);
}

void *output_memory_kinds(void *args) {
  char query[256] = {0};
  FIELD(size_t, query, 0) = config.num_outputs_size;
  FIELD(void *, query, config.num_outputs_executable) = FIELD(void *, args, config.kinds_executable);
  void *error = config.num_outputs(query);
  if (error != NULL) return error;
  size_t count = FIELD(size_t, query, config.num_outputs_result);
  if (count > MAX_OUTPUTS) abort();
  FIELD(size_t, args, config.kinds_count) = count;
  FIELD(const char **, args, config.kinds_names) = kind_names;
  FIELD(size_t *, args, config.kinds_sizes) = kind_sizes;
  return NULL;
}

/* Every *_count query of the TpuTopology extension: {size_t struct_size; void *topology; int32_t result}. */
void *topology_count(void *args) {
  FIELD(int32_t, args, 16) = 1;
  return NULL;
}

/* HostMemoryAllocator extension: XLA's host_memory_allocator_extension.h, version 0. */
struct host_allocation {
  size_t struct_size;
  void *extension_start, *client;
  size_t size;
  int numa_node;
  void *pointer;                             /* result */
  void (*deleter)(void *pointer, void *arg); /* result */
  void *deleter_arg;                         /* result */
};

static void host_free(void *pointer, void *arg) {
  (void)arg;
  free(pointer);
}

void *host_allocate(void *args) {
  struct host_allocation *request = args;
  size_t size = (request->size + ALIGNMENT) / ALIGNMENT * ALIGNMENT;
  request->pointer = aligned_alloc(ALIGNMENT, size);
  request->deleter = host_free;
  request->deleter_arg = NULL;
  return NULL;
}
