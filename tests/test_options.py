"""Every option of every function: against float64, or bit for bit against the rounding that it promises."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import DTYPES, assert_bits, assert_rows_close, assert_sums_close, random

import rmsnorm_raw
from rmsnorm_raw import calls, reference
from rmsnorm_raw.devices import Compiled, host

M, N, H = 6, 33, 3
EPS = 1e-5
POISON = 123.0
KINDS = ["float32", "bfloat16", "float16", "float64"]


def dtype_of(array):
    return np.asarray(array).dtype.name


def assert_weight_sums(actual, expected, dtype, rows, dout, what="dweight"):
    if dtype == "float64":  # accumulated in float64: as close as a row
        assert actual.shape == expected.shape, what
        assert_rows_close(actual, expected, dtype, what)
    else:
        assert_sums_close(actual, expected, dtype, rows, np.abs(dout.astype(np.float64)).max(), what=what)


def make(shape, dtype, *names):
    """NumPy operands by name; weight and bias of the last dimension."""
    seeds = {"x": 1, "residual": 2, "dout": 3, "dresidual_out": 4, "weight": 5, "bias": 6}
    return {
        name: random(shape[-1:] if name in ("weight", "bias") else shape, dtype, seed)
        for name, seed in seeds.items()
        if not names or name in names
    }


def pairs(*values):
    return list(itertools.product(values, repeat=2))


def put(backend, arrays):
    return {name: None if array is None else backend.put(array) for name, array in arrays.items()}


# ------------------------------------------------------------------------------------------------ weight, bias, offset


@pytest.mark.parametrize(
    ("weighted", "biased", "offset", "dtype"),
    [
        *((True, True, -0.5, dtype) for dtype in KINDS),
        *((False, False, 0.0, dtype) for dtype in KINDS),
        (True, True, 0.0, "bfloat16"),
        (False, True, 0.0, "float32"),
        (True, False, 1.0, "float32"),
    ],
)
def test_weight_bias_and_offset(backend, weighted, biased, offset, dtype):
    arrays = make((M, N), dtype)
    arrays |= {"weight": arrays["weight"] if weighted else None, "bias": arrays["bias"] if biased else None}
    given = put(backend, arrays)
    options = {"bias": given["bias"], "weight_offset": offset}

    y, rstd = rmsnorm_raw.rmsnorm_fwd(given["x"], given["weight"], EPS, True, **options)
    expected = reference.forward(arrays["x"], arrays["weight"], EPS, bias=arrays["bias"], weight_offset=offset)
    assert_rows_close(backend.get(y), expected.y, dtype, "y")
    assert_rows_close(backend.get(rstd)[:, None], expected.rstd[:, None], dtype_of(backend.get(rstd)), "rstd")

    fused, total = rmsnorm_raw.fused_add_rmsnorm(given["x"], given["residual"], given["weight"], EPS, **options)
    expected = reference.forward(
        arrays["x"],
        arrays["weight"],
        EPS,
        bias=arrays["bias"],
        weight_offset=offset,
        residual=arrays["residual"],
        residual_dtype=None if dtype == "float64" else DTYPES[dtype],
    )
    assert_rows_close(backend.get(fused), expected.y, dtype, "fused y")
    assert_rows_close(backend.get(total), expected.normed, dtype, "residual_out")

    back = rmsnorm_raw.rmsnorm_bwd(given["x"], given["weight"], given["dout"], rstd, **options)
    expected = reference.backward(arrays["x"], arrays["weight"], arrays["dout"], EPS, weight_offset=offset)
    assert_backward(backend, back, expected, arrays, dtype, fused=False)
    back = rmsnorm_raw.fused_add_rmsnorm_bwd(
        given["x"], given["weight"], given["dout"], rstd, given["dresidual_out"], **options
    )
    expected = reference.backward(
        arrays["x"], arrays["weight"], arrays["dout"], EPS, weight_offset=offset, dresidual_out=arrays["dresidual_out"]
    )
    assert_backward(backend, back, expected, arrays, dtype, fused=True)


def assert_backward(backend, results, expected, arrays, dtype, fused):
    """The results of a step in their order: (dx[, dresidual], dweight[, dbias])."""
    dx, *rest = results
    assert_rows_close(backend.get(dx), expected.dx, dtype, "dx")
    if fused:
        assert rest.pop(0) is dx, "equal gradients are one array"
    assert len(rest) == 1 + (arrays["bias"] is not None)
    for name, result, right in zip(("weight", "bias"), rest, (expected.dweight, expected.dbias), strict=False):
        if arrays[name] is None:
            assert result is None
        else:
            got = backend.get(result)
            assert got.dtype == arrays[name].dtype
            assert_weight_sums(got, right, dtype, M, arrays["dout"], f"d{name}")


def test_an_offset_is_no_weight(backend):
    """Weights stored around zero: w + 1 is what plain weights one higher give, in float64 to its last bits."""
    arrays = make((M, N), "float64")
    given = put(backend, arrays | {"plus": arrays["weight"] + 1.0})
    actual = rmsnorm_raw.rmsnorm(given["x"], given["weight"], EPS, weight_offset=1.0)
    assert_bits(backend.get(actual), backend.get(rmsnorm_raw.rmsnorm(given["x"], given["plus"], EPS)))


# ------------------------------------------------------------------------------------------------ casting


def promoted(a, b):
    if a == b:
        return a
    wide = {"float64": 3, "float32": 2}
    return max(a, b, key=lambda name: wide.get(name, 1)) if wide.keys() & {a, b} else "float32"


PAIRS = [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16"), ("float16", "bfloat16")]
PAIRS += [("float32", "bfloat16"), ("float32", "float32"), ("float64", "float64")]


@pytest.mark.parametrize("out_dtype", [None, "float32"])
@pytest.mark.parametrize(("x_dtype", "weight_dtype"), PAIRS)
def test_casting_llama_rounds_as_eager_code_does(backend, x_dtype, weight_dtype, out_dtype):
    """x̂ to x's dtype, the product in promote(x, w), then y's dtype: to the bit, given the kernel's own rstd."""
    if x_dtype == "float64":
        out_dtype = None
    x, weight = random((M, N), x_dtype, 1), random((N,), weight_dtype, 2)
    given = backend.put(x), backend.put(weight)
    y, rstd = rmsnorm_raw.rmsnorm_fwd(*given, EPS, True, casting="llama", out_dtype=out_dtype)
    rstd, real = backend.get(rstd), np.float64 if x_dtype == "float64" else np.float32
    assert_rows_close(rstd[:, None], reference.forward(x, eps=EPS).rstd[:, None], np.dtype(real).name, "rstd")

    normed = (x.astype(real) * rstd[:, None]).astype(x.dtype)
    product = (normed.astype(real) * weight.astype(real)).astype(DTYPES[promoted(x_dtype, weight_dtype)])
    assert_bits(backend.get(y), product.astype(DTYPES[out_dtype or x_dtype]), "y")


