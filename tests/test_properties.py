"""Properties of the public functions on the host, over drawn shapes, dtypes, layouts, options and values.

The oracle is reference.py in float64, with conftest's tolerances, except where float32 runs out of range: a finite row
whose squares do not add up in float32 counts as a row with rstd = 0. Every N and every mix of dtypes is a compilation,
so N is one of a dozen, and what is only about layouts keeps to few programs.
"""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest
from conftest import DTYPES, EPSILONS, TOLERANCES
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import rmsnorm_raw as rr
from rmsnorm_raw import calls, ops, reference
from rmsnorm_raw.plan import HOST, Traits

try:
    import torch
except ImportError:
    torch = None
try:
    import lanes
except ImportError:
    lanes = None

PROPERTY = settings(
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

CHEAP = settings(PROPERTY, max_examples=150)  # few programs

TRAITS = {
    "gfx942": Traits("amd", "gfx942:sramecc+:xnack-", wave=64, units=304),
    "gfx1100": Traits("amd", "gfx1100", wave=32, units=48),
    "sm_90": Traits("nvidia", "sm_90", wave=32, units=132),
    "host": HOST,
}
CARDS = ("gfx942", "gfx1100", "sm_90")


def on_host(function, *arguments, **options):
    return function(*arguments, **options)


def on_card(card, few_blocks):
    """Calls as that card would run them, on tests/lanes; on few blocks, so that the loops over rows turn."""
    from lanes.device import Device

    return Device(TRAITS[card], few_blocks=few_blocks)


def on_cards_only(test):
    """For tests that need tests/lanes."""
    reason = lanes.missing() if lanes else "tests/lanes is missing"
    return pytest.mark.lanes(pytest.mark.skipif(bool(reason), reason=str(reason))(test))


COLUMNS = (1, 2, 3, 5, 8, 17, 33, 64, 129, 300, 1024, 4099)
LEADING = ((), (1,), (3,), (7,), (2, 3), (4, 1, 2), (40,), (0,), (2, 0))
MIXED = ("float16", "bfloat16", "float32")
OPTIONAL = (None, *MIXED)
EPS = (1e-6, 1e-5, 1e-12, 1.0, None)
# Of x: with 1e20 and 1e30 a row's squares do not add up in float32, with 1e-40 it is subnormal there.
SCALES = (1.0, 1.0, 1e-3, 1e3, 1e15, 1e20, 1e30, 1e-10, 1e-20, 1e-30, 1e-40, 0.0)
SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e30, -1e30, 1e-30, 1e-40)
LARGEST = float(np.finfo(np.float32).max)


# ------------------------------------------------------------------------------------------------ values


def rows_of(draw, shape, dtype, scales=SCALES, special=SPECIAL, largest=math.inf):
    """Normal values, each row at a scale of its own, and up to three special values among them; up to `largest`."""
    scales, special = ([value for value in values if abs(value) <= largest] for values in (scales, special))
    if dtype == "float16":
        scales = [scale for scale in scales if 1e-8 < scale < 1e4 or scale == 0] + [1e-7]
    rows = math.prod(shape[:-1])
    numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = numbers.standard_normal((rows, shape[-1]))
    kinds = draw(st.lists(st.sampled_from(scales), min_size=1, max_size=4))
    values *= np.resize(np.array(kinds), rows)[:, None]
    if rows:
        for value in draw(st.lists(st.sampled_from(special), max_size=3)) if special else ():
            values[draw(st.integers(0, rows - 1)), draw(st.integers(0, shape[-1] - 1))] = value
    with np.errstate(all="ignore"):
        return values.reshape(shape).astype(DTYPES[dtype])


def weights_of(draw, shape, dtype):
    """Values of a weight or bias, some of them zero."""
    numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = numbers.standard_normal(shape) * draw(st.sampled_from((1.0, 1e-2, 1e2, 0.0)))
    values[numbers.random(shape) < draw(st.sampled_from((0.0, 0.3)))] = 0.0
    return values.astype(DTYPES[dtype])


def float64(values):
    return np.asarray(values).astype(np.float64)


