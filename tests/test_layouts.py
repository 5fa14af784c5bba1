"""Whatever way the values lie in memory, the results are those of contiguous copies, bit for bit.

The copies' own results are compared with float64 once; everything else is compared with the copies.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from conftest import DTYPES, assert_bits, assert_rows_close, assert_sums_close, bytewise, random

import rmsnorm_raw
from rmsnorm_raw import reference

M, N = 5, 13  # odd columns: no row but the first is aligned
EPS = 1e-5
POISON = 123.0
MATRICES = ("x", "residual", "dout", "dresidual_out")


def operands(rows=M, cols=N, dtype="float32"):
    made = {name: random((rows, cols), dtype, seed) for seed, name in enumerate(MATRICES)}
    return made | {name: random((cols,), dtype, 10 + seed) for seed, name in enumerate(("weight", "bias"))}


def run_all(x, residual, weight, bias, dout, dresidual_out, eps=EPS):
    """All results of the four steps, by name."""
    y, rstd = rmsnorm_raw.rmsnorm_fwd(x, weight, eps, True, bias=bias)
    dx, dweight, dbias = rmsnorm_raw.rmsnorm_bwd(x, weight, dout, rstd, bias=bias)
    fused_y, total, fused_rstd = rmsnorm_raw.fused_add_rmsnorm_fwd(x, residual, weight, eps, True, bias=bias)
    results = {"y": y, "rstd": rstd, "dx": dx, "dweight": dweight, "dbias": dbias}
    results |= {"fused y": fused_y, "residual_out": total, "fused rstd": fused_rstd}
    # x for the sum, so that its layout and not only the result's is read by the fused backward.
    fused = rmsnorm_raw.fused_add_rmsnorm_bwd(x, weight, dout, rstd, dresidual_out, bias=bias)
    return results | dict(zip(("fused dx", "fused dresidual", "fused dweight", "fused dbias"), fused, strict=True))


def assert_same(backend, actual, expected, what=""):
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert_bits(backend.get(value), backend.get(expected[name]), f"{what} {name}")


def put_all(backend, arrays):
    return {name: backend.put(array) for name, array in arrays.items()}


def assert_right(backend, results, x, residual, weight, bias, dout, dresidual_out, dtype="float32", eps=EPS):
    """Against float64; the fused backward here is that of x."""
    rows, largest = x.size // x.shape[-1], np.abs(dout.astype(np.float64)).max(initial=0)
    plain = reference.forward(x, weight, eps, bias=bias)
    fused = reference.forward(x, weight, eps, bias=bias, residual=residual, residual_dtype=DTYPES[dtype])
    back = reference.backward(x, weight, dout, eps)
    fused_back = reference.backward(x, weight, dout, eps, dresidual_out=dresidual_out)
    got = {name: backend.get(value) for name, value in results.items()}
    for name, expected in [
        ("y", plain.y),
        ("dx", back.dx),
        ("fused y", fused.y),
        ("residual_out", fused.normed),
        ("fused dx", fused_back.dx),
        ("fused dresidual", fused_back.dx),
    ]:
        assert_rows_close(got[name], expected, dtype, name)
    for name, expected in [("rstd", plain.rstd), ("fused rstd", fused.rstd)]:
        assert_rows_close(got[name][..., None], expected[..., None], "float32", name)
    for name, expected in [
        ("dweight", back.dweight),
        ("dbias", back.dbias),
        ("fused dweight", fused_back.dweight),
        ("fused dbias", fused_back.dbias),
    ]:
        assert_sums_close(got[name], expected, dtype, rows, largest, what=name)


# ------------------------------------------------------------------------------------------------ inputs

# Each takes the backend and a (rows, columns) NumPy array and gives the same values in another layout.


def pitched(extra):
    """Rows at columns + extra, the rest of each row NaN."""

    def lay(backend, array):
        base = np.full((array.shape[0], array.shape[1] + extra), np.nan, array.dtype)
        base[:, : array.shape[1]] = array
        return backend.put(base)[:, : array.shape[1]]

    return lay


def shifted(elements):
    """A contiguous array whose base lies some elements behind an aligned address."""

    def lay(backend, array):
        base = np.full(array.size + elements, np.nan, array.dtype)
        base[elements:] = array.reshape(-1)
        return backend.put(base)[elements:].reshape(array.shape)

    return lay


def every_second_row(backend, array):
    return backend.put(np.repeat(array, 2, axis=0))[::2]


def transposed(backend, array):
    return backend.put(np.ascontiguousarray(array.T)).T


def every_second_column(backend, array):
    return backend.put(np.repeat(array, 2, axis=1))[:, ::2]


def rows_reversed(backend, array):
    if "torch" in backend.name:
        pytest.skip("torch has no negative strides")
    return backend.put(np.ascontiguousarray(array[::-1]))[::-1]


def columns_reversed(backend, array):
    if "torch" in backend.name:
        pytest.skip("torch has no negative strides")
    return backend.put(np.ascontiguousarray(array[:, ::-1]))[:, ::-1]


def at_an_odd_byte(backend, array):
    if backend.name not in ("numpy", "torch-cpu"):
        pytest.skip("GPU arrays are aligned to their elements")
    memory = bytearray(b"\xff" + array.tobytes())
    if backend.name == "numpy":
        return np.ndarray(array.shape, array.dtype, buffer=memory, offset=1)
    import torch

    dtype = getattr(torch, array.dtype.name)
    return torch.frombuffer(memory, dtype=dtype, offset=1).reshape(array.shape)


def odd_row_bytes(backend, array):
    """Aligned columns in rows whose pitch is no whole number of elements."""
    if backend.name != "numpy":
        pytest.skip("a stride of other libraries counts elements")
    rows, cols = array.shape
    pitch = cols * array.itemsize + array.itemsize // 2
    laid = np.ndarray(array.shape, array.dtype, bytearray(rows * pitch), strides=(pitch, array.itemsize))
    laid[...] = array
    return laid


def field_of_records(backend, array):
    """Elements that are one and a half of their size apart."""
    if backend.name != "numpy":
        pytest.skip("only NumPy has records")
    records = np.zeros(array.shape, [("value", array.dtype), ("other", f"V{array.itemsize // 2}")])
    records["value"] = array
    return records["value"]


def column_major_pitch(backend, array):
    """Column-major, with a gap between the columns."""
    return pitched(3)(backend, np.ascontiguousarray(array.T)).T


LAYOUTS = {
    "pitch-1": pitched(1),
    "pitch-3": pitched(3),
    "shifted-1": shifted(1),
    "shifted-3": shifted(3),
    "every-second-row": every_second_row,
    "every-second-column": every_second_column,
    "rows-reversed": rows_reversed,
    "columns-reversed": columns_reversed,
    "transposed": transposed,
    "column-major-pitch": column_major_pitch,
    "odd-byte": at_an_odd_byte,
    "odd-row-bytes": odd_row_bytes,
    "field-of-records": field_of_records,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_contiguous_is_right(backend, dtype):
    arrays = operands(dtype=dtype)
    results = run_all(**put_all(backend, arrays))
    assert_right(backend, results, **arrays, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_all_matrices(backend, layout, dtype):
    arrays = operands(dtype=dtype)
    laid = {name: LAYOUTS[layout](backend, arrays[name]) for name in MATRICES}
    for name in MATRICES:
        assert_bits(backend.get(laid[name]), arrays[name], f"the test's own {name}")
    contiguous = put_all(backend, arrays)
    assert_same(backend, run_all(**(contiguous | laid)), run_all(**contiguous), layout)


@pytest.mark.parametrize("name", MATRICES)
def test_one_matrix_alone_in_another_layout(backend, name):
    """Its pitch is its own: the others stay contiguous."""
    arrays = operands()
    contiguous = put_all(backend, arrays)
    expected = run_all(**contiguous)
    for layout in ("pitch-3", "every-second-row", "transposed"):
        laid = {name: LAYOUTS[layout](backend, arrays[name])}
        assert_same(backend, run_all(**(contiguous | laid)), expected, f"{name} {layout}")


def test_each_matrix_with_a_pitch_of_its_own(backend):
    arrays = operands()
    contiguous = put_all(backend, arrays)
    laid = {name: pitched(extra)(backend, arrays[name]) for name, extra in zip(MATRICES, (1, 3, 6, 11), strict=True)}
    laid["dout"] = every_second_row(backend, arrays["dout"])
    assert_same(backend, run_all(**(contiguous | laid)), run_all(**contiguous))


@pytest.mark.parametrize("layout", ["pitch-3", "shifted-1", "every-second-column", "columns-reversed", "odd-byte"])
def test_layouts_of_weight_and_bias(backend, layout):
    arrays = operands()
    contiguous = put_all(backend, arrays)
    laid = {name: LAYOUTS[layout](backend, arrays[name][None])[0] for name in ("weight", "bias")}
    assert_same(backend, run_all(**(contiguous | laid)), run_all(**contiguous), layout)


@pytest.mark.parametrize("layout", ["pitch-3", "shifted-1", "rows-reversed", "odd-byte"])
def test_layouts_of_rstd(backend, layout):
    arrays = operands()
    given = put_all(backend, arrays)
    _, rstd = rmsnorm_raw.rmsnorm_fwd(given["x"], given["weight"], EPS, True)
    column = backend.get(rstd)[:, None]
    laid = LAYOUTS[layout](backend, column)[:, 0]
    expected = rmsnorm_raw.rmsnorm_bwd(given["x"], given["weight"], given["dout"], rstd)
    actual = rmsnorm_raw.rmsnorm_bwd(given["x"], given["weight"], given["dout"], laid)
    assert_same(backend, dict(enumerate(actual)), dict(enumerate(expected)), layout)
    _assert_rows_of_a_column(backend, given, column, expected)


def _assert_rows_of_a_column(backend, given, column, expected):
    """rstd in every second element of a longer array, and as a flat (rows,)."""
    spread = backend.put(np.repeat(column[:, 0], 2))[::2]
    actual = rmsnorm_raw.rmsnorm_bwd(given["x"], given["weight"], given["dout"], spread)
    assert_same(backend, dict(enumerate(actual)), dict(enumerate(expected)), "every second")


def broadcast(backend, row, shape):
    if "torch" in backend.name:
        return row.expand(shape)
    return (np if backend.name == "numpy" else __import__("cupy")).broadcast_to(row, shape)


def test_a_row_pitch_of_zero(backend):
    """One row read again for every row, without a copy of it."""
    arrays = operands()
    arrays |= {name: np.repeat(arrays[name][:1], M, axis=0) for name in MATRICES}
    contiguous = put_all(backend, arrays)
    laid = {name: broadcast(backend, backend.put(arrays[name][0].copy()), (M, N)) for name in MATRICES}
    assert_same(backend, run_all(**(contiguous | laid)), run_all(**contiguous))


def test_a_dout_without_strides(backend):
    """What `.sum().backward()` passes: one element, strides (0, 0)."""
    arrays = operands()
    arrays |= {name: np.ones((M, N), np.float32) for name in ("dout", "dresidual_out")}
    contiguous = put_all(backend, arrays)
    laid = {
        name: broadcast(backend, backend.put(np.ones((), np.float32)), (M, N)) for name in ("dout", "dresidual_out")
    }
    results = run_all(**(contiguous | laid))
    assert_same(backend, results, run_all(**contiguous))
    assert_right(backend, results, **arrays)


def test_a_sum_on_torch():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    arrays = operands()
    x, weight = (torch.from_numpy(arrays[name].copy()).requires_grad_() for name in ("x", "weight"))
    rmsnorm_raw.rmsnorm(x, weight, EPS).sum().backward()
    expected = reference.backward(arrays["x"], arrays["weight"], np.ones((M, N)), EPS)
    assert_rows_close(x.grad, expected.dx, "float32", "dx")
    assert_sums_close(weight.grad, expected.dweight, "float32", M, 1.0)


@pytest.mark.parametrize("name", [*MATRICES, "weight", "bias"])
@pytest.mark.parametrize("contiguous", [True, False])
def test_a_lazily_negated_tensor_is_resolved(name, contiguous):
    """Its memory holds the negative of its values."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    given = {name: torch.from_numpy(array) for name, array in operands().items()}
    if contiguous:
        negated = torch._neg_view(-given[name])
    else:  # as torch makes it itself
        negated = torch.complex(torch.zeros_like(given[name]), -given[name]).conj().imag
    assert negated.is_neg()
    assert negated.is_contiguous() == contiguous
    expected, actual = run_all(**given), run_all(**(given | {name: negated}))
    for result, value in actual.items():
        assert torch.equal(value, expected[result]), result