def test_one_rounding_and_two_differ(backend):
    """A public disagreement in four numbers."""
    x, weight = np.array([[1, 1.09375]], DTYPES["bfloat16"]), np.full(2, 1.921875, DTYPES["bfloat16"])
    for casting, expected in [("fp32", [1.8359375, 2.0]), ("llama", [1.828125, 2.015625])]:
        y = rmsnorm_raw.rmsnorm(backend.put(x), backend.put(weight), 1e-6, casting=casting)
        np.testing.assert_array_equal(backend.get(y).astype(np.float64), [expected], casting)


@pytest.mark.parametrize("residual_dtype", ["bfloat16", "float32"])
def test_casting_llama_of_a_sum(backend, residual_dtype):
    """As the norm of residual_out, which is then the x whose dtype x̂ is rounded to."""
    given = put(backend, make((M, N), "bfloat16"))
    y, total = rmsnorm_raw.fused_add_rmsnorm(
        given["x"], given["residual"], given["weight"], EPS, casting="llama", residual_dtype=residual_dtype
    )
    expected = rmsnorm_raw.rmsnorm(total, given["weight"], EPS, casting="llama", out_dtype="bfloat16")
    assert_bits(backend.get(y), backend.get(expected))


@pytest.mark.parametrize("fused", [False, True])
def test_casting_is_differentiated_as_the_identity(backend, fused):
    given = put(backend, make((M, N), "bfloat16"))
    _, rstd = rmsnorm_raw.rmsnorm_fwd(given["x"], given["weight"], EPS, True)
    step = rmsnorm_raw.fused_add_rmsnorm_bwd if fused else rmsnorm_raw.rmsnorm_bwd
    for actual, expected in zip(
        step(given["x"], given["weight"], given["dout"], rstd, casting="llama"),
        step(given["x"], given["weight"], given["dout"], rstd),
        strict=True,
    ):
        assert_bits(backend.get(actual), backend.get(expected))


# ------------------------------------------------------------------------------------------------ dtypes of results


@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16", "float16"])
def test_out_dtype_is_one_rounding(backend, x_dtype):
    """The fp32 value is the same, whatever it is rounded to."""
    given = put(backend, make((M, N), x_dtype))
    operands = given["x"], given["weight"], EPS
    unrounded = backend.get(rmsnorm_raw.rmsnorm(*operands, bias=given["bias"], out_dtype="float32"))
    x, weight, bias = (backend.get(given[name]) for name in ("x", "weight", "bias"))
    assert_rows_close(unrounded, reference.forward(x, weight, EPS, bias=bias).y, "float32")
    for out_dtype in ("float16", "bfloat16"):
        y = rmsnorm_raw.rmsnorm(*operands, bias=given["bias"], out_dtype=out_dtype)
        assert_bits(backend.get(y), unrounded.astype(DTYPES[out_dtype]), out_dtype)
        out = backend.put(np.full((M, N), POISON).astype(DTYPES[out_dtype]))
        assert rmsnorm_raw.rmsnorm(*operands, bias=given["bias"], out_dtype=out_dtype, out=out) is out
        assert_bits(backend.get(out), unrounded.astype(DTYPES[out_dtype]), f"{out_dtype} into a given array")


def test_dtypes_by_any_name():
    """A string, a NumPy dtype or type, or torch's own."""
    names = ["bfloat16", DTYPES["bfloat16"], DTYPES["bfloat16"].type]
    x = random((M, N), "float32", 1)
    expected = rmsnorm_raw.rmsnorm(x).astype(DTYPES["bfloat16"])
    for name in names:
        assert_bits(rmsnorm_raw.rmsnorm(x, out_dtype=name), expected, str(name))
    torch = pytest.importorskip("torch", reason="torch is not installed")
    assert_bits(rmsnorm_raw.rmsnorm(x, out_dtype=torch.bfloat16), expected, "torch.bfloat16")
    y = rmsnorm_raw.rmsnorm(torch.from_numpy(x), out_dtype="bfloat16")
    assert y.dtype == torch.bfloat16
    assert_bits(y.view(torch.int16).numpy(), expected.view(np.int16), "bfloat16 for a tensor")


