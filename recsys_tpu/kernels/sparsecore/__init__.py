"""SparseCore kernels (v5p, v6e, tpu7x): indirect streams on every vector subcore."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax

from recsys_tpu.chips import Chip
from recsys_tpu.kernels.sparsecore.lookup import pooled_lookup, sequence_lookup
from recsys_tpu.kernels.sparsecore.streams import Target
from recsys_tpu.kernels.sparsecore.update import fused_update


def kernels_for(chip: Chip) -> SimpleNamespace:
    """`pooled_lookup`, `sequence_lookup` and `fused_update` of a chip, with the signatures of `xla`.

    Raises ValueError for a chip without SparseCores.
    """
    if not chip.sparsecores:
        raise ValueError(f"{chip.name} has no SparseCores")
    target = Target(chip)
    functions = (pooled_lookup, sequence_lookup, fused_update)
    return SimpleNamespace(
        **{f.__name__: _for_chip(functools.partial(f, target=target), chip) for f in functions}
    )


def _for_chip(function: Callable[..., Any], chip: Chip) -> Callable[..., Any]:
    """Pallas reads from the mesh which chip a SparseCore kernel is for."""

    def traced(*args: Any, **options: Any) -> Any:
        with jax.sharding.use_abstract_mesh(chip.abstract_mesh()):
            return function(*args, **options)

    return traced
