"""A whole train step as one program that takes over its tables, on the `tpu` device.

torch.compile copies a table that a compiled function mutates; its compiler class, given a functional
graph and told which inputs are donated, does not.  That class is internal to torch_tpu: this module is
the only one that knows it.  The other form, donating ops around compiled towers, uses public API only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx


def compile_donating(
    step: Callable[..., tuple[Tensor, ...]], example_args: Sequence[Tensor], *, donate: Sequence[int]
) -> Callable[..., tuple[Tensor, ...]]:
    """`step` compiled for tensors shaped as `example_args` (on the device).

    step: pure; takes and returns tensors, may call torch.autograd.grad, lookups and `donating_update`.
    donate: arguments whose memory the results take over; they are dead after each call.
    """
    from torch_tpu._internal.compile.compiler import StaticCompiler

    graph = make_fx(step, tracing_mode="fake")(*example_args)
    _place_on(graph, example_args[0].device)
    program: Any = StaticCompiler()(graph, list(example_args), donated_inputs=list(donate))
    return lambda *arguments: tuple(program(*arguments))


def _place_on(graph: fx.GraphModule, device: torch.device) -> None:
    """Constants that the step makes belong to the program."""
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}
    graph.recompile()