@pytest.mark.parametrize("residual_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("x_dtype", "residual"), [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "float16")]
)
def test_stored_residual(backend, x_dtype, residual, residual_dtype):
    """The sum is one rounding of the fp32 sum, and y is the norm of what is stored, both to the bit."""
    x, added, weight = random((M, N), x_dtype, 1), random((M, N), residual, 2), random((N,), x_dtype, 3)
    total = x.astype(np.float32) + added.astype(np.float32)
    given = backend.put(x), backend.put(added), backend.put(weight)
    y, stored, rstd = rmsnorm_raw.fused_add_rmsnorm_fwd(*given, EPS, True, residual_dtype=residual_dtype)
    assert_bits(backend.get(stored), total.astype(DTYPES[residual_dtype]), "residual_out")
    expected, expected_rstd = rmsnorm_raw.rmsnorm_fwd(stored, given[2], EPS, True, out_dtype=x_dtype)
    assert_bits(backend.get(y), backend.get(expected), "y")
    assert_bits(backend.get(rstd), backend.get(expected_rstd), "rstd")


def test_the_stored_residual_has_the_residuals_dtype(backend):
    x, added = random((M, N), "bfloat16", 1), random((M, N), "float32", 2)
    y, total = rmsnorm_raw.fused_add_rmsnorm(backend.put(x), backend.put(added))
    assert dtype_of(backend.get(total)) == "float32"
    assert dtype_of(backend.get(y)) == "bfloat16"


def test_unrounded_residual(backend):
    """With "fp32" the norm is of the sum before it is stored; y in float32 shows the difference."""
    arrays = make((M, N), "bfloat16")
    given = put(backend, arrays)
    operands = given["x"], given["residual"], given["weight"], EPS, True
    exact = reference.forward(arrays["x"], arrays["weight"], EPS, residual=arrays["residual"])
    rounded = reference.forward(
        arrays["x"], arrays["weight"], EPS, residual=arrays["residual"], residual_dtype=DTYPES["bfloat16"]
    )
    for rounding, expected, other in [("fp32", exact, rounded), ("stored", rounded, exact)]:
        options = {"residual_rounding": rounding, "out_dtype": "float32"}
        y, total, rstd = rmsnorm_raw.fused_add_rmsnorm_fwd(*operands, **options)
        assert_rows_close(backend.get(y), expected.y, "float32", rounding)
        assert_rows_close(backend.get(rstd)[:, None], expected.rstd[:, None], "float32", f"{rounding} rstd")
        with pytest.raises(AssertionError):
            assert_rows_close(backend.get(y), other.y, "float32")
        assert_bits(backend.get(total).astype(np.float64), rounded.normed, f"{rounding} residual_out")


def test_stored_and_unrounded_differ(backend):
    """A public disagreement in four numbers."""
    x, residual = np.array([[1, 1]], DTYPES["bfloat16"]), np.array([[2.0**-8, 4]], DTYPES["bfloat16"])
    weight = np.ones(2, DTYPES["bfloat16"])
    for rounding, expected in [("stored", [0.27734375, 1.390625]), ("fp32", [0.279296875, 1.3828125])]:
        y, total = rmsnorm_raw.fused_add_rmsnorm(
            backend.put(x), backend.put(residual), backend.put(weight), 1e-6, residual_rounding=rounding
        )
        np.testing.assert_array_equal(backend.get(y).astype(np.float64), [expected], rounding)
        np.testing.assert_array_equal(backend.get(total).astype(np.float64), [[1, 5]], rounding)


MIXES = [
    # x, residual, weight, bias, dout, dresidual_out, y
    ("bfloat16", "float32", "float32", "float32", "bfloat16", "float32", "bfloat16"),
    ("float16", "bfloat16", "float32", "float16", "float32", "float16", "bfloat16"),
    ("float32", "float16", "bfloat16", "bfloat16", "float16", "bfloat16", "float16"),
    ("float32", "bfloat16", "float16", "float32", "bfloat16", "float32", "float32"),
    ("bfloat16", "float16", "float16", "bfloat16", "float16", "bfloat16", "float32"),
    ("float16", "float32", "bfloat16", "float32", "float32", "float32", "float16"),
]


@pytest.mark.parametrize("mix", MIXES, ids="-".join)
def test_mixed_dtypes(backend, mix):
    names = ("x", "residual", "weight", "bias", "dout", "dresidual_out")
    arrays = {name: make((M, N), dtype, name)[name] for name, dtype in zip(names, mix, strict=False)}
    given, y_dtype = put(backend, arrays), mix[-1]
    x_dtype, residual_dtype, weight_dtype, _, dout_dtype, _, _ = mix

    y, rstd = rmsnorm_raw.rmsnorm_fwd(given["x"], given["weight"], EPS, True, bias=given["bias"], out_dtype=y_dtype)
    expected = reference.forward(arrays["x"], arrays["weight"], EPS, bias=arrays["bias"])
    assert dtype_of(backend.get(y)) == y_dtype
    assert_rows_close(backend.get(y), expected.y, y_dtype, "y")
    assert_rows_close(backend.get(rstd)[:, None], expected.rstd[:, None], "float32", "rstd")

    fused, total, fused_rstd = rmsnorm_raw.fused_add_rmsnorm_fwd(
        given["x"], given["residual"], given["weight"], EPS, True, bias=given["bias"], out_dtype=y_dtype
    )
    expected = reference.forward(
        arrays["x"],
        arrays["weight"],
        EPS,
        bias=arrays["bias"],
        residual=arrays["residual"],
        residual_dtype=DTYPES[residual_dtype],
    )
    assert dtype_of(backend.get(total)) == residual_dtype
    assert_bits(backend.get(total).astype(np.float64), expected.normed, "residual_out")
    assert_rows_close(backend.get(fused), expected.y, y_dtype, "fused y")

    dx, dweight, dbias = rmsnorm_raw.rmsnorm_bwd(given["x"], given["weight"], given["dout"], rstd, bias=given["bias"])
    expected = reference.backward(arrays["x"], arrays["weight"], arrays["dout"], EPS)
    assert [dtype_of(backend.get(result)) for result in (dx, dweight)] == [x_dtype, weight_dtype]
    assert_rows_close(backend.get(dx), expected.dx, x_dtype, "dx")
    assert_weight_sums(backend.get(dweight), expected.dweight, weight_dtype, M, arrays["dout"])
    bias_result = backend.get(dbias)
    assert_weight_sums(bias_result, expected.dbias, dtype_of(bias_result), M, arrays["dout"], "dbias")

    total_array = backend.get(total)
    dx, dresidual, dweight = rmsnorm_raw.fused_add_rmsnorm_bwd(
        total, given["weight"], given["dout"], fused_rstd, given["dresidual_out"]
    )
    expected = reference.backward(
        total_array, arrays["weight"], arrays["dout"], EPS, dresidual_out=arrays["dresidual_out"]
    )
    assert [dtype_of(backend.get(result)) for result in (dx, dresidual)] == [dout_dtype, residual_dtype]
    assert_rows_close(backend.get(dx), expected.dx, dout_dtype, "fused dx")
    assert_rows_close(backend.get(dresidual), expected.dx, residual_dtype, "dresidual")
    assert_weight_sums(backend.get(dweight), expected.dweight, weight_dtype, M, arrays["dout"])


