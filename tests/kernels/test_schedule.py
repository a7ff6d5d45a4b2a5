"""Reading the compiler's schedules and counting traffic: on small texts and by hand."""

from dataclasses import replace

import pytest

from recsys_tpu.chips import CHIPS
from recsys_tpu.kernels.arg_specs import MATRIX
from recsys_tpu.kernels.schedule import Loop, loops_of, parse_loops
from recsys_tpu.kernels.traffic import dense_gradient_traffic, traffic

DUMP = """
   0x0   :  { %1 = vld [vmem:%2] }
   0x1 LB: > { %3 = sld [smem:%4] }
   0x2 LB: >> { %5 = dma.hbm_to_vmem %6 ;; %7 = vld [vmem:%8] }
   0x3   : >> { %9 = dma.vmem_to_hbm %6 }
   0x4   : > { %10 = sbr.rel %11 }
   0x5   :  { %12 = sbr.rel %13 }
"""


def test_loops_end_where_their_nesting_does():
    outer, inner = parse_loops(DUMP)
    assert inner == Loop(depth=2, bundles=2, copies_in=1, copies_out=1, loads=1)
    assert (outer.depth, outer.bundles) == (1, 4)


def test_a_missing_schedule_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no schedule of kernel 'pooled_lookup'"):
        loops_of(tmp_path, "pooled_lookup")


def program(name: str, **sizes):
    return replace(next(p for p in MATRIX if p.name == name), **sizes)


def test_traffic_of_a_lookup_by_hand():
    """Two bags, ten ids, dim 128: ten rows of 512 bytes, 12 bytes an id, two outputs, two offsets."""
    lookup = program("pooled-float32-128", ids=10, bags=2)
    counted = traffic(lookup, CHIPS["v6e"], ids=10, unique=10)
    assert counted.issued == 10 * (512 + 12) + 2 * 512 + 8
    assert counted.floor == 10 * (512 + 8) + 2 * 512 + 8


def test_traffic_of_an_update_does_not_know_the_table():
    update = program("rowwise_adagrad-float32-128", ids=10, bags=2)
    small, large = (traffic(replace(update, rows=r), CHIPS["v6e"], ids=10, unique=8) for r in (100, 10**9))
    assert small == large
    assert small.issued == 10 * (512 + 12) + 8 * (2 * 516 + 8)
    dense = [dense_gradient_traffic(replace(update, rows=r), ids=10).issued for r in (1000, 2000)]
    assert dense[1] - dense[0] == 4 * 1000 * 512


def test_a_tensorcore_reads_gradients_once_where_they_fit():
    update = program("sgd-float32-128", ids=10, bags=2)
    rows_and_ids = 8 * (2 * 512 + 8) + 10 * (12 + 16)
    assert traffic(update, CHIPS["v5e"], ids=10, unique=8).issued == 2 * 512 + rows_and_ids
    large = replace(update, bags=1 << 20)
    assert traffic(large, CHIPS["v5e"], ids=10, unique=8).issued == 10 * 512 + rows_and_ids


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize("candidate", MATRIX, ids=lambda p: p.name)
def test_nothing_goes_below_the_floor(chip, candidate):
    assert traffic(candidate, CHIPS[chip], ids=4096, unique=4000).ratio >= 1