def aligned(size):
    """That many bytes of memory, 16-byte aligned, full of NaN."""
    base = np.full(size // 4 + 4, np.nan, np.float32)
    start = -base.ctypes.data % 16 // 4
    return base[start : start + size // 4]


def finite_size(values):
    return np.where(np.isfinite(values), np.abs(values), 0.0)


def real_of(dtype):
    """What is computed in."""
    return "float64" if dtype == "float64" else "float32"


def overflown(h, dtype):
    """Rows of finite values whose squares do not add up in float32."""
    if dtype == "float64":
        return np.zeros(h.shape[:-1], bool)
    with np.errstate(all="ignore"):
        total = np.sum(h * h, axis=-1)
    return np.isfinite(h).all(axis=-1) & (total > LARGEST)


def assert_matches(actual, expected, dtype, allowed, what):
    """NaN and infinity where they are expected, else |Δ| ≤ allowed, or what that rounds to."""
    assert actual.dtype == DTYPES[dtype], what
    assert actual.shape == expected.shape, what
    info, actual = ml_dtypes.finfo(DTYPES[dtype]), float64(actual)
    with np.errstate(all="ignore"):
        allowed = allowed + 4 * float(info.smallest_subnormal) + 1e-42  # subnormals are coarse, and may be scaled after
        beyond = np.isinf(expected) | (np.abs(expected) + allowed >= float(info.max))
        good = (np.abs(actual - expected) <= allowed) | (np.isnan(actual) & np.isnan(expected))
        good |= np.isinf(actual) & beyond & (np.sign(actual) == np.sign(expected))
    assert good.all(), f"{what}: {actual[~good][:3]}, expected {expected[~good][:3]}"


def assert_equals(actual, expected, dtype, scale=0.0, roundings=(), what="result"):
    """The tolerance of conftest's assert_rows_close. `scale` is what was added up on the way: float32's rounding is
    relative to it, and that of other rounding steps, whose dtypes are `roundings`."""
    u, c = TOLERANCES[dtype]
    size = finite_size(expected)
    scale = np.maximum(size, scale)
    allowed = u * size + c * scale.max(axis=-1, keepdims=True, initial=0.0)
    for other in roundings:  # a subnormal is rounded coarsely, and may be scaled after
        allowed = (
            allowed + TOLERANCES[other][0] * scale + 1024 * float(ml_dtypes.finfo(DTYPES[other]).smallest_subnormal)
        )
    assert_matches(actual, expected, dtype, allowed, what)


# ------------------------------------------------------------------------------------------------ forward


@st.composite
def dtypes(draw, *names):
    """A dtype for each name: all float64, or any mix of the others; names that end in ? may be absent."""
    if draw(st.integers(0, 9)) == 0:
        return {name.rstrip("?"): None if name.endswith("?") and draw(st.booleans()) else "float64" for name in names}
    return {name.rstrip("?"): draw(st.sampled_from(OPTIONAL if name.endswith("?") else MIXED)) for name in names}


@st.composite
def weight_shapes(draw, shape):
    return shape[-2:] if len(shape) > 1 and shape[-2] and draw(st.booleans()) else shape[-1:]


@st.composite
def shapes(draw, at_least=0):
    """Of rows: leading dimensions, at_least so many, and columns."""
    return (
        *draw(st.sampled_from([leading for leading in LEADING if len(leading) >= at_least])),
        draw(st.sampled_from(COLUMNS)),
    )


@st.composite
def forward_cases(draw, on_a_card=False):
    """On a card of tests/lanes NaN marks memory that nobody has written, so none may come about there."""
    kinds = draw(dtypes("x", "y", "weight?", "bias?", "residual?", "total"))
    shape = draw(shapes(at_least=on_a_card))
    largest = math.inf if not on_a_card else 1e3 if "float16" in kinds.values() else 1e30
    affine = draw(weight_shapes(shape))
    given = {"x": rows_of(draw, shape, kinds["x"], largest=largest), "weight": None, "bias": None}
    for name in ("weight", "bias"):
        if kinds[name]:
            given[name] = weights_of(draw, affine, kinds[name])
    options = {
        "weight_offset": draw(st.sampled_from((0.0, 1.0))),
        "casting": draw(st.sampled_from(("fp32", "fp32", "llama"))),
        "out_dtype": draw(st.sampled_from((None, kinds["y"]))),
    }
    residual = None
    if kinds["residual"]:
        residual = rows_of(draw, shape, kinds["residual"], (1.0, 1e3, 1e-3, 1e15, 0.0), (np.inf, 0.0), largest)
        options["residual_dtype"] = draw(st.sampled_from((None, kinds["total"])))
        options["residual_rounding"] = draw(st.sampled_from(("stored", "fp32")))
    return SimpleNamespace(given=given, residual=residual, options=options, eps=draw(st.sampled_from(EPS)), kinds=kinds)


def eps_of(eps, dtype):
    return EPSILONS[real_of(dtype)] if eps is None else eps


def check_forward(case, call=on_host):
    x, weight, bias = case.given.values()
    dtype, options, fused = case.kinds["x"], case.options, case.residual is not None
    total_dtype = (options["residual_dtype"] or case.kinds["residual"]) if fused else None
    normed_dtype = total_dtype if fused and options["residual_rounding"] == "stored" else dtype
    with np.errstate(all="ignore"):
        if fused:
            y, total, rstd = call(
                rr.fused_add_rmsnorm_fwd, x, case.residual, weight, case.eps, True, bias=bias, **options
            )  # fmt: skip
        else:
            y, rstd = call(rr.rmsnorm_fwd, x, weight, case.eps, True, bias=bias, **options)
        kept = None
        if fused:  # what is unrounded is still a sum of float32
            unrounded = options["residual_rounding"] == "fp32" and dtype != "float64"
            kept = DTYPES["float32" if unrounded else total_dtype]
        expected = reference.forward(
            x, weight, eps_of(case.eps, dtype), residual=case.residual, bias=bias,
            weight_offset=options["weight_offset"], residual_dtype=kept,
        )  # fmt: skip
        lost = overflown(expected.normed, dtype)
        factor = np.ones(x.shape) if weight is None else float64(weight) + options["weight_offset"] + np.zeros(x.shape)
        shift = np.zeros(x.shape) if bias is None else float64(bias) + np.zeros(x.shape)
        y_expected = np.where(lost[..., None], shift, expected.y)
        normed = np.where(lost[..., None], 0.0, expected.normed * expected.rstd[..., None]) * factor
        scale = finite_size(normed) + np.abs(shift)
        if fused:
            np.testing.assert_array_equal(float64(total), float64(expected.normed.astype(DTYPES[total_dtype])))
    roundings = ()
    if fused and options["residual_rounding"] == "stored":
        again = {**options, "out_dtype": options["out_dtype"] or dtype}
        del again["residual_rounding"], again["residual_dtype"]
        y_again = call(rr.rmsnorm, total, weight, case.eps, bias=bias, **again)
        np.testing.assert_array_equal(float64(y), float64(y_again))
    if options["casting"] == "llama":
        roundings = (normed_dtype, normed_dtype, weight.dtype.name if weight is not None else normed_dtype)
    assert_equals(y, y_expected, options["out_dtype"] or dtype, scale, roundings, "y")
    assert_equals(rstd[..., None], np.where(lost, 0.0, expected.rstd)[..., None], real_of(dtype), what="rstd")


@PROPERTY
@given(forward_cases())
def test_forward_equals_float64(case):
    check_forward(case)


@on_cards_only
@settings(PROPERTY, max_examples=20)
@given(forward_cases(on_a_card=True), st.sampled_from(CARDS), st.booleans())
def test_forward_equals_float64_on_a_card(case, card, few_blocks):
    check_forward(case, on_card(card, few_blocks))


@CHEAP
@given(st.data())
def test_eps_of_zero(data):
    """Rows of zeros give NaN, rows whose squares vanish give infinity, all others are what the formula says."""
    cols = data.draw(st.sampled_from((2, 8, 33)))
    x = rows_of(data.draw, (6, cols), "float32", scales=(1.0, 1e15, 1e-10, 1e-30, 0.0), special=())
    y, rstd = rr.rmsnorm_fwd(x, None, 0.0, True)
    size = np.abs(x).max(axis=-1)
    zero, vanished = size == 0, (size > 0) & (size < 1e-25)
    assert np.isnan(y[zero]).all()
    assert np.isinf(rstd[zero | vanished]).all()
    np.testing.assert_array_equal(y[vanished], np.copysign(np.inf, x[vanished]))
    others = ~zero & ~vanished
    assert_equals(y[others], reference.forward(x[others], None, 0.0).y, "float32")


# ------------------------------------------------------------------------------------------------ backward


@st.composite
def backward_cases(draw, on_a_card=False):
    kinds = draw(dtypes("x", "weight?", "bias?", "dout", "dresidual_out?", "dx", "dresidual"))
    shape = draw(shapes(at_least=on_a_card))
    affine = draw(weight_shapes(shape))
    largest = math.inf if not on_a_card else 1e3 if "float16" in kinds.values() else 1e30
    x = rows_of(draw, shape, kinds["x"], largest=largest)
    dout = rows_of(draw, shape, kinds["dout"], (1.0, 1e-3, 1e15, 1e-30, 0.0), (np.nan, np.inf, 0.0), largest)
    weight = weights_of(draw, affine, kinds["weight"]) if kinds["weight"] else None
    bias = weights_of(draw, affine, kinds["bias"]) if kinds["bias"] else None
    fused, added = draw(st.booleans()), None
    if fused and kinds["dresidual_out"]:
        added = rows_of(draw, shape, kinds["dresidual_out"], (1.0, 1e3, 0.0), (np.inf, 0.0), largest)
    return SimpleNamespace(
        x=x, dout=dout, weight=weight, bias=bias, fused=fused, added=added,
        kinds=kinds, eps=draw(st.sampled_from(EPS)), weight_offset=draw(st.sampled_from((0.0, 1.0))),
        dx_dtype=draw(st.sampled_from((None, kinds["dx"]))),
        dresidual_dtype=draw(st.sampled_from((None, kinds["dresidual"]))),
        need_dx=draw(st.integers(0, 5)) > 0, need_dweight=draw(st.integers(0, 5)) > 0,
        own_workspace=draw(st.booleans()),
    )  # fmt: skip


def check_backward(case, call=on_host):
    x, dout, weight, bias = float64(case.x), float64(case.dout), case.weight, case.bias
    offset, x_dtype, real = case.weight_offset, case.kinds["x"], real_of(case.kinds["x"])
    with np.errstate(all="ignore"):
        eps, lost = eps_of(case.eps, x_dtype), overflown(x, x_dtype)
        rstd = np.where(lost, 0.0, reference.forward(x, None, eps).rstd)
        # To the sums a row with rstd = 0 is what a row of zeros is; it has no gradient of its own.
        kept = np.where(lost[..., None], 0.0, x)
        expected = reference.backward(kept, weight, dout, eps, weight_offset=offset)
        g = dout if weight is None else dout * (float64(weight) + offset)
        nothing = np.where(np.isfinite(g).all(axis=-1, keepdims=True), 0.0, np.nan)
        added = 0.0 if case.added is None else float64(case.added)
        dx_expected = np.where(lost[..., None], nothing, expected.dx) + added
        # What cancels in dx is g, against its part along the row; what a sum is rounded to, the sum of its terms.
        scale = finite_size(finite_size(g).max(axis=-1, keepdims=True, initial=0.0) * rstd[..., None]) + finite_size(
            added
        )
        terms = finite_size(np.abs(dout) * (finite_size(kept * rstd[..., None]) + 1e-38))
        heads = next((operand.ndim for operand in (weight, bias) if operand is not None), 1)
        leading = tuple(range(x.ndim - heads))
        dbias_expected = dout.sum(axis=leading)

    options = {"weight_offset": offset, "need_dx": case.need_dx, "need_dweight": case.need_dweight, "bias": bias}
    if case.own_workspace:
        options["workspace"] = aligned(call(rr.workspace_bytes, case.x, weight, bias=bias))
    operands = (case.x, weight, case.dout, rstd.astype(DTYPES[real]))
    dx_dtype, dresidual_dtype = x_dtype, None
    if case.fused:
        options |= {"dx_dtype": case.dx_dtype, "dresidual_dtype": case.dresidual_dtype}
        dx_dtype, dresidual_dtype = case.dx_dtype or case.kinds["dout"], case.dresidual_dtype or x_dtype
        dx, dresidual, *sums = call(rr.fused_add_rmsnorm_bwd, *operands, case.added, **options)
    else:
        dx, *sums = call(rr.rmsnorm_bwd, *operands, **options)
        dresidual = None

    if not case.need_dx:
        assert dx is None
        assert dresidual is None
    else:
        assert_equals(dx, dx_expected, dx_dtype, scale, what="dx")
        if case.fused:
            assert (dresidual is dx) == (dx_dtype == dresidual_dtype)
            assert_equals(dresidual, dx_expected, dresidual_dtype, scale, what="dresidual")
    wanted = [("dweight", weight, expected.dweight, terms)]
    if bias is not None:
        wanted.append(("dbias", bias, dbias_expected, finite_size(dout)))
    sum_dtype = next((operand.dtype.name for operand in (weight, bias) if operand is not None), None)
    for result, (name, operand, value, each) in zip(sums, wanted, strict=True):
        if operand is None or not case.need_dweight:
            assert result is None, name
        else:  # both have the weight's dtype
            allowed = TOLERANCES[real][1] * each.sum(axis=leading) + 2 * EPSILONS[sum_dtype] * np.abs(value)
            assert_matches(result, value, sum_dtype, allowed, name)


@PROPERTY
@given(backward_cases())
def test_backward_equals_float64(case):
    check_backward(case)


@on_cards_only
@settings(PROPERTY, max_examples=20)
@given(backward_cases(on_a_card=True), st.sampled_from(CARDS), st.booleans())
def test_backward_equals_float64_on_a_card(case, card, few_blocks):
    check_backward(case, on_card(card, few_blocks))


class Accepted(Exception):
    pass


@pytest.mark.parametrize("card", TRAITS)
@PROPERTY
@given(case=backward_cases(), rows=st.sampled_from((1, 7, 300, 5000, 100_000)))
def test_workspace_bytes_is_enough_for_every_option(card, case, rows):
    """By the plans of a card, for many rows that are one and the same; it ends where kernels would be compiled."""
    cols = case.x.shape[-1]

    def many(values):
        return None if values is None else np.broadcast_to(values.reshape(-1, cols)[:1], (rows, cols))

    assume(case.x.size and all(operand is None or operand.ndim == 1 for operand in (case.weight, case.bias)))
    x, rstd = many(case.x), np.zeros(rows, DTYPES[real_of(case.kinds["x"])])
    options = {"bias": case.bias, "weight_offset": case.weight_offset}
    options |= {"need_dx": case.need_dx, "need_dweight": case.need_dweight}
    calls.forget()
    with (
        patch.object(ops, "_traits", lambda door: TRAITS[card]),
        patch.object(ops, "_checked", side_effect=Accepted),
    ):
        options["workspace"] = aligned(rr.workspace_bytes(x, case.weight, bias=case.bias))
        operands, backward = (x, case.weight, many(case.dout), rstd), rr.rmsnorm_bwd
        if case.fused:
            options |= {"dx_dtype": case.dx_dtype, "dresidual_dtype": case.dresidual_dtype}
            operands, backward = (*operands, many(case.added)), rr.fused_add_rmsnorm_bwd
        with pytest.raises(Accepted):
            backward(*operands, **options)


@pytest.mark.parametrize("shared", [0, 99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "float64"])
def test_workspace_bytes_is_enough_for_long_rows(kind, shared):
    """How a long row is held depends on dout's dtype, too."""
    traits = Traits("nvidia", "sm_90", wave=32, units=132, shared_bytes=shared)
    kinds, rows = ("float64",) if kind == "float64" else ("float16", "float32"), 300
    calls.forget()
    with (
        patch.object(ops, "_traits", lambda door: traits),
        patch.object(ops, "_checked", side_effect=Accepted),
    ):
        for cols in (16384, 20480, 24576, 32768, 40960, 49152, 57344, 65536, 73728, 131072):
            row = np.ones((1, cols), DTYPES[kind])
            x, weight, rstd = np.broadcast_to(row, (rows, cols)), row[0], np.ones(rows, DTYPES[real_of(kind)])
            for need_dweight, bias in ((True, None), (True, weight), (False, None)):
                workspace = aligned(rr.workspace_bytes(x, weight, bias=bias, need_dweight=need_dweight))
                options = {"need_dweight": need_dweight, "bias": bias, "workspace": workspace}
                for dout in (np.broadcast_to(np.ones((1, cols), DTYPES[other]), (rows, cols)) for other in kinds):
                    for need_dx, added in ((True, None), (True, x), (False, None)):
                        with pytest.raises(Accepted):
                            rr.fused_add_rmsnorm_bwd(x, weight, dout, rstd, added, need_dx=need_dx, **options)


# ------------------------------------------------------------------------------------------------ layouts


ROWS_APART = ("plain", "offset", "pitch")  # read where they are
FORWARDS = (*ROWS_APART, "stride", "order")
LAYOUTS = (*FORWARDS, "reversed", "odd bytes")


@st.composite
def views(draw, values, kinds=LAYOUTS):
    """The same values, laid out in another way."""
    kind = draw(st.sampled_from(kinds))
    if kind == "offset" or not values.size:
        start = draw(st.integers(1, 9))
        base = np.zeros(values.size + 16, values.dtype)
        view = base[start : start + values.size].reshape(values.shape)
    elif kind == "pitch":
        before, after = draw(st.integers(0, 5)), draw(st.integers(0, 9))
        if draw(st.booleans()):  # padded, so that rows begin at whole packs
            before, after = 0, -values.shape[-1] % 16
        base = np.zeros((*values.shape[:-1], before + values.shape[-1] + after), values.dtype)
        view = base[..., before : before + values.shape[-1]]
    elif kind == "stride":
        steps = [draw(st.integers(1, 3)) for _ in values.shape]
        base = np.zeros([n * step for n, step in zip(values.shape, steps, strict=True)], values.dtype)
        view = base[tuple(slice(None, None, step) for step in steps)]
    elif kind == "order":
        axes = draw(st.permutations(range(values.ndim)))
        base = np.zeros([values.shape[axis] for axis in axes], values.dtype)
        view = base.transpose(np.argsort(axes))
    elif kind == "reversed":
        base = np.zeros(values.shape, values.dtype)
        view = base[tuple(slice(None, None, draw(st.sampled_from((1, -1)))) for _ in values.shape)]
    elif kind == "odd bytes":
        base = np.zeros(values.nbytes + 1, np.uint8)
        view = base[1:].view(values.dtype).reshape(values.shape)
    else:
        base = view = np.zeros(values.shape, values.dtype)
    view[...] = values
    assert view.base is base or view is base or values.size == 0 or np.shares_memory(view, base)
    return view


@st.composite
def repeated(draw, shape, dtype):
    """Values of that shape, of which some dimensions repeat one element: as they are, and as a broadcast view."""
    small = tuple(1 if draw(st.integers(0, 3)) == 0 else n for n in shape)
    values = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).standard_normal(small).astype(DTYPES[dtype])
    broadcast = np.broadcast_to(values, shape)
    return broadcast if draw(st.booleans()) else broadcast.copy()


LAYOUT_PROGRAMS = ((8, "float32"), (33, "bfloat16"), (300, "float16"), (5, "float64"))


def results_of(x, residual, weight, dout, added, call=on_host):
    y, rstd = call(rr.rmsnorm_fwd, x, weight, 1e-6, True)
    dx, dweight = call(rr.rmsnorm_bwd, x, weight, dout, rstd)
    fused_y, total, fused_rstd = call(rr.fused_add_rmsnorm_fwd, x, residual, weight, 1e-6, True)
    fused_dx, _, fused_dweight = call(rr.fused_add_rmsnorm_bwd, total, weight, dout, fused_rstd, added)
    return y, rstd, dx, fused_y, total, fused_rstd, fused_dx, dweight, fused_dweight


@CHEAP
@given(st.data())
def test_layout_changes_no_bit(data):
    cols, dtype = data.draw(st.sampled_from(LAYOUT_PROGRAMS))
    shape = (*data.draw(st.sampled_from(LEADING)), cols)
    plain = [data.draw(repeated(s, dtype)) for s in (shape, shape, shape[-1:], shape, shape)]
    given = [a if a.strides != a.copy().strides else data.draw(views(a)) for a in plain]
    kept = [a.copy() for a in given]
    expected = results_of(*(np.array(a, order="C") for a in plain))
    for _ in range(2):  # a call like an earlier one takes a shorter way
        for ours, theirs in zip(results_of(*given), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    for operand, before in zip(given, kept, strict=True):
        np.testing.assert_array_equal(operand, before)


@CHEAP
@given(st.data())
def test_a_row_follows_from_itself_alone(data):
    """Some of the rows, in any order, give what they give among all rows; so does every subset of the results."""
    cols, dtype = data.draw(st.sampled_from(LAYOUT_PROGRAMS))
    rows = data.draw(st.sampled_from((1, 2, 5, 64, 200)))
    x, residual, dout, added = (data.draw(repeated((rows, cols), dtype)) for _ in range(4))
    weight = weights_of(data.draw, (cols,), dtype)
    chosen = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=9))
    all_rows = results_of(x, residual, weight, dout, added)[:7]
    some_rows = results_of(x[chosen], residual[chosen], weight, dout[chosen], added[chosen])[:7]
    for among_all, among_some in zip(all_rows, some_rows, strict=True):
        np.testing.assert_array_equal(among_all[chosen], among_some)
    y, rstd, dx, fused_y = all_rows[:4]
    np.testing.assert_array_equal(rr.rmsnorm(x, weight), y)
    np.testing.assert_array_equal(rr.fused_add_rmsnorm(x, residual, weight, prenorm=False), fused_y)
    np.testing.assert_array_equal(rr.rmsnorm_bwd(x, weight, dout, rstd, need_dweight=False)[0], dx)


