"""The `runtime` section of a config: device, numeric precision, compilation, process group.

Read before `import torch`, so this module imports neither torch nor JAX.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

DeviceChoice = Literal["auto", "cpu", "tpu", "tpu-emulated"]
DeviceKind = Literal["cpu", "tpu", "tpu-emulated"]
Precision = Literal["fp32", "bf16"]
MatmulPrecision = Literal["highest", "high", "medium"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CompileCacheConfig(_Section):
    """Where compiled programs are kept between processes and runs (docs/running-on-tpu.md)."""

    share_between_local_ranks: bool = True
    """torch_tpu's tier 2: ranks of one host compile each program once (kept in /dev/shm)."""

    directory: str | None = None
    """torch_tpu's tier 3: a local directory or gs:// prefix that outlives the run."""

    inductor_directory: Path | None = None
    """Inductor's cache, used by `device: cpu` (TORCHINDUCTOR_CACHE_DIR)."""

    jax_directory: Path | None = None
    """XLA's persistent cache as JAX uses it (JAX_COMPILATION_CACHE_DIR): only for programs that JAX
    itself compiles, such as benchmarks of the kernels; torch_tpu keeps its own, above."""


class ProfileConfig(_Section):
    """Which steps to trace (docs/reliability.md)."""

    first_step: int | None = Field(default=None, ge=1)
    """First step of the window, counted from 1; none: no profile."""

    steps: int = Field(default=5, ge=1, le=1000)
    """Steps in the window."""

    ranks: tuple[int, ...] = (0,)
    """Ranks that trace; each writes a folder of its own."""

    @property
    def last_step(self) -> int:
        return (self.first_step or 1) + self.steps - 1


class RuntimeConfig(_Section):
    """What decides where and how a run computes."""

    device: DeviceChoice = "auto"
    """`auto` is `tpu` when a TPU is on the PCI bus and `cpu` otherwise; `tpu-emulated` is never chosen
    unasked."""

    precision: Precision = "fp32"
    """`bf16` computes the dense part in bfloat16 under autocast; weights and optimizer state stay
    float32 (master weights), and so do embedding tables."""

    matmul_precision: MatmulPrecision = "highest"
    """How a float32 matrix product is computed on the chip: `highest` float32, `high` three bfloat16
    passes, `medium` one bfloat16 pass.  torch_tpu's own default is `medium`; here float32 means float32
    unless the config says otherwise.  On the CPU every choice computes in float32 except that `medium`
    lets oneDNN use bfloat16 where the processor has it."""

    compile: bool = True
    """Pass dense towers through torch.compile."""

    compile_cache: CompileCacheConfig = CompileCacheConfig()

    warmup_steps: int = Field(default=3, ge=1)
    """Steps during which compilation is expected; a compilation after them is reported."""

    collective_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds that a run of several ranks may stand still in a step before it ends with an error."""

    compile_timeout_s: float = Field(default=600.0, gt=0)
    """The same where waiting is normal: the first step, compilation, the first evaluation and the computing
    of later ones, checkpoints.  Also the limit of a single collective, which raises when it is over."""

    profile: ProfileConfig = ProfileConfig()

    deterministic: bool = False
    """Refuse torch operators without a deterministic implementation."""
