"""Rung 4: `exchange_pooled` and its gradient, lowered by torch_tpu and compiled for a slice by libtpu."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recsys_tpu import aot

LOWER = """
import sys
from recsys_tpu import emulation
emulation.activate(slice_size=4)
import torch
from recsys_tpu import aot
from recsys_tpu.aot.slice_group import slice_group
from recsys_tpu.kernels.all_to_all.pooled import exchange_pooled

dims = [int(dim) for dim in sys.argv[1].split(",")]

with slice_group(4) as group:
    def step(pooled, weight):
        pooled = pooled.detach().requires_grad_()
        out = exchange_pooled(
            pooled, group, dims=dims, transport="kernel", wire_dtype=torch.bfloat16,
            grad_wire_dtype=torch.bfloat16, grad_scale=0.25,
        )
        grad, = torch.autograd.grad((out * weight).sum(), pooled)
        return out, grad

    args = [torch.empty(4 * 512, dims[0]), torch.empty(512, sum(dims))]
    sys.stdout.write(aot.lower(step, args, chip=None))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("tpu")
@pytest.mark.parametrize("dims", ["128,128,128,128", "128,96,64,0"], ids=["even", "uneven"])
def test_exchange_and_its_gradient_compile_for_a_slice(dims: str) -> None:
    lowered = subprocess.run(
        [sys.executable, "-c", LOWER, dims],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        check=False,
    )
    assert lowered.returncode == 0, lowered.stderr
    # Ranks of torch_tpu are replicas, for which a partition id is always 0.
    assert "partition_id" not in lowered.stdout
    report = aot.compile_stablehlo(lowered.stdout, "v6e:2x2", num_replicas=4)
    assert report.ok, report.error
    assert report.custom_calls == {"tpu_custom_call": 2}
    assert not report.collectives
