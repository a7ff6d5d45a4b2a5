"""One process for every test: the `tpu` device is emulated where the packages for it are installed.

This has to happen before anything imports torch.  CPU tests are unaffected (they name their device).
"""

from __future__ import annotations

import os

import hypothesis
import pytest

from recsys_tpu.emulation import requirements
from recsys_tpu.runtime import activation

# The same examples in every run, however slow the machine: a failure is one that anybody can see again.
# `--hypothesis-profile=search` draws new ones.
hypothesis.settings.register_profile("recsys_tpu", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None, derandomize=False)
hypothesis.settings.load_profile("recsys_tpu")

# JAX (Pallas interpreter tests) sees eight devices; it reads this once, at its first use.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
)

_MISSING = requirements.problems()
activation.activate("cpu" if _MISSING else "tpu-emulated")

import torch  # noqa: E402


@pytest.fixture(scope="session")
def tpu() -> torch.device:
    """The emulated `tpu` device; tests that use it are skipped where it cannot be had."""
    if _MISSING:
        pytest.skip(f"no emulated tpu device: {'; '.join(_MISSING)}. Run: {requirements.INSTALL}")
    return torch.device("tpu", 0)
