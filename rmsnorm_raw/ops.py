"""The public functions: door, plan, launch. Read this first.

Knows: the meaning and order of a call's steps; torch's autograd only as a question (does anything need a gradient?).
Must not: know how a library stores arrays, how a kernel divides its work, or how a device compiles.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from . import plan as planning
from .arrays import ABSENT, SIZE, Door, Rows, dtype_name
from .program import program

FLOAT32_EPS = 1.1920928955078125e-07
FLOAT64_EPS = 2.220446049250313e-16


# ------------------------------------------------------------------------------------------------ public


def rmsnorm(
    x: Any,
    weight: Any = None,
    eps: float | None = 1e-6,
    *,
    bias: Any = None,
    weight_offset: float = 0.0,
    casting: str = "fp32",
    out_dtype: Any = None,
    out: Any = None,
) -> Any:
    """RMSNorm over the last dimension: y = x / sqrt(mean(x²) + eps) · (weight + weight_offset) + bias.

    Args:
        x: (…, N); float16, bfloat16, float32 or float64, of NumPy, CuPy, torch or any DLPack library.
        weight, bias: (N,), or (H, N) for x (…, H, N); any of the dtypes (float64 only with float64). None: absent.
        eps: added to the mean square; None is float32's epsilon (float64's for float64).
        weight_offset: added to the weight (1.0 for weights stored around zero).
        casting: "fp32" rounds once, at the end; "llama" rounds x̂ to x's dtype and multiplies in promote(x, weight).
        out_dtype: dtype of y, x's by default.
        out: array of x's shape that receives y; may be x itself.

    Returns:
        y, (…, N), of x's library. For torch tensors it is differentiable in x, weight and bias.

    Raises:
        ValueError, TypeError: an operand does not fit; the message gives the values. Nothing is written then.
        RuntimeError: the device's compiler or runtime is missing; the message says what to install.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    if _needs_autograd(x, weight, bias):
        _refuse_out(out=out)
        from . import autograd

        return autograd.rmsnorm(x, weight, eps, bias, weight_offset, casting, out_dtype)
    return _forward(x, None, weight, eps, False, bias, weight_offset, casting, "stored", out_dtype, None, out, None)[0]


def fused_add_rmsnorm(
    x: Any,
    residual: Any,
    weight: Any = None,
    eps: float | None = 1e-6,
    prenorm: bool = True,
    *,
    bias: Any = None,
    weight_offset: float = 0.0,
    casting: str = "fp32",
    residual_rounding: str = "stored",
    out_dtype: Any = None,
    residual_dtype: Any = None,
    out: Any = None,
    residual_out: Any = None,
) -> Any:
    """Residual add and RMSNorm in one pass: residual_out = x + residual, y = rmsnorm(residual_out).

    Args:
        x, residual: (…, N) both; each of its own dtype.
        prenorm: return (y, residual_out); False returns y alone.
        residual_rounding: "stored" norms residual_out as it is stored (what eager code does); "fp32" norms the
            unrounded sum.
        residual_dtype: dtype of residual_out, residual's by default.
        residual_out: array that receives the sum; may be the residual itself.
        weight, eps, bias, weight_offset, casting, out_dtype, out: as in `rmsnorm`.

    Returns:
        (y, residual_out), or y. For torch tensors both are differentiable.

    Raises: as `rmsnorm`.
    """
    _require_residual(residual)
    if _needs_autograd(x, residual, weight, bias):
        _refuse_out(out=out, residual_out=residual_out)
        from . import autograd

        return autograd.fused_add_rmsnorm(
            x,
            residual,
            weight,
            eps,
            prenorm,
            bias,
            weight_offset,
            casting,
            residual_rounding,
            out_dtype,
            residual_dtype,
        )
    y, total, _ = _forward(
        x, residual, weight, eps, False, bias, weight_offset, casting, residual_rounding,
        out_dtype, residual_dtype, out, residual_out,
    )  # fmt: skip
    return (y, total) if prenorm else y