# ------------------------------------------------------------------------------------------------ dimensions


@pytest.mark.parametrize("shape", [(2, 3), (5, 1), (1, 5), (2, 1, 3), (3, 2, 1, 1)])
def test_leading_dimensions(backend, shape):
    rows = int(np.prod(shape))
    arrays = operands(rows)
    flat = put_all(backend, arrays)
    deep = flat | {name: flat[name].reshape(*shape, N) for name in MATRICES}
    actual, expected = run_all(**deep), run_all(**flat)
    for name, value in expected.items():
        if "rstd" in name:
            expected[name] = value.reshape(shape)
        elif "weight" not in name and "bias" not in name:
            expected[name] = value.reshape(*shape, N)
    assert_same(backend, actual, expected, str(shape))


def test_a_flat_rstd_goes_with_leading_dimensions(backend):
    given = put_all(backend, operands(6))
    x, dout = (given[name].reshape(2, 3, N) for name in ("x", "dout"))
    _, rstd = rmsnorm_raw.rmsnorm_fwd(x, given["weight"], EPS, True)
    assert tuple(rstd.shape) == (2, 3)
    expected = rmsnorm_raw.rmsnorm_bwd(x, given["weight"], dout, rstd)
    actual = rmsnorm_raw.rmsnorm_bwd(x, given["weight"], dout, rstd.reshape(6))
    assert_same(backend, dict(enumerate(actual)), dict(enumerate(expected)))


