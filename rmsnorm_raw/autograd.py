"""torch: the kernels as library operators with fakes (what torch.compile sees), and the autograd Functions around them.

Knows: torch, which it imports at its top; only loaded once a torch operand needs it.
Must not: check operands or touch memory; the operators call the same steps as every other array.
"""

from __future__ import annotations

from typing import Any

import torch

from . import ops

_LIBRARY = torch.library.Library("rmsnorm_raw", "FRAGMENT")

_SCHEMAS = {
    "forward": "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, float weight_offset, "
    "str casting, str residual_rounding, ScalarType? out_dtype, ScalarType? residual_dtype, bool store_rstd) "
    "-> (Tensor y, Tensor residual_out, Tensor rstd)",
    "backward": "(Tensor x, Tensor? weight, Tensor dout, Tensor rstd, Tensor? dresidual_out, Tensor? bias, "
    "float weight_offset, bool fused, bool need_dx, bool need_dweight, ScalarType dx_dtype, "
    "ScalarType dresidual_dtype) -> (Tensor dx, Tensor dresidual, Tensor dweight, Tensor dbias)",
}


def _absent(like: torch.Tensor) -> torch.Tensor:
    """An operator's results are tensors: an empty one stands for what is skipped."""
    return like.new_empty(0)


def _forward(
    x, residual, weight, bias, eps, weight_offset, casting, residual_rounding, out_dtype, residual_dtype, store_rstd
):
    y, total, rstd = ops._forward(
        x, residual, weight, eps, store_rstd, bias, weight_offset, casting, residual_rounding,
        out_dtype, residual_dtype, None, None,
    )  # fmt: skip
    return y, _absent(x) if total is None else total, _absent(x) if rstd is None else rstd


def _forward_fake(
    x, residual, weight, bias, eps, weight_offset, casting, residual_rounding, out_dtype, residual_dtype, store_rstd
):
    y = x.new_empty(x.shape, dtype=out_dtype or x.dtype)
    total = _absent(x) if residual is None else x.new_empty(x.shape, dtype=residual_dtype or residual.dtype)
    real = torch.float64 if x.dtype == torch.float64 else torch.float32
    return y, total, x.new_empty(x.shape[:-1], dtype=real) if store_rstd else _absent(x)


def _backward(
    x, weight, dout, rstd, dresidual_out, bias, weight_offset, fused, need_dx, need_dweight, dx_dtype, dresidual_dtype
):
    dx, dresidual, dweight, dbias = ops._backward(
        x, weight, dout, rstd, dresidual_out, bias, weight_offset, "fp32", need_dx, need_dweight,
        dx_dtype, dresidual_dtype, None, fused, None,
    )  # fmt: skip
    # One buffer may not be two results of an operator: where the gradients are equal, the first serves both.
    results = (dx, None if dresidual is dx else dresidual, dweight, dbias)
    return tuple(_absent(x) if result is None else result for result in results)


def _backward_fake(
    x, weight, dout, rstd, dresidual_out, bias, weight_offset, fused, need_dx, need_dweight, dx_dtype, dresidual_dtype
):
    two = fused and need_dx and dx_dtype != dresidual_dtype
    return (
        x.new_empty(x.shape, dtype=dx_dtype) if need_dx else _absent(x),
        x.new_empty(x.shape, dtype=dresidual_dtype) if two else _absent(x),
        torch.empty_like(weight) if need_dweight and weight is not None else _absent(x),
        torch.empty_like(bias, dtype=None if weight is None else weight.dtype)
        if need_dweight and bias is not None
        else _absent(x),
    )


def _register() -> None:
    """Once a process, also when a notebook loads this module anew: torch refuses a second definition."""
    for name, schema in _SCHEMAS.items():
        if hasattr(torch.ops.rmsnorm_raw, name):
            continue
        _LIBRARY.define(name + schema)
        _LIBRARY.impl(name, {"forward": _forward, "backward": _backward}[name], "CompositeExplicitAutograd")
        fake = {"forward": _forward_fake, "backward": _backward_fake}[name]
        torch.library.register_fake(f"rmsnorm_raw::{name}", fake, lib=_LIBRARY)


_register()

_is_compiling, _is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None)}


def _has_memory(x: Any, a: Any, b: Any, c: Any = None, d: Any = None) -> bool:
    """Whether a call may go to the kernels at once, without torch's dispatcher, which takes 5 µs and more each way.
    Compilers' stand-ins and subclasses with a dispatch of their own may not."""
    plain = _PLAIN
    return (
        type(x) in plain and type(a) in plain and type(b) in plain and type(c) in plain and type(d) in plain
    ) and not _is_compiling()