@on_cards_only
@settings(PROPERTY, max_examples=12)
@given(st.data())
def test_a_row_follows_from_itself_alone_on_a_card(data):
    """Among rows that share its block or not, aligned or not, whatever else is asked for: the same bits."""
    cols, dtype = data.draw(st.sampled_from(((33, "bfloat16"), (8, "float32"), (300, "float16"))))
    rows, card = data.draw(st.sampled_from((2, 40, 200))), data.draw(st.sampled_from(CARDS))
    x, residual, dout, added = (data.draw(repeated((rows, cols), dtype)).copy() for _ in range(4))
    weight = weights_of(data.draw, (cols,), dtype)
    chosen = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=3))
    device = on_card(card, data.draw(st.booleans()))
    all_rows = results_of(x, residual, weight, dout, added, device)[:7]
    some = [data.draw(views(operand[chosen], ROWS_APART)) for operand in (x, residual, dout, added)]
    some_rows = results_of(*some[:2], weight, *some[2:], device)[:7]
    for among_all, among_some in zip(all_rows, some_rows, strict=True):
        np.testing.assert_array_equal(among_all[chosen], among_some)
    y, rstd, dx = all_rows[:3]
    np.testing.assert_array_equal(device(rr.rmsnorm_fwd, x, weight, 1e-6)[0], y)
    np.testing.assert_array_equal(device(rr.rmsnorm_bwd, x, weight, dout, rstd, need_dweight=False)[0], dx)