@pytest.mark.parametrize(
    "view",
    [
        lambda base: base[..., :N],  # one pitch for all rows
        lambda base: base[:, :2, :N],  # the pitch changes from plane to plane: copied
        lambda base: base[:, 1:, 1 : N + 1],
        lambda base: base.swapaxes(0, 1)[..., :N],
        lambda base: base[:1, :, :N],
        lambda base: base[:, :1, :N],  # planes apart, one row each
    ],
    ids=["pitch", "planes", "planes-shifted", "axes-swapped", "one-plane", "one-row"],
)
def test_strides_of_three_dimensions(backend, view):
    deep = {name: random((2, 3, 16), "float32", 20 + seed) for seed, name in enumerate(MATRICES)}
    arrays = operands() | {name: np.ascontiguousarray(view(array)) for name, array in deep.items()}
    laid = put_all(backend, arrays) | {name: view(backend.put(array)) for name, array in deep.items()}
    assert_same(backend, run_all(**laid), run_all(**put_all(backend, arrays)))


def test_four_dimensions_transposed_to_heads_first(backend):
    """(batch, tokens, heads, columns) as attention hands it on: no even row pitch."""
    deep = {name: random((2, 3, 2, N), "float32", 30 + seed) for seed, name in enumerate(MATRICES)}
    arrays = operands() | {name: np.ascontiguousarray(array.swapaxes(1, 2)) for name, array in deep.items()}
    laid = put_all(backend, arrays) | {name: backend.put(array).swapaxes(1, 2) for name, array in deep.items()}
    results = run_all(**laid)
    assert_same(backend, results, run_all(**put_all(backend, arrays)))
    assert_right(backend, results, **arrays)