def test_float64_is_computed_in_float64(backend):
    """Also the rstd that travels between the steps; float32 anywhere would miss by nine orders."""
    arrays = make((M, N), "float64")
    given = put(backend, arrays)
    y, total, rstd = rmsnorm_raw.fused_add_rmsnorm_fwd(given["x"], given["residual"], given["weight"], EPS, True)
    expected = reference.forward(arrays["x"], arrays["weight"], EPS, residual=arrays["residual"])
    results = backend.get(y), backend.get(total), backend.get(rstd)
    assert [result.dtype for result in results] == [np.float64] * 3
    assert_rows_close(results[0], expected.y, "float64", "y")
    assert_bits(results[1], arrays["x"] + arrays["residual"], "residual_out")
    assert_rows_close(results[2][:, None], expected.rstd[:, None], "float64", "rstd")
    back = rmsnorm_raw.fused_add_rmsnorm_bwd(total, given["weight"], given["dout"], rstd, given["dresidual_out"])
    expected = reference.backward(
        results[1], arrays["weight"], arrays["dout"], EPS, dresidual_out=arrays["dresidual_out"]
    )
    assert_rows_close(backend.get(back[0]), expected.dx, "float64", "dx")
    assert_rows_close(backend.get(back[2]), expected.dweight, "float64", "dweight")


@pytest.mark.parametrize(("dx_dtype", "dresidual_dtype"), pairs("float32", "bfloat16", None))
def test_dtypes_of_the_two_gradients(backend, dx_dtype, dresidual_dtype):
    """One array where they agree, two roundings of one fp32 gradient where not."""
    total, dout = random((M, N), "float32", 1), random((M, N), "bfloat16", 2)
    added, weight = random((M, N), "float32", 3), random((N,), "float32", 4)
    given = [backend.put(array) for array in (total, weight, dout)]
    _, rstd = rmsnorm_raw.rmsnorm_fwd(given[0], given[1], EPS, True)
    given += [rstd, backend.put(added)]
    exact = rmsnorm_raw.fused_add_rmsnorm_bwd(*given, dx_dtype="float32")[0]
    assert_rows_close(
        backend.get(exact), reference.backward(total, weight, dout, EPS, dresidual_out=added).dx, "float32"
    )
    dx, dresidual, _ = rmsnorm_raw.fused_add_rmsnorm_bwd(*given, dx_dtype=dx_dtype, dresidual_dtype=dresidual_dtype)
    of_dx, of_dresidual = dx_dtype or "bfloat16", dresidual_dtype or "float32"  # dout's, and residual_out's
    assert (dx is dresidual) == (of_dx == of_dresidual)
    assert_bits(backend.get(dx), backend.get(exact).astype(DTYPES[of_dx]), "dx")
    assert_bits(backend.get(dresidual), backend.get(exact).astype(DTYPES[of_dresidual]), "dresidual")


# ------------------------------------------------------------------------------------------------ skipped results


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("weighted", "biased"), pairs(True, False))
@pytest.mark.parametrize(("need_dx", "need_dweight"), pairs(True, False))
def test_skipped_results_are_none(backend, need_dx, need_dweight, weighted, biased, fused):
    """None exactly where skipped, and the others bit for bit what they are in the complete call."""
    given = put(backend, make((M, N), "float32"))
    weight, bias = given["weight"] if weighted else None, given["bias"] if biased else None
    _, rstd = rmsnorm_raw.rmsnorm_fwd(given["x"], weight, EPS, True)
    step = rmsnorm_raw.fused_add_rmsnorm_bwd if fused else rmsnorm_raw.rmsnorm_bwd
    complete = step(given["x"], weight, given["dout"], rstd, bias=bias)
    results = step(given["x"], weight, given["dout"], rstd, bias=bias, need_dx=need_dx, need_dweight=need_dweight)
    wanted = [need_dx] * (1 + fused) + [need_dweight and weighted] + [need_dweight] * biased
    assert [result is not None for result in results] == wanted
    assert len(complete) == len(results)
    for actual, expected in zip(results, complete, strict=True):
        if actual is not None:
            assert_bits(backend.get(actual), backend.get(expected))


def test_store_rstd_and_prenorm(backend):
    given = put(backend, make((M, N), "float32"))
    x, residual = given["x"], given["residual"]
    y, nothing = rmsnorm_raw.rmsnorm_fwd(x)
    assert nothing is None
    assert tuple(rmsnorm_raw.rmsnorm_fwd(x, store_rstd=True)[1].shape) == (M,)
    total_y, total, nothing = rmsnorm_raw.fused_add_rmsnorm_fwd(x, residual)
    assert nothing is None
    alone = rmsnorm_raw.fused_add_rmsnorm(x, residual, prenorm=False)
    both = rmsnorm_raw.fused_add_rmsnorm(x, residual)
    assert type(both) is tuple
    assert_bits(backend.get(alone), backend.get(total_y))
    assert_bits(backend.get(both[0]), backend.get(total_y))
    assert_bits(backend.get(both[1]), backend.get(total))
    assert_bits(backend.get(rmsnorm_raw.rmsnorm(x)), backend.get(y))


