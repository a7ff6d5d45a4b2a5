"""Memory on the chip that a program's Pallas kernels reserve, read from their traced buffers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax


def vector_memory(jaxpr: Any) -> int:
    """Bytes of vector memory of the largest kernel in a traced program, 0 without one.

    TensorCore: VMEM, blocks that the grid pipelines counted twice.  SparseCore: of one vector subcore.
    """
    return max((sum(map(_bytes, buffers)) for buffers in _kernels(jaxpr)), default=0)


def _kernels(jaxpr: Any) -> Iterator[list[tuple[Any, int]]]:
    """For each kernel, its references and how many copies of each there are."""
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "pallas_call":
            mapping = params["grid_mapping"]
            first = mapping.num_index_operands
            last = first + mapping.num_inputs + mapping.num_outputs
            yield [
                (variable.aval, 2 if first <= at < last else 1)
                for at, variable in enumerate(params["jaxpr"].invars)
            ]
        elif name == "mpmd_map":  # a kernel on a mesh of subcores
            for kernel in params["jaxprs"]:
                inner = getattr(kernel, "jaxpr", kernel)
                yield [(variable.aval, 1) for variable in inner.invars]
        else:
            for inner in jax.core.jaxprs_in_params(params):
                yield from _kernels(inner)


def _bytes(buffer: tuple[Any, int]) -> int:
    aval, copies = buffer
    if "vmem" not in str(getattr(aval, "memory_space", "")):
        return 0
    return copies * math.prod(aval.shape) * aval.dtype.itemsize
