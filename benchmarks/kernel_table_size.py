"""Does a step cost more when tables grow?  The same ids in tables of 10 thousand to 10 million rows.

A step is a pooled lookup and a fused update, on the emulated `tpu` device (XLA on the CPU): this shows
that nothing of table size is computed or copied, not how fast a TPU is.  Sizes take turns within one run;
the median step of each is compared.

    python benchmarks/kernel_table_size.py
"""

from __future__ import annotations

from recsys_tpu import emulation

emulation.activate()

import argparse  # noqa: E402
import dataclasses  # noqa: E402
import os  # noqa: E402
import platform  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402

from recsys_tpu.embeddings.preparation import prepare  # noqa: E402
from recsys_tpu.kernels import Optimizer, OptimizerSpec, fused_update, hyper_tensor, pooled_lookup  # noqa: E402

SIZES = (10_000, 100_000, 1_000_000, 10_000_000)


def step_on(size: int, dim: int, bags: int, pooling: int) -> Callable[[], None]:
    """One lookup and update of a table of `size` rows, at ids that are the same for every size."""
    rows = np.random.default_rng(0).integers(0, SIZES[0], bags * pooling)
    capacity = len(rows)
    batch = prepare(
        rows,
        lengths=np.full(bags, pooling),
        num_bags=bags,
        num_rows=size,
        id_capacity=capacity,
        unique_capacity=capacity,
    )
    tensors = {name: value.to("tpu") for name, value in vars(batch).items() if torch.is_tensor(value)}
    batch = dataclasses.replace(batch, **tensors)
    spec = OptimizerSpec(Optimizer.ROWWISE_ADAGRAD)
    hyper = hyper_tensor(spec, learning_rate=0.1, step=1, device="tpu")
    table = torch.zeros(size * dim, device="tpu")
    state = tuple(torch.zeros(elements, device="tpu") for elements in spec.state_sizes(size, dim))

    def step() -> None:
        fused_update(table, state, pooled_lookup(table, batch, dim), batch, spec, hyper)
        torch.accelerator.synchronize()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--bags", type=int, default=16384)
    parser.add_argument("--pooling", type=int, default=5)
    parser.add_argument("--steps", type=int, default=31)
    options = parser.parse_args()

    steps = {size: step_on(size, options.dim, options.bags, options.pooling) for size in SIZES}
    seconds: dict[int, list[float]] = {size: [] for size in SIZES}
    for _ in range(options.steps):
        for size in SIZES:
            start = time.perf_counter()
            steps[size]()
            seconds[size].append(time.perf_counter() - start)
    medians = {size: statistics.median(times[2:]) * 1e3 for size, times in seconds.items()}
    print(f"{options.bags * options.pooling} ids, dim {options.dim}, float32, row-wise Adagrad;")
    print(f"emulated tpu device, {os.cpu_count()} cores, {platform.machine()}; median of {options.steps - 2}")
    for size, milliseconds in medians.items():
        ratio = milliseconds / medians[SIZES[0]]
        print(f"{size:>12,} rows  {milliseconds:7.2f} ms a step  {ratio:5.2f}x of {SIZES[0]:,} rows")


if __name__ == "__main__":
    main()
