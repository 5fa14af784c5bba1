"""Forward, backward and fused-add against float64: shapes, dtypes, tails, many rows, equal rows, special values."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import DTYPES, _cupy_backend, assert_rows_close, assert_sums_close, random

import rmsnorm_raw as rr
from rmsnorm_raw import reference

SHAPES = [
    (64, 256, "float32"), (32, 128, "float16"), (16, 512, "bfloat16"), (64, 2000, "float32"), (64, 3000, "float32"),
    (128, 4096, "float16"), (64, 8192, "bfloat16"), (512, 4096, "float16"), (513, 4097, "bfloat16"),
    (513, 5000, "bfloat16"), (1537, 3001, "float32"), (1024, 8192, "bfloat16"), (4096, 4096, "bfloat16"),
]  # fmt: skip
COLUMNS = [(3, n, dtype) for n in (*range(1, 18), 769) for dtype in ("float32", "float16", "bfloat16")]
COLUMNS += [(5, n, dtype) for n in (16384, 65536, 131072) for dtype in ("float32", "bfloat16")]
COLUMNS += [(4, n, "float64") for n in (1, 7, 300, 5000)]
ROWS = [(m, 33, dtype) for m in (0, 1, 65536, 65537) for dtype in ("float32", "bfloat16")]


def label(case):
    return "x".join(map(str, case))


@pytest.fixture(params=SHAPES + COLUMNS + ROWS, ids=label)
def case(request):
    return request.param


def run_and_check(backend, m, n, dtype, weight_dtype=None):
    weight_dtype = weight_dtype or dtype
    # With one column x̂² is 1 - eps·rstd²: a small eps would leave dx a difference of equal numbers, which no fp32
    # rstd can carry.
    eps = 1.0 if n == 1 else 1e-5
    put, get = backend.put, backend.get
    x, residual, dout, added = (random((m, n), dtype, seed) for seed in (1, 2, 3, 4))
    weight = random((n,), weight_dtype, 5)

    expected = reference.forward(x, weight, eps)
    y, rstd = rr.rmsnorm_fwd(put(x), put(weight), eps, True)
    assert_rows_close(get(y), expected.y, dtype, "y")
    assert_rows_close(
        get(rstd)[..., None], expected.rstd[..., None], "float64" if dtype == "float64" else "float32", "rstd"
    )
    gradients = reference.backward(x, weight, dout, eps)
    dx, dweight = rr.rmsnorm_bwd(put(x), put(weight), put(dout), rstd)
    assert_rows_close(get(dx), gradients.dx, dtype, "dx")
    dout_max = np.abs(dout.astype(np.float64)).max(initial=0.0)
    assert_sums_close(get(dweight), gradients.dweight, weight_dtype, m, dout_max)

    expected = reference.forward(x, weight, eps, residual=residual, residual_dtype=DTYPES[dtype])
    y, total, rstd = rr.fused_add_rmsnorm_fwd(put(x), put(residual), put(weight), eps, True)
    assert_rows_close(get(total), expected.normed, dtype, "residual_out")
    assert_rows_close(get(y), expected.y, dtype, "fused y")
    np.testing.assert_array_equal(get(y), get(rr.rmsnorm(total, put(weight), eps)))
    for dresidual_out in (None, added):
        gradients = reference.backward(get(total), weight, dout, eps, dresidual_out=dresidual_out)
        extra = None if dresidual_out is None else put(dresidual_out)
        dx, dresidual, dweight = rr.fused_add_rmsnorm_bwd(total, put(weight), put(dout), rstd, extra)
        assert dresidual is dx
        assert_rows_close(get(dx), gradients.dx, dtype, "fused dx")
        assert_sums_close(get(dweight), gradients.dweight, weight_dtype, m, dout_max)


def test_equals_float64(array_backend, case):
    run_and_check(array_backend, *case)


@pytest.mark.parametrize(
    ("m", "n", "dtype", "weight_dtype"), [(64, 512, "bfloat16", "float32"), (33, 769, "float16", "float32")]
)
def test_16_bit_rows_with_a_float32_weight(backend, m, n, dtype, weight_dtype):
    run_and_check(backend, m, n, dtype, weight_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("cols", [23001, 24576, 32768, 40000, 65536])
def test_long_rows_on_blocks_that_take_turns(cols, dtype):
    """Held in registers and shared memory or read twice: more rows than blocks, whatever else is wanted."""
    import cupy

    backend, m = _cupy_backend(), cupy.cuda.Device().attributes["MultiProcessorCount"] + 9
    run_and_check(backend, m, cols, dtype, dtype)
    x, weight, dout = (cupy.asarray(random(shape, dtype, i)) for i, shape in enumerate(((m, cols), (cols,), (m, cols))))
    _, rstd = rr.rmsnorm_fwd(x, weight, 1e-6, True)
    gradients = [
        rr.rmsnorm_bwd(x, weight, dout, rstd, **options)[0]
        for options in ({}, {"need_dweight": False}, {"bias": weight})
    ]
    assert all(bool((gradient == gradients[0]).all()) for gradient in gradients)


@pytest.mark.parametrize("m", [512, 4096, 65536])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_rows_whose_roundings_all_go_one_way(array_backend, m, dtype):
    row, weight = random((1, 33), dtype, 1), random((33,), dtype, 2)
    x, dout = np.repeat(row, m, axis=0), np.ones((m, 33), DTYPES[dtype])
    _, rstd = rr.rmsnorm_fwd(array_backend.put(x), array_backend.put(weight), 1e-6, True)
    _, dweight = rr.rmsnorm_bwd(*map(array_backend.put, (x, weight, dout)), rstd)
    expected = reference.backward(x, weight, dout)
    normed = np.abs(expected.dweight)
    assert_sums_close(array_backend.get(dweight), expected.dweight, dtype, m, 1.0, terms=normed)


def test_a_wrong_result_is_noticed(array_backend):
    """Negative control of the tolerances: another eps, or a sum that stops early, must not pass."""
    x, weight, dout = random((64, 256), "float32", 1), random((256,), "float32", 2), random((64, 256), "float32", 3)
    y = array_backend.get(rr.rmsnorm(array_backend.put(x), array_backend.put(weight), 1e-4))
    with pytest.raises(AssertionError):
        assert_rows_close(y, reference.forward(x, weight, 1e-6).y, "float32")
    gradients = reference.backward(x, weight, dout)
    with pytest.raises(AssertionError):
        assert_sums_close(gradients.dweight - dout[-1] * 1e-2, gradients.dweight, "float32", 64, np.abs(dout).max())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_nan_and_inf_stay_in_their_row(array_backend, dtype):
    x = np.array([[np.inf, 1], [np.nan, 1], [1, 1], [0, 0]], np.float32).astype(DTYPES[dtype])
    y, rstd = rr.rmsnorm_fwd(array_backend.put(x), None, 1e-6, True)
    expected = np.array([[np.nan, 0], [np.nan, np.nan], [1, 1], [0, 0]])
    np.testing.assert_allclose(array_backend.get(y).astype(np.float64), expected, atol=1e-2)
    dx, _ = rr.rmsnorm_bwd(array_backend.put(x), None, array_backend.put(np.ones_like(x)), rstd)
    assert np.isfinite(array_backend.get(dx)[2:].astype(np.float64)).all()


def test_a_row_whose_squares_overflow_gives_zero(array_backend):
    x = np.full((1, 4), 1e20, np.float32)
    y, rstd = rr.rmsnorm_fwd(array_backend.put(x), None, 1e-6, True)
    dx, _ = rr.rmsnorm_bwd(array_backend.put(x), None, array_backend.put(np.ones_like(x)), rstd)
    assert (array_backend.get(y) == 0).all()
    assert (array_backend.get(dx) == 0).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_pattern_is_read_and_rounded_right(array_backend, dtype):
    """Through x + 0 (a widening and a narrowing of each pattern), and through x / 2 in float32, rounded to 16 bits."""
    patterns = np.arange(65536, dtype=np.uint16).reshape(64, 1024).view(DTYPES[dtype])
    zeros = np.zeros_like(patterns)
    total = rr.fused_add_rmsnorm(array_backend.put(patterns), array_backend.put(zeros))[1]
    flushed = 2.0**-126 if array_backend.name == "cupy" else 0.0  # CuPy has every compiler flush fp32 denormals
    with np.errstate(all="ignore"):
        expected = patterns.astype(np.float32) + 0.0
        expected = np.where(np.abs(expected) < flushed, 0.0, expected)
    np.testing.assert_array_equal(array_backend.get(total).astype(np.float32), expected)

    values = np.frombuffer(np.random.default_rng(0).bytes(4 * 65536), np.float32).reshape(64, 1024)
    total = rr.fused_add_rmsnorm(
        array_backend.put(values), array_backend.put(np.zeros_like(values)), residual_dtype=DTYPES[dtype]
    )[1]
    with np.errstate(all="ignore"):
        expected = np.where(np.abs(values) < flushed, 0.0, values)
        expected = expected.astype(DTYPES[dtype]).astype(np.float32)
    np.testing.assert_array_equal(array_backend.get(total).astype(np.float32), expected)
