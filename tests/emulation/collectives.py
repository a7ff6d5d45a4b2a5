# ruff: noqa: E402 (the device is chosen before torch is imported)
"""Run by torchrun: every collective on the emulated device against the same one on the CPU."""

from __future__ import annotations

import sys

from recsys_tpu.runtime import activation

activation.activate("tpu-emulated")

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn

from recsys_tpu.runtime import Runtime, RuntimeConfig


def values(*shape: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return (torch.rand(*shape, generator=generator) * 100).to(dtype)


def both_devices(collective, *, async_op: bool) -> None:
    """`collective(device, async_op)` returns the tensors that it wrote, before they are complete."""
    results = []
    for device in (torch.device("cpu"), torch.device("tpu", 0)):
        written, work = collective(device, async_op)
        if async_op:
            work.wait()
        for tensor in written:
            assert tensor.device == device
        results.append([tensor.cpu() for tensor in written])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-5)


def collectives(rank: int, world: int):
    def all_reduce(operation, dtype=torch.float32):
        def run(device, async_op):
            x = values(5, 3, rank=rank, dtype=dtype).to(device)
            return [x], dist.all_reduce(x, op=operation, async_op=async_op)

        return run

    def broadcast(device, async_op):
        x = values(7, rank=rank).to(device)
        return [x], dist.broadcast(x, src=world - 1, async_op=async_op)

    def all_gather(device, async_op):
        out = [torch.zeros(4, 2, device=device) for _ in range(world)]
        return out, dist.all_gather(out, values(4, 2, rank=rank).to(device), async_op=async_op)

    def all_gather_single(device, async_op):
        out = torch.zeros(4 * world, 2, device=device)
        return [out], dist.all_gather_single(out, values(4, 2, rank=rank).to(device), async_op=async_op)

    def reduce_scatter(device, async_op):
        out = torch.zeros(rank + 1, 2, device=device)
        parts = [values(owner + 1, 2, rank=rank + owner).to(device) for owner in range(world)]
        return [out], dist.reduce_scatter(out, parts, async_op=async_op)

    def reduce_scatter_single(device, async_op):
        out = torch.zeros(3, 2, device=device)
        return [out], dist.reduce_scatter_single(
            out, values(3 * world, 2, rank=rank).to(device), async_op=async_op
        )

    def all_to_all_even(device, async_op):
        out = torch.zeros(2 * world, 3, device=device)
        return [out], dist.all_to_all_single(
            out, values(2 * world, 3, rank=rank).to(device), async_op=async_op
        )

    def all_to_all_uneven(device, async_op):
        """Rank s sends (s + 2 d) % 4 rows to rank d: some nothing at all."""
        sent = [(rank + 2 * d) % 4 for d in range(world)]
        received = [(s + 2 * rank) % 4 for s in range(world)]
        out = torch.zeros(sum(received), 3, device=device)
        source = values(sum(sent), 3, rank=rank).to(device)
        return [out], dist.all_to_all_single(out, source, received, sent, async_op=async_op)

    def all_to_all_list(device, async_op):
        out = [torch.zeros(s + 1, rank + 1, device=device) for s in range(world)]
        source = [values(rank + 1, d + 1, rank=10 * rank + d).to(device) for d in range(world)]
        return out, dist.all_to_all(out, source, async_op=async_op)

    def scatter(device, async_op):
        out = torch.zeros(3, device=device)
        parts = [values(3, rank=d).to(device) for d in range(world)] if rank == 0 else None
        return [out], dist.scatter(out, parts, src=0, async_op=async_op)

    def gather(device, async_op):
        out = [torch.zeros(3, device=device) for _ in range(world)] if rank == 1 else None
        return out or [], dist.gather(values(3, rank=rank).to(device), out, dst=1, async_op=async_op)

    def reduce(device, async_op):
        x = values(3, rank=rank).to(device)
        return [x] if rank == 1 else [], dist.reduce(x, dst=1, async_op=async_op)

    def into_a_view(device, async_op):
        whole = torch.zeros(4, 2 * world, device=device)
        out = whole[1, :world]
        return [whole], dist.all_to_all_single(out, values(world, rank=rank).to(device), async_op=async_op)

    return {
        "all_reduce sum": all_reduce(dist.ReduceOp.SUM),
        "all_reduce max": all_reduce(dist.ReduceOp.MAX),
        "all_reduce int64": all_reduce(dist.ReduceOp.SUM, torch.int64),
        "all_reduce bf16": all_reduce(dist.ReduceOp.SUM, torch.bfloat16),
        "broadcast": broadcast,
        "all_gather": all_gather,
        "all_gather_single": all_gather_single,
        "reduce_scatter": reduce_scatter,
        "reduce_scatter_single": reduce_scatter_single,
        "all_to_all_single even": all_to_all_even,
        "all_to_all_single uneven": all_to_all_uneven,
        "all_to_all": all_to_all_list,
        "scatter": scatter,
        "gather": gather,
        "reduce": reduce,
        "into a view": into_a_view,
    }


