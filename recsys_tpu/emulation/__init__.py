"""The native PyTorch `tpu` device on a machine without a TPU.

    from recsys_tpu import emulation
    emulation.activate()

and `torch.device("tpu")` works: torch_tpu's own eager operators, autograd, torch.compile and
`torch.tpu.pallas.jax_op` run, compiled by XLA for the CPU.  It is a device to develop, debug and test on;
it says nothing about a TPU's speed.  docs/emulation.md states what is and is not emulated.

`python -m recsys_tpu.emulation script.py ...` runs any torch_tpu script so, unchanged.
"""

from recsys_tpu.emulation.device import activate, compilations, compiled_programs, is_active
from recsys_tpu.emulation.errors import EmulationError

__all__ = ["EmulationError", "activate", "compilations", "compiled_programs", "is_active"]