def rmsnorm_fwd(
    x: Any,
    weight: Any = None,
    eps: float | None = 1e-6,
    store_rstd: bool = False,
    *,
    bias: Any = None,
    weight_offset: float = 0.0,
    casting: str = "fp32",
    out_dtype: Any = None,
    out: Any = None,
) -> tuple[Any, Any]:
    """The forward alone, never differentiated: (y, rstd), with rstd (…,) in float32 (float64), or None.

    Arguments and errors as `rmsnorm`; RuntimeError also where a torch operand requires a gradient in grad mode.
    """
    _refuse_gradient("rmsnorm_fwd", "rmsnorm", x, weight, bias, out)
    y, _, rstd = _forward(
        x, None, weight, eps, store_rstd, bias, weight_offset, casting, "stored", out_dtype, None, out, None
    )
    return y, rstd


def fused_add_rmsnorm_fwd(
    x: Any,
    residual: Any,
    weight: Any = None,
    eps: float | None = 1e-6,
    store_rstd: bool = False,
    *,
    bias: Any = None,
    weight_offset: float = 0.0,
    casting: str = "fp32",
    residual_rounding: str = "stored",
    out_dtype: Any = None,
    residual_dtype: Any = None,
    out: Any = None,
    residual_out: Any = None,
) -> tuple[Any, Any, Any]:
    """The fused-add forward alone, never differentiated: (y, residual_out, rstd or None).

    Arguments and errors as `fused_add_rmsnorm`; RuntimeError also where a torch operand requires a gradient in grad
    mode.
    """
    _require_residual(residual)
    _refuse_gradient("fused_add_rmsnorm_fwd", "fused_add_rmsnorm", x, residual, weight, bias, out, residual_out)
    return _forward(
        x, residual, weight, eps, store_rstd, bias, weight_offset, casting, residual_rounding,
        out_dtype, residual_dtype, out, residual_out,
    )  # fmt: skip


def rmsnorm_bwd(
    x: Any,
    weight: Any,
    dout: Any,
    rstd: Any,
    *,
    bias: Any = None,
    weight_offset: float = 0.0,
    casting: str = "fp32",
    need_dx: bool = True,
    need_dweight: bool = True,
    out: tuple[Any, ...] | None = None,
    workspace: Any = None,
) -> tuple[Any, ...]:
    """The backward: (dx, dweight), and dbias last where a bias is given. Skipped results are None.

    Args:
        x: what was normed, (…, N).
        weight: as in the forward, or None (dweight is None then).
        dout: gradient of y, (…, N).
        rstd: from the forward, (…,) or (rows,), float32 (float64 for float64).
        need_dx, need_dweight: False skips the work of that result (need_dweight: dbias too).
        out: arrays for the results in their order, None for each that is to be allocated or skipped.
        workspace: contiguous scratch on the device, of `workspace_bytes(x, weight, bias=…)` bytes at least.

    Returns:
        dx (…, N) of x's dtype; dweight and dbias of weight's shape and dtype, summed in float32 in a fixed order.

    Raises: as `rmsnorm_fwd`.
    """
    _refuse_gradient("rmsnorm_bwd", "rmsnorm", x, weight, dout, rstd, bias, *_tuple(out))
    dx, _, dweight, dbias = _backward(
        x, weight, dout, rstd, None, bias, weight_offset, casting, need_dx, need_dweight,
        None, None, out, False, workspace,
    )  # fmt: skip
    return (dx, dweight) if bias is None else (dx, dweight, dbias)