def test_the_residual_out_is_also_written_without_prenorm(backend):
    given = put(backend, make((M, N), "float32"))
    total = backend.put(np.full((M, N), POISON, np.float32))
    rmsnorm_raw.fused_add_rmsnorm(given["x"], given["residual"], prenorm=False, residual_out=total)
    assert_bits(backend.get(total), backend.get(given["x"]) + backend.get(given["residual"]))


# ------------------------------------------------------------------------------------------------ weights per head


def heads_reference(x, weight, bias, dout, dresidual_out=None):
    forward = reference.forward(x, weight, EPS, bias=bias)
    return forward, reference.backward(x, weight, dout, EPS, dresidual_out=dresidual_out)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (0,), (40,)], ids=str)
def test_weights_per_head(backend, leading, dtype):
    """(…, heads, columns) with (heads, columns): values, and sums over all but these two dimensions."""
    shape, rows = (*leading, H, N), int(np.prod(leading))
    arrays = {name: random(shape, dtype, seed) for seed, name in enumerate(("x", "residual", "dout", "dresidual_out"))}
    arrays |= {name: random((H, N), dtype, 7 + seed) for seed, name in enumerate(("weight", "bias"))}
    given = put(backend, arrays)
    forward, back = heads_reference(arrays["x"], arrays["weight"], arrays["bias"], arrays["dout"])

    y, rstd = rmsnorm_raw.rmsnorm_fwd(given["x"], given["weight"], EPS, True, bias=given["bias"])
    assert_rows_close(backend.get(y), forward.y, dtype, "y")
    assert tuple(rstd.shape) == shape[:-1]
    dx, dweight, dbias = rmsnorm_raw.rmsnorm_bwd(given["x"], given["weight"], given["dout"], rstd, bias=given["bias"])
    assert_rows_close(backend.get(dx), back.dx, dtype, "dx")
    assert dtype_of(backend.get(dweight)) == dtype_of(backend.get(dbias)) == dtype
    if rows:
        assert_weight_sums(backend.get(dweight), back.dweight, dtype, rows, arrays["dout"])
        assert_weight_sums(backend.get(dbias), back.dbias, dtype, rows, arrays["dout"], "dbias")
    else:
        assert_bits(backend.get(dweight), np.zeros((H, N), DTYPES[dtype]), "dweight")
        assert_bits(backend.get(dbias), np.zeros((H, N), DTYPES[dtype]), "dbias")

    fused, total, fused_rstd = rmsnorm_raw.fused_add_rmsnorm_fwd(
        given["x"], given["residual"], given["weight"], EPS, True, bias=given["bias"]
    )
    total_array = backend.get(total)
    forward, back = heads_reference(
        total_array, arrays["weight"], arrays["bias"], arrays["dout"], arrays["dresidual_out"]
    )
    assert_rows_close(backend.get(fused), forward.y, dtype, "fused y")
    dx, dresidual, dweight, dbias = rmsnorm_raw.fused_add_rmsnorm_bwd(
        total, given["weight"], given["dout"], fused_rstd, given["dresidual_out"], bias=given["bias"]
    )
    assert dx is dresidual
    assert_rows_close(backend.get(dx), back.dx, dtype, "fused dx")
    if rows:
        assert_weight_sums(backend.get(dweight), back.dweight, dtype, rows, arrays["dout"])
        assert_weight_sums(backend.get(dbias), back.dbias, dtype, rows, arrays["dout"], "dbias")


def per_head(rows=40):
    arrays = {"x": random((rows, H, N), "float32", 1), "dout": random((rows, H, N), "float32", 2)}
    return arrays | {"weight": random((H, N), "float32", 3), "bias": random((H, N), "float32", 4)}


def test_each_head_is_as_if_alone(backend):
    given = put(backend, per_head())
    x, weight, bias, dout = (given[name] for name in ("x", "weight", "bias", "dout"))
    y, rstd = rmsnorm_raw.rmsnorm_fwd(x, weight, EPS, True, bias=bias)
    dx, _, _ = rmsnorm_raw.rmsnorm_bwd(x, weight, dout, rstd, bias=bias)
    for head in range(H):
        alone, alone_rstd = rmsnorm_raw.rmsnorm_fwd(x[:, head], weight[head], EPS, True, bias=bias[head])
        assert_bits(backend.get(y)[:, head], backend.get(alone), f"y of head {head}")
        assert_bits(backend.get(rstd)[:, head], backend.get(alone_rstd), f"rstd of head {head}")
        alone_dx, _, _ = rmsnorm_raw.rmsnorm_bwd(x[:, head], weight[head], dout[:, head], alone_rstd, bias=bias[head])
        assert_bits(backend.get(dx)[:, head], backend.get(alone_dx), f"dx of head {head}")


def test_one_head(backend):
    arrays = per_head()
    x, dout = (backend.put(np.ascontiguousarray(arrays[name][:, :1])) for name in ("x", "dout"))
    weight, bias = (backend.put(arrays[name][:1]) for name in ("weight", "bias"))
    y, rstd = rmsnorm_raw.rmsnorm_fwd(x, weight, EPS, True, bias=bias)
    flat, _ = rmsnorm_raw.rmsnorm_fwd(x, weight[0], EPS, True, bias=bias[0])
    assert_bits(backend.get(y), backend.get(flat))
    _, dweight, dbias = rmsnorm_raw.rmsnorm_bwd(x, weight, dout, rstd, bias=bias)
    _, flat_dweight, flat_dbias = rmsnorm_raw.rmsnorm_bwd(x, weight[0], dout, rstd, bias=bias[0])
    assert_bits(backend.get(dweight), backend.get(flat_dweight)[None], "dweight")
    assert_bits(backend.get(dbias), backend.get(flat_dbias)[None], "dbias")