TRUE_OR_FALSE = st.sampled_from((True, False, 1, 0, np.True_, np.False_))


@CHEAP
@given(st.lists(st.tuples(TRUE_OR_FALSE, TRUE_OR_FALSE, TRUE_OR_FALSE), min_size=2, max_size=4))
def test_what_is_asked_for_follows_from_this_call_alone(calls_in_order):
    """Whatever calls of the same operands came before."""
    calls.forget()
    x, weight = np.ones((3, 8), np.float32), np.ones(8, np.float32)
    for store_rstd, need_dx, need_dweight in calls_in_order:
        _, rstd = rr.rmsnorm_fwd(x, weight, 1e-6, store_rstd)
        assert (rstd is not None) == bool(store_rstd)
        rstd = rr.rmsnorm_fwd(x, weight, 1e-6, True)[1]
        dx, dweight = rr.rmsnorm_bwd(x, weight, x, rstd, need_dx=need_dx, need_dweight=need_dweight)
        assert (dx is not None, dweight is not None) == (bool(need_dx), bool(need_dweight))
        total, rstd = rr.fused_add_rmsnorm_fwd(x, x, weight, 1e-6, store_rstd)[1:]
        assert total is not None
        assert (rstd is not None) == bool(store_rstd)
        prenorm = rr.fused_add_rmsnorm(x, x, weight, 1e-6, need_dx)
        assert isinstance(prenorm, tuple) == bool(need_dx)


