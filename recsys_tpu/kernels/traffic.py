"""HBM bytes of a program: what its kernels ask for, counted from how they walk, and the floor.

The floor is what no implementation avoids: every id's row read once (or, in an update, every distinct row
and its state read and written once), one index and weight an id, outputs or gradients once.
"""

from __future__ import annotations

from dataclasses import dataclass

from recsys_tpu.chips import Chip
from recsys_tpu.kernels import tensorcore
from recsys_tpu.kernels.arg_specs import Program
from recsys_tpu.kernels.flat_rows import LINE

WORD = 4


@dataclass(frozen=True)
class Traffic:
    """Bytes a step, for `ids` valid ids and `unique` distinct rows."""

    issued: int
    floor: int

    @property
    def ratio(self) -> float:
        return self.issued / self.floor


def traffic(program: Program, chip: Chip, *, ids: int, unique: int) -> Traffic:
    """Of the variant that the dispatcher picks on `chip`."""
    return _update(program, chip, ids, unique) if program.is_update else _lookup(program, chip, ids)


def dense_gradient_traffic(program: Program, *, ids: int) -> Traffic:
    """Of an update by a dense gradient of the table, as autograd of a plain lookup leaves it (SGD).

    Zeros written, rows scattered (read and written) an id, then gradient and table read, table written.
    """
    table, row = program.rows * program.row_bytes, program.dim * WORD
    issued = 4 * table + ids * (3 * row + 2 * WORD)
    return Traffic(issued, _update_floor(program, ids, min(ids, program.rows)))


def _per_id(program: Program, chip: Chip) -> int:
    """Index, segment and weight; for a TensorCore XLA reads the first two and writes addresses."""
    addresses = 0 if chip.sparsecores else 4 * WORD
    return WORD * (3 if program.weighted else 2) + addresses


def _read_row(program: Program, chip: Chip) -> int:
    """A TensorCore copies whole lines of 128 words."""
    return program.row_bytes if chip.sparsecores else max(program.row_bytes, LINE * WORD)


def _lookup(program: Program, chip: Chip, ids: int) -> Traffic:
    output = program.bags * program.dim * WORD
    index = WORD * (2 if program.weighted else 1)
    floor = ids * (program.row_bytes + index) + output + program.bags * WORD
    if not program.by_kernel(chip):
        return Traffic(ids * (_element_read(program) + _per_id(program, chip)) + output, floor)
    issued = ids * (_read_row(program, chip) + _per_id(program, chip)) + output + program.bags * WORD
    if chip.sparsecores and program.dim % LINE:
        issued += 2 * output  # XLA brings the linear output into its tiled layout
    if not chip.sparsecores and program.table == "packed":
        issued += 2 * output  # the halves are interleaved again
    return Traffic(issued, floor)


def _update(program: Program, chip: Chip, ids: int, unique: int) -> Traffic:
    floor = _update_floor(program, ids, unique)
    gradient_row, touched = program.dim * WORD, program.row_bytes + program.state_bytes
    if chip.sparsecores:
        by_kernel = program.by_kernel(chip)
    else:
        by_kernel = program.table == "float32" and program.dim % LINE == 0
    if by_kernel:
        rows = unique * (2 * touched + 2 * WORD)
        gradients = program.bags * gradient_row
        if chip.sparsecores or gradients > tensorcore.resident_bytes(chip):
            gradients = ids * gradient_row  # once an id
        return Traffic(gradients + ids * _per_id(program, chip) + rows, floor)
    # XLA: unpooled gradients written and summed into rows
    issued = ids * (4 * gradient_row + _per_id(program, chip)) + unique * 4 * gradient_row
    if program.by_kernel(chip):  # whole lines read twice, written once
        line = max(LINE * WORD, program.row_bytes)
        issued += unique * 3 * (line + (line * (program.state_bytes // gradient_row) or WORD))
    else:
        states = 2 * program.state_bytes
        issued += unique * (2 * _element_read(program) + states)
    return Traffic(issued, floor)


def _element_read(program: Program) -> int:
    """A row that XLA reads, then writes and reads once more: by its line, or by an index an element."""
    if program.table != "bfloat16" and LINE % (program.row_bytes // WORD) == 0:
        return LINE * WORD + 2 * program.dim * WORD
    return program.row_bytes + 3 * program.dim * WORD


def _update_floor(program: Program, ids: int, unique: int) -> int:
    gradients = program.bags * program.dim * WORD
    index = WORD * (2 if program.weighted else 1)
    return gradients + ids * index + unique * (2 * (program.row_bytes + program.state_bytes) + WORD)
