"""XLA's CPU plugin, completed so that torch_tpu accepts it as a TPU.

torch_tpu reaches the chip only through the PJRT C API: a table of function pointers that the library at
TPU_LIBRARY_PATH hands out.  This module loads the CPU plugin and edits that table in place before
torch_tpu reads it:

* PJRT_Client_Create: drops TPU-only options, asks for `slice_size` CPU devices;
* PJRT_Client_AddressableDevices: this process owns the device numbered `rank`;
* PJRT_Client_Compile: counts compilations;
* PJRT_Executable_OutputMemoryKinds: missing in the plugin, asked by torch.compile's runner;
* the TpuTopology extension: missing, asked by `jax_op` for the number of chips.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recsys_tpu.emulation import requirements
from recsys_tpu.emulation.errors import EmulationError

_Callback = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_MAX_OUTPUTS = 65536
_TOPOLOGY_COUNT_OFFSET = 16  # every *_count query is {size_t struct_size; void* topology; int32_t out}


def library_path() -> Path:
    """Where the installed plugin's shared library is."""
    import lammps_jax_pjrt_cpu

    return Path(lammps_jax_pjrt_cpu.PLUGIN_PATH)


class Plugin:
    """The plugin's function table, edited.  Keep a reference: the table calls back into it."""

    def __init__(self, path: Path, *, rank: int, slice_size: int) -> None:
        """
        Args:
            path: the plugin's shared library.
            rank: which device of the slice this process owns.
            slice_size: devices in the slice that torch_tpu is shown.

        Raises:
            EmulationError: the library has no PJRT API, or one of an unknown version.
        """
        from pypjrt._abi import pjrt_0_114 as abi

        self.compilations = 0
        self._abi = abi
        self._rank = rank
        self._keep: list[Any] = []
        self._api = self._load(path)
        self._install_client_create(slice_size)
        self._install_addressable_devices()
        self._install_compile()
        self._install_output_memory_kinds()
        self._install_topology_extension()

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

    def _original(self, name: str) -> Callable[[int], int | None]:
        """The plugin's own function of that slot, taken before it is replaced."""
        function = _Callback(getattr(self._api, name))
        self._keep.append(function)
        return function

    def _install(self, struct: ctypes.Structure, slot: str, function: Callable[[int], int | None]) -> None:
        callback = _Callback(function)
        self._keep.append(callback)
        setattr(struct, slot, ctypes.cast(callback, ctypes.c_void_p).value)

    def _view(self, struct: type, address: int) -> Any:
        return ctypes.cast(address, ctypes.POINTER(struct)).contents

    def _install_client_create(self, slice_size: int) -> None:
        option = self._abi.PJRT_NamedValue()
        name = ctypes.create_string_buffer(b"cpu_device_count")
        option.struct_size = ctypes.sizeof(option)
        option.name, option.name_size = ctypes.addressof(name), len(name.value)
        option.type, option.value_size = self._abi.PJRT_NamedValue_kInt64, 1
        option.int64_value = slice_size
        self._keep += [option, name]
        original = self._original("PJRT_Client_Create")

        def client_create(address: int) -> int | None:
            args = self._view(self._abi.PJRT_Client_Create_Args, address)
            args.create_options, args.num_options = ctypes.addressof(option), 1
            return original(address)

        self._install(self._api, "PJRT_Client_Create", client_create)

    def _install_addressable_devices(self) -> None:
        original = self._original("PJRT_Client_AddressableDevices")

        def addressable_devices(address: int) -> int | None:
            if error := original(address):
                return error
            args = self._view(self._abi.PJRT_Client_AddressableDevices_Args, address)
            args.addressable_devices += self._rank * ctypes.sizeof(ctypes.c_void_p)
            args.num_addressable_devices = 1
            return None

        self._install(self._api, "PJRT_Client_AddressableDevices", addressable_devices)

    def _install_compile(self) -> None:
        original = self._original("PJRT_Client_Compile")

        def compile_program(address: int) -> int | None:
            self.compilations += 1
            return original(address)

        self._install(self._api, "PJRT_Client_Compile", compile_program)

    def _install_output_memory_kinds(self) -> None:
        count_outputs = self._original("PJRT_Executable_NumOutputs")
        kind = b"device"
        kinds = (ctypes.c_char_p * _MAX_OUTPUTS)(*([kind] * _MAX_OUTPUTS))
        sizes = (ctypes.c_size_t * _MAX_OUTPUTS)(*([len(kind)] * _MAX_OUTPUTS))
        self._keep += [kinds, sizes]

        def output_memory_kinds(address: int) -> int | None:
            args = self._view(self._abi.PJRT_Executable_OutputMemoryKinds_Args, address)
            query = self._abi.PJRT_Executable_NumOutputs_Args()
            query.struct_size, query.executable = ctypes.sizeof(query), args.executable
            if error := count_outputs(ctypes.addressof(query)):
                return error
            assert query.num_outputs <= _MAX_OUTPUTS, f"a program with {query.num_outputs} outputs"
            args.num_outputs = query.num_outputs
            args.memory_kinds = ctypes.addressof(kinds)
            args.memory_kind_sizes = ctypes.addressof(sizes)
            return None

        self._install(self._api, "PJRT_Executable_OutputMemoryKinds", output_memory_kinds)

    def _install_topology_extension(self) -> None:
        """One chip with one core of every kind, whatever is asked."""
        topology = self._abi.PJRT_TpuTopology_Extension()
        topology.base.struct_size = ctypes.sizeof(topology)
        topology.base.type = self._abi.PJRT_Extension_Type_TpuTopology
        topology.base.next = self._api.extension_start

        def one(address: int) -> None:
            self._view(ctypes.c_int32, address + _TOPOLOGY_COUNT_OFFSET).value = 1

        for name, _ in self._abi.PJRT_TpuTopology_Extension._fields_[1:]:
            if "count" in name or name == "chips_per_process":
                self._install(topology, name, one)
        self._keep.append(topology)
        self._api.extension_start = ctypes.addressof(topology)