def check_functional(world: int, rank: int) -> None:
    x = values(2 * world, 3, rank=rank)
    group = dist.group.WORLD
    for name, call in {
        "all_to_all": lambda t: functional.all_to_all_single(t, None, None, group),
        "all_reduce": lambda t: functional.all_reduce(t, "sum", group),
        "avg": lambda t: functional.all_reduce(t, "avg", group),
        "all_gather": lambda t: functional.all_gather_single(t, 0, group),
        "reduce_scatter": lambda t: functional.reduce_scatter_single(t, "sum", 0, group),
        "autograd all_to_all": lambda t: functional.all_to_all_single_autograd(t, None, None, group),
    }.items():
        expected, actual = call(x), call(x.to("tpu"))
        assert actual.device.type == "tpu", name
        # `+ 0` waits: a functional collective returns before it is complete
        torch.testing.assert_close((actual + 0).cpu(), expected + 0, msg=name)


def check_inside_compile() -> None:
    """No deadlock and no abort: an error that says what to do."""
    exchange = torch.compile(lambda t: functional.all_reduce(t * 2, "sum", dist.group.WORLD) + 1)
    try:
        exchange(torch.ones(4, device="tpu"))
    except Exception as error:
        assert "Keep the exchange outside the compiled function" in str(error)
    else:
        raise AssertionError("a collective inside torch.compile was not refused")


def check_objects_and_subgroups(world: int, rank: int) -> None:
    gathered: list[object] = [None] * world
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": r} for r in range(world)]
    boxed = [("plan", rank)]
    dist.broadcast_object_list(boxed, src=1)
    assert boxed == [("plan", 1)]
    pair = dist.new_group([0, 1])
    if rank < 2:
        x = torch.full((3,), float(rank + 1), device="tpu")
        dist.all_reduce(x, group=pair)
        assert x.tolist() == [3.0, 3.0, 3.0]
    dist.barrier()


def check_ddp(rank: int) -> None:
    """DDP on the emulated device gives the gradients of the whole batch."""
    torch.manual_seed(rank)  # DDP has to broadcast rank 0's weights
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to("tpu")
    ddp = nn.parallel.DistributedDataParallel(model)
    ddp(values(6, 4, rank=rank).to("tpu")).mean().backward()
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    batch = torch.cat([values(6, 4, rank=r) for r in range(dist.get_world_size())])
    whole(batch).mean().backward()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-5)


def main() -> None:
    with Runtime.start(RuntimeConfig(device="tpu-emulated", compile_timeout_s=60)) as runtime:
        rank, world = runtime.rank, runtime.world_size
        for name, collective in collectives(rank, world).items():
            for async_op in (False, True):
                try:
                    both_devices(collective, async_op=async_op)
                except Exception as error:
                    print(f"FAILED {name}, async_op={async_op}: {error}", file=sys.stderr)
                    raise
        check_functional(world, rank)
        check_inside_compile()
        check_objects_and_subgroups(world, rank)
        check_ddp(rank)
        print(f"rank {rank} of {world}: all collectives agree")


main()
