"""Debug mode names what is out of range; in production nothing reaches beyond a table."""

import dataclasses

import numpy as np
import pytest
import torch

from recsys_tpu.embeddings.fused_params import parse_fused_params
from recsys_tpu.embeddings.fused_tables import FusedTables, PooledInput
from recsys_tpu.embeddings.preparation import prepare
from recsys_tpu.embeddings.stacks import LocalTable
from recsys_tpu.kernels import (
    IdRangeError,
    LookupBatch,
    debugging,
    fused_update,
    hyper_tensor,
    pooled_lookup,
    sequence_lookup,
)
from tests.kernels.cases import SPECS, Case
from tests.kernels.test_ops import on

DIM = 8
CPU = torch.device("cpu")


def case() -> Case:
    rng = np.random.default_rng(0)
    return Case(24, 6, rng.integers(0, 24, 20), np.sort(rng.integers(0, 6, 20)), None, 32, 32)


def with_value(batch: LookupBatch, field: str, position: int, value: int) -> LookupBatch:
    changed = getattr(batch, field).clone()
    changed[position] = value
    return dataclasses.replace(batch, **{field: changed})


@pytest.mark.parametrize("value", [24, -1])
@pytest.mark.parametrize("lookup", [pooled_lookup, sequence_lookup])
def test_a_row_that_the_stack_does_not_have(lookup, value):
    batch = with_value(case().batch(), "rows", 3, value)
    with debugging(), pytest.raises(IdRangeError, match=rf"id 3 points at {value}, .* \[0, 24\)"):
        lookup(torch.zeros(24 * DIM), batch, DIM)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("unique_rows", 24, "distinct row 2"),
        ("sorted_bags", 6, "bag of sorted id 2"),
        ("segments", 99, "segment"),
    ],
)
def test_an_update_beyond_its_buffers(field, value, message):
    spec, batch = SPECS["sgd"], with_value(case().batch(), field, 2, value)
    hyper = hyper_tensor(spec, learning_rate=0.1, step=1)
    with debugging(), pytest.raises(IdRangeError, match=f"fused_update: {message}"):
        fused_update(torch.zeros(24 * DIM), (), torch.zeros(6, DIM), batch, spec, hyper)


def test_right_batches_pass_in_debug_mode(tpu):
    batch, table = case().batch(), torch.randn(24 * DIM)
    expected = pooled_lookup(table, batch, DIM)
    with debugging():
        torch.testing.assert_close(pooled_lookup(table, batch, DIM), expected)
        torch.testing.assert_close(pooled_lookup(table.to(tpu), on(tpu, batch), DIM).cpu(), expected)


def tables_of_two() -> FusedTables:
    tables = [LocalTable("users", 10, DIM), LocalTable("items", 14, DIM)]
    return FusedTables(tables, [0, 1], dtype=torch.float32, params=parse_fused_params(None), device=CPU)


@pytest.mark.parametrize(
    ("position", "row", "message"),
    [
        (0, 12, r"table users: id 12 is not in \[0, 10\) \(1 of 4 ids"),  # a row of the neighbour
        (3, 9, r"table items: id -1 is not in \[0, 14\)"),
        (3, 24, r"table items: id 14 is not in \[0, 14\)"),  # a row that only fills up the stack
    ],
)
def test_table_and_id_are_named(position, row, message):
    """Samples x features: users, items, users, items; the stack's rows are 10 users, 14 items, padding."""
    tables = tables_of_two()
    num_rows = tables.stacks[0].num_rows
    rows = np.array([3, 10 + 5, 9, 10 + 13])
    batch = prepare(
        rows, lengths=np.ones(4, np.int64), num_bags=4, num_rows=num_rows, id_capacity=8, unique_capacity=8
    )
    with debugging():
        tables(PooledInput(2, [batch]))
        with pytest.raises(IdRangeError, match=message):
            tables(PooledInput(2, [with_value(batch, "rows", position, row)]))


@pytest.mark.parametrize("row", [-1, 24, 2**31])
def test_in_production_the_host_refuses_bad_ids_before_a_kernel_sees_them(row):
    bad = case()
    bad.rows[5] = row
    with pytest.raises(ValueError, match=f"row {row} at position 5"):
        bad.batch()


@pytest.mark.parametrize("name", ["sgd", "rowwise_adagrad", "adam"])
def test_in_production_nothing_beyond_the_tables_is_read_or_written(tpu, name):
    """Poisoned rows behind the last table: results are finite, the poison is where it was."""
    spec, ids, guards = SPECS[name], case(), 8
    ids.num_rows += guards
    batch = on(tpu, ids.batch())
    table = torch.randn(ids.num_rows, DIM)
    table[-guards:] = torch.nan
    state = tuple(torch.rand(size) for size in spec.state_sizes(ids.num_rows, DIM))
    for buffer in state:
        buffer[-guards * (buffer.numel() // ids.num_rows) :] = torch.nan
    table, state = table.view(-1).to(tpu), tuple(buffer.to(tpu) for buffer in state)
    assert pooled_lookup(table, batch, DIM).cpu().isfinite().all()
    assert sequence_lookup(table, batch, DIM).cpu().isfinite().all()
    grad = torch.randn(ids.num_bags, DIM).to(tpu)
    hyper = hyper_tensor(spec, learning_rate=0.1, step=1).to(tpu)
    fused_update(table, state, grad, batch, spec, hyper)
    for buffer in (table, *state):
        rows = buffer.cpu().view(ids.num_rows, -1)
        assert rows[:-guards].isfinite().all() and rows[-guards:].isnan().all()