def _call_forward(x, residual, weight, bias, eps, weight_offset, casting, residual_rounding, out_dtype, residual_dtype):
    """(y, residual_out, rstd); what is absent is None or empty."""
    if _has_memory(x, residual, weight, bias):
        return ops._forward(
            x, residual, weight, eps, True, bias, weight_offset, casting, residual_rounding,
            out_dtype, residual_dtype, None, None,
        )  # fmt: skip
    return torch.ops.rmsnorm_raw.forward(
        x, residual, weight, bias, ops._check_eps(eps, _name(x.dtype)), ops._check_offset(weight_offset), casting,
        residual_rounding, _dtype(out_dtype, "out_dtype"), _dtype(residual_dtype, "residual_dtype"), True,
    )  # fmt: skip


def _gradients(ctx: Any, dout: Any, dresidual_out: Any, fused: bool, need_dx: bool, need_dweight: bool) -> Any:
    """(dx, dresidual, dweight, dbias) as far as they are needed, None elsewhere."""
    x, weight, bias, rstd = ctx.saved_tensors
    dx_dtype, dresidual_dtype = ctx.dtypes if fused else (None, None)
    if _has_memory(x, weight, dout, dresidual_out, bias):
        gradients = ops._backward(
            x, weight, dout, rstd, dresidual_out, bias, ctx.weight_offset, "fp32", need_dx, need_dweight,
            dx_dtype, dresidual_dtype, None, fused, None,
        )  # fmt: skip
    else:
        results = torch.ops.rmsnorm_raw.backward(
            x, weight, dout, rstd, dresidual_out, bias, ctx.weight_offset, fused, need_dx, need_dweight,
            dx_dtype or x.dtype, dresidual_dtype or x.dtype,
        )  # fmt: skip
        two = need_dx and dx_dtype != dresidual_dtype
        wanted = (need_dx, two, need_dweight and weight is not None, need_dweight and bias is not None)
        gradients = [result if needed else None for result, needed in zip(results, wanted, strict=True)]
        if not two:
            gradients[1] = gradients[0]
    if _is_grad_enabled():
        operands = (x, weight, dout, dresidual_out)
        if any(operand is not None and operand.requires_grad for operand in operands):
            once = {id(gradient): _Once.apply(gradient, *operands) for gradient in gradients if gradient is not None}
            gradients = [None if gradient is None else once[id(gradient)] for gradient in gradients]
    return gradients


class _Once(torch.autograd.Function):
    """A gradient in a graph that was asked for (create_graph): the value as it is, and an error for its derivative.
    torch's own once_differentiable would drop the derivative in silence where dout is a constant."""

    @staticmethod
    def forward(ctx, gradient, *operands):
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            "a second derivative of rmsnorm or fused_add_rmsnorm was asked for; their backward is not differentiable. "
            "Use torch.nn.functional.rms_norm where double backward is needed"
        )


class RMSNormFunction(torch.autograd.Function):
    """`apply(x, weight, eps) -> y`; further arguments in order: bias, weight_offset, casting, out_dtype.

    Shapes, dtypes and errors as `rmsnorm`. A second derivative raises RuntimeError.
    """

    @staticmethod
    def forward(ctx, x, weight=None, eps=1e-6, bias=None, weight_offset=0.0, casting="fp32", out_dtype=None):
        y, _, rstd = _call_forward(x, None, weight, bias, eps, weight_offset, casting, "stored", out_dtype, None)
        ctx.save_for_backward(x, weight, bias, rstd)
        ctx.set_materialize_grads(False)
        ctx.weight_offset = float(weight_offset)
        return y

    @staticmethod
    def backward(ctx, dout):  # pyright: ignore[reportIncompatibleMethodOverride]
        if dout is None:
            return (None,) * 7
        needs = ctx.needs_input_grad  # of what follows x, only weight and bias can
        dx, _, dweight, dbias = _gradients(ctx, dout, None, False, needs[0], True in needs[1:])
        return dx, dweight, None, dbias, None, None, None