@CHEAP
@given(st.data())
def test_outputs_of_the_callers_own(data):
    """In views of any row pitch or in place: the same bits, and nothing around them."""
    cols, dtype = data.draw(st.sampled_from(LAYOUT_PROGRAMS))
    shape = (*data.draw(st.sampled_from(LEADING)), cols)
    x, residual, dout, added = (data.draw(repeated(shape, dtype)).copy() for _ in range(4))
    weight = weights_of(data.draw, (cols,), dtype)
    y, rstd, dx, fused_y, total, fused_rstd, fused_dx, dweight, fused_dweight = results_of(
        x, residual, weight, dout, added
    )
    checks = []

    def output(like, in_place=None):
        if in_place is not None and data.draw(st.booleans()):
            copy = in_place.copy()
            return copy, copy
        before, after = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5))
        # Beyond two dimensions rows that step evenly have no gap between them.
        rows = math.prod(like.shape[:-1])
        base = np.full((rows + 2, before + like.shape[-1] + after), 77.0, like.dtype)
        view = base[1 : rows + 1, before : before + like.shape[-1]]
        view = view[0] if like.ndim == 1 else view.reshape(like.shape)
        assert np.shares_memory(view, base) or view.size == 0
        checks.append((base, (slice(1, rows + 1), slice(before, before + like.shape[-1]))))
        return view, in_place

    out, x_in = output(y, x)
    assert rr.rmsnorm(x_in, weight, out=out) is out
    np.testing.assert_array_equal(out, y)
    (out, x_in), (total_out, residual_in) = output(y, x), output(total, residual)
    rr.fused_add_rmsnorm(x_in, residual_in, weight, out=out, residual_out=total_out)
    np.testing.assert_array_equal(out, fused_y)
    np.testing.assert_array_equal(total_out, total)
    (dx_out, x_in), (dweight_out, _) = output(dx, x), output(dweight)
    workspace = aligned(rr.workspace_bytes(x, weight)) if data.draw(st.booleans()) else None
    rr.rmsnorm_bwd(x_in, weight, dout, rstd, out=(dx_out, dweight_out), workspace=workspace)
    np.testing.assert_array_equal(dx_out, dx)
    np.testing.assert_array_equal(dweight_out, dweight)
    (dx_out, total_in), (dweight_out, _) = output(fused_dx, total), output(fused_dweight)
    rr.fused_add_rmsnorm_bwd(total_in, weight, dout, fused_rstd, added, out=(dx_out, None, dweight_out))
    np.testing.assert_array_equal(dx_out, fused_dx)
    np.testing.assert_array_equal(dweight_out, fused_dweight)
    for base, where in checks:
        base[where] = 77.0
        assert (float64(base) == 77.0).all()


