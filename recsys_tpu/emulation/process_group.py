"""Collectives between emulated chips: tensors of the `tpu` device travel through gloo on the host.

`register()` makes the backend `gloo_staged` known, and then

    torch.distributed.init_process_group("cpu:gloo,tpu:gloo_staged")

gives a group whose collectives take tensors of either device.  A tensor on `tpu` is copied to the host
when the collective is issued (so it may be overwritten at once), and the result is copied back when its
work is waited for.  The results are those of a chip's interconnect; the time it takes is not.

Collectives inside a torch.compile graph become part of the XLA program and cannot be staged; a program
with them compiles for real chips only.
"""

# Methods take the one form in which torch.distributed calls them, not every overload of its stubs.
# mypy: disable-error-code="override"

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroupGloo, ReduceOp
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from recsys_tpu.emulation.errors import EmulationError

NAME = "gloo_staged"


def register() -> None:
    """Make `gloo_staged` a backend of torch.distributed.  Doing so again does nothing."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["tpu"])


def _create(options: Any, _: Any) -> StagedProcessGroup:
    return StagedProcessGroup(options.store, options.group_rank, options.group_size, options.timeout)


class StagedWork(dist.Work):
    """A gloo operation together with the copies that bring its results back to the device."""

    def __init__(self, inner: dist.Work, results: Sequence[tuple[Tensor, Tensor]], divisor: int = 1) -> None:
        super().__init__()
        self._inner = inner
        self._results = results
        self._divisor = divisor
        self._finished = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait, then write the results.

        Raises:
            RuntimeError: a rank did not join in time, or its connection broke.
        """
        if self._finished:
            return True
        self._inner.wait() if not timeout else self._inner.wait(timeout)
        with torch.no_grad():
            for destination, result in self._results:
                if self._divisor != 1:
                    result.div_(self._divisor)
                if destination is not result:
                    destination.detach().copy_(result)
        self._finished = True
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def is_success(self) -> bool:
        return self._inner.is_success()

    def exception(self) -> Any:
        return self._inner.exception()

    def result(self) -> list[Tensor]:
        self.wait()
        return [destination for destination, _ in self._results]

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future that is done: results reach the device only on a thread that waits for them."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self.result())
        return future


