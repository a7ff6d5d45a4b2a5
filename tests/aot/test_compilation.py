"""torch programs through torch_tpu and libtpu, with no TPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recsys_tpu import aot
from recsys_tpu.aot import compilation
from recsys_tpu.chips import CHIPS, chip_of

pytestmark = pytest.mark.usefixtures("tpu")
M, K, N = 2048, 512, 256


def _step(x, weight):
    (gradient,) = torch.autograd.grad((x @ weight.requires_grad_()).square().sum(), weight)
    return gradient.square().sum(), weight - 0.1 * gradient


@pytest.fixture(scope="module")
def step_text(tpu):
    return aot.lower(_step, [torch.empty(M, K), torch.empty(K, N, device="meta")])


@pytest.mark.parametrize(
    "chip", ["v6e", *(pytest.param(c, marks=pytest.mark.slow) for c in ("v5e", "v5p", "tpu7x"))]
)
def test_a_gradient_step_compiles_for_every_chip(step_text, chip):
    report = aot.compile_stablehlo(step_text, CHIPS[chip].smallest_topology)
    assert report.ok, report.error
    assert report.flops == pytest.approx(2 * 2 * M * K * N, rel=0.05)  # forward and weight gradient
    assert report.argument_bytes == 4 * (M * K + K * N)
    assert report.peak_bytes >= report.argument_bytes
    assert report.bytes_accessed >= report.argument_bytes
    assert report.collectives == {}


@pytest.mark.slow
def test_donation_shares_the_memory_of_argument_and_output(step_text):
    kept = aot.compile_stablehlo(step_text, "v6e:2x2")
    donated = aot.compile_stablehlo(step_text, "v6e:2x2", aliases={1: 1})
    assert (kept.alias_bytes, donated.alias_bytes) == (0, 4 * K * N)
    assert donated.peak_bytes < kept.peak_bytes


def test_matmul_precision_reaches_the_program(tpu):
    before = torch.get_float32_matmul_precision()
    texts = {}
    for precision in ("highest", "medium"):
        torch.set_float32_matmul_precision(precision)
        texts[precision] = aot.lower(torch.mm, [torch.empty(64, 64), torch.empty(64, 64)])
    torch.set_float32_matmul_precision(before)
    assert "precision = [HIGHEST, HIGHEST]" in texts["highest"]
    assert "precision = [HIGHEST, HIGHEST]" not in texts["medium"]


def test_a_faulty_program_is_a_report_with_the_compilers_words(step_text):
    report = aot.compile_stablehlo(step_text.replace("stablehlo.dot_general", "stablehlo.absent"), "v6e:2x2")
    assert not report.ok and "stablehlo.absent" in report.error


def test_an_abort_is_a_report_with_the_fatal_line():
    text = compilation._abort_text(-6, "I0 fine\nF0701 tables.cc:7] Check failed: a == b\n*** stack ***\n")
    assert text == "libtpu's compiler ended with -6: F0701 tables.cc:7] Check failed: a == b"


def test_a_compiler_that_does_not_finish_is_a_report(step_text):
    report = aot.compile_stablehlo(step_text, "v6e:2x2", timeout_s=0.01)
    assert not report.ok and "did not finish" in report.error


def test_a_program_is_for_one_device_or_the_whole_slice(step_text):
    report = aot.compile_stablehlo(step_text, "v6e:2x2", num_replicas=3)
    assert not report.ok and "has 4 devices" in report.error
    with pytest.raises(ValueError, match="unknown chip 'v9'"):
        aot.compile_stablehlo(step_text, "v9:2x2")


SHARDED = """
from recsys_tpu import emulation
emulation.activate(slice_size=8)
import sys, torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from recsys_tpu import aot
from recsys_tpu.aot.slice_group import slice_group

def step(pooled, weight):
    mine = functional.all_to_all_single(pooled, None, None, dist.group.WORLD)
    return functional.all_reduce(mine @ weight, "sum", dist.group.WORLD)

with slice_group(8):
    sys.stdout.write(aot.lower(step, [torch.empty(4096, 128), torch.empty(128, 128)]))
"""


@pytest.mark.slow
def test_collectives_compile_for_a_whole_slice():
    root = str(Path(__file__).parents[2])
    run = subprocess.run(
        [sys.executable, "-c", SHARDED],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert run.returncode == 0, run.stderr
    report = aot.compile_stablehlo(run.stdout, "v6e:2x4", num_replicas=8)
    assert report.ok, report.error
    assert report.collectives == {"all-to-all": 1, "all-reduce": 1}


def test_chip_figures_are_those_of_torch_tpu_and_jax():
    from jax.experimental.pallas import tpu as pltpu
    from torch_tpu._internal.utils import hardware

    versions = {
        "v4": ("V4", "TPU_V4", 2),
        "v5e": ("V5E", "TPU_V5E", 1),
        "v5p": ("V5P", "TPU_V5P", 2),
        "v6e": ("V6E", "TPU_V6E", 1),
        "tpu7x": ("V7", "TPU_7X", 1),
    }
    for name, (torch_name, jax_name, cores_per_device) in versions.items():
        version = hardware.TpuVersion[torch_name]
        devices = hardware._DEVICES_PER_CHIP.get(version, 1)
        assert CHIPS[name].bf16_flops == hardware._BF16_FLOPS_PER_CHIP[version] / devices
        assert CHIPS[name].hbm_bytes == hardware._HBM_BYTES_PER_CHIP[version] // devices
        info = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion[jax_name], 1)
        assert CHIPS[name].hbm_bytes_per_second == info.mem_bw_bytes_per_second * cores_per_device
        assert CHIPS[name].vmem_bytes == info.vmem_capacity_bytes
    assert chip_of("v5p:2x2x1").name == "v5p"


def test_roofline_is_the_slower_of_compute_and_memory():
    chip = CHIPS["v6e"]
    line = aot.Roofline(chip, flops=chip.bf16_flops, hbm_bytes=chip.hbm_bytes_per_second * 2)
    assert (line.seconds, line.bound_by, line.mfu_bound) == (2.0, "HBM", 0.5)
    exact = aot.Roofline(chip, flops=chip.bf16_flops, hbm_bytes=chip.hbm_bytes_per_second * 2, passes=6)
    assert (exact.seconds, exact.bound_by) == (6.0, "compute")
    assert exact.mfu_bound == pytest.approx(1 / 6)
