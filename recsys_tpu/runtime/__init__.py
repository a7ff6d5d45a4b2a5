"""The one place that decides device, process group, precision and compilation.

`activation` and `settings` come before `import torch` and do not import it; `Runtime` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recsys_tpu.runtime.settings import CompileCacheConfig, RuntimeConfig

if TYPE_CHECKING:
    from recsys_tpu.runtime.runtime import Runtime

__all__ = ["CompileCacheConfig", "Runtime", "RuntimeConfig"]


def __getattr__(name: str) -> Any:
    if name == "Runtime":  # late, because it imports torch
        from recsys_tpu.runtime.runtime import Runtime

        return Runtime
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
