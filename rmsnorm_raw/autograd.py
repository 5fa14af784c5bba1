"""torch: the kernels as library operators with fakes (what torch.compile sees), and the autograd Functions around them.

Knows: torch, which it imports at its top; only loaded once a torch operand needs it.
Must not: check operands or touch memory; the operators call the same steps as every other array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from . import calls, ops
from .libraries import Device, Library

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
    ).run()  # fmt: skip
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
    ).run()  # fmt: skip
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
    if _is_compiling():  # first: torch 2.6 cannot read the rest
        return False
    return all(type(tensor) in _PLAIN for tensor in (x, a, b, c, d))


def _call_forward(x, residual, weight, bias, eps, weight_offset, casting, residual_rounding, out_dtype, residual_dtype):
    """(y, residual_out, rstd); what is absent is None or empty."""
    options = {"bias": bias, "weight_offset": weight_offset, "casting": casting, "out_dtype": out_dtype}
    if not _has_memory(x, residual, weight, bias):
        return torch.ops.rmsnorm_raw.forward(
            x, residual, weight, bias, ops._check_eps(eps, _name(x.dtype)), ops._check_offset(weight_offset), casting,
            residual_rounding, _dtype(out_dtype, "out_dtype"), _dtype(residual_dtype, "residual_dtype"), True,
        )  # fmt: skip
    if residual is None:
        y, rstd = ops.rmsnorm_fwd(x, weight, eps, True, **options)
        return y, None, rstd
    options |= {"residual_rounding": residual_rounding, "residual_dtype": residual_dtype}
    return ops.fused_add_rmsnorm_fwd(x, residual, weight, eps, True, **options)


def _gradients(
    saved: Sequence[Any],
    weight_offset: float,
    dtypes: tuple[torch.dtype, torch.dtype] | None,
    douts: Sequence[Any],
    needs: Sequence[bool],
    remember: Callable[[ops._Prepared], None] | None = None,
    apart: bool = False,
) -> list[Any]:
    """The gradients of x, residual, weight and bias, None where `needs` says so of them.

    `saved`: what was normed, weight, bias, rstd; `dtypes`: of the gradients of x and the residual, if there is one;
    `douts`: of y and, with a residual, of residual_out. `remember` is the short way's, and takes what has passed the
    door; `apart` as of `_Node`.
    """
    x, weight, bias, rstd = saved
    dout, dresidual_out = (*douts, None)[:2]
    need_dx, need_dweight = needs[0] or needs[1], needs[2] or needs[3]
    fused, (dx_dtype, dresidual_dtype) = dtypes is not None, dtypes or (None, None)
    if dout is None:  # only the sum was used, if anything: no zeros stand in for dout
        sums = [None if dresidual_out is None else dresidual_out.to(dtype) for dtype in dtypes or (None, None)]
        return [gradient if needed else None for gradient, needed in zip((*sums, None, None), needs, strict=True)]
    if not _has_memory(x, weight, dout, dresidual_out, bias):
        results = torch.ops.rmsnorm_raw.backward(
            x, weight, dout, rstd, dresidual_out, bias, weight_offset, fused, need_dx, need_dweight,
            dx_dtype or x.dtype, dresidual_dtype or x.dtype,
        )  # fmt: skip
        two = need_dx and dx_dtype != dresidual_dtype
        wanted = (need_dx, two, need_dweight and weight is not None, need_dweight and bias is not None)
        gradients = [result if needed else None for result, needed in zip(results, wanted, strict=True)]
        if not two:
            gradients[1] = gradients[0]
    elif remember is not None:
        call = ops._backward(
            x, weight, dout, rstd, dresidual_out, bias, weight_offset, "fp32", need_dx, need_dweight,
            dx_dtype, dresidual_dtype, None, fused, None, apart and needs[0] and needs[1],
        )  # fmt: skip
        remember(call)
        gradients = list(call.run())
    else:
        options = {"bias": bias, "weight_offset": weight_offset, "need_dx": need_dx, "need_dweight": need_dweight}
        with torch.no_grad():
            if fused:
                options |= {"dx_dtype": dx_dtype, "dresidual_dtype": dresidual_dtype}
                gradients = [*ops.fused_add_rmsnorm_bwd(x, weight, dout, rstd, dresidual_out, **options), None][:4]
            else:
                dx, *sums = ops.rmsnorm_bwd(x, weight, dout, rstd, **options)
                gradients = [dx, None, *sums, None][:4]
    if _is_grad_enabled():
        operands = (x, weight, dout, dresidual_out)
        if any(operand is not None and operand.requires_grad for operand in operands):
            once = {id(gradient): _Once.apply(gradient, *operands) for gradient in gradients if gradient is not None}
            gradients = [None if gradient is None else once[id(gradient)] for gradient in gradients]
    for i in (0, 1):  # the two are computed together
        gradients[i] = gradients[i] if needs[i] else None
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
        need_x, need_weight, _, need_bias, *_ = (*ctx.needs_input_grad, *(False,) * 3)  # what is left out is not there
        needs = (need_x, False, need_weight, need_bias)
        dx, _, dweight, dbias = _gradients(ctx.saved_tensors, ctx.weight_offset, None, (dout,), needs)
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
        need_x, need_residual, need_weight, _, need_bias, *_ = (*ctx.needs_input_grad, *(False,) * 3)
        needs, douts = (need_x, need_residual, need_weight, need_bias), (dout, dresidual_out)
        gradients = _gradients(ctx.saved_tensors, ctx.weight_offset, ctx.dtypes, douts, needs)
        return *gradients[:3], None, gradients[3], *(None,) * 5


# ------------------------------------------------------------------------------------------------ the short way


_OPERANDS = ("x", "residual", "weight", "bias")  # whose gradients are a backward's results, in this order


@dataclass(slots=True)
class _Node:
    """What the two directions of a call share. It outlives the call where that is recorded."""

    operands: tuple[str, ...]  # those of _OPERANDS that there are
    weight_offset: float
    dtypes: tuple[torch.dtype, torch.dtype] | None = None  # of the gradients of x and the residual, if there is one
    # x and the residual are leaves, as in a checkpointed layer or a stage of a pipeline: of one array as the gradient
    # of both torch makes a copy for one of them, which costs more than to write two.
    apart: bool = False
    backward: tuple[Callable[..., tuple[Any, ...] | None], ...] = ()  # as recorded
    kept: bool = False  # with a recorded forward: it will meet other backwards

    @property
    def scale(self) -> list[str]:
        """The operands that are saved as they are, behind what was normed."""
        return [name for name in self.operands if name in ("weight", "bias")]

    def outputs(self, y: Any, total: Any, tensors: dict[str, Any]) -> tuple[Any, Any]:
        """What the Function returns, and what it saves. Of texts too."""
        scale = [tensors[name] for name in self.scale]
        return (y, (tensors["x"], *scale)) if self.dtypes is None else ((y, total), (total, *scale))

    def gradients(
        self, saved: tuple[Any, ...], rstd: _Rstd, needs: tuple[bool, ...], douts: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """The long way; `needs` is torch's needs_input_grad, the first of which is not an operand's."""
        needed, (normed, *scale) = dict(zip(self.operands, needs[1:], strict=True)), saved
        kept = dict(zip(self.scale, scale, strict=True))
        shape = normed.shape[:-1]
        gradients = _gradients(
            (normed, kept.get("weight"), kept.get("bias"), rstd[1].view(-1)[: math.prod(shape)].view(shape)),
            self.weight_offset, self.dtypes, douts,
            [needed.get(name, False) for name in _OPERANDS], partial(self.remember, needs), self.apart,
        )  # fmt: skip
        return None, *(gradients[_OPERANDS.index(name)] for name in self.operands)

    def remember(self, needs: tuple[bool, ...], prepared: ops._Prepared) -> None:
        """Keeps a backward for the next one, as the forward is kept."""
        if not self.kept or _is_grad_enabled() or not prepared.door.can_be_remembered():
            return
        normed, _, dout, _, added, _ = prepared.call.operands
        opening = ["    if needs != NEEDS: return", f"    {', '.join([normed, *self.scale])}, = saved"]
        if self.dtypes is None:
            opening += [f"    {dout}, = douts"]
        else:
            opening += [f"    {dout}, {added} = douts"]
            opening += [] if prepared.call.operands[added] is not None else [f"    if {added} is not None: return"]
        needed = zip(self.operands, needs[1:], strict=True)
        results = [f"{{{_OPERANDS.index(name)}}}" if need else "None" for name, need in needed]
        written = calls.Written(
            ("saved", "p_rstd", "needs", "douts"), opening, ", ".join(["None", *results]), space={"NEEDS": needs}
        )
        self.backward = calls.with_first(prepared.call.recall(written), self.backward)


# An rstd that a graph keeps: its address, its tensor, and the list that its place returns to at the graph's end. Users
# never see it, and so it needs nothing of what torch does for a tensor that is saved.
_Rstd = tuple[int, torch.Tensor, "list[_Rstd] | None"]


class _Places:
    """Places for rstds of few rows: a tensor for each takes longer to make, save and free than many a kernel runs.

    COUNT of them share a tensor. Each stream has its own, so that who gets a place comes after who had it; what a
    stream captures gets none, since a graph of the device's keeps its addresses after the call. The tensors stay, as
    many as were ever in use at once, in the memory pool that was current when they were made.
    """

    COUNT, BYTES, STREAMS = 64, 1024, 16  # BYTES: the most of one place; STREAMS: the most that have any

    def __init__(self, library: Library, device: Device, dtype: str, size: int):
        elements = size // ops.SIZE[dtype]
        self.make_many = library.maker((self.COUNT * elements,), dtype, device)
        self.make_one = library.maker((elements,), dtype, device)
        self.free: dict[int, list[_Rstd]] = {}  # by stream

    def alone(self) -> _Rstd:
        """A tensor of its own."""
        tensor = self.make_one()
        return tensor.data_ptr(), tensor, None

    def more(self, stream: int) -> _Rstd:
        """A place for a stream where none is free."""
        if stream not in self.free and len(self.free) >= self.STREAMS:
            return self.alone()
        free = self.free.setdefault(stream, [])
        first, *others = [(part.data_ptr(), part, free) for part in self.make_many().chunk(self.COUNT)]
        free += others
        return first


_places = lru_cache(maxsize=256)(_Places)


def _placed(prepared: ops._Prepared) -> dict[str, Any]:
    """How a recalled call gets its rstd from a place, as of `calls.Written`; nothing where it has a tensor."""
    call, dtype = prepared.call, ops._real(prepared.door.x.dtype)
    size = max(16, prepared.door.rows * ops.SIZE[dtype])
    if size > _Places.BYTES or not hasattr(_RMSNorm, "_backward_cls"):
        return {}
    places = _places(call.library, call.device, dtype, 1 << (size - 1).bit_length())
    space: dict[str, Any] = {"free": places.free, "more": places.more}
    lines = ["    try: r2 = free[here].pop()", "    except LookupError: r2 = more(here)"]
    if call.device.kind == "gpu":  # the default stream cannot be captured
        space |= {"captured": torch.cuda.is_current_stream_capturing, "alone": places.alone}
        lines = ["    if here and captured(): r2 = alone()", "    else:", *(f"    {line}" for line in lines)]
    return {"made": {2: [*lines, "    q2 = r2[0]"]}, "space": space}


class _RMSNorm(torch.autograd.Function):
    """Either Function for a forward that was done already. `done` is its node, rstd, the outputs and what is saved, in
    one argument so that torch does not take them for operands. This is the way of every step in training: without the
    frames of save_for_backward and set_materialize_grads, which set what is set here."""

    @staticmethod
    def forward(ctx, done, *operands):
        ctx.node, ctx.rstd, outputs, ctx.to_save = done
        ctx.materialize_grads = False
        return outputs

    @staticmethod
    def backward(ctx, *douts):
        node, saved, needs = ctx.node, ctx.saved_tensors, ctx.needs_input_grad
        for recall in () if calls.is_traced() else node.backward:
            gradients = recall(saved, ctx.rstd[0], needs, douts)
            if gradients is not None:
                return gradients
        return node.gradients(saved, ctx.rstd, needs, douts)


# Without what torch does around `apply` in Python, 2 µs each way: the look for functorch's transforms and wrappers,
# which the callers below take, and whether it is backward or vjp that is defined. The contexts have places for the
# node and rstd, so that none needs a dictionary.
_APPLY = super(torch.autograd.Function, _RMSNorm).apply  # pyright: ignore[reportAttributeAccessIssue]


def _give_back(ctx: Any) -> None:
    """The place of a graph's rstd, at the graph's end."""
    rstd = getattr(ctx, "rstd", None)
    if rstd is not None and rstd[2] is not None:
        rstd[2].append(rstd)


if hasattr(_RMSNorm, "_backward_cls"):
    _PARTS = {"apply": _RMSNorm.backward, "__slots__": ("node", "rstd"), "__del__": _give_back}
    _RMSNorm._backward_cls = type("RMSNormBackward", (_RMSNorm._backward_cls,), _PARTS)


def rmsnorm(x, weight, eps, bias, weight_offset, casting, out_dtype, ticket):
    """`rmsnorm` for torch tensors of which one needs a gradient, or while torch.compile traces."""
    if _has_memory(x, weight, bias) and not torch._C._are_functorch_transforms_active():
        call = ops._forward(
            x, None, weight, eps, True, bias, weight_offset, casting, "stored", out_dtype, None, None, None
        )
        return _apply(call, weight_offset, ticket)
    ops._check_choice(casting, "casting", ("fp32", "llama"))
    x, weight, bias = _tensor(x, "x"), _tensor(weight, "weight"), _tensor(bias, "bias")
    return RMSNormFunction.apply(
        x, weight, eps, bias, ops._check_offset(weight_offset), casting, _dtype(out_dtype, "out_dtype")
    )


def fused_add_rmsnorm(
    x, residual, weight, eps, prenorm, bias, weight_offset, casting, residual_rounding, out_dtype, residual_dtype,
    ticket,
):  # fmt: skip
    if _has_memory(x, residual, weight, bias) and not torch._C._are_functorch_transforms_active():
        call = ops._forward(
            x, residual, weight, eps, True, bias, weight_offset, casting, residual_rounding,
            out_dtype, residual_dtype, None, None,
        )  # fmt: skip
        dtypes = x.dtype, residual.dtype
        return _apply(call, weight_offset, ticket, dtypes, prenorm)
    x, residual, weight, bias = (
        _tensor(x, "x"), _tensor(residual, "residual"), _tensor(weight, "weight"), _tensor(bias, "bias"),
    )  # fmt: skip
    y, total = FusedAddRMSNormFunction.apply(
        x, residual, weight, eps, bias, ops._check_offset(weight_offset), casting, residual_rounding,
        _dtype(out_dtype, "out_dtype"), _dtype(residual_dtype, "residual_dtype"),
    )  # fmt: skip
    return (y, total) if prenorm else y


def _apply(prepared, weight_offset, ticket, dtypes=None, prenorm=True):
    """A call that has passed the door, and the next one like it, into the graph."""
    tensors = {name: tensor for name, tensor in prepared.call.operands.items() if tensor is not None}
    node = _Node(tuple(tensors), float(weight_offset), dtypes)
    first, seen = "" if prenorm else "[0]", []
    if dtypes is not None:
        node.apart = tensors["x"].is_leaf and tensors["residual"].is_leaf
        seen = [f"    if {'not ' if node.apart else ''}(x.is_leaf and residual.is_leaf): return"]
    named = dict(zip(tensors, tensors, strict=True))  # the names in place of tensors: the same tuples, as text
    done = ", ".join(str(part).replace("'", "") for part in node.outputs("{0}", "{1}", named))
    place = _placed(prepared)
    text = f"apply((node, {'{2}' if place else '(q2, {2}, None)'}, {done}), {', '.join(tensors)}){first}"
    space = {**place.get("space", {}), "apply": _APPLY, "node": node}
    node.kept = prepared.remember(ticket, text, seen=seen, made=place.get("made", {}), space=space)
    y, total, rstd = prepared.run()
    results = _APPLY((node, (rstd.data_ptr(), rstd, None), *node.outputs(y, total, tensors)), *tensors.values())
    return results if prenorm else results[0]


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
