"""The named matrix of programs that tests, ahead-of-time proofs and the report all read."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from recsys_tpu.chips import Chip
from recsys_tpu.kernels import any_row
from recsys_tpu.kernels.batch import Optimizer
from recsys_tpu.kernels.optimizer import HYPER_SIZE, OptimizerSpec

DIMS = (16, 32, 64, 96, 128, 256, 512)
ODD_DIMS = (4, 12, 20, 100, 200)  # neither registers nor lines
TABLES = ("float32", "packed")  # packed: pairs of bfloat16
ELEMENTS = {"float32": jnp.float32, "packed": jnp.int32, "bfloat16": jnp.bfloat16}
OPTIMIZERS = {
    "sgd": OptimizerSpec(Optimizer.SGD),
    "momentum": OptimizerSpec(Optimizer.SGD, momentum=0.9, weight_decay=1e-5),
    "adagrad": OptimizerSpec(Optimizer.ADAGRAD),
    "rowwise_adagrad": OptimizerSpec(Optimizer.ROWWISE_ADAGRAD, max_norm=1.0),
    "adam": OptimizerSpec(Optimizer.ADAM, weight_decay=1e-5, decoupled_weight_decay=True),
    "ftrl": OptimizerSpec(Optimizer.FTRL, l1=0.01, l2=0.1),
}


@dataclass(frozen=True)
class Program:
    """One operation at one shape.

    op: "pooled", "sequence", or the optimizer of an update.  rows of the table, ids (capacity of ids and
    of distinct rows), bags.
    """

    op: str
    table: str
    dim: int
    weighted: bool = True
    rows: int = 1 << 20
    ids: int = 4096
    bags: int = 1024

    @property
    def name(self) -> str:
        return f"{self.op}-{self.table}-{self.dim}"

    @property
    def is_update(self) -> bool:
        return self.op in OPTIMIZERS

    @property
    def kernel(self) -> str:
        """Name that its kernel has in the compiler's dumps."""
        return f"fused_{OPTIMIZERS[self.op].optimizer.value}" if self.is_update else "pooled_lookup"

    @property
    def row_bytes(self) -> int:
        """Of a table row as it is stored."""
        return self.dim * (4 if self.table == "float32" else 2)

    @property
    def state_bytes(self) -> int:
        """Of the optimizer state of a row."""
        return sum(OPTIMIZERS[self.op].state_sizes(1, self.dim)) * 4 if self.is_update else 0

    def donated_bytes(self) -> int:
        """What an update must change in place."""
        return self.rows * (self.row_bytes + self.state_bytes) if self.is_update else 0

    def by_kernel(self, chip: Chip) -> bool:
        """Whether a Pallas kernel reads such rows on `chip`; XLA's gathers and scatters read the others."""
        lanes = chip.lanes if chip.sparsecores else None
        return any_row.takes_rows(lanes, ELEMENTS[self.table], self.dim)

    def arguments(self) -> tuple[Any, ...]:
        """Shapes, in the order of `function`."""
        shape = jax.ShapeDtypeStruct
        elements = self.rows * self.dim // (2 if self.table == "packed" else 1)
        table = shape((elements,), ELEMENTS[self.table])
        ids = shape((self.ids,), jnp.int32)
        weights = shape((self.ids,), jnp.float32) if self.weighted else None
        if self.op == "pooled":
            return table, ids, ids, shape((self.bags + 1,), jnp.int32), weights
        if self.op == "sequence":
            return table, ids, ids
        sizes = OPTIMIZERS[self.op].state_sizes(self.rows, self.dim)
        state = tuple(shape((size,), jnp.float32) for size in sizes)
        gradient, offsets = shape((self.bags, self.dim), jnp.float32), shape((self.ids + 1,), jnp.int32)
        hyper = shape((HYPER_SIZE,), jnp.float32)
        return table, state, gradient, ids, offsets, ids, ids, weights, hyper

    def donate(self) -> tuple[int, ...]:
        """Arguments that the program takes over: table and state of an update."""
        return (0, 1) if self.is_update else ()

    def function(self, kernels: Any) -> Callable[..., Any]:
        """The operation of a variant (`sparsecore.kernels_for(chip)` and the like), its static part bound."""
        if self.op == "pooled":
            return lambda *a: kernels.pooled_lookup(*a, num_bags=self.bags, dim=self.dim)
        if self.op == "sequence":
            return lambda *a: kernels.sequence_lookup(*a, num_bags=self.bags, dim=self.dim)
        return lambda *a: kernels.fused_update(*a, spec=OPTIMIZERS[self.op])


def kernels_for(chip: Chip) -> Any:
    """The variant that the dispatcher picks on `chip`."""
    return any_row.kernels_for(chip, on_sparsecore=bool(chip.sparsecores))


# Lookups and the usual optimizer at every dim and type; the other optimizers at three.  Rows that no
# kernel takes: lookup and update at each odd dim, and of bfloat16 as PyTorch stores it.
MATRIX = (
    *(Program(op, table, dim) for op, table, dim in itertools.product(("pooled",), TABLES, DIMS)),
    *(Program("rowwise_adagrad", table, dim) for table, dim in itertools.product(TABLES, DIMS)),
    *(Program("sequence", table, dim) for table, dim in (("float32", 64), ("packed", 128))),
    *(
        Program(op, table, dim)
        for op in OPTIMIZERS
        if op != "rowwise_adagrad"
        for table, dim in (("float32", 32), ("float32", 128), ("packed", 64))
    ),
    *(Program(op, "float32", dim) for op in ("pooled", "rowwise_adagrad") for dim in ODD_DIMS),
    *(Program(op, "bfloat16", dim) for op in ("pooled", "rowwise_adagrad") for dim in (64, 100)),
)
QUICK = tuple(
    p for p in MATRIX if p.name in ("pooled-float32-64", "pooled-packed-64", "rowwise_adagrad-float32-128")
)
