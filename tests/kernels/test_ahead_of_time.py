"""Rung 4: the matrix compiles for real chips, aliases table and state, allocates nothing of table size.

The whole matrix for one chip: `python -m recsys_tpu.kernels.compile_matrix v6e`.
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from recsys_tpu.kernels.arg_specs import MATRIX, QUICK
from recsys_tpu.libtpu import environment

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install 'recsys-tpu[tpu]'"
)

# Each kernel, each layout (several rows a line, one, several lines; packed), each kind of state.
REPRESENTATIVE = (
    "pooled-float32-96",
    "pooled-float32-128",
    "pooled-packed-32",
    "sequence-packed-128",
    "sgd-packed-64",
    "rowwise_adagrad-float32-128",
    "rowwise_adagrad-float32-16",
    "rowwise_adagrad-packed-128",
    "adam-float32-32",
    "pooled-bfloat16-64",
    "rowwise_adagrad-float32-20",
)
ELEMENT_BY_ELEMENT = "rowwise_adagrad-float32-20"  # no kernel reads such rows; XLA updates them
# It takes 5.5 MB on these two chips, whatever the table.
LIMITS = {(chip, ELEMENT_BY_ELEMENT): 6e6 for chip in ("v5p", "tpu7x")}


def compiled(chip: str, names: Sequence[str], *options: str) -> list[dict[str, Any]]:
    run = subprocess.run(
        [sys.executable, "-m", "recsys_tpu.kernels.compile_matrix", chip, *names, *options],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    results = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert [result["name"] for result in results] == [p.name for p in MATRIX if p.name in names]
    return results


def check(chip: str, names: Sequence[str], *options: str) -> None:
    programs = {program.name: program for program in MATRIX}
    for result in compiled(chip, names, *options):
        assert "error" not in result, result
        program = programs[result["name"]]
        table = program.rows * program.row_bytes
        assert result["aliased"] == program.donated_bytes(), result
        assert result["temporaries"] < table / 8, result
        assert result["temporaries"] < LIMITS.get((chip, program.name), 4e6), result


def test_quick_programs_on_sparsecore():
    check("v6e", [program.name for program in QUICK])


@pytest.mark.slow
def test_the_blocks_of_a_criteo_step_need_not_fit_a_subcore():
    """26 features x 65,536 samples of row-wise tables on one chip."""
    names = ("pooled-float32-128", "rowwise_adagrad-float32-128")
    check("v6e", names, "--ids", "262144", "--bags", "1703936")


@pytest.mark.parametrize(
    "chip",
    [
        pytest.param("v5e", marks=pytest.mark.slow),
        pytest.param("v6e", marks=pytest.mark.slow),
        pytest.param("v5p", marks=pytest.mark.long),
        pytest.param("tpu7x", marks=pytest.mark.long),
    ],
)
def test_representative_programs(chip):
    check(chip, REPRESENTATIVE)


@pytest.mark.long
@pytest.mark.parametrize("chip", ["v5p", "tpu7x"])
def test_a_larger_table_needs_no_larger_temporaries(chip):
    program = next(program for program in MATRIX if program.name == ELEMENT_BY_ELEMENT)
    rows = (program.rows, 2 * program.rows)
    small, large = (compiled(chip, [program.name], "--rows", str(n))[0]["temporaries"] for n in rows)
    assert large - small < program.rows * program.row_bytes / 100