def fused_add_rmsnorm_bwd(
    residual_out: Any,
    weight: Any,
    dout: Any,
    rstd: Any,
    dresidual_out: Any = None,
    *,
    dx_dtype: Any = None,
    dresidual_dtype: Any = None,
    bias: Any = None,
    weight_offset: float = 0.0,
    casting: str = "fp32",
    need_dx: bool = True,
    need_dweight: bool = True,
    out: tuple[Any, ...] | None = None,
    workspace: Any = None,
) -> tuple[Any, ...]:
    """The fused-add backward: (dx, dresidual, dweight), and dbias last where a bias is given.

    Args:
        residual_out: the forward's sum, (…, N).
        dresidual_out: gradient that reached residual_out from elsewhere, (…, N); None reads and allocates nothing.
        dx_dtype, dresidual_dtype: dout's and residual_out's by default. Where they agree, dx and dresidual are one
            array: the two gradients are equal.
        others: as `rmsnorm_bwd`; need_dx=False skips both dx and dresidual.

    Raises: as `rmsnorm_fwd`.
    """
    _refuse_gradient(
        "fused_add_rmsnorm_bwd",
        "fused_add_rmsnorm",
        residual_out,
        weight,
        dout,
        rstd,
        dresidual_out,
        bias,
        *_tuple(out),
    )
    dx, dresidual, dweight, dbias = _backward(
        residual_out, weight, dout, rstd, dresidual_out, bias, weight_offset, casting, need_dx, need_dweight,
        dx_dtype, dresidual_dtype, out, True, workspace,
    )  # fmt: skip
    return (dx, dresidual, dweight) if bias is None else (dx, dresidual, dweight, dbias)


def workspace_bytes(x: Any, weight: Any = None, *, bias: Any = None, need_dweight: bool = True) -> int:
    """Bytes of scratch that a backward with these operands needs: partial sums of dweight, dbias; means of long rows.

    It depends on shapes, dtypes and the device, not on values or on the other options.
    """
    door = Door(x)
    weight_rows = door.weight(weight, "weight") if weight is not None else ABSENT
    if bias is not None:
        door.weight(bias, "bias")
    need_dweight, need_dbias = need_dweight and weight is not None, need_dweight and bias is not None
    if door.rows == 0:
        return 0
    sums, most = need_dweight + need_dbias, 0
    for dresidual_out in (None, door.x.dtype):  # the grid depends on how much a row brings along
        backward = planning.plan_backward(
            door.rows, door.cols, _traits(door), x=door.x.dtype, dout=door.x.dtype, dx=door.x.dtype,
            dresidual_out=dresidual_out, weight=weight_rows.dtype or None, heads=door.heads,
            need_dweight=need_dweight, need_dbias=need_dbias,
        )  # fmt: skip
        means, partials = backward.scratch_elements(door.rows, sums)
        most = max(most, _padded(means) + sums * partials)
    return most * SIZE[_real(door.x.dtype)]


# ------------------------------------------------------------------------------------------------ the steps


def _forward(
    x, residual, weight, eps, store_rstd, bias, weight_offset, casting, residual_rounding,
    out_dtype, residual_dtype, out, residual_out,
):  # fmt: skip
    """Plain (residual None) and fused-add: (y, residual_out or None, rstd or None)."""
    door = Door(x)
    added = residual is not None
    residual_rows = door.rows_of(residual, "residual") if added else ABSENT
    weight_rows = door.weight(weight, "weight") if weight is not None else ABSENT
    bias_rows = door.weight(bias, "bias") if bias is not None else ABSENT
    x_dtype = door.x.dtype
    eps = _check_eps(eps, x_dtype)
    weight_offset = _check_offset(weight_offset)
    _check_choice(casting, "casting", ("fp32", "llama"))
    _check_choice(residual_rounding, "residual_rounding", ("stored", "fp32"))
    y_dtype = _result_dtype(out_dtype, "out_dtype", x_dtype, x_dtype)
    sum_dtype = _result_dtype(residual_dtype, "residual_dtype", residual_rows.dtype, x_dtype) if added else ""
    # Both outputs are checked before either is allocated; each may lie exactly on the operand that it replaces.
    y = door.output(out, "out", door.shape, y_dtype, in_place_of=("x",))
    total = (
        door.output(residual_out, "residual_out", door.shape, sum_dtype, in_place_of=("residual",)) if added else None
    )
    if not added and residual_out is not None:
        raise ValueError("residual_out is given without a residual")

    y = door.allocate(y, door.shape, y_dtype)
    total = door.allocate(total, door.shape, sum_dtype) if added else None
    rstd = door.allocate(None, door.shape[:-1], _real(x_dtype)) if store_rstd else None
    if door.rows:
        round_residual = residual_rounding == "stored"
        normed = sum_dtype if added and round_residual else x_dtype
        traits = _traits(door)
        outputs = (y,) if total is None else (y, total)
        forward = planning.plan_forward(
            door.rows, door.cols, traits,
            x=x_dtype, y=y_dtype, residual=residual_rows.dtype or None, residual_out=sum_dtype or None,
            weight=weight_rows.dtype or None, bias=bias_rows.dtype or None, heads=door.heads,
            vector=door.alignment(outputs, planning.elements_per_pack(normed, traits)),
            round_residual=round_residual, offset_weight=weight_offset != 0.0, llama=casting == "llama",
        )  # fmt: skip
        _launch(door, [(forward, (
            door.x_rows.pointer, residual_rows.pointer, weight_rows.pointer, bias_rows.pointer,
            y.pointer, total.pointer if total else 0, rstd.pointer if rstd else 0,
            door.rows, door.x_rows.pitch, residual_rows.pitch, y.pitch, total.pitch if total else 0,
            eps, weight_offset, forward.blocks,
        ))])  # fmt: skip
    return door.finish(y), door.finish(total), door.finish(rstd)