@pytest.mark.parametrize("layout", ["pitch", "transposed", "every-second"])
def test_layouts_of_weights_per_head(backend, layout):
    arrays = per_head()
    given = put(backend, arrays)
    _, rstd = rmsnorm_raw.rmsnorm_fwd(given["x"], None, EPS, True)
    laid = {}
    for name in ("weight", "bias"):
        if layout == "pitch":
            laid[name] = backend.put(np.pad(arrays[name], ((0, 0), (0, 4)), constant_values=np.nan))[:, :N]
        elif layout == "transposed":
            laid[name] = backend.put(np.ascontiguousarray(arrays[name].T)).T
        else:
            laid[name] = backend.put(np.repeat(arrays[name], 2, axis=0))[::2]
    y = rmsnorm_raw.rmsnorm(given["x"], laid["weight"], EPS, bias=laid["bias"])
    expected = rmsnorm_raw.rmsnorm(given["x"], given["weight"], EPS, bias=given["bias"])
    assert_bits(backend.get(y), backend.get(expected), "y")
    back = rmsnorm_raw.rmsnorm_bwd(given["x"], laid["weight"], given["dout"], rstd, bias=laid["bias"])
    expected = rmsnorm_raw.rmsnorm_bwd(given["x"], given["weight"], given["dout"], rstd, bias=given["bias"])
    for actual, right in zip(back, expected, strict=True):
        assert_bits(backend.get(actual), backend.get(right))


@pytest.mark.parametrize("gap", [0, 1, 7])
def test_sums_per_head_into_given_arrays(backend, gap):
    """Rows with a gap are written in place, or refused; never as if there were none."""
    given = put(backend, per_head())
    _, rstd = rmsnorm_raw.rmsnorm_fwd(given["x"], None, EPS, True)
    operands = given["x"], given["weight"], given["dout"], rstd
    _, dweight, dbias = (backend.get(result) for result in rmsnorm_raw.rmsnorm_bwd(*operands, bias=given["bias"]))
    bases = [backend.put(np.full((H + 1, N + gap), POISON, np.float32)) for _ in range(2)]
    untouched = np.full((H + 1, N + gap), POISON, np.float32)
    try:
        rmsnorm_raw.rmsnorm_bwd(*operands, bias=given["bias"], out=(None, *(base[:H, :N] for base in bases)))
    except ValueError:
        assert gap, "a contiguous array must be accepted"
        dweight = dbias = None
    for base, sums in zip(bases, (dweight, dbias), strict=True):
        expected = untouched.copy()
        if sums is not None:
            expected[:H, :N] = sums
        assert_bits(backend.get(base), expected)


# ------------------------------------------------------------------------------------------------ eps


@pytest.fixture
def compiled(monkeypatch):
    """The programs that the host loads from here on, in a process that has none yet."""
    programs, load = [], host._load

    def count(program):
        programs.append(program)
        return load(program)

    monkeypatch.setattr(host, "_compiled", Compiled())
    calls.forget()
    monkeypatch.setattr(host, "_load", count)
    return programs


def test_eps_at_run_time(backend):
    """Three values of eps, whose results differ widely where x is small."""
    x, weight = 1e-3 * random((M, N), "float32", 1), random((N,), "float32", 2)
    given, seen = (backend.put(x), backend.put(weight)), []
    for eps in (1e-5, 1e-6, 1e-2, 0.0, 3):
        y, rstd = rmsnorm_raw.rmsnorm_fwd(*given, eps, True)
        expected = reference.forward(x, weight, eps)
        assert_rows_close(backend.get(y), expected.y, "float32", f"y with eps {eps}")
        assert_rows_close(backend.get(rstd)[:, None], expected.rstd[:, None], "float32", f"rstd with eps {eps}")
        fused, _ = rmsnorm_raw.fused_add_rmsnorm(given[0], backend.put(np.zeros_like(x)), given[1], eps)
        assert_rows_close(backend.get(fused), expected.y, "float32", f"fused y with eps {eps}")
        for other in seen:
            with pytest.raises(AssertionError):
                assert_rows_close(backend.get(y), other, "float32")
        seen.append(expected.y)


def test_a_new_eps_compiles_nothing(compiled):
    x, weight = 1e-3 * random((M, N), "float32", 1), random((N,), "float32", 2)
    results = [rmsnorm_raw.rmsnorm(x, weight, eps) for eps in (1e-5, 1e-6, 1e-2, None, 0.0)]
    assert len(compiled) == 1
    assert len({result.tobytes() for result in results}) == 5
    for offset in (1.0, 2.0, -0.5):
        rmsnorm_raw.rmsnorm(x, weight, weight_offset=offset)
    assert len(compiled) == 2
    for rows in (1, 2, 5):
        rmsnorm_raw.rmsnorm(np.repeat(x, rows, axis=0), weight)
    assert len(compiled) == 2


