"""The query tower with its tables in plain torch, for torch.export; and the arrays that it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

NO_ID = -1
"""Fills up rows of ids that are shorter than the widest."""


class QueryTower(nn.Module):
    """Looks up and mean-pools every query feature, then runs the tower.

    Args:
        tables: ``[rows, D]`` float32 by name.
        table_of: the table of each feature, in the tower's order.
        tower: ``[B, features, D]`` to ``[B, D]``.
        normalize: scale the result to length 1.
    """

    def __init__(
        self, tables: Mapping[str, Tensor], table_of: Mapping[str, str], tower: nn.Module, *, normalize: bool
    ) -> None:
        super().__init__()
        self.tables = nn.ParameterDict({name: nn.Parameter(value) for name, value in tables.items()})
        self.tower = tower
        self._table_of = dict(table_of)
        self._normalize = normalize

    def forward(self, ids: dict[str, Tensor]) -> Tensor:
        """Ids ``[B, width of the feature]`` int64 by feature, `NO_ID` where there is none, to ``[B, D]``."""
        pooled = []
        for feature, table in self._table_of.items():
            present = (ids[feature] >= 0).unsqueeze(-1).to(self.tables[table].dtype)
            rows = nn.functional.embedding(ids[feature].clamp(min=0), self.tables[table]) * present
            pooled.append(rows.sum(1) / present.sum(1).clamp(min=1.0))
        query = self.tower(torch.stack(pooled, dim=1))
        return nn.functional.normalize(query, dim=-1) if self._normalize else query


def export_query_tower(tower: QueryTower, widths: Mapping[str, int]) -> torch.export.ExportedProgram:
    """The tower as a program for any number of queries; `widths` says how many ids a feature holds."""
    batch = torch.export.Dim("batch", min=1)
    example = {name: torch.zeros(2, width, dtype=torch.int64) for name, width in widths.items()}
    with torch.no_grad():
        return torch.export.export(
            tower.eval(), (example,), dynamic_shapes=({name: {0: batch} for name in widths},)
        )


def fill_rows(rows: Sequence[Sequence[int]], width: int) -> npt.NDArray[np.int64]:
    """``[rows, width]`` filled up with `NO_ID`; every row has at most `width` ids."""
    result = np.full((len(rows), width), NO_ID, np.int64)
    for row, ids in zip(result, rows, strict=True):
        row[: len(ids)] = ids
    return result
