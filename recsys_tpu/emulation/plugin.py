"""XLA's CPU plugin, completed so that torch_tpu accepts it as a TPU.

torch_tpu reaches the chip only through the PJRT C API: a table of function pointers that the library at
TPU_LIBRARY_PATH hands out.  This module loads the CPU plugin and edits that table in place before
torch_tpu reads it.  Replaced (by functions of `shim.c`):

* PJRT_Client_Create: drops TPU-only options, asks for `slice_size` CPU devices;
* PJRT_Client_AddressableDevices: this process owns the device numbered `rank`;
* PJRT_Client_Compile: counts compilations;
* PJRT_Executable_OutputMemoryKinds: missing in the plugin, asked by torch.compile's runner;
* the TpuTopology extension: missing, asked by `jax_op` for the number of chips;
* the HostMemoryAllocator extension: missing, asked for pinned host memory (DDP's reducer does).
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from recsys_tpu.emulation import native, requirements
from recsys_tpu.emulation.errors import EmulationError


class _Configuration(ctypes.Structure):
    """`struct configuration` of shim.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("client_create", "addressable_devices")),
        *((name, ctypes.c_void_p) for name in ("compile", "num_outputs", "create_option")),
        ("rank", ctypes.c_int64),
        *((name, ctypes.c_size_t) for name in ("create_options", "create_num_options")),
        *((name, ctypes.c_size_t) for name in ("addressable_list", "addressable_count")),
        *((f"num_outputs_{name}", ctypes.c_size_t) for name in ("size", "executable", "result")),
        *((f"kinds_{name}", ctypes.c_size_t) for name in ("executable", "count", "names", "sizes")),
        *((name, ctypes.c_size_t) for name in ("compile_program", "program_code", "program_code_size")),
    )


class _HostMemoryAllocatorExtension(ctypes.Structure):
    """XLA's `host_memory_allocator_extension.h`, version 0; pypjrt has no layout of it."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
    )


def library_path() -> Path:
    """Where the installed plugin's shared library is."""
    import lammps_jax_pjrt_cpu

    return Path(lammps_jax_pjrt_cpu.PLUGIN_PATH)


_NAME_LENGTH, _NAMES_KEPT = 96, 32  # of shim.c


