"""HiGHS, called directly: a plan solves a hundred small programs, so checks and banners add up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import highspy
import numpy as np
from scipy.sparse import csc_matrix

from recsys_tpu.sharding.planner.problem import FloatArray

INFINITY: float = highspy.kHighsInf
Bases = dict[tuple[int, int], Any]


class _Quiet(highspy.Highs):
    """Without the callbacks that `Highs` installs, because that prints a banner before it can be silenced."""

    def __init__(self) -> None:
        super(highspy.Highs, self).__init__()
        self.setOptionValue("output_flag", False)
        self.setOptionValue("threads", 1)


def minimise(
    cost: FloatArray,
    matrix: csc_matrix,
    row_lower: FloatArray,
    row_upper: FloatArray,
    column_upper: FloatArray,
    *,
    integer: Sequence[bool] | None = None,
    nodes: int = 0,
    bases: Bases | None = None,
) -> FloatArray | None:
    """Columns ≥ 0 of least cost with the rows of `matrix` between their bounds; None: there are none.

    Args:
        integer: columns that must be whole; then None also means that `nodes` branches were not enough.
        bases: where the last basis of a program of each shape is kept, for the next one to start from.
    """
    lp = highspy.HighsLp()
    lp.num_row_, lp.num_col_ = matrix.shape
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, np.zeros(len(cost)), column_upper
    lp.row_lower_, lp.row_upper_ = row_lower, row_upper
    lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = matrix.indptr, matrix.indices, matrix.data
    highs = _Quiet()
    if integer is not None:
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        lp.integrality_ = [kinds[whole] for whole in integer]
        highs.setOptionValue("mip_rel_gap", 0.0)
        highs.setOptionValue("mip_max_nodes", nodes)
    highs.passModel(lp)
    if bases is not None and matrix.shape in bases:
        highs.setBasis(bases[matrix.shape])
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    if bases is not None:
        bases[matrix.shape] = highs.getBasis()
    return np.array(highs.getSolution().col_value)