def test_one_dimension(backend):
    arrays = operands(1)
    flat = put_all(backend, arrays)
    single = flat | {name: flat[name].reshape(N) for name in MATRICES}
    actual, expected = run_all(**single), run_all(**flat)
    for name, value in expected.items():
        if "rstd" in name:
            assert tuple(actual[name].shape) == (), f"{name} of a 1-d x is 0-d"
            expected[name] = value.reshape(())
        else:
            expected[name] = value.reshape(N)
    assert_same(backend, actual, expected)
    rows_shaped = actual["rstd"].reshape(1)
    again = rmsnorm_raw.rmsnorm_bwd(single["x"], flat["weight"], single["dout"], rows_shaped)
    assert_bits(backend.get(again[0]), backend.get(actual["dx"]), "dx with rstd of (1,)")


def test_one_column(backend):
    """The strides of a dimension of one may say anything. A large eps: without it dx is all cancellation."""
    arrays = operands(M, 1)
    contiguous = put_all(backend, arrays)
    expected = run_all(**contiguous, eps=1.0)
    assert_right(backend, expected, **arrays, eps=1.0)
    for layout in ("pitch-3", "every-second-row", "rows-reversed", "transposed"):
        if "torch" in backend.name and layout == "rows-reversed":
            continue
        laid = {name: LAYOUTS[layout](backend, arrays[name]) for name in MATRICES}
        assert_same(backend, run_all(**(contiguous | laid), eps=1.0), expected, layout)


