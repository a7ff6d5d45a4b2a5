"""Child process: exchanges on interpreted chips against XLA's own collectives, bit for bit."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recsys_tpu.kernels.all_to_all import api, reference
from recsys_tpu.kernels.all_to_all.fused import fused_lookup_all_to_all
from recsys_tpu.kernels.all_to_all.reduce_scatter import Bands
from tests.kernels.all_to_all.children import serve
from tests.kernels.all_to_all.interpreting import (
    MODES,
    differences,
    interpreter,
    mesh_of,
    on_chips,
    races_found,
)


def payload(*shape: int, dtype: Any = jnp.float32, seed: int = 0) -> Any:
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return jnp.asarray(values * 1000 if jnp.issubdtype(dtype, jnp.integer) else values).astype(dtype)


def equal(
    mode: str, chips: int, chunk: tuple[int, ...], dtype: Any = jnp.float32, **options: Any
) -> list[str]:
    x = payload(chips, chips, *chunk, dtype=dtype)
    mesh = mesh_of(chips)
    got = on_chips(
        mesh, functools.partial(api.all_to_all, axis="x", interpret=interpreter(mode), **options), x
    )
    return differences(got, on_chips(mesh, functools.partial(reference.all_to_all, axis="x", **options), x))


def ragged(mode: str, counts: list[list[int]], capacity: int, dim: int, **options: Any) -> list[str]:
    chips = len(counts)
    x, send = payload(chips, chips, capacity, dim), np.array(counts, np.int32)
    mesh = mesh_of(chips)
    got = on_chips(
        mesh,
        functools.partial(api.ragged_all_to_all, axis="x", interpret=interpreter(mode), **options),
        x,
        send,
    )
    expected = on_chips(mesh, functools.partial(reference.ragged_all_to_all, axis="x", **options), x, send)
    return differences(got, expected)


def planned(mode: str, counts: list[list[int]], capacity: int, dim: int, **options: Any) -> list[str]:
    chips, mesh = len(counts), mesh_of(len(counts))
    x, sent = payload(chips, chips, capacity, dim), np.array(counts, np.int32)

    def mine(x: jax.Array) -> jax.Array:
        rows = api.planned_all_to_all(x, sent, axis="x", interpret=interpreter(mode), **options)
        return reference.valid_rows(jnp.asarray(sent)[:, jax.lax.axis_index("x")], rows)

    def theirs(x: jax.Array, sent: jax.Array) -> jax.Array:
        return reference.ragged_all_to_all(x, sent, axis="x", **options)[0]

    return differences(on_chips(mesh, mine, x), on_chips(mesh, theirs, x, sent))


def on_torus(mode: str, rows: int, columns: int, chunk: tuple[int, ...]) -> list[str]:
    chips, mesh = rows * columns, mesh_of(rows, columns)
    x = payload(chips, chips, *chunk)
    axes = ("x", "y")
    got = on_chips(mesh, functools.partial(api.torus_all_to_all, axes=axes, interpret=interpreter(mode)), x)
    return differences(got, on_chips(mesh, functools.partial(reference.all_to_all, axis=axes), x))


def torus_gradient(mode: str) -> list[str]:
    """The gradient of an exchange of chunks is the exchange of the weights that they are summed with."""
    x, weight = payload(4, 4, 10, 24), payload(4, 4, 10, 24, seed=1)
    axes = ("x", "y")

    def gradient(x: jax.Array, weight: jax.Array) -> jax.Array:
        exchange = functools.partial(api.torus_all_to_all, axes=axes, interpret=interpreter(mode))
        return jax.grad(lambda x: (exchange(x) * weight).sum())(x)

    mesh = mesh_of(2, 2)
    expected = on_chips(mesh, functools.partial(reference.all_to_all, axis=axes), weight)
    return differences(on_chips(mesh, gradient, x, weight), expected)


def in_row_groups(mode: str, groups: int, size: int) -> list[str]:
    """Sums within a row group, then an exchange across: what table-row-wise shards need, each on one axis."""
    x, mesh = payload(groups * size, size, groups, 10, 24), mesh_of(groups, size)

    def ours(x: jax.Array) -> jax.Array:
        sums = api.reduce_scatter(x, axis="y", collective_id=1, interpret=interpreter(mode))
        return api.all_to_all(sums, axis="x", collective_id=0, interpret=interpreter(mode))

    def xlas(x: jax.Array) -> jax.Array:
        return reference.all_to_all(reference.reduce_scatter(x, axis="y"), axis="x")

    (got,), (expected,) = on_chips(mesh, ours, x), on_chips(mesh, xlas, x)
    problems = ["race"] if races_found() else []
    return problems if np.allclose(got, expected, atol=1e-5) else [*problems, "not what XLA gives"]


def ring_sums(x: np.ndarray) -> np.ndarray:
    """``[chips, chips, lines, 128]`` summed in the order that the kernel states."""
    chips = len(x)
    bands = Bands.of(x[0, 0].size, tile=8)
    padded = np.zeros((chips, chips, bands.lines, 128), np.float32)
    padded[:, :, : x.shape[2]] = x
    halves = padded.reshape(chips, chips, bands.count, 2, -1)
    sums = np.empty(halves.shape[1:], np.float32)
    for chunk in range(chips):
        for half, step in ((0, 1), (1, -1)):
            total = halves[(chunk + step) % chips, chunk, :, half]
            for hop in range(2, chips + 1):
                total = halves[(chunk + step * hop) % chips, chunk, :, half] + total
            sums[chunk, :, half] = total
    return sums.reshape(chips, bands.lines, 128)[:, : x.shape[2]]


def summed(mode: str, chips: int, lines: int) -> list[str]:
    x = np.asarray(payload(chips, chips, lines, 128))
    mesh = mesh_of(chips)
    got = on_chips(mesh, functools.partial(api.reduce_scatter, axis="x", interpret=interpreter(mode)), x)
    (xla,) = on_chips(mesh, functools.partial(reference.reduce_scatter, axis="x"), x)
    problems = [] if np.allclose(got[0], xla, atol=1e-5) else ["not the sums of psum_scatter"]
    return problems + differences(got, [ring_sums(x)])


def summed_gradient(mode: str) -> list[str]:
    x, weight = payload(4, 4, 10, 24), payload(4, 10, 24, seed=1)

    def gradient(x: jax.Array, weight: jax.Array) -> jax.Array:
        sums = functools.partial(api.reduce_scatter, axis="x", interpret=interpreter(mode))
        return jax.grad(lambda x: (sums(x) * weight).sum())(x)

    mesh = mesh_of(4)
    gathered = on_chips(mesh, functools.partial(reference.all_gather, axis="x"), weight)
    return differences(on_chips(mesh, gradient, x, weight), gathered)


def equal_gradient(mode: str) -> list[str]:
    x, weight = payload(4, 4, 12, 40), payload(4, 4, 12, 40, seed=1)

    def gradient(x: jax.Array, weight: jax.Array, exchange: Any) -> jax.Array:
        return jax.grad(lambda x: (exchange(x) * weight).sum())(x)

    mine = functools.partial(
        api.all_to_all,
        axis="x",
        scale=0.5,
        grad_wire_dtype=jnp.bfloat16,
        interpret=interpreter(mode),
    )

    def expected(x: jax.Array, weight: jax.Array) -> jax.Array:
        return reference.all_to_all(weight, axis="x", scale=0.5, wire_dtype=jnp.bfloat16)

    mesh = mesh_of(4)
    return differences(
        on_chips(mesh, functools.partial(gradient, exchange=mine), x, weight),
        on_chips(mesh, expected, x, weight),
    )


def ragged_gradient(mode: str) -> list[str]:
    counts = np.array([[3, 0, 5, 16], [1, 16, 0, 2], [0, 0, 0, 0], [7, 8, 9, 10]], np.int32)
    x, weight = payload(4, 4, 16, 24), payload(4, 4, 16, 24, seed=1)

    def gradient(x: jax.Array, weight: jax.Array, send: jax.Array, exchange: Any) -> jax.Array:
        return jax.grad(lambda x: (exchange(x, send)[0] * weight).sum())(x)

    mine = functools.partial(api.ragged_all_to_all, axis="x", interpret=interpreter(mode))
    theirs = functools.partial(reference.ragged_all_to_all, axis="x")
    mesh = mesh_of(4)
    return differences(
        on_chips(mesh, functools.partial(gradient, exchange=mine), x, weight, counts),
        on_chips(mesh, functools.partial(gradient, exchange=theirs), x, weight, counts),
    )


def lookup(mode: str, chips: int, dim: int, longest_bag: int) -> list[str]:
    """Sums in the order of the ids, then delivered; bags of up to `longest_bag` ids, some empty."""
    bags, random = 16, np.random.default_rng(chips)
    table = random.standard_normal((chips, 50, dim), dtype=np.float32)
    lengths = random.integers(0, longest_bag + 1, (chips, chips * bags))
    offsets = np.concatenate([np.zeros((chips, 1)), lengths.cumsum(1)], axis=1).astype(np.int32)
    rows = random.integers(0, 50, (chips, max(1, int(offsets.max()))), dtype=np.int32)
    sums = np.zeros((chips, chips * bags, dim), np.float32)
    for chip in range(chips):
        for bag in range(chips * bags):
            for row in rows[chip, offsets[chip, bag] : offsets[chip, bag + 1]]:
                sums[chip, bag] += table[chip, row]
    mesh = mesh_of(chips)
    both = functools.partial(fused_lookup_all_to_all, axis="x", interpret=interpreter(mode))
    got = on_chips(mesh, both, table, rows, offsets)
    return differences(got, [sums.reshape(chips, chips, bags, dim).swapaxes(0, 1)])


def one_chip() -> list[str]:
    """No peers: no kernel, only scale and rounding."""
    x, counts, mesh = payload(1, 1, 10, 24), np.array([[7]], np.int32), mesh_of(1)
    options = {"axis": "x", "scale": 0.5, "wire_dtype": BF16}
    pairs = [
        (getattr(module, name), arguments)
        for name, arguments in (("all_to_all", (x,)), ("ragged_all_to_all", (x, counts)))
        for module in (api, reference)
    ]
    results = [on_chips(mesh, functools.partial(run, **options), *inputs) for run, inputs in pairs]
    sums = on_chips(mesh, functools.partial(api.reduce_scatter, axis="x"), x)
    same = all(
        np.array_equal(mine, theirs)
        for ours, xla in (results[0:2], results[2:4], (sums, [np.asarray(x)[:, 0]]))
        for mine, theirs in zip(ours, xla, strict=True)
    )
    return [] if same else ["differs"]


def random_counts(chips: int, capacity: int) -> list[list[int]]:
    return np.random.default_rng(chips).integers(0, capacity + 1, (chips, chips)).tolist()


BF16 = jnp.bfloat16
SHAPES = {
    **{f"equal, {chips} chips": (equal, chips, (40, 128)) for chips in (2, 4, 8)},
    "equal, 3 chips": (equal, 3, (16, 128)),
    "equal, dim 24": (equal, 4, (10, 24)),
    "equal, dim 200": (equal, 2, (9, 200)),
    "equal, one element": (equal, 4, (1,)),
    "equal, bf16": (equal, 4, (33, 128), BF16),
    "equal, int32": (equal, 2, (33, 128), jnp.int32),
    **{f"ragged, {chips} chips": (ragged, random_counts(chips, 70), 70, 48) for chips in (2, 4, 8)},
    "ragged, a rank with zero ids": (ragged, [[0, 0, 0], [5, 0, 7], [0, 9, 1]], 16, 64),
    "ragged, no ids at all": (ragged, [[0, 0], [0, 0]], 16, 64),
    "ragged, capacity full": (ragged, [[16, 16], [16, 16]], 16, 128),
}
TORUS = {
    "torus 2x2": (on_torus, 2, 2, (40, 128)),
    "torus 2x4, dim 24": (on_torus, 2, 4, (10, 24)),
    "torus 3x2": (on_torus, 3, 2, (16, 128)),
    "row groups 2x2": (in_row_groups, 2, 2),
    "row groups 2x3": (in_row_groups, 2, 3),
}
SUMS = {
    **{f"reduce-scatter, {chips} chips": (summed, chips, 70) for chips in (2, 4, 8)},
    "reduce-scatter, 3 chips": (summed, 3, 8),
    "reduce-scatter, several bands": (summed, 2, 2 * 2048 + 100),
}
LOOKUPS = {
    "lookup and exchange, 2 chips": (lookup, 2, 256, 3),
    "lookup and exchange, 4 chips": (lookup, 4, 128, 5),
    "lookup and exchange, no ids": (lookup, 2, 128, 0),
}
CONVERTING = {
    "scaled": (equal, 4, (40, 128), jnp.float32, {"scale": 0.25}),
    "bf16 wire, 4 chips": (equal, 4, (100, 96), jnp.float32, {"wire_dtype": BF16, "scale": 1 / 3}),
    "bf16 wire, more pieces than buffers": (equal, 2, (2560, 128), jnp.float32, {"wire_dtype": BF16}),
    "planned": (planned, random_counts(4, 50), 50, 24),
    "planned, bf16 wire": (planned, random_counts(4, 50), 50, 128, {"wire_dtype": BF16, "scale": 0.5}),
    "ragged, bf16 wire": (ragged, random_counts(4, 50), 50, 128, {"wire_dtype": BF16, "scale": 0.5}),
}


def bind(case: tuple[Any, ...], mode: str) -> Any:
    function, *arguments = case
    options = arguments.pop() if isinstance(arguments[-1], dict) else {}
    return functools.partial(function, mode, *arguments, **options)


CASES = {**SHAPES, **TORUS, **SUMS, **LOOKUPS, **CONVERTING}
PROOFS = {
    **{f"{name}, {mode}": bind(case, mode) for (name, case), mode in itertools.product(CASES.items(), MODES)},
    "one chip": one_chip,
    **{f"equal gradient, {mode}": functools.partial(equal_gradient, mode) for mode in MODES},
    **{f"torus gradient, {mode}": functools.partial(torus_gradient, mode) for mode in MODES},
    **{f"reduce-scatter gradient, {mode}": functools.partial(summed_gradient, mode) for mode in MODES},
    **{f"ragged gradient, {mode}": functools.partial(ragged_gradient, mode) for mode in MODES},
}

# More chips or more pieces of what smaller cases show, by the mark of their tests.
MARKS = {
    "slow": ("equal, 8 chips", "torus 2x4", "planned, bf16 wire", "lookup and exchange, 4 chips"),
    "long": (
        "ragged, 8 chips",
        "reduce-scatter, 8 chips",
        "reduce-scatter, several bands",
        "row groups 2x3",
        "bf16 wire, more pieces",
    ),
}

if __name__ == "__main__":
    serve(PROOFS)
