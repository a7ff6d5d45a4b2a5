"""What a lookup and its update receive: one step's ids of one table stack, at static shapes.

A *stack* holds every table of one (dim, dtype, optimizer) on one rank, one after the other, in a flat
1-D buffer: row ``r`` of the stack is elements ``[r * dim, (r + 1) * dim)``.  A flat buffer reshaped
inside a program is copy-free at any dim, on every chip.

Sorting, deduplication and range checks are done on the host, so that a device program has static
shapes and no `scan`, and no kernel needs to check an id.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class LookupBatch:
    """Ids of one step for one stack, in the two orders that forward and backward read them.

    ``N`` = id capacity, ``U`` = unique-row capacity, ``B`` = bags (features x samples).  All index
    tensors are int32.  Valid entries come first; what lies behind them is padding, whose values are
    stated here and which no kernel may let reach a table.

    Forward, ids sorted by bag (CSR):
        rows         ``[N]`` row in the stack; padding 0
        bags         ``[N]`` bag of each id, ascending; padding ``B``
        weights      ``[N]`` float32 per-id weight (MEAN pooling folds ``1 / length`` in); padding 0.
                     None means every valid id weighs 1.
        bag_offsets  ``[B + 1]`` ids of bag ``b`` are ``[bag_offsets[b], bag_offsets[b + 1])``
    Backward, the same ids sorted (stably) by row:
        unique_rows    ``[U]`` distinct rows, ascending; padding = number of rows in the stack
        row_offsets    ``[U + 1]`` occurrences of unique row ``u``; padding = number of valid ids
        sorted_bags    ``[N]`` bag of each occurrence; padding ``B``
        sorted_weights ``[N]`` float32, padding 0; None with `weights`
        segments       ``[N]`` index into `unique_rows` of each occurrence, ascending; padding ``U``
        order          ``[N]`` position in `rows` of each occurrence, so that
                       ``rows[order] == unique_rows[segments]``; padding ``N - 1``
    Counts:
        counts  ``[2]`` number of valid ids, number of unique rows
    """

    num_bags: int
    rows: Tensor
    bags: Tensor
    weights: Tensor | None
    bag_offsets: Tensor
    unique_rows: Tensor
    row_offsets: Tensor
    sorted_bags: Tensor
    sorted_weights: Tensor | None
    segments: Tensor
    order: Tensor
    counts: Tensor

    def per_id(self) -> LookupBatch:
        """The same ids with every position its own bag: what updates after a sequence lookup.

        The gradient is then ``[N, dim]``.  Only the backward fields and `rows` are meaningful.
        """
        return replace(
            self, num_bags=self.rows.shape[0], weights=None, sorted_weights=None, sorted_bags=self.order
        )


class Optimizer(enum.Enum):
    """Fused sparse optimizers, with the state that each keeps (flat buffers, float32)."""

    SGD = "sgd"  # none; with momentum: one value per element
    ADAGRAD = "adagrad"  # sum of squares per element
    ROWWISE_ADAGRAD = "rowwise_adagrad"  # sum of mean squares per row
    ADAM = "adam"  # two moments per element
    FTRL = "ftrl"  # z and n per element
