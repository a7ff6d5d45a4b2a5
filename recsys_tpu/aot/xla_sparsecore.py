"""Compiles XLA's own SparseCore operations, `torch.tpu.ops.sparse_dense_matmul*`, for a chip.

    python -m recsys_tpu.aot.xla_sparsecore v6e --ids 4096 --bags 1024

One JSON object a line, named as the program of `recsys_tpu.kernels.arg_specs` that does the same.  Their
input is split by (SparseCore of the sample, SparseCore of the row); each part has room for `max_ids`, here
an equal share of `ids`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

from recsys_tpu import emulation

emulation.activate()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from recsys_tpu.aot.compilation import compile_stablehlo  # noqa: E402
from recsys_tpu.aot.lowering import lower  # noqa: E402
from recsys_tpu.chips import CHIPS, Chip  # noqa: E402

DIM, ROWS = 128, 1 << 20
POINTERS = 8  # row pointers of a SparseCore are padded to a register

Function = Callable[..., tuple[Tensor, ...]]


def programs(chip: Chip, ids: int, bags: int) -> dict[str, tuple[Function, list[Tensor]]]:
    """(function, arguments on the meta device) by name."""
    cores = chip.sparsecores
    max_ids = ids // cores**2
    sizes = (bags, max_ids, max_ids)
    ops = torch.ops.tpu

    def pooled(*arguments: Tensor) -> tuple[Tensor, ...]:
        return (ops._sparse_dense_matmul(*arguments, *sizes),)

    def sgd(*arguments: Tensor) -> tuple[Tensor, ...]:
        return (ops._sparse_dense_matmul_grad_with_sgd(*arguments, *sizes, "sgd"),)

    def adagrad(*arguments: Tensor) -> tuple[Tensor, ...]:
        return tuple(ops._sparse_dense_matmul_grad_with_adagrad(*arguments, 1e-8, *sizes, "adagrad"))

    with torch.device("meta"):
        pointers = torch.empty(max(POINTERS, cores) * cores, dtype=torch.int32)
        part_ids, samples = (torch.empty(ids, dtype=torch.int32) for _ in range(2))
        batch = [pointers, part_ids, samples, torch.empty(ids)]
        table, grad, rate = torch.empty(ROWS, DIM), torch.empty(bags, DIM), torch.empty(())
        return {
            "pooled-float32-128": (pooled, [*batch, table]),
            "sgd-float32-128": (sgd, [*batch, table, grad, rate]),
            "adagrad-float32-128": (adagrad, [*batch, table, torch.empty(ROWS, DIM), grad, rate]),
            "rowwise_adagrad-float32-128": (adagrad, [*batch, table, torch.empty(ROWS), grad, rate]),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="compile XLA's SparseCore operations ahead of time")
    parser.add_argument("chip", choices=sorted(name for name, chip in CHIPS.items() if chip.sparsecores))
    parser.add_argument("--ids", type=int, default=4096)
    parser.add_argument("--bags", type=int, default=1024)
    options = parser.parse_args()
    chip = CHIPS[options.chip]
    for name, (function, arguments) in programs(chip, options.ids, options.bags).items():
        result: dict[str, object] = {"name": name, "chip": chip.name}
        try:
            report = compile_stablehlo(lower(function, arguments, chip=chip.name), chip.smallest_topology)
            result |= {"temporaries": report.temp_bytes, "aliased": report.alias_bytes}
            if report.error is not None:
                result["error"] = " ".join(report.error.split())[:300]
        except Exception as error:  # what torch_tpu raises when it can't lower an operation has no type
            result["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