def _backward(
    x, weight, dout, rstd, dresidual_out, bias, weight_offset, casting, need_dx, need_dweight,
    dx_dtype, dresidual_dtype, out, fused, workspace,
):  # fmt: skip
    """Plain and fused-add: (dx, dresidual, dweight, dbias), None where skipped."""
    door = Door(x, "residual_out" if fused else "x")
    weight_rows = door.weight(weight, "weight") if weight is not None else ABSENT
    bias_rows = door.weight(bias, "bias") if bias is not None else ABSENT
    dout_rows = door.rows_of(dout, "dout")
    rstd_rows = door.rstd(rstd)
    added_rows = door.rows_of(dresidual_out, "dresidual_out") if dresidual_out is not None else ABSENT
    x_dtype = door.x.dtype
    weight_offset = _check_offset(weight_offset)
    _check_choice(casting, "casting", ("fp32", "llama"))
    dx_dtype = _result_dtype(dx_dtype, "dx_dtype", dout_rows.dtype if fused else x_dtype, x_dtype)
    dresidual_dtype = _result_dtype(dresidual_dtype, "dresidual_dtype", x_dtype, x_dtype)
    need_dbias = need_dweight and bias is not None
    need_dweight = need_dweight and weight is not None
    two_gradients = fused and need_dx and dresidual_dtype != dx_dtype

    names = ("dx", "dresidual", "dweight", "dbias") if fused else ("dx", "dweight", "dbias")
    given = _name_outputs(out, names[: len(names) - (bias is None)])
    if fused and need_dx and not two_gradients:
        given = _one_gradient(given)
    wanted = {"dx": need_dx, "dresidual": two_gradients, "dweight": need_dweight, "dbias": need_dbias}
    shapes = {"dx": door.shape, "dresidual": door.shape}
    shapes |= {"dweight": _shape(weight_rows), "dbias": _shape(bias_rows)}
    dtypes = {"dx": dx_dtype, "dresidual": dresidual_dtype, "dweight": weight_rows.dtype}
    dtypes["dbias"] = weight_rows.dtype or bias_rows.dtype
    results: dict[str, Rows | None] = {}
    for name, array in given.items():
        if array is not None and not wanted[name]:
            raise ValueError(f"out has an array for {name}, which this call does not compute")
        is_sum = name in ("dweight", "dbias")
        in_place_of = () if is_sum else ("x", "residual_out")
        results[name] = door.output(array, f"out: {name}", shapes[name], dtypes[name], in_place_of, contiguous=is_sum)

    sums = need_dweight + need_dbias
    if door.rows == 0:
        for name in wanted:
            if wanted[name]:
                results[name] = door.zeros(results.get(name), shapes[name], dtypes[name])
    else:
        traits = _traits(door)
        for name in wanted:
            if wanted[name]:
                results[name] = door.allocate(results.get(name), shapes[name], dtypes[name])
        outputs = tuple(rows for name in ("dx", "dresidual") if (rows := results.get(name)) is not None)
        backward = planning.plan_backward(
            door.rows, door.cols, traits,
            x=x_dtype, dout=dout_rows.dtype, dx=dx_dtype if need_dx else None,
            dresidual_out=added_rows.dtype or None, dresidual=dresidual_dtype if two_gradients else None,
            weight=weight_rows.dtype or None, heads=door.heads,
            vector=door.alignment(outputs, planning.elements_per_pack(x_dtype, traits)),
            offset_weight=weight_offset != 0.0, need_dweight=need_dweight, need_dbias=need_dbias,
        )  # fmt: skip
        means, partials = backward.scratch_elements(door.rows, sums)
        real_size = SIZE[_real(x_dtype)]
        start, scratch = door.workspace(workspace, (_padded(means) + sums * partials) * real_size)
        sums_start = start + _padded(means) * real_size
        at = {name: rows.pointer if (rows := results.get(name)) else 0 for name in wanted}
        dx, dresidual = results.get("dx") or ABSENT, results.get("dresidual") or ABSENT
        partials_of = {"dweight": sums_start, "dbias": sums_start + need_dweight * partials * real_size}
        into = at if backward.direct else partials_of
        launches: list[tuple[planning.Plan, tuple]] = [
            (step, (
                door.x_rows.pointer, weight_rows.pointer, dout_rows.pointer, rstd_rows.pointer,
                added_rows.pointer, start, at["dx"], at["dresidual"], into["dweight"], into["dbias"],
                door.rows, door.x_rows.pitch, dout_rows.pitch, added_rows.pitch, dx.pitch, dresidual.pitch,
                backward.partials_pitch, weight_offset, step.blocks,
            ))
            for step in backward.launches
            if need_dx or sums
        ]  # fmt: skip
        for name in ("dweight", "dbias"):
            if wanted[name] and not backward.direct:
                reduce = planning.plan_reduce(
                    door.cols, traits, weight=dtypes[name], compute=_real(x_dtype), heads=door.heads
                )
                launches.append((reduce, (
                    partials_of[name], at[name], backward.partials_rows // door.heads, backward.partials_pitch,
                    door.heads, door.cols, reduce.blocks,
                )))  # fmt: skip
        _launch(door, launches)
        del scratch  # alive until the launches that use it are in its stream
    dx = door.finish(results.get("dx"))
    dresidual = door.finish(results.get("dresidual")) if two_gradients else dx if fused else None
    return dx, dresidual, door.finish(results.get("dweight")), door.finish(results.get("dbias"))


