"""Debug mode's check of a step's ids against each table, by name; see `kernels.debug`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recsys_tpu.embeddings.stacks import LocalTable, TableStack, features_of
from recsys_tpu.kernels.batch import LookupBatch
from recsys_tpu.kernels.debug import IdRangeError


def check_ids(
    tables: Sequence[LocalTable], stack: TableStack, feature_tables: Sequence[int], batch: LookupBatch
) -> None:
    """Raises IdRangeError for an id that its table doesn't have, naming both.

    An id of the right stack but of another table, which no bounds check finds, is found as well.  Bags are
    in sample-major order (bag = sample * features + feature), which says which table an id is for.
    """
    features = features_of(stack, feature_tables)
    count = int(batch.counts[0])
    table_of_feature = np.array([feature_tables[feature] for feature in features], np.int64)
    table = table_of_feature[batch.bags[:count].cpu().numpy() % len(features)]
    first_rows = np.zeros(len(tables), np.int64)
    first_rows[list(stack.first_rows)] = list(stack.first_rows.values())
    ids = batch.rows[:count].cpu().numpy() - first_rows[table]
    bad = np.flatnonzero((ids < 0) | (ids >= np.array([t.rows for t in tables])[table]))
    if len(bad):
        wrong = tables[table[bad[0]]]
        raise IdRangeError(
            f"table {wrong.name}: id {ids[bad[0]]} is not in [0, {wrong.rows}) "
            f"({len(bad)} of {count} ids of this step are out of range)"
        )