@pytest.mark.parametrize("shape", [(0, N), (0, 3, N), (2, 0, N)])
def test_no_rows(backend, shape):
    arrays = operands()
    arrays |= {name: np.empty(shape, np.float32) for name in MATRICES}
    results = run_all(**put_all(backend, arrays))
    for name, value in results.items():
        got = backend.get(value)
        if "weight" in name or "bias" in name:
            assert_bits(got, np.zeros(N, np.float32), name)
        else:
            assert_bits(got, np.empty(shape[:-1] if "rstd" in name else shape, np.float32), name)
    assert_same(backend, run_all(**put_all(backend, operands())), run_all(**put_all(backend, operands())))


def test_no_rows_into_given_outputs(backend):
    """dweight and dbias are zeros also where the caller brings them."""
    given = put_all(backend, operands() | {name: np.empty((0, N), np.float32) for name in MATRICES})
    dx, rstd = backend.put(np.empty((0, N), np.float32)), backend.put(np.empty(0, np.float32))
    dweight, dbias = (backend.put(np.full(N, POISON, np.float32)) for _ in range(2))
    back = rmsnorm_raw.rmsnorm_bwd(
        given["x"], given["weight"], given["dout"], rstd, bias=given["bias"], out=(dx, dweight, dbias)
    )
    assert all(result is mine for result, mine in zip(back, (dx, dweight, dbias), strict=True))
    assert_bits(backend.get(dweight), np.zeros(N, np.float32), "dweight")
    assert_bits(backend.get(dbias), np.zeros(N, np.float32), "dbias")
    assert rmsnorm_raw.rmsnorm(given["x"], given["weight"], out=dx) is dx
    assert rmsnorm_raw.workspace_bytes(given["x"], given["weight"]) == 0


# ------------------------------------------------------------------------------------------------ outputs