@pytest.mark.parametrize("dtype", KINDS)
def test_eps_none_is_that_of_the_arithmetic(backend, dtype):
    """finfo(float32).eps for 16 bits too: bfloat16's own would halve the result here."""
    of_float32, of_float64 = float(np.finfo(np.float32).eps), float(np.finfo(np.float64).eps)
    double = dtype == "float64"
    eps, unlike = (of_float64, of_float32) if double else (of_float32, 1e-6)
    x = np.full((1, 32), 0.058 * (2.0**-20 if double else 1.0)).astype(DTYPES[dtype])
    given, wide = backend.put(x), dtype if double else "float32"
    y = backend.get(rmsnorm_raw.rmsnorm(given, eps=None, out_dtype=wide))
    assert_rows_close(y, reference.forward(x, eps=eps).y, wide)
    with pytest.raises(AssertionError):
        assert_rows_close(y, reference.forward(x, eps=unlike).y, wide)
    assert_bits(y, backend.get(rmsnorm_raw.rmsnorm(given, eps=eps, out_dtype=wide)))
    fused, _ = rmsnorm_raw.fused_add_rmsnorm(given, backend.put(np.zeros_like(x)), eps=None, out_dtype=wide)
    assert_bits(backend.get(fused), y, "fused y")


# ------------------------------------------------------------------------------------------------ workspace

MANY = 300  # several chunks, so several rows of partials


def aligned(size, dtype, offset=0):
    """NumPy memory whose address is a multiple of 64, plus `offset` bytes."""
    memory = np.full(size + 64 + offset, 0xFF, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    return memory[start : start + size].view(dtype)


@pytest.fixture
def backward():
    """Operands of a backward over several chunks, and its results with memory of its own."""
    arrays = make((MANY, N), "float32")
    _, rstd = rmsnorm_raw.rmsnorm_fwd(arrays["x"], None, EPS, True)
    operands = arrays["x"], arrays["weight"], arrays["dout"], rstd
    return operands, arrays["bias"], rmsnorm_raw.rmsnorm_bwd(*operands, bias=arrays["bias"])


@pytest.mark.parametrize("dtype", ["float32", "uint8", "int64", "float16"])
def test_workspace_of_any_content(backend, backward, dtype):
    """NaN in every byte changes nothing, and nothing beside the promised bytes is written."""
    operands, bias, _ = backward
    operands, bias = [backend.put(array) for array in operands], backend.put(bias)
    expected = rmsnorm_raw.rmsnorm_bwd(*operands, bias=bias)
    size = rmsnorm_raw.workspace_bytes(operands[0], operands[1], bias=bias)
    assert size > 0
    assert size % 16 == 0
    base = aligned(size + 64, np.uint8) if backend.name == "numpy" else backend.put(np.full(size + 64, 0xFF, np.uint8))
    workspace = base[:size]
    if dtype != "uint8":
        workspace = workspace.view(getattr(__import__("torch"), dtype) if "torch" in backend.name else dtype)
    for content in (0xFF, 0x7F, 0):
        base[:size] = content
        results = rmsnorm_raw.rmsnorm_bwd(*operands, bias=bias, workspace=workspace)
        for actual, right in zip(results, expected, strict=True):
            assert_bits(backend.get(actual), backend.get(right), f"over {content:#x}")
    assert np.any(backend.get(base)[:size] != 0), "the given memory is not what was used"
    assert np.all(backend.get(base)[size:] == 0xFF), "bytes behind the workspace were written"


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(("dtype", "fused"), [("float32", False), ("bfloat16", True), ("float64", False)])
def test_workspace_bytes_suffice(backend, fused, dtype, per_head):
    """For every dtype, with and without a bias, with weights per head."""
    shape = (20, H, N) if per_head else (MANY, N)
    x, dout = backend.put(random(shape, dtype, 1)), backend.put(random(shape, dtype, 2))
    weight, bias = (backend.put(random((H, N) if per_head else (N,), dtype, seed)) for seed in (3, 4))
    _, rstd = rmsnorm_raw.rmsnorm_fwd(x, None, EPS, True)
    step = rmsnorm_raw.fused_add_rmsnorm_bwd if fused else rmsnorm_raw.rmsnorm_bwd
    sizes = set()
    for w, b in ((weight, None), (None, bias), (weight, bias)):
        size = rmsnorm_raw.workspace_bytes(x, w, bias=b)
        sizes.add(size)
        base = (
            aligned(size + 64, np.uint8) if backend.name == "numpy" else backend.put(np.full(size + 64, 0xFF, np.uint8))
        )
        results = step(x, w, dout, rstd, bias=b, workspace=base[:size])
        for actual, right in zip(results, step(x, w, dout, rstd, bias=b), strict=True):
            if right is not None:
                assert_bits(backend.get(actual), backend.get(right))
        assert np.all(backend.get(base)[size:] == 0xFF), "bytes behind the workspace were written"
    if max(sizes) == 0:
        assert backend.name != "numpy", "only a GPU's lone block writes the sums itself"
    else:
        assert len(sizes) == 2, "one sum or two"
        assert max(sizes) == 2 * min(sizes)


def test_no_workspace_is_needed_without_sums(backend):
    given = put(backend, make((M, N), "float32"))
    assert rmsnorm_raw.workspace_bytes(given["x"]) == 0
    assert rmsnorm_raw.workspace_bytes(given["x"], given["weight"], bias=given["bias"], need_dweight=False) == 0
    _, rstd = rmsnorm_raw.rmsnorm_fwd(given["x"], None, EPS, True)
    empty = backend.put(np.empty(0, np.uint8))
    operands = given["x"], given["weight"], given["dout"], rstd
    dx, _ = rmsnorm_raw.rmsnorm_bwd(*operands, need_dweight=False, workspace=empty)
    assert_bits(backend.get(dx), backend.get(rmsnorm_raw.rmsnorm_bwd(*operands)[0]))


def test_a_workspace_of_another_library(backward):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    operands, bias, expected = backward
    size = rmsnorm_raw.workspace_bytes(operands[0], operands[1], bias=bias)
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8)
    for actual, right in zip(rmsnorm_raw.rmsnorm_bwd(*operands, bias=bias, workspace=workspace), expected, strict=True):
        assert_bits(actual, right)
    assert not torch.all(workspace == 0xFF)


