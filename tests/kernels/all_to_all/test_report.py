"""The report of exchanges: figures by hand for a small slice, and that the compiled part runs."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from recsys_tpu.kernels.all_to_all.report import compiled_report, exchange_report


def text_of(table: Table) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_bytes_of_four_chips_in_a_square() -> None:
    # 1000 x 400 float32 a device: 0.4 MB for each of 4; 3 leave; along an axis a link carries two of them
    row = text_of(exchange_report(["v6e:2x2"], batch=1000, columns=400)).splitlines()[-2]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        "v6e:2x2",
        "4",
        "1.20 MB",
        "0.80 MB",
        "0.40 MB",
        "x 1.00",
    ]


@pytest.mark.slow
def test_compiled_part_says_that_both_compile() -> None:
    lines = text_of(compiled_report("v6e:2x2", batch=1024, columns=512)).splitlines()
    kernels = [line for line in lines if "kernel" in line]
    assert len(kernels) == 3
    assert all("yes" in line for line in kernels)
    assert sum("XLA (" in line for line in lines) == 3


def test_unknown_slice_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a topology like"):
        compiled_report("v6e")