def output_steps(given, outs):
    """Every function that writes into given arrays; `outs` makes the array for a name and shape, or None."""
    x, residual, dout, dresidual_out = (given[name] for name in MATRICES)
    weight, bias = given["weight"], given["bias"]
    rows, cols = tuple(x.shape), (x.shape[-1],)
    results = {"y": rmsnorm_raw.rmsnorm(x, weight, EPS, bias=bias, out=outs("y", rows))}
    results["fused y"], results["residual_out"] = rmsnorm_raw.fused_add_rmsnorm(
        x, residual, weight, EPS, bias=bias, out=outs("fused y", rows), residual_out=outs("residual_out", rows)
    )
    _, rstd = rmsnorm_raw.rmsnorm_fwd(x, weight, EPS, True)
    out = (outs("dx", rows), outs("dweight", cols), outs("dbias", cols))
    back = rmsnorm_raw.rmsnorm_bwd(x, weight, dout, rstd, bias=bias, out=out)
    results |= dict(zip(("dx", "dweight", "dbias"), back, strict=True))
    out = (outs("fused dx", rows), None, outs("fused dweight", cols), outs("fused dbias", cols))
    back = rmsnorm_raw.fused_add_rmsnorm_bwd(x, weight, dout, rstd, dresidual_out, bias=bias, out=out)
    return results | dict(zip(("fused dx", "fused dresidual", "fused dweight", "fused dbias"), back, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("cols", [1, 3, 13, 16, 33])
@pytest.mark.parametrize("gap", [0, 1, 5])
def test_nothing_beside_an_output_is_written(backend, gap, cols, dtype):
    """Every output is a view into a poisoned buffer: rows with a gap, and a guard zone at either end."""
    given = put_all(backend, operands(M, cols, dtype))
    expected = output_steps(given, lambda name, shape: None)
    guard, bases = 7, {}

    def view(base, shape):
        inside = base[guard : base.shape[0] - guard]
        return inside if len(shape) == 1 else inside.reshape(shape[0], cols + gap)[:, :cols]

    def guarded(name, shape):
        size = shape[0] if len(shape) == 1 else shape[0] * (cols + gap)
        bases[name] = backend.put(np.full(size + 2 * guard, POISON).astype(DTYPES[dtype])), shape
        return view(*bases[name])

    results = output_steps(given, guarded)
    assert_same(backend, results, expected, "into a view:")
    assert len(bases) == 9
    for name, (base, shape) in bases.items():
        image = np.full(base.shape, POISON).astype(DTYPES[dtype])
        view(image, shape)[...] = backend.get(expected[name])
        assert_bits(backend.get(base), image, f"{name} and what lies around it")


def test_an_output_with_its_rows_reversed():
    arrays, bases = operands(), {}
    expected = output_steps(arrays, lambda name, shape: None)

    def reverse(name, shape):
        if len(shape) == 1:
            return None
        bases[name] = np.full(shape, POISON, np.float32)
        return bases[name][::-1]

    output_steps(arrays, reverse)
    assert len(bases) == 5
    for name, base in bases.items():
        assert_bits(base[::-1], expected[name], name)


def test_each_output_has_a_pitch_of_its_own(backend):
    given = put_all(backend, operands())
    x, residual, weight, dout = (given[name] for name in ("x", "residual", "weight", "dout"))

    def gapped(gap, dtype=np.float32):
        return backend.put(np.full((M, N + gap), POISON, dtype))

    y, total, _ = rmsnorm_raw.fused_add_rmsnorm_fwd(x, residual, weight, EPS)
    bases = gapped(1), gapped(6)
    rmsnorm_raw.fused_add_rmsnorm(x, residual, weight, EPS, out=bases[0][:, :N], residual_out=bases[1][:, :N])
    assert_gapped(backend, bases, (y, total))

    _, rstd = rmsnorm_raw.rmsnorm_fwd(x, weight, EPS, True)
    step = partial(rmsnorm_raw.fused_add_rmsnorm_bwd, x, weight, dout, rstd, dx_dtype="float16")
    dx, dresidual, _ = step()
    bases = gapped(5, np.float16), gapped(2)
    step(out=(bases[0][:, :N], bases[1][:, :N], None))
    assert_gapped(backend, bases, (dx, dresidual))


def assert_gapped(backend, bases, results):
    for base, result in zip(bases, results, strict=True):
        image = np.full(base.shape, POISON, backend.get(result).dtype)
        image[:, :N] = backend.get(result)
        assert_bits(backend.get(base), image)


def test_given_outputs_are_what_is_returned(backend):
    given, made = put_all(backend, operands()), {}

    def keep(name, shape):
        made[name] = backend.put(np.full(shape, POISON, np.float32))
        return made[name]

    results = output_steps(given, keep)
    for name, array in made.items():
        assert results[name] is array, name
    assert results["fused dresidual"] is made["fused dx"], "equal gradients are one array"


@pytest.mark.parametrize("layout", ["contiguous", "pitch-3", "shifted-1"])
def test_in_place(backend, layout):
    """Exactly x, and exactly the residual, in any layout that can be written."""
    arrays = operands()
    contiguous = put_all(backend, arrays)
    expected = run_all(**contiguous)
    lay = LAYOUTS.get(layout, lambda backend, array: backend.put(array.copy()))

    x = lay(backend, arrays["x"])
    assert rmsnorm_raw.rmsnorm(x, contiguous["weight"], EPS, bias=contiguous["bias"], out=x) is x
    assert_bits(backend.get(x), backend.get(expected["y"]), "y")

    x, residual = lay(backend, arrays["x"]), lay(backend, arrays["residual"])
    rmsnorm_raw.fused_add_rmsnorm(
        x, residual, contiguous["weight"], EPS, bias=contiguous["bias"], out=x, residual_out=residual
    )
    assert_bits(backend.get(x), backend.get(expected["fused y"]), "fused y")
    assert_bits(backend.get(residual), backend.get(expected["residual_out"]), "residual_out")

    x = lay(backend, arrays["x"])
    out = (x, None, None)
    back = rmsnorm_raw.rmsnorm_bwd(
        x, contiguous["weight"], contiguous["dout"], expected["rstd"], bias=contiguous["bias"], out=out
    )
    assert back[0] is x
    for result, name in zip(back, ("dx", "dweight", "dbias"), strict=True):
        assert_bits(backend.get(result), backend.get(expected[name]), name)

    x = lay(backend, arrays["x"])
    back = rmsnorm_raw.fused_add_rmsnorm_bwd(
        x, contiguous["weight"], contiguous["dout"], expected["rstd"], contiguous["dresidual_out"], out=(x, None, None)
    )
    assert back[0] is x
    assert back[1] is x
    assert_bits(backend.get(x), backend.get(expected["fused dx"]), "fused dx")
    assert_bits(backend.get(back[2]), backend.get(expected["fused dweight"]), "fused dweight")


def test_inputs_are_left_alone(backend):
    arrays = operands()
    given = put_all(backend, {name: array.copy() for name, array in arrays.items()})
    run_all(**given)
    for name, array in arrays.items():
        assert_bits(backend.get(given[name]), array, name)


def test_read_only_inputs():
    arrays = operands()
    expected = run_all(**arrays)
    locked = {name: array.copy() for name, array in arrays.items()}
    for array in locked.values():
        array.flags.writeable = False
    for name, value in run_all(**locked).items():
        assert_bits(value, expected[name], name)


# ------------------------------------------------------------------------------------------------ other libraries


class Foreign:
    """Nothing but the two DLPack methods around a NumPy array."""

    def __init__(self, array):
        self._array = array

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)


class OldForeign(Foreign):
    """A producer from before DLPack 1.0."""

    def __dlpack__(self, stream=None):
        return self._array.__dlpack__()


class Namespaced(Foreign):
    """An array of a library that has a from_dlpack."""

    def __array_namespace__(self, api_version=None):
        return Namespaced

    @staticmethod
    def from_dlpack(obj):
        return Namespaced(np.from_dlpack(obj))


@pytest.mark.parametrize("kind", [Foreign, OldForeign])
def test_dlpack_objects_give_numpy(kind):
    arrays = operands()
    expected = run_all(**arrays)
    for name, value in run_all(**{name: kind(array) for name, array in arrays.items()}).items():
        assert type(value) is np.ndarray, name
        assert_bits(value, expected[name], name)


def test_dlpack_objects_come_back_by_their_own_from_dlpack():
    arrays = operands()
    expected = run_all(**arrays)
    for name, value in run_all(**{name: Namespaced(array) for name, array in arrays.items()}).items():
        assert type(value) is Namespaced, name
        assert_bits(np.from_dlpack(value), expected[name], name)


def test_dlpack_objects_without_rows_or_leading_dimensions():
    nothing = Namespaced(np.empty((0, N), np.float32))
    weight = Namespaced(np.ones(N, np.float32))
    y, rstd = rmsnorm_raw.rmsnorm_fwd(nothing, weight, store_rstd=True)
    dx, dweight = rmsnorm_raw.rmsnorm_bwd(nothing, weight, nothing, rstd)
    for value, shape in [(y, (0, N)), (rstd, (0,)), (dx, (0, N)), (dweight, (N,))]:
        assert type(value) is Namespaced
        assert_bits(np.from_dlpack(value), np.zeros(shape, np.float32))
    _, rstd = rmsnorm_raw.rmsnorm_fwd(Namespaced(np.ones(N, np.float32)), store_rstd=True)
    assert np.from_dlpack(rstd).shape == ()


@pytest.mark.parametrize("layout", ["pitch-3", "transposed", "rows-reversed", "shifted-1"])
def test_layouts_of_dlpack_objects(layout):
    numpy = SimpleNamespace(name="numpy", put=lambda a: a, get=lambda a: a)
    arrays = operands()
    expected = run_all(**arrays)
    laid = {name: Foreign(LAYOUTS[layout](numpy, arrays[name])) for name in MATRICES}
    for name, value in run_all(**(arrays | laid)).items():
        assert_bits(value, expected[name], name)


def test_dlpack_memory_is_kept_alive():
    """The producer may be gone once it has handed its capsule over."""
    arrays = operands()
    expected = rmsnorm_raw.rmsnorm(arrays["x"], arrays["weight"])
    for _ in range(20):
        y = rmsnorm_raw.rmsnorm(Foreign(arrays["x"].copy()), Foreign(arrays["weight"].copy()))
        assert_bits(y, expected)


def test_bfloat16_of_a_library_that_names_its_dtype():
    """NumPy's from_dlpack knows no bfloat16: such an object is read as an array, as JAX's can be."""

    class Jax(Foreign):
        dtype = np.dtype(ml_dtypes.bfloat16)

        def __array__(self, dtype=None, copy=None):
            return self._array

        def __dlpack_device__(self):
            return (1, 0)

    x = random((M, N), "bfloat16", 1)
    assert_bits(rmsnorm_raw.rmsnorm(Jax(x)), rmsnorm_raw.rmsnorm(x))


def test_numpy_subclasses():
    arrays = operands()
    expected = run_all(**arrays)

    class Mine(np.ndarray):
        pass

    for name, value in run_all(**{name: array.view(Mine) for name, array in arrays.items()}).items():
        assert_bits(value, expected[name], name)


@pytest.mark.parametrize("mixed", [("weight", "bias"), ("residual", "dout", "dresidual_out"), ("bias",)])
@pytest.mark.parametrize("of_x", ["numpy", "torch"])
def test_the_result_is_of_the_library_of_x(of_x, mixed):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    arrays = operands()
    tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    own, other = (arrays, tensors) if of_x == "numpy" else (tensors, arrays)
    expected = run_all(**arrays)
    for name, value in run_all(**(own | {name: other[name] for name in mixed})).items():
        assert isinstance(value, np.ndarray if of_x == "numpy" else torch.Tensor), name
        assert_bits(value if of_x == "numpy" else value.numpy(), expected[name], name)


def test_an_rstd_of_another_library():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    arrays = operands()
    _, rstd = rmsnorm_raw.rmsnorm_fwd(arrays["x"], None, EPS, True)
    expected = rmsnorm_raw.rmsnorm_bwd(arrays["x"], arrays["weight"], arrays["dout"], rstd)
    actual = rmsnorm_raw.rmsnorm_bwd(arrays["x"], arrays["weight"], arrays["dout"], torch.from_numpy(rstd))
    for value, right in zip(actual, expected, strict=True):
        assert_bits(value, right)
    x, dout = torch.from_numpy(arrays["x"]), Foreign(arrays["dout"])
    actual = rmsnorm_raw.rmsnorm_bwd(x, arrays["weight"], dout, Foreign(rstd))
    for value, right in zip(actual, expected, strict=True):
        assert isinstance(value, torch.Tensor)
        assert_bits(value.numpy(), right)


def test_a_tensor_that_needs_a_gradient_among_numpy_operands():
    """The gradient reaches x though its weight and residual are another library's."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    arrays = operands()
    expected = run_all(**arrays)

    x = torch.from_numpy(arrays["x"].copy()).requires_grad_()
    y = rmsnorm_raw.rmsnorm(x, arrays["weight"], EPS, bias=arrays["bias"])
    assert_bits(y.detach().numpy(), expected["y"], "y")
    y.backward(torch.from_numpy(arrays["dout"]))
    assert_bits(x.grad.numpy(), expected["dx"], "dx")

    x = torch.from_numpy(arrays["x"].copy()).requires_grad_()
    y, total = rmsnorm_raw.fused_add_rmsnorm(x, arrays["residual"], arrays["weight"], EPS, bias=arrays["bias"])
    assert_bits(y.detach().numpy(), expected["fused y"], "fused y")
    assert_bits(total.detach().numpy(), expected["residual_out"], "residual_out")
    y.backward(torch.from_numpy(arrays["dout"]))
    right = reference.backward(arrays["x"] + arrays["residual"], arrays["weight"], arrays["dout"], EPS)
    assert_rows_close(x.grad, right.dx, "float32", "dx")


def test_bfloat16_tensors_without_ml_dtypes(monkeypatch):
    """torch needs no ml_dtypes: its own dtype names the bits."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import sys

    arrays = operands(dtype="bfloat16")
    expected = run_all(**arrays)
    tensors = {name: torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) for name, array in arrays.items()}
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    for name, value in run_all(**tensors).items():
        assert value.dtype == (torch.float32 if "rstd" in name else torch.bfloat16), name
        bits = value if "rstd" in name else value.view(torch.int16)
        assert_bits(bytewise(bits.numpy()), bytewise(expected[name]), name)
