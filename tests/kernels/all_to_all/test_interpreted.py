"""Rung 3: exchanges on 2 to 8 interpreted chips equal XLA's collectives bit for bit, without a race."""

from __future__ import annotations

import pytest

from tests.kernels.all_to_all import children, interpreted

SECONDS_EACH = 120


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, dict[str, object]]:
    """The proofs that this run selected, in one child process."""
    wanted = {
        item.callspec.params["proof"]
        for item in request.session.items
        if item.module is request.module and hasattr(item, "callspec")
    }
    names = [name for name in interpreted.PROOFS if name in wanted]
    return children.run(interpreted.__name__, names, seconds_each=SECONDS_EACH)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "proof",
    [
        pytest.param(
            proof,
            marks=[getattr(pytest.mark, m) for m, of in interpreted.MARKS.items() if proof.startswith(of)],
        )
        for proof in interpreted.PROOFS
    ],
)
def test_exchange_equals_the_collective(proof: str, outcomes: dict[str, dict[str, object]]) -> None:
    assert outcomes[proof] == {"result": []}


def test_a_hang_ends_and_is_reported() -> None:
    outcomes = children.run("tests.kernels.all_to_all.hanging", ["hangs", "returns"], seconds_each=20)
    assert outcomes == {"hangs": {"hung": 20}, "returns": {"result": "reached"}}