class Plugin:
    """The plugin's function table, edited.  Keep a reference: the table points into it."""

    def __init__(self, path: Path, *, rank: int, slice_size: int) -> None:
        """
        Args:
            path: the plugin's shared library.
            rank: which device of the slice this process owns.
            slice_size: devices in the slice that torch_tpu is shown.

        Raises:
            EmulationError: the library has no PJRT API or one of an unknown version, or the shim cannot
                be built.
        """
        from pypjrt._abi import pjrt_0_114 as abi

        self._abi = abi
        self._keep: list[Any] = []
        self._api = self._load(path)
        self._shim = native.load_shim()
        self._configure(rank, slice_size)
        self._replace(self._api, "PJRT_Client_Create", "client_create")
        self._replace(self._api, "PJRT_Client_AddressableDevices", "addressable_devices")
        self._replace(self._api, "PJRT_Client_Compile", "compile")
        self._replace(self._api, "PJRT_Executable_OutputMemoryKinds", "output_memory_kinds")
        self._add_topology_extension()
        self._add_host_memory_allocator_extension()

    @property
    def compilations(self) -> int:
        """Programs compiled so far."""
        return ctypes.c_long.in_dll(self._shim, "compilations").value

    def programs(self, since: int) -> list[str]:
        """Names of the programs compiled after the first `since`; "" for those too long ago to be known."""
        names = (ctypes.c_char * _NAME_LENGTH * _NAMES_KEPT).in_dll(self._shim, "program_names")
        last = self.compilations
        known = range(max(since, last - _NAMES_KEPT), last)
        return [""] * (known.start - since) + [names[n % _NAMES_KEPT].value.decode() for n in known]

    def _load(self, path: Path) -> Any:
        library = ctypes.CDLL(str(path))
        try:
            get_api = library.GetPjrtApi
        except AttributeError:
            raise EmulationError(f"{path} is not a PJRT plugin: it has no GetPjrtApi") from None
        get_api.restype = ctypes.POINTER(self._abi.PJRT_Api)
        api = get_api().contents
        version = api.pjrt_api_version
        found = (version.major_version, version.minor_version)
        expected = (requirements.PJRT_MAJOR, requirements.PJRT_MINOR)
        if found != expected:
            raise EmulationError(
                f"{path} speaks PJRT {found[0]}.{found[1]}; emulation is proven with "
                f"{expected[0]}.{expected[1]}. Run: {requirements.INSTALL}"
            )
        self._keep.append(library)
        return api

    def _configure(self, rank: int, slice_size: int) -> None:
        abi, api = self._abi, self._api
        create, devices = abi.PJRT_Client_Create_Args, abi.PJRT_Client_AddressableDevices_Args
        outputs, kinds = abi.PJRT_Executable_NumOutputs_Args, abi.PJRT_Executable_OutputMemoryKinds_Args
        configuration = _Configuration(
            client_create=api.PJRT_Client_Create,
            addressable_devices=api.PJRT_Client_AddressableDevices,
            compile=api.PJRT_Client_Compile,
            num_outputs=api.PJRT_Executable_NumOutputs,
            create_option=self._device_count_option(slice_size),
            rank=rank,
            create_options=create.create_options.offset,
            create_num_options=create.num_options.offset,
            addressable_list=devices.addressable_devices.offset,
            addressable_count=devices.num_addressable_devices.offset,
            num_outputs_size=ctypes.sizeof(outputs),
            num_outputs_executable=outputs.executable.offset,
            num_outputs_result=outputs.num_outputs.offset,
            kinds_executable=kinds.executable.offset,
            kinds_count=kinds.num_outputs.offset,
            kinds_names=kinds.memory_kinds.offset,
            kinds_sizes=kinds.memory_kind_sizes.offset,
            compile_program=abi.PJRT_Client_Compile_Args.program.offset,
            program_code=abi.PJRT_Program.code.offset,
            program_code_size=abi.PJRT_Program.code_size.offset,
        )
        self._shim.configure(ctypes.byref(configuration))

    def _device_count_option(self, slice_size: int) -> int:
        """Address of the one option that the client is created with."""
        option = self._abi.PJRT_NamedValue()
        name = ctypes.create_string_buffer(b"cpu_device_count")
        option.struct_size = ctypes.sizeof(option)
        option.name, option.name_size = ctypes.addressof(name), len(name.value)
        option.type, option.value_size = self._abi.PJRT_NamedValue_kInt64, 1
        option.int64_value = slice_size
        self._keep += [option, name]
        return ctypes.addressof(option)

    def _replace(self, struct: ctypes.Structure, slot: str, function: str) -> None:
        setattr(struct, slot, ctypes.cast(getattr(self._shim, function), ctypes.c_void_p).value)

    def _add_topology_extension(self) -> None:
        """One chip with one core of every kind, whatever is asked."""
        topology = self._abi.PJRT_TpuTopology_Extension()
        topology.base.struct_size = ctypes.sizeof(topology)
        topology.base.type = self._abi.PJRT_Extension_Type_TpuTopology
        topology.base.next = self._api.extension_start
        for name, _ in self._abi.PJRT_TpuTopology_Extension._fields_[1:]:
            if "count" in name or name == "chips_per_process":
                self._replace(topology, name, "topology_count")
        self._keep.append(topology)
        self._api.extension_start = ctypes.addressof(topology)

    def _add_host_memory_allocator_extension(self) -> None:
        """Host memory from the C library: for a CPU all of it is pinned."""
        extension = _HostMemoryAllocatorExtension()
        extension.struct_size = ctypes.sizeof(extension)
        extension.type = self._abi.PJRT_Extension_Type_HostMemoryAllocator
        extension.next = self._api.extension_start
        self._replace(extension, "allocate", "host_allocate")
        self._keep.append(extension)
        self._api.extension_start = ctypes.addressof(extension)
