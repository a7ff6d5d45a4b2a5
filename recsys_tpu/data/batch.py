"""One step's samples: what the reader yields and a model takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


@dataclass(frozen=True)
class Batch:
    """Samples of one rank in one step; ``B`` is fixed over a run, so that shapes on a device are static.

    dense   ``[B, dense features]`` float32
    sparse  keys = sparse features, stride ``B``, int32 ids
    labels  ``[B]`` float32, 0 or 1
    weights ``[B]`` float32: 1 for a sample, 0 for padding of the last batch (which has no ids)
    global_rows: samples over all ranks in this step, padding not counted
    """

    dense: Tensor
    sparse: KeyedJaggedTensor
    labels: Tensor
    weights: Tensor
    global_rows: int

    def dense_to(self, device: torch.device) -> Batch:
        """The batch with all but the ids on `device`; where the ids go is the sharded module's decision."""
        return replace(
            self,
            dense=self.dense.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            weights=self.weights.to(device, non_blocking=True),
        )
