import os
import subprocess
import sys
from pathlib import Path

import pytest

from recsys_tpu.runtime import Runtime, RuntimeConfig


@pytest.mark.slow
def test_collectives_of_four_emulated_chips_agree_with_gloo_on_the_cpu(tpu):
    """Uneven and empty splits, async work, functional collectives, subgroups, objects and DDP."""
    root = Path(__file__).parents[2]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    run = subprocess.run(
        [*launcher, str(Path(__file__).with_name("collectives.py"))],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        cwd=root,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    for rank in range(4):
        assert f"rank {rank} of 4: all collectives agree" in run.stdout


def test_a_single_emulated_chip_has_a_process_group_too(tpu):
    import torch

    with Runtime.start(RuntimeConfig(device="tpu-emulated")) as runtime:
        x = torch.ones(3, device=runtime.device)
        torch.distributed.all_reduce(x)
        out = torch.empty_like(x)
        torch.distributed.all_to_all_single(out, x)
        assert out.tolist() == x.tolist() == [1.0, 1.0, 1.0]
        runtime.synchronize()
        assert "no TPU involved" in runtime.describe()["proof"]