# ------------------------------------------------------------------------------------------------ torch


def tensor_of(array):
    if array.dtype == DTYPES["bfloat16"]:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array_of(tensor):
    tensor = tensor.detach()
    return (
        tensor.view(torch.int16).numpy().view(DTYPES["bfloat16"]) if tensor.dtype == torch.bfloat16 else tensor.numpy()
    )


@pytest.mark.skipif(torch is None, reason="torch is not installed")
@CHEAP
@given(st.data())
def test_torch_gives_the_same_bits_and_only_the_gradients_that_are_needed(data):
    cols, dtype = data.draw(st.sampled_from(LAYOUT_PROGRAMS))
    shape = (*data.draw(st.sampled_from(LEADING)), cols)
    needs = data.draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
    use_y, use_total = data.draw(st.sampled_from(((True, False), (False, True), (True, True))))
    x, residual, dout, added = (data.draw(repeated(shape, dtype)).copy() for _ in range(4))
    weight = weights_of(data.draw, (cols,), dtype)
    operands = [tensor_of(data.draw(views(a, FORWARDS))) for a in (x, residual, weight)]
    for tensor, need in zip(operands, needs, strict=True):
        tensor.requires_grad_(need)
    y, total = rr.fused_add_rmsnorm(*operands)
    fused_y, fused_total, rstd = rr.fused_add_rmsnorm_fwd(x, residual, weight, store_rstd=True)
    np.testing.assert_array_equal(array_of(y), fused_y)
    np.testing.assert_array_equal(array_of(total), fused_total)
    assert y.requires_grad == any(needs)
    if not any(needs):
        return
    gradients = [tensor_of(data.draw(views(a, FORWARDS))) for a in (dout, added)]
    pairs = [pair for pair, use in zip(zip((y, total), gradients, strict=True), (use_y, use_total), strict=True) if use]
    torch.autograd.backward([result for result, _ in pairs], [gradient for _, gradient in pairs])
    if use_y:
        dx, _, dweight = rr.fused_add_rmsnorm_bwd(fused_total, weight, dout, rstd, added if use_total else None)
    else:
        dx, dweight = added, np.zeros_like(weight)
    for tensor, need, expected in zip(operands, needs, (dx, dx, dweight), strict=True):
        if not need:
            assert tensor.grad is None
        elif tensor.grad is not None:
            np.testing.assert_array_equal(array_of(tensor.grad), expected)
        else:
            assert tensor is operands[2]
            assert not use_y


# ------------------------------------------------------------------------------------------------ refusals


