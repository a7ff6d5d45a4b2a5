"""Bytes that a planned model moves in a training step on ranks, beside those that the cost model counts.

Counted are the ids that TorchRec's input dists hand to all-to-all, the vectors, sums and gradients that the
output dists hand to collectives, and, for each stack of tables, the HBM bytes that the kernels ask for
(`recsys_tpu.kernels.traffic`; a row's state in whole granules) given the ids, distinct rows and bags that
the host routed to it.
Replicated tables exchange nothing but dense gradients and are left out.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torchrec.distributed import dist_data

from recsys_tpu.chips import CHIPS
from recsys_tpu.kernels.arg_specs import Program
from recsys_tpu.kernels.flat_rows import LINE
from recsys_tpu.kernels.traffic import traffic
from recsys_tpu.runtime import Runtime
from recsys_tpu.sharding.lookups import PooledLookup, SortedFeatures
from recsys_tpu.sharding.planner import Plan, ShardingType, Workload
from recsys_tpu.sharding.planner.costs import CostModel
from recsys_tpu.sharding.planner.estimate import table_terms
from recsys_tpu.sharding.planner.torchrec_bridge import workload_of
from tests.sharding.planner.bridge_ranks import train_one
from tests.sharding.ranks import TIMEOUT_S, on_ranks
from tests.sharding.training import Case, Model, batch_of

CHIP = "v6e"
GRANULE = 32
TERMS = ("ids", "lengths of bags", "vectors", "partial sums", "lookup", "output laid out again", "update")


def counted(
    case: Case, plans: list[Plan], device: str, *, timeout_s: float = TIMEOUT_S
) -> list[Counter[str]]:
    """Bytes over all ranks of the first step under each plan, by term.  All plans are of one topology."""
    with TemporaryDirectory() as folder:
        files = [str(Path(folder) / f"plan{index}.json") for index in range(len(plans))]
        for plan, name in zip(plans, files, strict=True):
            plan.save(Path(name))
        ranks = plans[0].topology.ranks
        of_ranks = on_ranks(f"{__name__}:_count", ranks, device, case, files, timeout_s=timeout_s)
    return [sum(of_plan, Counter()) for of_plan in zip(*of_ranks, strict=True)]


def modelled(case: Case, plan: Plan) -> Counter[str]:
    """The same terms by the cost model, for the batch's own mean ids a sample."""
    work = _workload(case, plan)
    topology = plan.topology
    ids_only = replace(work, exchange_bytes=0)
    group = topology.row_group(plan.row_group)
    total: Counter[str] = Counter()
    for spec in work.tables:
        table = plan.table(spec.name)
        terms = table_terms(CostModel(work, topology, group), plan, spec, table)
        to_others = table_terms(CostModel(ids_only, topology, group), plan, spec, table)["send"].sum()
        total["ids"] += to_others * topology.injection_bytes_per_s / (1 - 1 / topology.ranks)
        total["vectors"] += (terms["send"].sum() - to_others) * topology.injection_bytes_per_s
        whole = table.kind is ShardingType.ROW_WISE
        ring = topology.injection_bytes_per_s if whole else group.ring_bytes_per_s
        total["partial sums"] += terms["ring"].sum() * ring
        for name in ("lookup", "update"):
            total[name] += terms[name].sum() * topology.hbm_bytes_per_s
    return total


def _workload(case: Case, plan: Plan) -> Workload:
    batch = batch_of(case, 0)
    factors = {name: ids / case.batch for name, ids in zip(batch.keys(), batch.length_per_key(), strict=True)}
    ranks = plan.topology.ranks
    return workload_of(
        Model(case),
        batch_per_rank=case.batch // ranks,
        optimizer=case.optimizer,
        pooling_factors=factors,
    )


def _count(runtime: Runtime, case: Case, plan_files: list[str]) -> list[Counter[str]]:
    """On each rank: its bytes of one step of each plan."""
    counts = []
    for name in plan_files:
        counts.append(Counter())
        with _counting(counts[-1], case, runtime.world_size):
            train_one(runtime, replace(case, steps=1), Plan.load(Path(name)), True)
    return counts


@contextmanager
def _counting(total: Counter[str], case: Case, world: int) -> Iterator[None]:
    def hook(owner: Any, name: str, count: Callable[..., None], *, after: bool = False) -> Any:
        original = getattr(owner, name)

        @functools.wraps(original)
        def called(*args: Any, **named: Any) -> Any:
            if not after:
                count(*args, **named)
            result = original(*args, **named)
            if after:
                count(*args, result)
            return result

        return mock.patch.object(owner, name, called)

    def ids(_: Any, **named: Any) -> None:
        for label, tensor in zip(named["labels"], named["input_tensors"], strict=True):
            term = {"values": "ids", "lengths": "lengths of bags"}[label]
            total[term] += tensor.numel() * tensor.element_size()

    def vectors(
        output: Tensor,
        input: Tensor,
        output_splits: list[int] | None = None,
        input_splits: list[int] | None = None,
        group: dist.ProcessGroup | None = None,
        **_: Any,
    ) -> None:
        if input.is_floating_point():
            size, rank = dist.get_world_size(group), dist.get_rank(group)
            sizes = input_splits or [len(input) // size] * size
            rows = sum(sizes) - sizes[rank]
            total["vectors"] += rows * math.prod(input.shape[1:]) * input.element_size()

    def reduced(output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None, **_: Any) -> None:
        total["partial sums"] += input.nbytes - input.nbytes // dist.get_world_size(group)

    def gathered(output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None, **_: Any) -> None:
        total["partial sums"] += input.nbytes * (dist.get_world_size(group) - 1)

    def stacks(lookup: PooledLookup, _: Any, sorted_ids: SortedFeatures) -> None:
        for kernel, of_group in zip(lookup._emb_modules, sorted_ids.groups, strict=True):
            for stack, ids_of_stack in zip(kernel.emb_module.stacks, of_group, strict=True):
                count, unique = ids_of_stack.sizes
                for term, op in (("lookup", "pooled"), ("update", case.optimizer)):
                    program = Program(
                        op,
                        "float32",
                        stack.dim,
                        weighted=False,
                        rows=stack.num_rows,
                        ids=count,
                        bags=ids_of_stack.num_bags,
                    )
                    again = 0
                    if term == "lookup" and stack.dim % LINE:
                        # XLA brings the SparseCores' output into tiles; `traffic` counts that too.
                        again = 2 * ids_of_stack.num_bags * stack.dim * 4
                    total["output laid out again"] += again
                    total[term] += traffic(program, CHIPS[CHIP], ids=count, unique=unique).issued - again
                    # What the kernels ask for a row's state is less than the least that HBM moves.
                    total[term] += 2 * unique * (-program.state_bytes % GRANULE)

    with ExitStack() as hooks:
        hooks.enter_context(hook(dist_data.KJTAllToAllTensorsAwaitable, "__init__", ids))
        hooks.enter_context(hook(dist, "all_to_all_single", vectors))
        hooks.enter_context(hook(dist, "reduce_scatter_tensor", reduced))
        hooks.enter_context(hook(dist, "all_gather_into_tensor", gathered))
        hooks.enter_context(hook(PooledLookup, "sort", stacks, after=True))
        yield
