"""RMSNorm forward, backward and fused residual-add as raw HIP C kernels, for AMD, NVIDIA and the CPU.

Importing does nothing: no compiler is looked for, no GPU is touched, neither torch nor CuPy is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .ahead import warmup
from .bridge import to_cupy, to_numpy, to_torch
from .ops import (
    fused_add_rmsnorm,
    fused_add_rmsnorm_bwd,
    fused_add_rmsnorm_fwd,
    rmsnorm,
    rmsnorm_bwd,
    rmsnorm_fwd,
    workspace_bytes,
)

if TYPE_CHECKING:
    from .autograd import FusedAddRMSNormFunction, RMSNormFunction
    from .modules import FusedAddRMSNorm, RMSNorm

__version__ = "0.1.0"

# Names that need torch are looked up when they are asked for.
_WITH_TORCH = {
    "RMSNormFunction": "autograd",
    "FusedAddRMSNormFunction": "autograd",
    "RMSNorm": "modules",
    "FusedAddRMSNorm": "modules",
}

__all__ = [
    "FusedAddRMSNorm",
    "FusedAddRMSNormFunction",
    "RMSNorm",
    "RMSNormFunction",
    "fused_add_rmsnorm",
    "fused_add_rmsnorm_bwd",
    "fused_add_rmsnorm_fwd",
    "get_num_threads",
    "rmsnorm",
    "rmsnorm_bwd",
    "rmsnorm_fwd",
    "set_num_threads",
    "to_cupy",
    "to_numpy",
    "to_torch",
    "warmup",
    "workspace_bytes",
]


def get_num_threads() -> int:
    """Threads that a call on the host may use: set_num_threads, RMSNORM_RAW_THREADS, or the process's CPUs."""
    from .devices import host

    return host.get_num_threads()


def set_num_threads(count: int | None) -> None:
    """Sets the threads of calls on the host; None goes back to the default. Results do not depend on it."""
    from .devices import host

    host.set_num_threads(count)


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise RuntimeError(f"{name} needs torch: pip install 'rmsnorm-raw[torch]'")
    return getattr(import_module(f".{_WITH_TORCH[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
