"""The public functions: door, plan, launch. Read this first.

Knows: the meaning and order of a call's steps; torch's autograd only as a question (does anything need a gradient?).
Must not: know how a library stores arrays, how a kernel divides its work, or how a device compiles.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import calls
from . import plan as planning
from .arrays import ABSENT, SIZE, Door, Rows, dtype_name
from .libraries import Outlines
from .program import program

FLOAT32_EPS = 1.1920928955078125e-07
FLOAT64_EPS = 2.220446049250313e-16


# ------------------------------------------------------------------------------------------------ public

_RMSNORM = calls.Entry("x", "weight", "eps", "bias", "weight_offset", "casting", "out_dtype", "out")
_FUSED_ADD_RMSNORM = calls.Entry(
    "x", "residual", "weight", "eps", "prenorm", "bias", "weight_offset", "casting", "residual_rounding",
    "out_dtype", "residual_dtype", "out", "residual_out",
)  # fmt: skip
_RMSNORM_FWD = calls.Entry("x", "weight", "eps", "store_rstd", "bias", "weight_offset", "casting", "out_dtype", "out")
_FUSED_ADD_RMSNORM_FWD = calls.Entry(
    "x", "residual", "weight", "eps", "store_rstd", "bias", "weight_offset", "casting", "residual_rounding",
    "out_dtype", "residual_dtype", "out", "residual_out",
)  # fmt: skip
_RMSNORM_BWD = calls.Entry(
    "x", "weight", "dout", "rstd", "bias", "weight_offset", "casting", "need_dx", "need_dweight", "out", "workspace"
)  # fmt: skip
_FUSED_ADD_RMSNORM_BWD = calls.Entry(
    "residual_out", "weight", "dout", "rstd", "dresidual_out", "dx_dtype", "dresidual_dtype", "bias", "weight_offset",
    "casting", "need_dx", "need_dweight", "out", "workspace",
)  # fmt: skip


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
    if not calls.is_traced():  # `find` without its frame: this is what loops at decode sizes wait for
        for recall in _RMSNORM.latest:
            y = recall(x, weight, eps, bias, weight_offset, casting, out_dtype, out)
            if y is not None:
                return y
    y, ticket = _RMSNORM.look_up(x, weight, eps, bias, weight_offset, casting, out_dtype, out)
    if y is not None:
        return y
    if _needs_autograd(x, weight, bias):
        _refuse_out(out=out)
        from . import autograd

        return autograd.rmsnorm(x, weight, eps, bias, weight_offset, casting, out_dtype, ticket)
    call = _forward(x, None, weight, eps, False, bias, weight_offset, casting, "stored", out_dtype, None, out, None)
    call.remember(ticket)
    return call.run()[0]


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
    if not calls.is_traced():  # as in rmsnorm
        for recall in _FUSED_ADD_RMSNORM.latest:
            results = recall(
                x, residual, weight, eps, prenorm, bias, weight_offset, casting, residual_rounding,
                out_dtype, residual_dtype, out, residual_out,
            )  # fmt: skip
            if results is not None:
                return results
    results, ticket = _FUSED_ADD_RMSNORM.look_up(
        x, residual, weight, eps, prenorm, bias, weight_offset, casting, residual_rounding,
        out_dtype, residual_dtype, out, residual_out,
    )  # fmt: skip
    if results is not None:
        return results
    _require_residual(residual)
    if _needs_autograd(x, residual, weight, bias):
        _refuse_out(out=out, residual_out=residual_out)
        from . import autograd

        return autograd.fused_add_rmsnorm(
            x, residual, weight, eps, prenorm, bias, weight_offset, casting, residual_rounding,
            out_dtype, residual_dtype, ticket,
        )  # fmt: skip
    call = _forward(
        x, residual, weight, eps, False, bias, weight_offset, casting, residual_rounding,
        out_dtype, residual_dtype, out, residual_out,
    )  # fmt: skip
    call.remember(ticket, "{0}, {1}" if prenorm else "{0}")
    y, total, _ = call.run()
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
    results, ticket = _RMSNORM_FWD.find(x, weight, eps, store_rstd, bias, weight_offset, casting, out_dtype, out)
    if results is not None:
        return results
    _refuse_gradient("rmsnorm_fwd", "rmsnorm", x, weight, bias, out)
    call = _forward(
        x, None, weight, eps, store_rstd, bias, weight_offset, casting, "stored", out_dtype, None, out, None
    )
    call.remember(ticket, "{0}, {2}")
    y, _, rstd = call.run()
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
    results, ticket = _FUSED_ADD_RMSNORM_FWD.find(
        x, residual, weight, eps, store_rstd, bias, weight_offset, casting, residual_rounding,
        out_dtype, residual_dtype, out, residual_out,
    )  # fmt: skip
    if results is not None:
        return results
    _require_residual(residual)
    _refuse_gradient("fused_add_rmsnorm_fwd", "fused_add_rmsnorm", x, residual, weight, bias, out, residual_out)
    call = _forward(
        x, residual, weight, eps, store_rstd, bias, weight_offset, casting, residual_rounding,
        out_dtype, residual_dtype, out, residual_out,
    )  # fmt: skip
    call.remember(ticket, "{0}, {1}, {2}")
    return call.run()


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
    results, ticket = _RMSNORM_BWD.find(
        x, weight, dout, rstd, bias, weight_offset, casting, need_dx, need_dweight, out, workspace
    )
    if results is not None:
        return results
    _refuse_gradient("rmsnorm_bwd", "rmsnorm", x, weight, dout, rstd, bias, *_tuple(out))
    call = _backward(
        x, weight, dout, rstd, None, bias, weight_offset, casting, need_dx, need_dweight,
        None, None, out, False, workspace,
    )  # fmt: skip
    call.remember(ticket, "{0}, {2}" if bias is None else "{0}, {2}, {3}")
    dx, _, dweight, dbias = call.run()
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
    results, ticket = _FUSED_ADD_RMSNORM_BWD.find(
        residual_out, weight, dout, rstd, dresidual_out, dx_dtype, dresidual_dtype, bias, weight_offset, casting,
        need_dx, need_dweight, out, workspace,
    )  # fmt: skip
    if results is not None:
        return results
    _refuse_gradient(
        "fused_add_rmsnorm_bwd", "fused_add_rmsnorm",
        residual_out, weight, dout, rstd, dresidual_out, bias, *_tuple(out),
    )  # fmt: skip
    call = _backward(
        residual_out, weight, dout, rstd, dresidual_out, bias, weight_offset, casting, need_dx, need_dweight,
        dx_dtype, dresidual_dtype, out, True, workspace,
    )  # fmt: skip
    call.remember(ticket, "{0}, {1}, {2}" if bias is None else "{0}, {1}, {2}, {3}")
    dx, dresidual, dweight, dbias = call.run()
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
    # How a row is held, and so the grid, depends on how much it brings along.
    douts = ("float64",) if door.x.dtype == "float64" else ("float16", "float32")
    for dout, dresidual_out in itertools.product(douts, (None, door.x.dtype)):
        backward = planning.plan_backward(
            door.rows, door.cols, _traits(door), x=door.x.dtype, dout=dout, dx=door.x.dtype,
            dresidual_out=dresidual_out, weight=weight_rows.dtype or None, heads=door.heads,
            need_dweight=need_dweight, need_dbias=need_dbias,
        )  # fmt: skip
        means, partials = backward.scratch_elements(door.rows, sums)
        most = max(most, _padded(means) + sums * partials)
    return most * SIZE[_real(door.x.dtype)]


# ------------------------------------------------------------------------------------------------ the steps


@dataclass(slots=True)
class _Prepared:
    """A call that has passed the door, with what its operands were: nothing is written before `run`."""

    door: Door
    call: calls.Call
    views: dict[str, Rows]  # of the operands, as the kernels get them; they keep those alive that had to be copied
    opening: Sequence[str] = ()  # what a recalled call of this kind has to see first
    results: Sequence[Any] | None = None  # where there is nothing to run

    def remember(self, ticket: calls.Ticket | None, results: str = "{0}", **how: Any) -> bool:
        """For the next call like this one, where it is not one of a kind. As `calls.Ticket.remember`."""
        if ticket is None or self.results is not None or not self.door.can_be_remembered():
            return False
        return ticket.remember(self.call, results, self.opening, **how)

    def run(self) -> tuple[Any, ...]:
        """The results in their order, None where not wanted."""
        results = self.results
        if results is None:
            _order_streams(self.door)
            results = self.call.run({name: rows.pointer for name, rows in self.views.items()})
        return tuple(self.door.finish(result) for result in results)


def _forward(
    x, residual, weight, eps, store_rstd, bias, weight_offset, casting, residual_rounding,
    out_dtype, residual_dtype, out, residual_out,
) -> _Prepared:  # fmt: skip
    """Plain (residual None) and fused-add: y, residual_out or None, rstd or None."""
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
    # Each output may lie exactly on the operand that it replaces.
    y = door.output(out, "out", door.shape, y_dtype, in_place_of=("x",))
    if added:
        total = door.output(residual_out, "residual_out", door.shape, sum_dtype, in_place_of=("residual",))
    elif residual_out is not None:
        raise ValueError("residual_out is given without a residual")
    else:
        total = None

    round_residual = residual_rounding == "stored"
    normed = sum_dtype if round_residual and added else x_dtype
    traits = _traits(door)
    y_rows, total_rows = door.result(y, door.shape, y_dtype), door.result(total, door.shape, sum_dtype)
    outputs = (y_rows, total_rows) if added else (y_rows,)
    steps = []
    if door.rows:
        forward = planning.plan_forward(
            door.rows, door.cols, traits,
            x=x_dtype, y=y_dtype, residual=residual_rows.dtype or None, residual_out=sum_dtype or None,
            weight=weight_rows.dtype or None, bias=bias_rows.dtype or None, heads=door.heads,
            vector=door.alignment(outputs, planning.elements_per_pack(normed, traits)),
            round_residual=round_residual, offset_weight=weight_offset != 0.0, llama=casting == "llama",
        )  # fmt: skip
        sizes = (door.rows, door.x_rows.pitch, residual_rows.pitch, y_rows.pitch, total_rows.pitch)
        pointers = ("p_x", "p_residual", "p_weight", "p_bias", "q0", "q1", "q2")
        steps.append((forward, (*pointers, *sizes, eps, weight_offset, forward.blocks)))
    wanted = (y_dtype, sum_dtype or None, _real(x_dtype) if store_rstd else None)
    shapes = (door.shape, door.shape, door.shape[:-1])
    operands = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    call = _checked(door, wanted, shapes, 0, steps, operands, {"out": out, "residual_out": residual_out, "_": None})
    # Each output may lie on the operand that it replaces, if it lies there element by element.
    pairs = (("out", "x"), ("residual_out", "residual"))
    call.in_place = [(output, name) for output, name in pairs if calls.same_layout(call.given[output], operands[name])]
    return _Prepared(door, call, dict(zip(operands, (door.x_rows, residual_rows, weight_rows, bias_rows), strict=True)))


def _backward(
    x, weight, dout, rstd, dresidual_out, bias, weight_offset, casting, need_dx, need_dweight,
    dx_dtype, dresidual_dtype, out, fused, workspace, apart=False,
) -> _Prepared:  # fmt: skip
    """Plain and fused-add: dx, dresidual, dweight, dbias, None where skipped. `apart`: dx and dresidual are two arrays
    in any case."""
    x_name = "residual_out" if fused else "x"
    operands = {
        x_name: x, "weight": weight, "dout": dout, "rstd": rstd, "dresidual_out": dresidual_out, "bias": bias
    }  # fmt: skip
    result_names = _result_names(fused, bias is not None)
    named = _named(out, result_names)
    door = Door(x, x_name)
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
    two_gradients = fused and need_dx and (apart or dresidual_dtype != dx_dtype)

    given = _as_one_gradient(named) if fused and need_dx and not two_gradients else named
    shapes = (door.shape, door.shape, _shape(weight_rows), _shape(bias_rows))
    dtypes = (dx_dtype, dresidual_dtype, weight_rows.dtype, weight_rows.dtype or bias_rows.dtype)
    needed = (need_dx, two_gradients, need_dweight, need_dbias)
    rows = []
    for (name, array), shape, dtype, need in zip(given.items(), shapes, dtypes, needed, strict=True):
        if array is not None and not need:
            raise ValueError(f"out has an array for {name}, which this call does not compute")
        is_sum = name in ("dweight", "dbias")
        in_place_of = () if is_sum else ("x", "residual_out")
        rows.append(door.result(door.output(array, f"out: {name}", shape, dtype, in_place_of, is_sum), shape, dtype))

    sums = need_dweight + need_dbias
    if door.rows == 0:
        results = [
            door.zeros(array, shape, dtype) if need else None
            for array, shape, dtype, need in zip(given.values(), shapes, dtypes, needed, strict=True)
        ]
        if fused and not two_gradients:
            results[1] = results[0]
        nothing = calls.Call(door.library, door.device, None, (), None, (), {}, {})
        return _Prepared(door, nothing, {}, results=results)
    traits = _traits(door)
    gradients = tuple(row for row, need in zip(rows[:2], needed[:2], strict=True) if need)
    backward = planning.plan_backward(
        door.rows, door.cols, traits,
        x=x_dtype, dout=dout_rows.dtype, dx=dx_dtype if need_dx else None,
        dresidual_out=added_rows.dtype or None, dresidual=dresidual_dtype if two_gradients else None,
        weight=weight_rows.dtype or None, dweight=dtypes[3] or None, heads=door.heads,
        vector=door.alignment(gradients, planning.elements_per_pack(x_dtype, traits)),
        offset_weight=weight_offset != 0.0, need_dweight=need_dweight, need_dbias=need_dbias,
    )  # fmt: skip
    others, pointers = (dout_rows, added_rows, *rows[:2]), [f"p_{name}" for name in list(operands)[:5]]  # no bias
    steps = _backward_steps(door, backward, traits, dtypes, others, needed, pointers, weight_offset)
    means, partials = backward.scratch_elements(door.rows, sums)
    scratch_bytes = (_padded(means) + sums * partials) * SIZE[_real(x_dtype)]
    door.workspace(workspace, scratch_bytes)
    wanted = tuple(dtype if need else None for dtype, need in zip(dtypes, needed, strict=True))
    call = _checked(door, wanted, shapes, scratch_bytes, steps, operands, given, workspace)
    call.share = fused and not two_gradients
    call.in_place = [(name, x_name) for name in list(given)[:2] if calls.same_layout(given[name], x)]
    views = (door.x_rows, weight_rows, dout_rows, rstd_rows, added_rows, bias_rows)
    return _Prepared(door, call, dict(zip(operands, views, strict=True)), _opening(out, result_names, named, given))


def _backward_steps(
    door: Door,
    backward: planning.BackwardPlan,
    traits: planning.Traits,
    dtypes: tuple[str, ...],
    others: tuple[Rows, ...],
    needed: tuple[bool, ...],
    pointers: Sequence[str],
    weight_offset: float,
) -> list[tuple[planning.Plan, Sequence[calls.Argument]]]:
    """The backward's launches over the rows, then the sums of its partials."""
    _, _, need_dweight, need_dbias = needed
    real_size = SIZE[_real(door.x.dtype)]
    means, partials = backward.scratch_elements(door.rows, need_dweight + need_dbias)
    # The scratch holds the means, dweight's partials, dbias's partials.
    dweight_offset = _padded(means) * real_size
    dbias_offset = dweight_offset + need_dweight * partials * real_size
    sizes = (door.rows, door.x_rows.pitch, *(rows.pitch for rows in others), backward.partials_pitch)
    sums = ("q2", "q3") if backward.direct else (("start", dweight_offset), ("start", dbias_offset))
    pointers = (*pointers, "start", "q0", "q1")
    steps: list[tuple[planning.Plan, Sequence[calls.Argument]]] = [
        (plan, (*pointers, *sums, *sizes, weight_offset, plan.blocks))
        for plan in (backward.launches if any(needed) else ())
    ]
    if backward.direct:
        return steps
    for index, offset in ((2, dweight_offset), (3, dbias_offset)):
        if needed[index]:
            plan = planning.plan_reduce(
                door.cols, traits, weight=dtypes[index], compute=_real(door.x.dtype), heads=door.heads
            )
            counts = (backward.partials_rows // door.heads, backward.partials_pitch, door.heads, door.cols, plan.blocks)
            steps.append((plan, (("start", offset), f"q{index}", *counts)))
    return steps


def _checked(
    door: Door,
    wanted: tuple[str | None, ...],
    shapes: tuple[tuple[int, ...], ...],
    scratch_bytes: int,
    steps: Sequence[tuple[planning.Plan, Sequence[calls.Argument]]],
    operands: dict[str, Any],
    given: dict[str, Any],
    workspace: Any = None,
) -> calls.Call:
    """Compiles everything before anything runs."""
    if door.device.kind == "host":
        from .devices import host as device
    else:
        from .devices import cupy as device
    elements, index = door.rows * door.cols, door.device.index
    launches = [(program(plan.kernel, plan.constants), plan.blocks, elements, index) for plan, _ in steps]
    if isinstance(door.library, Outlines):
        door.library.programs |= dict.fromkeys((device.prepare, *launch) for launch in launches)
        return calls.Call(door.library, door.device, None, [None] * len(wanted), None, [], operands, given)
    ready = [(device.prepare(*launch), arguments) for launch, (_, arguments) in zip(launches, steps, strict=True)]
    library = door.library.memory(door.device)
    makers = [
        None if dtype is None else library.maker(shape, dtype, door.device)
        for dtype, shape in zip(wanted, shapes, strict=True)
    ]
    scratch = library.maker((-(-scratch_bytes // 4),), "float32", door.device) if scratch_bytes else None
    return calls.Call(library, door.device, device.place(), makers, scratch, ready, operands, given, workspace)


def _order_streams(door: Door) -> None:
    """What other libraries have queued for their operands comes before this call's launches."""
    if door.other_streams:
        from .devices import cupy as gpu

        stream = door.stream()
        for other in door.other_streams - {stream}:
            gpu.order(other, stream, door.device.index)


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


def _result_names(fused: bool, with_bias: bool) -> list[str]:
    return ["dx", *(["dresidual"] if fused else []), "dweight", *(["dbias"] if with_bias else [])]


def _named(out: Any, names: list[str]) -> dict[str, Any]:
    """The caller's outputs by name, in the order of the results."""
    arrays: dict[str, Any] = {"dx": None, "dresidual": None, "dweight": None, "dbias": None}
    if out is not None:
        if not isinstance(out, (tuple, list)) or len(out) != len(names):
            wanted = ", ".join(names)
            raise TypeError(f"out must be the tuple ({wanted}), None for each that is to be allocated or skipped")
        arrays.update(zip(names, out, strict=True))
    return arrays


def _as_one_gradient(named: dict[str, Any]) -> dict[str, Any]:
    """The same where dx and dresidual are one array, the first result, which the caller may give as either or both."""
    dx, dresidual, *_ = named.values()
    if dresidual is None:
        return named
    if dx is None:
        return {"dresidual": dresidual} | named
    if dx is not dresidual:
        raise ValueError("out: dx and dresidual have one dtype and are one array; give the same array, or None for one")
    return named | {"dresidual": None}


def _opening(out: Any, names: list[str], named: dict[str, Any], given: dict[str, Any]) -> Sequence[str]:
    """Lines that take a tuple `out` apart, if it is like this one."""
    if out is None:
        return ()
    terms = [
        "dresidual is not dx" if named[name] is not None else f"{name} is not None"
        for name in names
        if given[name] is None
    ]
    return [
        f"    if type(out) is not {type(out).__name__} or len(out) != {len(names)}: return",
        f"    {', '.join(names)} = out",
        *([f"    if {' or '.join(terms)}: return"] if terms else []),
    ]


# ------------------------------------------------------------------------------------------------ torch's gradients


def _needs_autograd(x: Any, *others: Any) -> bool:
    """Whether autograd or torch.compile has to see this call. False without torch, and inside a Function."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    tensor, compiling = torch.Tensor, torch.compiler.is_compiling
    if not isinstance(x, tensor):
        for other in others:
            if isinstance(other, tensor) and other.requires_grad and torch.is_grad_enabled() and not compiling():
                raise RuntimeError(
                    f"x is a {type(x).__module__} array, but another operand is a torch tensor that requires a "
                    "gradient, which would be lost; pass x as a torch tensor (to_torch), or call under torch.no_grad()"
                )
        return False
    if compiling():  # the compiler knows the operators, not the pointers behind them
        return True
    _refuse_tangent(torch, x, *others)
    if not torch.is_grad_enabled():
        return False
    if x.requires_grad:
        return True
    for other in others:  # noqa: SIM110  (any() with a generator takes three times as long)
        if other is not None and isinstance(other, tensor) and other.requires_grad:
            return True
    return False


def _refuse_gradient(name: str, instead: str, *operands: Any) -> None:
    torch = sys.modules.get("torch")
    if torch is None:
        return
    _refuse_tangent(torch, *operands)
    if not torch.is_grad_enabled():
        return
    if any(isinstance(operand, torch.Tensor) and operand.requires_grad for operand in operands):
        raise RuntimeError(
            f"{name} is not differentiable, and an operand requires a gradient, which would be lost; "
            f"call {instead}, or {name} under torch.no_grad()"
        )


def _refuse_tangent(torch: Any, *operands: Any) -> None:
    forward_ad = torch.autograd.forward_ad
    if getattr(forward_ad, "_current_level", -1) < 0:
        return
    tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise RuntimeError(
            "an operand has a tangent (torch.autograd.forward_ad), which would be lost: there is no forward-mode "
            "derivative here; use torch.nn.functional.rms_norm, or pass the primal that unpack_dual returns"
        )


def _refuse_out(**outputs: Any) -> None:
    given = [name for name, array in outputs.items() if array is not None]
    if given:
        raise RuntimeError(
            f"{given[0]} is given, but an operand requires a gradient; leave it out, or call under torch.no_grad()"
        )