class StagedProcessGroup(dist.ProcessGroup):
    """Gloo for tensors on the CPU and on the emulated `tpu` device.

    Methods have the names and signatures by which torch.distributed calls a process group.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the form meant for Python subclasses
        backend = ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._gloo: Any = dist.ProcessGroup(store, rank, size)
        for group in (self, self._gloo):
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)

    def getBackendName(self) -> str:
        return NAME

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or AllreduceOptions()
        options, divisor = AllreduceOptions(), self._averages(opts)
        options.timeout, options.reduceOp = opts.timeout, _summed(opts.reduceOp)
        staged = _staged(tensors)
        return StagedWork(self._gloo.allreduce(staged, options), _pairs(tensors, staged), divisor)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return _Together([self.allreduce([tensor], opts) for tensor in tensors])

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or ReduceOptions()
        staged = _staged(tensors, copy=True)
        results = _pairs(tensors, staged) if self.rank() == opts.rootRank else []
        divisor = self._averages(opts)
        opts.reduceOp = _summed(opts.reduceOp)
        return StagedWork(self._gloo.reduce(staged, opts), results, divisor)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        staged = _staged(tensors)
        work = self._gloo.broadcast(staged, opts or BroadcastOptions())
        return StagedWork(work, _pairs(tensors, staged))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        staged = [_host_buffers(row) for row in outputs]
        work = self._gloo.allgather(staged, _staged(inputs), opts or AllgatherOptions())
        return StagedWork(work, _nested_pairs(outputs, staged))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        buffer = _host_buffer(output)
        work = self._gloo.all_gather_single(buffer, *_staged([input]), opts or AllgatherOptions())
        return StagedWork(work, [(output, buffer)])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        works = [self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return _Together(works)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        """Inputs of different sizes are allowed."""
        (output,), (parts,) = outputs, inputs
        opts = opts or ReduceScatterOptions()
        works = []
        for owner, part in enumerate(parts):
            options = ReduceOptions()
            options.reduceOp, options.rootRank, options.timeout = opts.reduceOp, owner, opts.timeout
            works.append(self._reduce_to(owner, part, output, options))
        return _Together(works)

    def _reduce_to(self, owner: int, part: Tensor, output: Tensor, options: Any) -> dist.Work:
        staged = _staged([part], copy=True)
        divisor = self._averages(options)
        options.reduceOp = _summed(options.reduceOp)
        results = [(output, staged[0])] if self.rank() == owner else []
        return StagedWork(self._gloo.reduce(staged, options), results, divisor)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter([output], [list(input.chunk(self.size()))], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        works = [self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return _Together(works)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int] | None = None,
        input_splits: list[int] | None = None,
        opts: Any = None,
    ) -> dist.Work:
        """Splits may be uneven; empty lists mean even splits."""
        buffer = _host_buffer(output)
        work = self._gloo.all_to_all_single(
            buffer, *_staged([input]), output_splits or [], input_splits or [], opts or AllToAllOptions()
        )
        return StagedWork(work, [(output, buffer)])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        buffer = torch.empty(sum(t.numel() for t in outputs), dtype=outputs[0].dtype)
        flat = torch.cat([t.reshape(-1) for t in _staged(inputs)])
        received = [t.numel() for t in outputs]
        sent = [t.numel() for t in inputs]
        work = self._gloo.all_to_all_single(buffer, flat, received, sent, opts or AllToAllOptions())
        parts = zip(outputs, buffer.split(received), strict=True)
        return StagedWork(work, [(output, part.reshape(output.shape)) for output, part in parts])

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        staged = [_host_buffers(row) for row in outputs]
        work = self._gloo.gather(staged, _staged(inputs), opts or GatherOptions())
        return StagedWork(work, _nested_pairs(outputs, staged))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        staged = _host_buffers(outputs)
        work = self._gloo.scatter(staged, [_staged(row) for row in inputs], opts or ScatterOptions())
        return StagedWork(work, _pairs(outputs, staged))

    def send(self, tensors: list[Tensor], destination: int, tag: int = 0) -> dist.Work:
        return StagedWork(self._gloo.send(_staged(tensors), destination, tag), [])

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist.Work:
        staged = _host_buffers(tensors)
        return StagedWork(self._gloo.recv(staged, source, tag), _pairs(tensors, staged))

    def barrier(self, opts: Any = None) -> dist.Work:
        options = BarrierOptions()
        if opts is not None:
            options.timeout = opts.timeout
        return self._gloo.barrier(options)

    def _averages(self, opts: Any) -> int:
        """What to divide by: gloo has no average."""
        return self.size() if opts.reduceOp == ReduceOp.AVG else 1


class _Together(StagedWork):
    """Several works waited for as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        dist.Work.__init__(self)
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        return next((e for work in self._works if (e := work.exception())), None)

    def result(self) -> list[Tensor]:
        return [tensor for work in self._works for tensor in work.result()]


def _summed(operation: Any) -> Any:
    return ReduceOp.SUM if operation == ReduceOp.AVG else operation


def _staged(tensors: Sequence[Tensor], *, copy: bool = False) -> list[Tensor]:
    """Host copies of device tensors; host tensors themselves unless `copy`."""
    return [
        tensor.clone() if copy and tensor.device.type == "cpu" else _to_host(tensor) for tensor in tensors
    ]


def _to_host(tensor: Tensor) -> Tensor:
    try:
        return tensor.detach().cpu().contiguous()
    except RuntimeError as error:
        if "placeholder" not in str(error):
            raise
        raise EmulationError(
            "a collective inside torch.compile cannot run on an emulated tpu device: it would be part of "
            "the compiled program. Keep the exchange outside the compiled function"
        ) from error


def _host_buffer(tensor: Tensor) -> Tensor:
    """Where gloo may write what will be copied to `tensor`."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _host_buffers(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [_host_buffer(tensor) for tensor in tensors]


def _pairs(tensors: Sequence[Tensor], staged: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(tensors, staged, strict=True))


def _nested_pairs(
    tensors: Sequence[Sequence[Tensor]], staged: Sequence[Sequence[Tensor]]
) -> list[tuple[Tensor, Tensor]]:
    return [pair for row, host in zip(tensors, staged, strict=True) for pair in _pairs(row, host)]
