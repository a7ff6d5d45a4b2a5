"""Sharding planner: tables and a TPU topology in, the fastest plan within HBM out.

`make_plan(workload, topology)` is the entry; `torchrec_bridge` (not imported here, it needs torch) turns a
plan into TorchRec's ShardingPlan.
"""

from recsys_tpu.sharding.planner.errors import InfeasibleError, PlanDriftError, PlanError, PlanInputError
from recsys_tpu.sharding.planner.estimate import Estimate, estimate
from recsys_tpu.sharding.planner.make import make_plan
from recsys_tpu.sharding.planner.plan import Plan, Shard, TablePlan
from recsys_tpu.sharding.planner.search import Effort
from recsys_tpu.sharding.planner.tables import (
    DensePart,
    IdStatistics,
    ShardingType,
    TableConstraint,
    TableSpec,
    Workload,
    dlrm_dense_part,
)
from recsys_tpu.sharding.planner.topology import Topology, emulated, parse_topology

__all__ = [
    "DensePart",
    "Effort",
    "Estimate",
    "IdStatistics",
    "InfeasibleError",
    "Plan",
    "PlanDriftError",
    "PlanError",
    "PlanInputError",
    "Shard",
    "ShardingType",
    "TableConstraint",
    "TablePlan",
    "TableSpec",
    "Topology",
    "Workload",
    "dlrm_dense_part",
    "emulated",
    "estimate",
    "make_plan",
    "parse_topology",
]