def _launch(door: Door, launches: list[tuple[planning.Plan, tuple]]) -> None:
    """Compiles all that is needed before anything runs, then launches on the caller's stream, behind what the other
    operands wait for."""
    programs = [program(plan.kernel, plan.constants) for plan, _ in launches]
    if door.device.kind == "host":
        from .devices import host

        kernels = [host.compile(text) for text in programs]
        for kernel, text, (plan, arguments) in zip(kernels, programs, launches, strict=True):
            host.launch(kernel, plan.blocks, text.pack_arguments(arguments), door.rows * door.cols)
    else:
        from .devices import cupy as gpu

        index, stream = door.device.index, door.stream()
        kernels = [gpu.compile(text, index) for text in programs]
        for other in door.other_streams - {stream}:
            gpu.order(other, stream, index)
        for kernel, text, (plan, arguments) in zip(kernels, programs, launches, strict=True):
            gpu.launch(kernel, text, plan.blocks, arguments, index, stream)
    door.written()


def _traits(door: Door) -> planning.Traits:
    if door.device.kind == "host":
        return planning.HOST
    from .devices import cupy as gpu

    return gpu.traits(door.device.index)


def _padded(elements: int) -> int:
    """To a multiple that keeps what follows 16-byte aligned."""
    return -(-elements // 4) * 4


# ------------------------------------------------------------------------------------------------ plain values


def _real(x_dtype: str) -> str:
    return "float64" if x_dtype == "float64" else "float32"


def _shape(rows: Rows) -> tuple[int, ...]:
    return rows.array.shape


def _check_eps(eps: float | None, x_dtype: str) -> float:
    if eps is None:
        return FLOAT64_EPS if x_dtype == "float64" else FLOAT32_EPS
    try:
        value = float(eps)
    except (TypeError, ValueError):
        raise TypeError(f"eps is {eps!r}; it must be a number or None") from None
    if math.isnan(value) or value < 0:
        raise ValueError(f"eps is {eps}; it must be zero or positive")
    return value


def _check_offset(weight_offset: float) -> float:
    try:
        return float(weight_offset)
    except (TypeError, ValueError):
        raise TypeError(f"weight_offset is {weight_offset!r}; it must be a number") from None


def _check_choice(value: str, name: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be {' or '.join(map(repr, choices))}")


def _result_dtype(given: Any, name: str, default: str, x_dtype: str) -> str:
    if given is None:
        return default
    dtype = dtype_name(given, name)
    if (dtype == "float64") != (x_dtype == "float64"):
        raise TypeError(f"{name} is {dtype}, x is {x_dtype}; float64 goes only with float64")
    return dtype


def _require_residual(residual: Any) -> None:
    if residual is None:
        raise ValueError("residual is None; without a residual call rmsnorm")


def _tuple(out: Any) -> tuple[Any, ...]:
    return tuple(out) if isinstance(out, (tuple, list)) else ()


def _name_outputs(out: Any, names: tuple[str, ...]) -> dict[str, Any]:
    if out is None:
        return {}
    if not isinstance(out, (tuple, list)) or len(out) != len(names):
        raise TypeError(f"out must be the tuple ({', '.join(names)}), None for each that is to be allocated or skipped")
    return dict(zip(names, out, strict=True))


def _one_gradient(given: dict[str, Any]) -> dict[str, Any]:
    """dx and dresidual are one array here: the caller may give it as either or as both."""
    dx, dresidual = given.get("dx"), given.pop("dresidual", None)
    if dx is not None and dresidual is not None and dx is not dresidual:
        raise ValueError("out: dx and dresidual have one dtype and are one array; give the same array, or None for one")
    return {**given, "dx": dx if dx is not None else dresidual} if given or dresidual is not None else given


# ------------------------------------------------------------------------------------------------ torch's gradients


def _needs_autograd(*operands: Any) -> bool:
    """Whether autograd or torch.compile has to see this call. False without torch, and inside a Function."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if torch.compiler.is_compiling():  # the compiler knows the operators, not the pointers behind them
        return isinstance(operands[0], torch.Tensor)
    if not torch.is_grad_enabled():
        return False
    needs = any(isinstance(operand, torch.Tensor) and operand.requires_grad for operand in operands)
    if needs and not isinstance(operands[0], torch.Tensor):
        raise RuntimeError(
            f"x is a {type(operands[0]).__module__} array, but another operand is a torch tensor that requires a "
            "gradient, which would be lost; pass x as a torch tensor (to_torch), or call under torch.no_grad()"
        )
    return needs


def _refuse_gradient(name: str, instead: str, *operands: Any) -> None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return
    if any(isinstance(operand, torch.Tensor) and operand.requires_grad for operand in operands):
        raise RuntimeError(
            f"{name} is not differentiable, and an operand requires a gradient, which would be lost; "
            f"call {instead}, or {name} under torch.no_grad()"
        )


def _refuse_out(**outputs: Any) -> None:
    given = [name for name, array in outputs.items() if array is not None]
    if given:
        raise RuntimeError(
            f"{given[0]} is given, but an operand requires a gradient; leave it out, or call under torch.no_grad()"
        )
