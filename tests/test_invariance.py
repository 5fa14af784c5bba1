"""A row's results are its own: bit for bit the same whatever rows lie around it, whatever else is wanted, however many
threads there are, and in every repetition.
"""

from __future__ import annotations

import numpy as np
import pytest
from conftest import assert_bits
from test_layouts import (
    EPS,
    MATRICES,
    assert_right,
    assert_same,
    operands,
    pitched,
    put_all,
    run_all,
    shifted,
)

import rmsnorm_raw
from rmsnorm_raw import plan

MANY, WIDE = 1100, 64  # several chunks of rows on the host, forward and backward, and work for more than one thread


@pytest.fixture(scope="module")
def many():
    return operands(MANY, WIDE)


def test_many_rows_are_right(backend, many):
    assert_right(backend, run_all(**put_all(backend, many)), **many)


@pytest.mark.parametrize("row", [0, 1, 511, 512, 777, MANY - 1])
def test_a_row_alone_and_among_many(backend, many, row):
    among = run_all(**put_all(backend, many))
    alone = run_all(**put_all(backend, many | {name: many[name][row : row + 1].copy() for name in MATRICES}))
    some = run_all(**put_all(backend, many | {name: many[name][row : row + 3].copy() for name in MATRICES}))
    misaligned = many | {name: shifted(1)(backend, many[name][row : row + 1]) for name in MATRICES}
    misaligned = run_all(**{name: misaligned[name] if name in MATRICES else backend.put(many[name]) for name in many})
    strided = {name: pitched(3)(backend, many[name])[row : row + 2] for name in MATRICES}
    strided = run_all(**(put_all(backend, {"weight": many["weight"], "bias": many["bias"]}) | strided))
    for name, value in among.items():
        if "weight" in name or "bias" in name:
            continue  # these depend on all rows
        expected = backend.get(value)[row : row + 1]
        for what, results in [("alone", alone), ("some", some), ("misaligned", misaligned), ("strided", strided)]:
            assert_bits(backend.get(results[name])[:1], expected, f"{name} of row {row}, {what}")


def test_rows_do_not_depend_on_what_else_is_wanted(backend, many):
    given = put_all(backend, many)
    x, residual, weight, bias, dout = (given[name] for name in ("x", "residual", "weight", "bias", "dout"))
    expected = run_all(**given)

    y = rmsnorm_raw.rmsnorm(x, weight, EPS, bias=bias)
    assert_bits(backend.get(y), backend.get(expected["y"]), "y without rstd")
    _, rstd = rmsnorm_raw.rmsnorm_fwd(x, None, EPS, True)
    assert_bits(backend.get(rstd), backend.get(expected["rstd"]), "rstd without a weight")
    half, rstd = rmsnorm_raw.rmsnorm_fwd(x, weight, EPS, True, out_dtype="float16")
    assert backend.get(half).dtype == np.float16
    assert_bits(backend.get(rstd), backend.get(expected["rstd"]), "rstd beside another dtype of y")

    y = rmsnorm_raw.fused_add_rmsnorm(x, residual, weight, EPS, prenorm=False, bias=bias)
    assert_bits(backend.get(y), backend.get(expected["fused y"]), "fused y without the sum")
    total, rstd = expected["residual_out"], expected["fused rstd"]
    alone, alone_rstd = rmsnorm_raw.rmsnorm_fwd(total, weight, EPS, True, bias=bias)
    assert_bits(backend.get(alone), backend.get(expected["fused y"]), "fused y is the norm of the sum")
    assert_bits(backend.get(alone_rstd), backend.get(rstd), "so is its rstd")

    rstd = expected["rstd"]
    dx, nothing = rmsnorm_raw.rmsnorm_bwd(x, weight, dout, rstd, need_dweight=False)
    assert nothing is None
    assert_bits(backend.get(dx), backend.get(expected["dx"]), "dx without dweight")
    dx, _ = rmsnorm_raw.rmsnorm_bwd(x, weight, dout, rstd)
    assert_bits(backend.get(dx), backend.get(expected["dx"]), "dx without dbias")
    nothing, dweight, dbias = rmsnorm_raw.rmsnorm_bwd(x, weight, dout, rstd, bias=bias, need_dx=False)
    assert nothing is None
    assert_bits(backend.get(dweight), backend.get(expected["dweight"]), "dweight without dx")
    assert_bits(backend.get(dbias), backend.get(expected["dbias"]), "dbias without dx")
    fused = rmsnorm_raw.fused_add_rmsnorm_bwd(x, weight, dout, rstd)
    assert_bits(backend.get(fused[0]), backend.get(expected["dx"]), "fused dx without dresidual_out")


# ------------------------------------------------------------------------------------------------ determinism


def test_repeated_calls_agree(backend, many):
    given = put_all(backend, many)
    expected = run_all(**given)
    for _ in range(3):
        assert_same(backend, run_all(**given), expected)


def test_results_do_not_depend_on_threads(many):
    before = rmsnorm_raw.get_num_threads()
    try:
        rmsnorm_raw.set_num_threads(1)
        expected = run_all(**many)
        for count in (2, 3, 7, 64):
            rmsnorm_raw.set_num_threads(count)
            for function in vars(plan).values():  # a plan is made once; none of these may have the threads in it
                getattr(function, "cache_clear", lambda: None)()
            for name, value in run_all(**many).items():
                assert_bits(value, expected[name], f"{name} by {count} threads")
    finally:
        rmsnorm_raw.set_num_threads(before)


def test_dweight_of_rows_in_another_order_differs():
    """The order of the sum is the rows' own, so the tests above compare sums that could differ."""
    arrays = operands(MANY, WIDE)
    _, rstd = rmsnorm_raw.rmsnorm_fwd(arrays["x"], None, EPS, True)
    order = np.random.default_rng(0).permutation(MANY)
    _, there = rmsnorm_raw.rmsnorm_bwd(arrays["x"], arrays["weight"], arrays["dout"], rstd)
    _, again = rmsnorm_raw.rmsnorm_bwd(arrays["x"][order], arrays["weight"], arrays["dout"][order], rstd[order])
    assert np.any(there != again)
    np.testing.assert_allclose(there, again, rtol=0, atol=1e-3)
