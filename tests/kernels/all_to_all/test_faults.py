"""The checks of `test_interpreted` find what is wrong in kernels that are wrong."""

from __future__ import annotations

import pytest

from tests.kernels.all_to_all import children, faulty
from tests.kernels.all_to_all.interpreting import MODES

SECONDS_EACH = 120


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, object]]:
    return children.run(faulty.__name__, faulty.PROOFS, seconds_each=SECONDS_EACH)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", faulty.FAULTS)
def test_fault_is_found(fault: str, mode: str, outcomes: dict[str, dict[str, object]]) -> None:
    """Wrong values or a race: in both DMA modes, as the order in which DMAs end is not the kernel's."""
    assert outcomes[f"{fault}, {mode}"].get("result"), outcomes


@pytest.mark.parametrize("mode", MODES)
def test_the_same_kernel_without_a_fault_passes(mode: str, outcomes: dict[str, dict[str, object]]) -> None:
    assert outcomes[f"no fault, {mode}"] == {"result": []}
