"""The CPU's lookup and update: in C (`host.c`) for float32 tables, else, and without a compiler, plain torch.

The C parts are those that decide the time of a step with many ids a sample; what they compute is the
reference's up to the rounding of sums.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recsys_tpu.kernels import reference
from recsys_tpu.kernels.batch import LookupBatch, Optimizer
from recsys_tpu.kernels.optimizer import LEARNING_RATE, OptimizerSpec
from recsys_tpu.native import NativeBuildError, load_library

log = logging.getLogger(__name__)

_HUGE_PAGE = 2 << 20
_SOURCE = Path(__file__).with_name("host.c")
_NO_MEMORY = -2
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-std=gnu11")


@torch.compiler.disable
def pooled_lookup(weights_flat: Tensor, batch: LookupBatch, dim: int) -> Tensor:
    """See `kernels.pooled_lookup`."""
    library = _library() if _is_plain(weights_flat) else None
    if library is None:
        return reference.pooled_lookup(weights_flat, batch, dim)
    out = torch.empty(batch.num_bags, dim)
    outside = library.pooled_lookup(
        _data(weights_flat),
        ctypes.c_int64(weights_flat.numel() // dim),
        _data(batch.rows),
        _data(batch.weights),
        _data(batch.bag_offsets),
        ctypes.c_int64(batch.num_bags),
        ctypes.c_int64(dim),
        _data(out),
        torch.get_num_threads(),
    )
    _check_inside("pooled_lookup", batch.rows, outside, weights_flat.numel() // dim)
    return out


@torch.compiler.disable
def fused_update(
    weights_flat: Tensor,
    state: tuple[Tensor, ...],
    grad_output: Tensor,
    batch: LookupBatch,
    spec: OptimizerSpec,
    hyper: Tensor,
) -> None:
    """See `kernels.fused_update`."""
    library = _library() if _in_c(weights_flat, spec) else None
    if library is None:
        reference.fused_update(weights_flat, state, grad_output, batch, spec, hyper)
        return
    grad_output = grad_output.float().contiguous()
    dim = grad_output.shape[1]
    outside = library.rowwise_adagrad(
        _data(weights_flat),
        ctypes.c_int64(weights_flat.numel() // dim),
        _data(state[0]),
        _data(grad_output),
        _data(batch.unique_rows),
        _data(batch.row_offsets),
        _data(batch.sorted_bags),
        _data(batch.sorted_weights),
        ctypes.c_int64(int(batch.counts[1])),
        ctypes.c_int64(dim),
        ctypes.c_float(float(hyper[LEARNING_RATE])),
        ctypes.c_float(spec.eps),
        torch.get_num_threads(),
    )
    if outside == _NO_MEMORY:
        raise MemoryError("fused_update: no memory for one row a thread")
    _check_inside("fused_update", batch.unique_rows, outside, weights_flat.numel() // dim)


def _check_inside(operation: str, rows: Tensor, outside: int, table_rows: int) -> None:
    """As torch's own indexing: nothing outside the table is read or written, whoever checked the ids."""
    if outside >= 0:
        raise IndexError(
            f"{operation}: row {int(rows[outside])} at position {outside} is outside of a table of "
            f"{table_rows} rows"
        )


def zeros_in_huge_pages(elements: int, dtype: torch.dtype) -> Tensor:
    """Flat zeros on the CPU, in pages of 2 MB where the system has them.

    Rows of a table are read in any order: with pages of 4 KB nearly each of them costs a walk through the
    page table (seen: lookups took three times as long).
    """
    tensor = torch.empty(elements, dtype=dtype)
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - start
    if size >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):  # Linux; before the pages are first touched
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)  # advice: may be refused
    return tensor.zero_()


def _in_c(weights_flat: Tensor, spec: OptimizerSpec) -> bool:
    adagrad = spec.optimizer is Optimizer.ROWWISE_ADAGRAD
    return _is_plain(weights_flat) and adagrad and not spec.weight_decay and spec.max_norm is None


def _is_plain(weights_flat: Tensor) -> bool:
    return weights_flat.dtype is torch.float32 and weights_flat.device.type == "cpu"


def _data(tensor: Tensor | None) -> ctypes.c_void_p:
    if tensor is None:
        return ctypes.c_void_p(None)
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    return ctypes.c_void_p(tensor.data_ptr())


@functools.cache
def _library() -> Any:
    try:
        library = load_library(_SOURCE, _FLAGS, machine=_processor())
    except NativeBuildError as error:
        log.warning("lookups and updates run in plain torch, which takes longer: %s", error)
        return None
    for function in (library.pooled_lookup, library.rowwise_adagrad):
        function.restype = ctypes.c_int64
    return library


def _processor() -> str:
    """What this machine's processor can do: a home folder may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