def complete_call(draw, library):
    """A function, valid operands for it, and outputs for all that it gives, all full of 77."""
    shape = (
        *draw(st.sampled_from([leading for leading in LEADING if 0 not in leading])),
        draw(st.sampled_from((2, 5, 8))),
    )
    dtype = draw(st.sampled_from(MIXED))
    name = draw(st.sampled_from(("rmsnorm", "fused_add_rmsnorm", "rmsnorm_bwd", "fused_add_rmsnorm_bwd")))

    def new(shape, dtype=dtype, value=77.0):
        return np.full(shape, value).astype(DTYPES[dtype])

    rows = {key: new(shape, value=0.5) for key in ("x", "residual", "dout", "dresidual_out")}
    affine = {"weight": new(shape[-1:], value=0.5), "bias": new(shape[-1:], value=0.5)}
    if name == "rmsnorm":
        call = {"x": rows["x"], **affine, "out": new(shape)}
    elif name == "fused_add_rmsnorm":
        call = {"x": rows["x"], "residual": rows["residual"], **affine, "out": new(shape), "residual_out": new(shape)}
    else:
        first = "x" if name == "rmsnorm_bwd" else "residual_out"
        call = {first: rows["x"], "dout": rows["dout"], **affine, "rstd": new(shape[:-1], "float32", 0.5)}
        call["out"] = [new(shape), new(shape[-1:]), new(shape[-1:])]
        if name == "fused_add_rmsnorm_bwd":
            call["dresidual_out"] = rows["dresidual_out"]
            call["out"].insert(1, None)
    return SimpleNamespace(name=name, call=call, shape=shape, dtype=dtype, library=library)


def row_operands(case):
    return [key for key in ("residual", "dout", "dresidual_out") if key in case.call]


def wrong_shape(draw, case):
    key = draw(st.sampled_from([*row_operands(case), "weight", "bias", *(["rstd"] if "rstd" in case.call else [])]))
    given = case.call[key]
    if key in ("weight", "bias"):  # (heads, columns) would do
        shape = draw(
            st.sampled_from(
                [(case.shape[-1] + 1,), (case.shape[-1] - 1,), (), (97, case.shape[-1]), (1, 1, *given.shape)]
            )
        )
    else:
        shape = list(case.shape)
        where = draw(st.integers(0, len(shape) - 1))
        shape[where] += draw(st.integers(1, 3))
        shape = tuple(shape) if key != "rstd" else (*case.shape[:-1], 9, 9)
    case.call[key] = np.full(shape, 0.5).astype(given.dtype)


def wrong_dtype(draw, case):
    keys = [key for key in case.call if isinstance(case.call[key], np.ndarray) and key != "rstd"]
    key = draw(st.sampled_from(keys))
    names = ["int8", "int32", "int64", "uint8", "bool", "complex64", "float64"]
    dtype = np.dtype(draw(st.sampled_from(names)))
    if case.library == "numpy":
        dtype = draw(
            st.sampled_from((dtype, np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(">f4"), np.dtype("O"), np.dtype("U3")))
        )
    case.call[key] = np.zeros(case.call[key].shape, dtype)


def wrong_rstd(draw, case):
    assume("rstd" in case.call)
    case.call["rstd"] = case.call["rstd"].astype(draw(st.sampled_from(("float16", "float64", "int32"))))


def wrong_option(draw, case):
    forward = not case.name.endswith("bwd")
    options = {"casting": ["fp16", "", "FP32"], "weight_offset": ["one", None]}
    if forward:
        options |= {"eps": [-1e-6, -1, math.nan, -math.inf, "small"], "out_dtype": ["int8", "float64", "complex64"]}
    if case.name == "fused_add_rmsnorm":
        options |= {"residual_rounding": ["bf16", "fp16"], "residual_dtype": ["float64", "int32"]}
    if case.name == "fused_add_rmsnorm_bwd":
        options |= {"dx_dtype": ["float64", "uint8"]}
    key = draw(st.sampled_from(sorted(options)))
    case.call[key] = draw(st.sampled_from(options[key]))


def no_array(draw, case):
    keys = [key for key in case.call if isinstance(case.call[key], np.ndarray)]
    key = draw(st.sampled_from(keys))
    case.call[key] = draw(st.sampled_from((case.call[key].tolist(), 1.0, "x", object())))


def outputs_of(case):
    """(where, the array) of each output."""
    if isinstance(case.call["out"], list):
        return [("out", i) for i, array in enumerate(case.call["out"]) if array is not None]
    return [(key, None) for key in ("out", "residual_out") if key in case.call]


def replace_output(draw, case, change):
    key, index = draw(st.sampled_from(outputs_of(case)))
    if index is None:
        case.call[key] = change(case.call[key])
    else:
        case.call[key][index] = change(case.call[key][index])


def wrong_output(draw, case):
    shape_or_dtype = draw(st.booleans())

    def change(array):
        if shape_or_dtype:
            shape = draw(st.sampled_from(((1, *array.shape), (*array.shape[:-1], array.shape[-1] + 1), (), (0,))))
            return np.full(shape, 77.0).astype(array.dtype)
        other = draw(st.sampled_from([name for name in (*MIXED, "float64", "int16") if name != array.dtype.name]))
        return np.full(array.shape, 77).astype(DTYPES.get(other, other))

    replace_output(draw, case, change)


def read_only_output(draw, case):
    def change(array):
        array.flags.writeable = False
        return array

    replace_output(draw, case, change)


def output_that_is_not_rows(draw, case):
    def change(array):
        if array.ndim > 1 and math.prod(array.shape[:-1]) > 1 and draw(st.booleans()):
            return np.full(array.shape[::-1], 77.0).astype(array.dtype).T
        return np.full((*array.shape, 2), 77.0).astype(array.dtype)[..., 0]

    replace_output(draw, case, change)


