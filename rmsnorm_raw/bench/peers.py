"""The other packages: how each is called for an operation. A peer is a function of an operation's name and its operands
as torch tensors; it prepares what is not timed and returns the call, whose results come in the operation's order.

Knows: torch, Liger Kernel, quack; each imported only when asked for.
Must not: time. A peer raises where it cannot do what is asked; its caller reports that and goes on.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from .cases import EPS

Peer = Callable[[str, dict[str, Any]], Callable[[], tuple[Any, ...]]]


def load_torch(wanted: Sequence[str]) -> None:
    """Imports torch if a peer wants it and it is there: all peers are built on it."""
    if wanted and importlib.util.find_spec("torch") is not None:
        importlib.import_module("torch")


def find(wanted: Sequence[str], on_gpu: bool) -> tuple[dict[str, Peer], dict[str, str]]:
    """The peers that can be called here, and for the others why not."""
    found: dict[str, Peer] = {}
    absent: dict[str, str] = {}
    for name in wanted:
        try:
            found[name] = _MAKERS[name](on_gpu)
        except ImportError as error:
            absent[name] = "not installed" if isinstance(error, ModuleNotFoundError) else str(error)
        except Exception as error:  # importing a GPU package can fail in any way
            absent[name] = str(error).strip().partition("\n")[0] or type(error).__name__
    return found, absent


def _torch(on_gpu: bool) -> Peer:
    """The fused operators behind torch.nn.functional.rms_norm. The CPU has none: what F.rms_norm does there."""
    import torch

    if not on_gpu:
        return _through_autograd(lambda x, weight: torch.nn.functional.rms_norm(x, weight.shape, weight, EPS))
    _require_gpu(torch, on_gpu)
    forward, backward = torch.ops.aten._fused_rms_norm, torch.ops.aten._fused_rms_norm_backward

    def prepare(op: str, o: dict[str, Any]) -> Callable[[], tuple[Any, ...]]:
        x, weight = o["x"], o["weight"]
        shape = list(weight.shape)
        if op == "fwd":
            return lambda: forward(x, shape, weight, EPS)[:1]
        if op == "fused_fwd":

            def fused_forward() -> tuple[Any, ...]:
                total = x + o["residual"]
                return forward(total, shape, weight, EPS)[0], total

            return fused_forward
        rstd = forward(x, shape, weight, EPS)[1]
        if op == "bwd_frozen":
            return lambda: backward(o["dout"], x, shape, rstd, weight, [True, False])[:1]
        if op == "bwd":
            return lambda: tuple(backward(o["dout"], x, shape, rstd, weight, [True, True]))

        def fused_backward() -> tuple[Any, ...]:
            dx, dweight = backward(o["dout"], x, shape, rstd, weight, [True, True])
            return dx.add_(o["dresidual_out"]), dweight

        return fused_backward

    return prepare


def _compile(on_gpu: bool) -> Peer:
    """torch.compile of the formula, in float32 as torch.nn.RMSNorm computes it."""
    import torch
    from torch._functorch import config

    if on_gpu:
        _require_gpu(torch, on_gpu)
    config.donated_buffer = False  # one graph's backward is called many times

    def formula(x: Any, weight: Any) -> Any:
        h = x.float()
        return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS) * weight.float()).to(x.dtype)

    return _through_autograd(formula, lambda f: torch.compile(f, dynamic=False))


def _through_autograd(norm: Callable[[Any, Any], Any], wrap: Callable[[Any], Any] | None = None) -> Peer:
    """A differentiable norm as the operations; `wrap` is put around what is one step of a model."""
    import torch

    def fused(x: Any, residual: Any, weight: Any) -> tuple[Any, Any]:
        total = x + residual
        return norm(total, weight), total

    prepared: dict[Any, Any] = {}

    def wrapped(key: Any, function: Any) -> Any:
        # One program for one shape: a second shape would make it a dynamic one, and a ninth none at all.
        if wrap is None:
            return function
        if key not in prepared:
            prepared.clear()
            torch._dynamo.reset()
            prepared[key] = wrap(function)
        return prepared[key]

    def prepare(op: str, o: dict[str, Any]) -> Callable[[], tuple[Any, ...]]:
        x, weight = o["x"], o["weight"]
        key = (op, x.shape, x.dtype)
        if op in ("fwd", "fused_fwd"):
            with_sum = op == "fused_fwd"
            forward = wrapped(key, fused if with_sum else norm)

            def call() -> tuple[Any, ...]:
                with torch.no_grad():
                    return forward(x, o["residual"], weight) if with_sum else (forward(x, weight),)

            return call
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_(op != "bwd_frozen")
        inputs = (x,) if op == "bwd_frozen" else (x, weight)
        if op == "fused_bwd":
            # x stands for the sum, so what is added to it is zero.
            outputs = wrapped(key, fused)(x, torch.zeros_like(x), weight)
            gradients = (o["dout"], o["dresidual_out"])
        else:
            outputs, gradients = (wrapped(key, norm)(x, weight),), (o["dout"],)
        return lambda: torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)

    return prepare


def _liger(on_gpu: bool) -> Peer:
    """In Liger's defaults: casting "llama", dx written over dout, each set's own copy of it."""
    import torch
    from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_backward, fused_add_rms_norm_forward
    from liger_kernel.ops.rms_norm import rms_norm_backward, rms_norm_forward

    _require_gpu(torch, on_gpu)

    def prepare(op: str, o: dict[str, Any]) -> Callable[[], tuple[Any, ...]]:
        x, weight = o["x"], o["weight"]
        if op == "fwd":
            return lambda: rms_norm_forward(x, weight, EPS, 0.0, "llama", None)[:1]
        if op == "fused_fwd":
            return lambda: fused_add_rms_norm_forward(x, o["residual"], weight, EPS, 0.0, "llama")[:2]
        _, _, rstd, block, warps, casting = rms_norm_forward(x, weight, EPS, 0.0, "llama", None)
        if op == "fused_bwd":
            # Here dx in place of dout would save nothing. Two stages are what its forward asks for.

            def fused_backward() -> tuple[Any, ...]:
                dx, _, dweight = fused_add_rms_norm_backward(
                    o["dout"], o["dresidual_out"], x, weight, rstd, 0.0, casting, block, warps, 2, False
                )
                return dx, dweight

            return fused_backward
        # Not in place, it would fill dx with zeros first.
        dout, needs_dw = o["dout"].clone(), op == "bwd"

        def backward() -> tuple[Any, ...]:
            results = rms_norm_backward(
                dout, x, weight, rstd, 0.0, casting, block, warps, True, None, needs_dw=needs_dw
            )
            return results if needs_dw else results[:1]

        return backward

    return prepare


def _quack(on_gpu: bool) -> Peer:
    import torch
    from quack.rmsnorm import rmsnorm_bwd, rmsnorm_fwd

    _require_gpu(torch, on_gpu)

    def prepare(op: str, o: dict[str, Any]) -> Callable[[], tuple[Any, ...]]:
        x, weight = o["x"], o["weight"]
        if op == "fwd":
            return lambda: rmsnorm_fwd(x, weight, eps=EPS)[:1]
        if op == "fused_fwd":
            return lambda: rmsnorm_fwd(x, weight, residual=o["residual"], eps=EPS)[:2]
        rstd = rmsnorm_fwd(x, weight, eps=EPS, store_rstd=True)[2]
        if op == "bwd":
            return lambda: rmsnorm_bwd(x, weight, o["dout"], rstd)[:2]
        if op == "fused_bwd":
            return lambda: rmsnorm_bwd(x, weight, o["dout"], rstd, o["dresidual_out"], has_residual=True)[:2]
        # Its function always computes dweight where there is a weight; the operator below it can leave it out.
        from quack.rmsnorm import _rmsnorm_bwd, get_sm_count

        units = get_sm_count(x.shape[-1], x.device)

        def frozen() -> tuple[Any, ...]:
            dx = torch.empty_like(x)
            _rmsnorm_bwd(x, weight, o["dout"], rstd, dx, None, None, None, None, units)
            return (dx,)

        return frozen

    return prepare


def _require_gpu(torch: Any, on_gpu: bool) -> None:
    if not on_gpu:
        raise RuntimeError("runs on GPUs only")
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU")


_MAKERS: dict[str, Callable[[bool], Peer]] = {"torch": _torch, "liger": _liger, "quack": _quack, "compile": _compile}