def refused_workspaces():
    yield "too-small", lambda size: aligned(size - 4, np.float32), ValueError, r"{have} bytes.*{size} bytes"
    yield "much-too-small", lambda size: aligned(16, np.uint8), ValueError, r"\b16 bytes.*{size} bytes"
    yield "empty", lambda size: np.empty(0, np.float32), ValueError, r"\b0 bytes.*{size} bytes"
    yield "misaligned-by-4", lambda size: aligned(size, np.float32, 4), ValueError, r"(aligned|alignment)"
    yield "misaligned-by-8", lambda size: aligned(size + 16, np.uint8, 8), ValueError, r"(aligned|alignment)"
    yield "strided", lambda size: aligned(2 * size, np.float32)[::2], ValueError, r"contiguous"
    yield "read-only", lambda size: locked(aligned(size, np.float32)), ValueError, r"(writable|read-only)"
    yield "list", lambda size: [0.0] * size, TypeError, r"list.*NumPy"
    yield "bytes", lambda size: bytes(size), TypeError, r"bytes.*NumPy"


def locked(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("make_workspace", "error", "pattern"), [pytest.param(*case[1:], id=case[0]) for case in refused_workspaces()]
)
def test_refused_workspaces(backward, make_workspace, error, pattern):
    operands, bias, _ = backward
    size = rmsnorm_raw.workspace_bytes(operands[0], operands[1], bias=bias)
    workspace = make_workspace(size)
    before = workspace.tobytes() if isinstance(workspace, np.ndarray) else None
    out = tuple(np.full(shape, POISON, np.float32) for shape in ((MANY, N), (N,), (N,)))
    with pytest.raises(error, match=rf"(?s)^workspace .*{pattern.format(size=size, have=size - 4)}"):
        rmsnorm_raw.rmsnorm_bwd(*operands, bias=bias, out=out, workspace=workspace)
    assert all(np.all(array == POISON) for array in out)
    if before is not None:
        assert workspace.tobytes() == before


ODD_BYTE = """
import numpy, rmsnorm_raw
x = numpy.ones((300, 33), numpy.float32)
weight, rstd = numpy.ones(33, numpy.float32), numpy.ones(300, numpy.float32)
size = rmsnorm_raw.workspace_bytes(x, weight)
memory = numpy.full(size + 17, 255, numpy.uint8)
workspace = memory[-(memory.ctypes.data - 1) % 16 :][:size].view(numpy.float32)
assert workspace.ctypes.data % 16 == 1
try:
    rmsnorm_raw.rmsnorm_bwd(x, weight, x, rstd, workspace=workspace)
except ValueError as error:
    print("refused:", error)
"""


def test_a_workspace_at_an_odd_byte_is_refused():
    """Not even aligned to its elements; NumPy would copy it, and the copy's memory is no workspace. A process of its
    own, since writing to freed memory ends one."""
    environment = os.environ | {"PYTHONPATH": str(Path(rmsnorm_raw.__file__).resolve().parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", ODD_BYTE], capture_output=True, text=True, env=environment, timeout=100
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert re.search(r"refused: workspace .*(aligned|alignment)", done.stdout), done.stdout


# ------------------------------------------------------------------------------------------------ out= of a backward


@pytest.mark.parametrize(
    "given_names", [(), ("dx",), ("dweight",), ("dbias",), ("dx", "dbias"), ("dx", "dweight", "dbias")]
)
@pytest.mark.parametrize("container", [tuple, list])
def test_outputs_of_a_backward(backend, given_names, container):
    given = put(backend, make((M, N), "float32"))
    _, rstd = rmsnorm_raw.rmsnorm_fwd(given["x"], given["weight"], EPS, True)
    operands = given["x"], given["weight"], given["dout"], rstd
    expected = rmsnorm_raw.rmsnorm_bwd(*operands, bias=given["bias"])
    shapes = {"dx": (M, N), "dweight": (N,), "dbias": (N,)}
    out = [
        backend.put(np.full(shape, POISON, np.float32)) if name in given_names else None
        for name, shape in shapes.items()
    ]
    results = rmsnorm_raw.rmsnorm_bwd(*operands, bias=given["bias"], out=container(out))
    for mine, actual, right in zip(out, results, expected, strict=True):
        assert mine is None or actual is mine
        assert_bits(backend.get(actual), backend.get(right))


@pytest.mark.parametrize("two", [False, True], ids=["one-array", "two-arrays"])
@pytest.mark.parametrize("given_names", [("dx",), ("dresidual",), ("dx", "dresidual"), ("dweight",)])
def test_outputs_of_a_fused_backward(backend, given_names, two):
    """Where dx and dresidual have one dtype they are one array, which may be given as either or as both."""
    given = put(backend, make((M, N), "float32"))
    _, rstd = rmsnorm_raw.rmsnorm_fwd(given["x"], given["weight"], EPS, True)
    operands = given["x"], given["weight"], given["dout"], rstd, given["dresidual_out"]
    options = {"dx_dtype": "float16"} if two else {}
    expected = rmsnorm_raw.fused_add_rmsnorm_bwd(*operands, **options)
    made = {
        "dx": np.full((M, N), POISON, np.float16 if two else np.float32),
        "dresidual": np.full((M, N), POISON, np.float32),
        "dweight": np.full(N, POISON, np.float32),
    }
    made = {name: backend.put(array) for name, array in made.items() if name in given_names}
    if not two and len(given_names) == 2:
        made["dresidual"] = made["dx"]
    out = tuple(made.get(name) for name in ("dx", "dresidual", "dweight"))
    results = rmsnorm_raw.fused_add_rmsnorm_bwd(*operands, out=out, **options)
    for name, mine, actual, right in zip(("dx", "dresidual", "dweight"), out, results, expected, strict=True):
        assert mine is None or actual is mine, name
        assert_bits(backend.get(actual), backend.get(right), name)
    assert (results[0] is results[1]) != two
