"""Lower a torch function through torch_tpu to StableHLO, without compiling it.

Runs in a process whose `tpu` device is emulated; the program may hold Mosaic kernels (`jax_op`), which
only libtpu can compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from recsys_tpu import emulation
from recsys_tpu.chips import CHIPS
from recsys_tpu.emulation import EmulationError


def lower(
    function: Callable[..., Any],
    example_args: Sequence[Tensor],
    *,
    chip: str | None = "v6e",
) -> str:
    """StableHLO text of `function`, a pure function of tensors to tensors.

    Tensors that it captures, such as a module's buffers, become arguments behind `example_args`.

    Args:
        function: takes `example_args`, returns a tensor or a (nested) tuple of tensors.  It may compute
            gradients with torch.autograd.grad and call functional collectives; it must not change its
            arguments in place.
        example_args: tensors on any device; only shape and dtype count (meta tensors do).
        chip: whose limits the Pallas kernels inside are made for; None for kernels between chips, which
            bring the mesh of their slice.

    Raises:
        EmulationError: no `tpu` device is emulated in this process.
        ValueError: `chip` is unknown.
    """
    if not emulation.is_active():
        raise EmulationError("lowering needs the emulated tpu device: call recsys_tpu.emulation.activate()")
    if chip is not None and chip not in CHIPS:
        raise ValueError(f"unknown chip {chip!r}; known are {', '.join(CHIPS)}")
    from torch_tpu._internal.compile import tpu_torch_compile
    from torch_tpu._internal.export import export

    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [torch.empty(x.shape, dtype=x.dtype, device="tpu") for x in example_args]
    with _kernels_for(chip) if chip else nullcontext():
        graph = make_fx(function, tracing_mode="fake")(*fakes)
        _move_factories(graph)
        arguments = [*example_args, *_lift_constants(graph)]
        placeholders = [tpu_torch_compile.placeholder(list(x.shape), x.dtype, False) for x in arguments]
        with _build_only(tpu_torch_compile):
            module = export.fx_to_mlir(graph, placeholders).module
    return tpu_torch_compile.serialize_mlir_text(module, enable_debug_info=False)


@contextmanager
def _kernels_for(chip: str) -> Iterator[None]:
    """Pallas asks which chip a kernel is for."""
    import jax

    with jax.sharding.use_abstract_mesh(CHIPS[chip].abstract_mesh()):
        yield


@contextmanager
def _build_only(tpu_torch_compile: Any) -> Iterator[None]:
    """Let torch_tpu stop once the module is built; the CPU plugin could not compile its kernels."""
    original = tpu_torch_compile.traverse_and_compile

    def build(result_tensors: Any, argument_tensors: Any, **_: Any) -> Any:
        module = tpu_torch_compile.build_mlir(result_tensors, argument_tensors)
        return SimpleNamespace(module=module, executable=None)

    tpu_torch_compile.traverse_and_compile = build
    try:
        yield
    finally:
        tpu_torch_compile.traverse_and_compile = original


def _lift_constants(graph: fx.GraphModule) -> list[Tensor]:
    """Make arguments, behind the function's own, of the tensors that it captured; returns those."""
    nodes = graph.graph.nodes
    last_argument = [node for node in nodes if node.op == "placeholder"][-1]
    lifted: list[Tensor] = []
    for node in list(nodes):
        if node.op != "get_attr":
            continue
        with graph.graph.inserting_after(last_argument):
            last_argument = graph.graph.placeholder(f"lifted_{len(lifted)}")
        node.replace_all_uses_with(last_argument)
        graph.graph.erase_node(node)
        lifted.append(getattr(graph, str(node.target)))
    graph.recompile()
    return lifted


def _move_factories(graph: fx.GraphModule) -> None:
    """Tensors that the function makes on the CPU are made on the device."""
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("tpu")}
    graph.recompile()