class FusedAddRMSNormFunction(torch.autograd.Function):
    """`apply(x, residual, weight, eps) -> (y, residual_out)`; further arguments in order: bias, weight_offset, casting,
    residual_rounding, out_dtype, residual_dtype.

    x and residual get one gradient object, since the gradients are equal: `.grad` of leaves are apart, but
    `torch.autograd.grad` may return one tensor twice, as it does for `a + b`. A second derivative raises RuntimeError.
    """

    @staticmethod
    def forward(
        ctx, x, residual, weight=None, eps=1e-6, bias=None, weight_offset=0.0, casting="fp32",
        residual_rounding="stored", out_dtype=None, residual_dtype=None,
    ):  # fmt: skip
        y, total, rstd = _call_forward(
            x, residual, weight, bias, eps, weight_offset, casting, residual_rounding, out_dtype, residual_dtype
        )
        ctx.save_for_backward(total, weight, bias, rstd)
        ctx.set_materialize_grads(False)
        ctx.weight_offset = float(weight_offset)
        ctx.dtypes = x.dtype, residual.dtype
        return y, total

    @staticmethod
    def backward(ctx, dout, dresidual_out):  # pyright: ignore[reportIncompatibleMethodOverride]
        if dout is None and dresidual_out is None:
            return (None,) * 10
        needs = ctx.needs_input_grad
        need_x, need_residual = needs[:2]
        if dout is None:  # only the sum was used: no zeros stand in for dout
            dx, dresidual = (dresidual_out.to(dtype) for dtype in ctx.dtypes)
            dweight = dbias = None
        else:
            dx, dresidual, dweight, dbias = _gradients(
                ctx, dout, dresidual_out, True, need_x or need_residual, True in needs[2:]
            )
        return (dx if need_x else None, dresidual if need_residual else None, dweight, None, dbias, *(None,) * 5)


# Function.apply looks for functorch's transforms and wrappers in Python before it calls this: 2 µs.
_APPLY = super(torch.autograd.Function, RMSNormFunction).apply  # pyright: ignore[reportAttributeAccessIssue]
_APPLY_FUSED = super(torch.autograd.Function, FusedAddRMSNormFunction).apply  # pyright: ignore[reportAttributeAccessIssue]


def rmsnorm(x, weight, eps, bias, weight_offset, casting, out_dtype):
    """`rmsnorm` for torch tensors of which one needs a gradient, or while torch.compile traces."""
    if _has_memory(x, weight, bias) and not torch._C._are_functorch_transforms_active():
        return _APPLY(x, weight, eps, bias, weight_offset, casting, out_dtype)  # its forward checks all of it
    ops._check_choice(casting, "casting", ("fp32", "llama"))
    x, weight, bias = _tensor(x, "x"), _tensor(weight, "weight"), _tensor(bias, "bias")
    return RMSNormFunction.apply(
        x, weight, eps, bias, ops._check_offset(weight_offset), casting, _dtype(out_dtype, "out_dtype")
    )


def fused_add_rmsnorm(
    x, residual, weight, eps, prenorm, bias, weight_offset, casting, residual_rounding, out_dtype, residual_dtype
):
    if _has_memory(x, residual, weight, bias) and not torch._C._are_functorch_transforms_active():
        apply = _APPLY_FUSED
    else:
        apply = FusedAddRMSNormFunction.apply
        x, residual, weight, bias = (
            _tensor(x, "x"), _tensor(residual, "residual"), _tensor(weight, "weight"), _tensor(bias, "bias"),
        )  # fmt: skip
        weight_offset = ops._check_offset(weight_offset)
        out_dtype, residual_dtype = _dtype(out_dtype, "out_dtype"), _dtype(residual_dtype, "residual_dtype")
    y, total = apply(
        x, residual, weight, eps, bias, weight_offset, casting, residual_rounding, out_dtype, residual_dtype
    )
    return (y, total) if prenorm else y


def _tensor(obj: Any, name: str) -> torch.Tensor | None:
    """An operand as the operators take it: what is no tensor crosses by DLPack, what has no memory is refused."""
    if obj is None:
        return None
    if not isinstance(obj, torch.Tensor):
        from .bridge import to_torch
        from .libraries import library_of

        view = library_of(obj, name).view(obj, name)
        if view.dtype not in ops.SIZE:
            raise TypeError(f"{name} is {view.dtype}; it must be one of {', '.join(ops.SIZE)}")
        try:
            return to_torch(obj)
        except BufferError:  # read-only: torch has no such tensors
            return to_torch(obj, copy=True)
    if not torch.compiler.is_compiling() and obj.device.type not in ("cpu", "cuda"):
        from .libraries import library_of

        library_of(obj, name).view(obj, name)  # raises
    return obj


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(dtype: Any, name: str) -> torch.dtype | None:
    return None if dtype is None else getattr(torch, ops.dtype_name(dtype, name))