def overlapping_output(draw, case):
    """An output that shares some elements with an operand or with another output, but is not exactly upon it."""
    outputs = {
        place: case.call[place[0]] if place[1] is None else case.call["out"][place[1]] for place in outputs_of(case)
    }
    operands = {(key, None): value for key, value in case.call.items() if isinstance(value, np.ndarray)}
    first = draw(st.sampled_from(sorted(outputs, key=str)))
    partners = {place: array for place, array in (operands | outputs).items() if array.dtype == outputs[first].dtype}
    second = draw(st.sampled_from(sorted(partners.keys() - {first}, key=str)))
    a, b = outputs[first], partners[second]
    start = draw(st.integers(1, a.size + b.size - 1))
    assume(not (a.shape == b.shape and start == b.size))  # exactly one upon the other
    base = np.full(a.size + 2 * b.size, 0.5).astype(a.dtype)
    views = {
        first: base[b.size : b.size + a.size].reshape(a.shape),
        second: base[start : start + b.size].reshape(b.shape),
    }
    assert np.shares_memory(*views.values())
    for (key, index), view in views.items():
        if index is None:
            case.call[key] = view
        else:
            case.call[key][index] = view


def output_upon_an_operand(draw, case):
    """An output exactly where an operand lies that it may not replace."""
    pairs = {"rmsnorm": (), "fused_add_rmsnorm": (("out", "residual"), ("residual_out", "x"))}.get(case.name)
    if pairs is None:
        weight, bias = len(case.call["out"]) - 2, len(case.call["out"]) - 1
        pairs = ((0, "dout"), (weight, "weight"), (weight, "bias"), (bias, "bias"), (bias, "weight"))
        pairs += ((0, "dresidual_out"),) if "dresidual_out" in case.call else ()
    assume(pairs)
    output, operand = draw(st.sampled_from(pairs))
    (case.call if isinstance(output, str) else case.call["out"])[output] = case.call[operand]


def output_in_another_layout_upon_its_operand(draw, case):
    """At the operand's own address, but with other rows or another dtype: not in place."""
    output, operand = draw(st.sampled_from((("out", "x"), ("residual_out", "residual"))))
    assume(output in case.call and operand in case.call and isinstance(case.call[output], np.ndarray))
    array, rows = case.call[operand], math.prod(case.shape[:-1])
    if draw(st.booleans()):
        assume(rows > 1)
        base = np.full((*case.shape[:-1], 2 * case.shape[-1]), 0.5).astype(array.dtype)
        views = [base[..., : case.shape[-1]], base.reshape(-1)[: array.size].reshape(case.shape)]
        case.call[operand], case.call[output] = views if draw(st.booleans()) else views[::-1]
    else:
        assume(case.dtype != "float32")
        base = np.full(array.size, 77.0, np.float32)
        case.call[output], case.call[operand] = (
            base.reshape(case.shape),
            base.view(array.dtype)[: array.size].reshape(case.shape),
        )
        case.call[operand][...] = 0.5
        case.call["out_dtype" if output == "out" else "residual_dtype"] = "float32"


SPOILED = (
    wrong_shape, wrong_dtype, wrong_rstd, wrong_option, no_array, wrong_output, read_only_output,
    output_that_is_not_rows, overlapping_output, output_upon_an_operand, output_in_another_layout_upon_its_operand,
)  # fmt: skip


def as_tensors(value):
    if isinstance(value, np.ndarray):
        return tensor_of(value)
    return (
        [as_tensors(each) for each in value]
        if isinstance(value, list) and any(isinstance(v, np.ndarray) for v in value)
        else value
    )


def elsewhere(value):
    """The same arrays in memory of their own: equal shapes, strides, alignment and values."""
    if isinstance(value, (list, tuple)):
        return type(value)(elsewhere(each) for each in value)
    if not isinstance(value, np.ndarray) or value.dtype.kind in "OU":
        return value
    steps = [(n - 1) * stride for n, stride in zip(value.shape, value.strides, strict=True)]
    before = -sum(min(0, step) for step in steps)
    base = np.zeros(before + sum(max(0, step) for step in steps) + value.itemsize + 16, np.uint8)
    start = (value.ctypes.data - before - base.ctypes.data) % 16 + before
    view = np.ndarray(value.shape, value.dtype, base, start, value.strides)
    view[...] = value
    view.flags.writeable = value.flags.writeable
    return view


def arguments_of(call, library):
    if library == "torch":
        call = {key: as_tensors(value) for key, value in call.items()}
    if isinstance(call["out"], list) and any(value is None or hasattr(value, "shape") for value in call["out"]):
        call = call | {"out": tuple(call["out"])}
    return call


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("spoil", SPOILED, ids=lambda function: function.__name__)
@PROPERTY
@given(data=st.data())
def test_what_is_refused_writes_nothing(library, spoil, data):
    """Also after a call just like it, with every array in memory of its own, which may be valid."""
    if library == "torch" and (torch is None or spoil is read_only_output):
        pytest.skip("torch is not installed" if torch is None else "torch has no read-only tensors")
    calls.forget()
    case = complete_call(data.draw, library)
    spoil(data.draw, case)
    if data.draw(st.booleans()):
        with contextlib.suppress(ValueError, TypeError):
            getattr(rr, case.name)(**arguments_of({key: elsewhere(value) for key, value in case.call.items()}, library))
    arrays = [array for value in case.call.values() for array in (value if isinstance(value, list) else [value])]
    arrays = [array for array in arrays if isinstance(array, np.ndarray)]
    before = [array.tobytes() for array in arrays]
    with pytest.raises((ValueError, TypeError)) as raised:
        getattr(rr, case.name)(**arguments_of(case.call, library))
    assert len(str(raised.value)) > 20
    assert [array.tobytes() for array in arrays] == before
