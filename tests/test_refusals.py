"""Everything that is refused: the error's type, the values in its message, and that no byte was written.

One table: (id, call, error, pattern). A call gets fresh operands; its outputs are filled with 123 beforehand.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
from functools import partial
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from conftest import (
    DTYPES,
    _cupy_backend,
    _numpy_backend,
    _torch_backend,
    assert_rows_close,
    assert_sums_close,
    gpu_count,
    random,
)

import rmsnorm_raw
from rmsnorm_raw import calls, reference
from rmsnorm_raw.devices import Compiled, host
from rmsnorm_raw.devices import cupy as gpu_device

M, N = 3, 13
POISON = 123.0


class Operands:
    """Operands of every function and poisoned outputs, in one library; remembers the bytes of all it has made."""

    def __init__(self, backend, dtype="float32"):
        self.backend, self.dtype, self._images = backend, dtype, []
        self.x = self.keep(backend.put(random((M, N), dtype, 1)))
        self.residual, self.dout, self.dresidual_out = (
            self.keep(backend.put(random((M, N), dtype, seed))) for seed in (2, 3, 4)
        )
        self.weight, self.bias = (self.keep(backend.put(random((N,), dtype, seed))) for seed in (5, 6))
        self.rstd = self.new((M,), "float64" if dtype == "float64" else "float32", 1.0)
        self.y, self.total, self.dx, self.dresidual = (self.new((M, N), dtype, POISON) for _ in range(4))
        self.dweight, self.dbias = (self.new((N,), dtype, POISON) for _ in range(2))

    @property
    def is_torch(self):
        return self.backend.name.startswith("torch")

    def new(self, shape, dtype=None, fill=0.5):
        dtype = dtype or self.dtype
        if dtype.startswith("float8"):
            return self.keep(self._float8(np.full(shape, fill, np.float32), dtype))
        return self.keep(self.backend.put(np.full(shape, fill).astype(DTYPES.get(dtype, dtype))))

    def _float8(self, array, dtype):
        if self.is_torch:
            import torch

            return self.backend.put(array).to(getattr(torch, dtype))
        try:
            return self.backend.put(array.astype(getattr(ml_dtypes, dtype)))
        except (TypeError, ValueError) as error:
            pytest.skip(f"{self.backend.name} has no {dtype}: {error}")

    def keep(self, array):
        self._images.append((array, self._image(array)))
        return array

    def assert_untouched(self):
        for number, (array, image) in enumerate(self._images):
            assert self._image(array) == image, f"array {number} of shape {tuple(array.shape)} was written"

    def _image(self, array):
        if self.is_torch:
            import torch

            array = array.detach().cpu().contiguous().reshape(-1)
            array = array.view(torch.uint8).numpy() if array.numel() else np.empty(0)
        elif self.backend.name == "cupy":
            array = self.backend.get(array)
        return array.tobytes()


# The four steps, complete and writing into the poisoned outputs; a case changes what it is about.


def fwd(a, **changes):
    given = {"x": a.x, "weight": a.weight, "bias": a.bias, "out": a.y} | changes
    return rmsnorm_raw.rmsnorm(**given)


def fused(a, **changes):
    given = {"x": a.x, "residual": a.residual, "weight": a.weight, "bias": a.bias, "out": a.y, "residual_out": a.total}
    return rmsnorm_raw.fused_add_rmsnorm(**(given | changes))


def fwd_step(a, **changes):
    return rmsnorm_raw.rmsnorm_fwd(**({"x": a.x, "weight": a.weight, "bias": a.bias, "out": a.y} | changes))


def fused_fwd_step(a, **changes):
    given = {"x": a.x, "residual": a.residual, "weight": a.weight, "bias": a.bias, "out": a.y, "residual_out": a.total}
    return rmsnorm_raw.fused_add_rmsnorm_fwd(**(given | changes))


def bwd(a, **changes):
    given = {"x": a.x, "weight": a.weight, "dout": a.dout, "rstd": a.rstd, "bias": a.bias}
    given["out"] = (a.dx, a.dweight, a.dbias)
    return rmsnorm_raw.rmsnorm_bwd(**(given | changes))


def fused_bwd(a, **changes):
    given = {"residual_out": a.x, "weight": a.weight, "dout": a.dout, "rstd": a.rstd, "bias": a.bias}
    given |= {"dresidual_out": a.dresidual_out, "out": (a.dx, None, a.dweight, a.dbias)}
    return rmsnorm_raw.fused_add_rmsnorm_bwd(**(given | changes))


STEPS = {"fwd": fwd, "fused": fused, "bwd": bwd, "fused_bwd": fused_bwd}
OPERANDS = {
    "fwd": ("x", "weight", "bias"),
    "fused": ("x", "residual", "weight", "bias"),
    "bwd": ("x", "weight", "dout", "bias"),
    "fused_bwd": ("residual_out", "weight", "dout", "dresidual_out", "bias"),
}
EACH_OPERAND = [(step, name) for step, names in OPERANDS.items() for name in names]
FIRST = {"fwd": "x", "fused": "x", "bwd": "x", "fused_bwd": "residual_out"}
SHAPES = {"weight": (N,), "bias": (N,)}


@pytest.mark.parametrize("step", STEPS)
def test_complete_calls_write(backend, step):
    """The calls that the tables below spoil one argument of: they run, and overwrite every output."""
    a = Operands(backend)
    x, residual, dout, dresidual_out = (backend.get(v) for v in (a.x, a.residual, a.dout, a.dresidual_out))
    weight, bias = backend.get(a.weight), backend.get(a.bias)
    if step in ("fwd", "fused"):
        STEPS[step](a)
        added = {"residual": residual, "residual_dtype": np.float32} if step == "fused" else {}
        expected = reference.forward(x, weight, bias=bias, **added)
        assert_rows_close(backend.get(a.y), expected.y, "float32")
        if step == "fused":
            assert_rows_close(backend.get(a.total), expected.normed, "float32")
        return
    _, a.rstd = rmsnorm_raw.rmsnorm_fwd(a.x, a.weight, store_rstd=True)
    STEPS[step](a)
    added = {"dresidual_out": dresidual_out} if step == "fused_bwd" else {}
    expected = reference.backward(x, weight, dout, **added)
    assert_rows_close(backend.get(a.dx), expected.dx, "float32")
    largest = np.abs(dout).max()
    assert_sums_close(backend.get(a.dweight), expected.dweight, "float32", M, largest)
    assert_sums_close(backend.get(a.dbias), expected.dbias, "float32", M, largest, what="dbias")


# ------------------------------------------------------------------------------------------------ the table


def spoil(step, **changes):
    """The call of a step with some arguments changed; a function among them is given the operands first."""
    return lambda a: STEPS[step](a, **{name: value(a) if callable(value) else value for name, value in changes.items()})


def made(*shape, dtype=None, fill=0.5):
    return lambda a: a.new(shape, dtype, fill)


def in_float64(step, **changes):
    """As `spoil`, among operands of float64."""

    def call(a):
        b = Operands(a.backend, "float64")
        try:
            spoil(step, **changes)(b)
        finally:
            b.assert_untouched()

    return call


def all_of(*shapes):
    """All shapes, in any order."""
    return "".join(rf"(?=.*{re.escape(str(shape))})" for shape in shapes)


def size(shape):
    return "x".join(map(str, shape)) or "0d"


def _wrong_shapes():
    for step, name in EACH_OPERAND:
        wrong = [(M, N - 1), (M + 1, N), (1, N), (N,), (N, M), (1, M, N), (M * N,)]
        if name in SHAPES:  # (3, 13) would be a weight for each of three heads
            wrong = [(N - 1,), (N + 1,), (1, N), (M - 1, N), (N, 1), (M,), (), (1, M, N)]
        for shape in wrong if name != FIRST[step] else ():
            call = spoil(step, **{name: made(*shape)})
            yield f"{step}-{name}-{size(shape)}", call, ValueError, rf"(?s)^(?=.*\b{name}\b){all_of(shape, (M, N))}"
    for step in ("bwd", "fused_bwd"):
        for shape in [(M + 1,), (M, 1), (1, M), (), (M - 1,), (N,)]:
            call = spoil(step, rstd=made(*shape))
            yield f"{step}-rstd-{size(shape)}", call, ValueError, rf"^rstd {all_of(shape, (M, N))}"
    for step in STEPS:  # three heads for the one, none for the other
        for name in SHAPES:
            call = spoil(step, **{name: made(M, N)})
            yield f"{step}-{name}-alone-per-head", call, ValueError, r"^(?=.*weight)(?=.*bias).*\((3, 13|13,)\)"


def _wrong_dtypes():
    for step, name in EACH_OPERAND:
        shape = SHAPES.get(name, (M, N))
        for dtype in ("int32", "uint8", "bool", "complex64", "float8_e4m3fn", "float8_e5m2"):
            call = spoil(step, **{name: made(*shape, dtype=dtype)})
            yield (
                f"{step}-{name}-{dtype}",
                call,
                TypeError,
                rf"^{name} is {dtype}\b.*float16.*bfloat16.*float32.*float64",
            )
        if name != FIRST[step]:
            call = spoil(step, **{name: made(*shape, dtype="float64")})
            yield f"{step}-{name}-float64-for-float32", call, TypeError, rf"^{name} is float64, .* is float32"
            call = in_float64(step, **{name: made(*shape, dtype="float32")})
            yield f"{step}-{name}-float32-for-float64", call, TypeError, rf"^{name} is float32, .* is float64"
    for step in ("bwd", "fused_bwd"):
        for dtype in ("float64", "float16", "bfloat16", "int32", "complex64", "bool"):
            call = spoil(step, rstd=made(M, dtype=dtype))
            yield f"{step}-rstd-{dtype}", call, TypeError, rf"^rstd is {dtype}\b.*float32"
        call = in_float64(step, rstd=made(M, dtype="float32"))
        yield f"{step}-rstd-float32-for-float64", call, TypeError, r"^rstd is float32\b.*float64"
    for step, option in [
        ("fwd", "out_dtype"),
        ("fused", "out_dtype"),
        ("fused", "residual_dtype"),
        ("fused_bwd", "dx_dtype"),
        ("fused_bwd", "dresidual_dtype"),
    ]:
        for dtype in ("int8", "complex64", "float8_e4m3fn", "unheard-of"):
            call = spoil(step, **{option: dtype})
            yield f"{step}-{option}-{dtype}", call, TypeError, rf"^{option} is {dtype}\b.*bfloat16"
        call = spoil(step, **{option: np.dtype(np.float32).newbyteorder()})
        yield f"{step}-{option}-byte-swapped", call, TypeError, rf"^{option} is "
        call = spoil(step, **{option: 3})
        yield f"{step}-{option}-3", call, TypeError, rf"^{option} .*3"
        call = spoil(step, **{option: np.dtype(np.float64)})
        yield f"{step}-{option}-float64-for-float32", call, TypeError, rf"^{option} is float64, .* is float32"
        call = in_float64(step, **{option: "float32"})
        yield f"{step}-{option}-float32-for-float64", call, TypeError, rf"^{option} is float32, .* is float64"


def _wrong_kinds():
    things = {"list": [[1.0] * N] * M, "tuple": (1.0,) * N, "float": 1.0, "float32": np.float32(1), "str": "x"}
    for step, name in EACH_OPERAND:
        for kind, thing in things.items():
            call = spoil(step, **{name: thing})
            yield f"{step}-{name}-{kind}", call, TypeError, rf"^{name} is a .*{kind}.*NumPy.*CuPy.*torch.*__dlpack__"
    for step, name in [
        ("fwd", "x"),
        ("fused", "x"),
        ("bwd", "x"),
        ("bwd", "dout"),
        ("bwd", "rstd"),
        ("fused_bwd", "dout"),
    ]:
        yield f"{step}-{name}-None", spoil(step, **{name: None}), TypeError, rf"^{name} is a .*None.*NumPy.*torch"
    for step in ("bwd", "fused_bwd"):
        yield f"{step}-rstd-list", spoil(step, rstd=[1.0] * M), TypeError, r"^rstd is a .*list.*NumPy.*torch"


def _outputs(step, name, make):
    """The keywords that make `make(a)` the output `name` of a step, the others allocated."""
    if step in ("fwd", "fused"):
        return {name: make}
    names = ("dx", "dweight", "dbias") if step == "bwd" else ("dx", "dresidual", "dweight", "dbias")
    return {"out": lambda a: tuple(make(a) if known == name else None for known in names)}


EACH_OUTPUT = [("fwd", "out"), ("fused", "out"), ("fused", "residual_out"), ("bwd", "dx"), ("bwd", "dweight")]
EACH_OUTPUT += [("bwd", "dbias"), ("fused_bwd", "dx"), ("fused_bwd", "dresidual"), ("fused_bwd", "dweight")]


def _wrong_outputs():
    for step, name in EACH_OUTPUT:
        right = (N,) if name in ("dweight", "dbias") else (M, N)
        # Where dx and dresidual are one array, the message may name it by either.
        named = r"(?=.*\b(dx|dresidual)\b)" if name == "dresidual" else rf"(?=.*\b{name}\b)"
        wrong = [(M, N + 1), (M + 1, N), (1, M, N), (M * N,), ()] if len(right) == 2 else [(N + 1,), (1, N), (N, 1), ()]
        for shape in wrong:
            call = spoil(step, **_outputs(step, name, made(*shape, fill=POISON)))
            yield f"{step}-output-{name}-{size(shape)}", call, ValueError, rf"^{named}{all_of(shape, right)}"
        for dtype in ("float16", "float64", "int32"):
            call = spoil(step, **_outputs(step, name, made(*right, dtype=dtype, fill=POISON)))
            yield f"{step}-output-{name}-{dtype}", call, TypeError, rf"^{named}(?=.*{dtype})(?=.*float32)"
        call = spoil(step, **_outputs(step, name, lambda a: [POISON]))
        yield f"{step}-output-{name}-list", call, TypeError, rf"^{named}.*list"
        call = spoil(step, **_outputs(step, name, partial(_of_another_library, shape=right)))
        yield f"{step}-output-{name}-of-another-library", call, TypeError, rf"^{named}(?=.*NumPy)(?=.*(torch|CuPy))"
        if len(right) == 2:
            call = spoil(step, **_outputs(step, name, lambda a: a.new((N, M), fill=POISON).T))
            yield f"{step}-output-{name}-transposed", call, ValueError, rf"^{named}.*strides"
    for step in ("bwd", "fused_bwd"):
        call = spoil(step, out=lambda a: a.dx)
        yield f"{step}-out-not-a-tuple", call, TypeError, r"^out .*tuple.*dx.*dweight"
        call = spoil(step, out=lambda a: (a.dx,))
        yield f"{step}-out-too-short", call, TypeError, r"^out .*tuple.*dx.*dweight.*dbias"
        yield f"{step}-out-has-dbias-without-bias", spoil(step, bias=None), TypeError, r"^out .*tuple.*dx.*dweight"
        yield f"{step}-out-for-skipped-dx", spoil(step, need_dx=False), ValueError, r"^out .*\bdx\b"
        yield f"{step}-out-for-skipped-dweight", spoil(step, need_dweight=False), ValueError, r"^out .*\bdweight\b"
        yield f"{step}-out-for-dweight-without-weight", spoil(step, weight=None), ValueError, r"^out .*\bdweight\b"
        call = spoil(step, need_dweight=False, **_outputs(step, "dbias", lambda a: a.dbias))
        yield f"{step}-out-for-skipped-dbias", call, ValueError, r"^out .*\bdbias\b"
    call = spoil("fused_bwd", need_dx=False, out=lambda a: (None, a.dresidual, None, None))
    yield "fused_bwd-out-for-skipped-dresidual", call, ValueError, r"^out .*\bdresidual\b"
    call = spoil("fused_bwd", out=lambda a: (a.dx, a.dresidual, None, None))
    yield "fused_bwd-out-two-arrays-for-one-gradient", call, ValueError, r"\bdx\b.*\bdresidual\b.*one array"


def _of_another_library(a, shape):
    if a.backend.name == "numpy":
        torch = pytest.importorskip("torch", reason="torch is not installed")
        return torch.full(shape, POISON)
    return np.full(shape, POISON, np.float32)


def _shifted(step, operand, output, by):
    """A call whose `output` begins `by` elements behind its operand, in one buffer."""

    def call(a):
        base = a.keep(a.backend.put(random((2 * M * N,), "float32", 7)))
        given, written = base[: M * N].reshape(M, N), base[by : by + M * N].reshape(M, N)
        spoil(step, **{operand: given}, **_outputs(step, output, lambda a: written))(a)

    return call


def _reinterpreted(a):
    """In place, but in other 16 bits."""
    b = Operands(a.backend, "float16")
    if b.is_torch:
        import torch

        out = b.x.view(torch.bfloat16)
    else:
        out = b.x.view(ml_dtypes.bfloat16)
    try:
        fwd(b, out=out, out_dtype="bfloat16")
    finally:
        b.assert_untouched()


def _reversed_rows(a):
    return pytest.skip("torch has no negative strides") if a.is_torch else a.x[::-1]


def _overlaps():
    for step, output, operands in [
        ("fwd", "out", ("x",)),
        ("fused", "out", ("x", "residual")),
        ("fused", "residual_out", ("x", "residual")),
        ("bwd", "dx", ("x", "dout")),
        ("fused_bwd", "dx", ("residual_out", "dout", "dresidual_out")),
    ]:
        for operand in operands:
            for by in (1, N, M * N - 1):
                case, call = f"{step}-{output}-{by}-behind-{operand}", _shifted(step, operand, output, by)
                yield case, call, ValueError, rf"\b{output} overlaps {operand}\b"
    for output, operand, call in [
        ("out", "residual", spoil("fused", out=lambda a: a.residual)),
        ("residual_out", "x", spoil("fused", residual_out=lambda a: a.x)),
        ("residual_out", "out", spoil("fused", residual_out=lambda a: a.y)),
        ("dx", "dout", spoil("bwd", out=lambda a: (a.dout, None, None))),
        ("dweight", "weight", spoil("bwd", out=lambda a: (None, a.weight, None))),
        ("dbias", "bias", spoil("bwd", out=lambda a: (None, None, a.bias))),
        ("dbias", ".*dweight", spoil("bwd", out=lambda a: (None, a.dbias, a.dbias))),
        ("dweight", ".*dx", spoil("bwd", out=lambda a: (a.dx, a.dx[0], None))),
        ("dx", "dresidual_out", spoil("fused_bwd", out=lambda a: (a.dresidual_out, None, None, None))),
        ("out", "weight", spoil("fwd", x=lambda a: a.residual, weight=lambda a: a.x[1], out=lambda a: a.x)),
        ("out", "bias", spoil("fwd", x=lambda a: a.residual, bias=lambda a: a.x[1], out=lambda a: a.x)),
    ]:
        yield f"{output}-overlaps-{operand.strip('.*')}", call, ValueError, rf"\b{output} overlaps {operand}\b"
    call = spoil("fwd", out=_reversed_rows)
    yield "out-is-x-with-its-rows-reversed", call, ValueError, r"\bout overlaps x\b"
    yield "out-is-x-as-bits-of-another-dtype", _reinterpreted, ValueError, r"\bout overlaps x\b"
    # The kernel would read copies of these, but what the caller passed as an input would be overwritten.
    call = spoil("fwd", x=lambda a: a.x.reshape(N, M).T, out=lambda a: a.x)
    yield "out-lies-in-a-transposed-x", call, ValueError, r"\bout overlaps x\b"
    call = spoil("bwd", rstd=lambda a: a.dx[:, 0], out=lambda a: (a.dx, None, None))
    yield "dx-lies-in-a-strided-rstd", call, ValueError, r"\bdx overlaps rstd\b"


def _wrong_values():
    for step in ("fwd", "fused"):
        for eps in (-1e-6, float("nan"), -float("inf"), -1):
            yield f"{step}-eps-{eps}", spoil(step, eps=eps), ValueError, rf"^eps is {eps}\b"
        for eps in ("small", [1e-6], 1j):
            yield (
                f"{step}-eps-{type(eps).__name__}",
                spoil(step, eps=eps),
                TypeError,
                rf"^eps is {re.escape(repr(eps))}",
            )
    for step, first in FIRST.items():
        for casting in ("fp16", "", None, "FP32"):
            call = spoil(step, casting=casting)
            yield f"{step}-casting-{casting}", call, ValueError, rf"^casting is {casting!r}.*'fp32'.*'llama'"
        yield f"{step}-weight_offset", spoil(step, weight_offset="one"), TypeError, r"^weight_offset is 'one'"
        yield f"{step}-0-d", spoil(step, **{first: made()}), ValueError, rf"^{first} .*0-d"
        for shape in [(M, 0), (0,), (0, 0), (2, M, 0)]:
            call = spoil(step, **{first: made(*shape)})
            yield f"{step}-no-columns-{size(shape)}", call, ValueError, rf"^{first} .*{re.escape(str(shape))}"
    for rounding in ("fp16", None, "rounded"):
        call, pattern = (
            spoil("fused", residual_rounding=rounding),
            rf"^residual_rounding is {rounding!r}.*'stored'.*'fp32'",
        )
        yield f"fused-residual_rounding-{rounding}", call, ValueError, pattern
    yield "fused-residual-None", spoil("fused", residual=None), ValueError, r"residual.*None.*\brmsnorm\b"
    call = partial(fused_fwd_step, residual=None)
    yield "fused_fwd-residual-None", call, ValueError, r"residual.*None.*\brmsnorm\b"


def _cases(*tables):
    """(id, call, error, pattern) to parameters."""
    cases = [pytest.param(*case[1:], id=case[0]) for table in tables for case in table]
    return pytest.mark.parametrize(("call", "error", "pattern"), cases)


def refuse(a, call, error, pattern):
    with pytest.raises(error) as caught:
        call(a)
    assert type(caught.value) is error, f"{type(caught.value)}: {caught.value}"
    assert re.search(pattern, str(caught.value)), f"{pattern!r} is not in {str(caught.value)!r}"
    a.assert_untouched()


@_cases(_wrong_shapes(), _wrong_dtypes(), _wrong_kinds(), _wrong_outputs(), _overlaps(), _wrong_values())
def test_refused(backend, call, error, pattern):
    refuse(Operands(backend), call, error, pattern)


# ------------------------------------------------------------------------------------------------ NumPy alone


def _locked(array):
    array.flags.writeable = False
    return array


def _odd_bytes(a):
    """An output whose base is aligned to a byte only."""
    return a.keep(np.ndarray((M, N), np.float32, buffer=np.full(M * N * 4 + 1, 7, np.uint8), offset=1))


def _reversed_into_out(a):
    """x runs down from row 4 to row 2 of a base, out up from row 0 to row 2."""
    base = a.keep(random((5, N), "float32", 7))
    fwd(a, x=base[2:][::-1], out=base[:3])


def _numpy_only():
    swapped = np.dtype(np.float32).newbyteorder()
    for step, name in EACH_OPERAND:
        shape = SHAPES.get(name, (M, N))
        call, pattern = (
            spoil(step, **{name: np.ones(shape, swapped)}),
            rf"^{name} is byte-swapped.*{re.escape(swapped.str)}",
        )
        yield f"{step}-{name}-byte-swapped", call, TypeError, pattern
        call = spoil(step, **{name: np.ma.ones(shape, np.float32)})
        yield f"{step}-{name}-masked", call, TypeError, rf"^{name} is a masked array.*NumPy.*torch"
    for dtype in ("longdouble", "object", "U3", "datetime64[s]", "V8", "V0", "f4,f4"):
        call = spoil("fwd", x=np.zeros((M, N), dtype))
        yield f"fwd-x-{dtype}", call, TypeError, rf"^x is {re.escape(np.dtype(dtype).name)}"
    yield "bwd-rstd-byte-swapped", spoil("bwd", rstd=np.ones(M, swapped)), TypeError, r"^rstd is byte-swapped"
    yield "fwd-out-masked", spoil("fwd", out=np.ma.ones((M, N), np.float32)), TypeError, r"^out is a masked array"
    for step, name in EACH_OUTPUT:
        own = {"out": "y", "residual_out": "total"}.get(name, name)
        call = spoil(step, **_outputs(step, name, lambda a, own=own: _locked(getattr(a, own))))
        yield f"{step}-{name}-read-only", call, ValueError, rf"\b({name}|dx)\b.*read-only"
    yield "fwd-out-in-place-read-only", spoil("fwd", out=lambda a: _locked(a.x)), ValueError, r"^out .*read-only"
    call = spoil("fwd", out=lambda a: np.lib.stride_tricks.as_strided(a.y, (M, N), (0, 4)))
    yield "fwd-out-of-expanded-rows", call, ValueError, r"^out .*strides \(0, 1\)"
    call = spoil("fwd", out=lambda a: np.lib.stride_tricks.as_strided(a.y, (M, N), (4, 4)))
    yield "fwd-out-of-overlapping-rows", call, ValueError, r"^out .*strides \(1, 1\)"
    call = spoil(
        "fwd", out=lambda a: np.ndarray((M, N), np.float32, bytearray(M * (4 * N + 2)), strides=(4 * N + 2, 4))
    )
    yield "fwd-out-with-an-odd-pitch", call, ValueError, r"^out .*misaligned"
    yield "fwd-x-reversed-ends-in-out", _reversed_into_out, ValueError, r"\bout overlaps x\b"
    yield "fwd-out-at-an-odd-byte", spoil("fwd", out=_odd_bytes), ValueError, r"^out .*misaligned"


@_cases(_numpy_only())
def test_refused_numpy(call, error, pattern):
    refuse(Operands(_numpy_backend()), call, error, pattern)


# ------------------------------------------------------------------------------------------------ torch alone


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def on_torch():
    """Operands of torch on the host."""
    return Operands(_torch_backend("cpu"))


@pytest.mark.parametrize(("step", "name"), EACH_OPERAND)
@pytest.mark.parametrize("kind", ["sparse", "sparse_csr", "meta", "mps", "xpu"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_refused_torch_kinds(torch, on_torch, step, name, kind):
    wrong = torch.ones(SHAPES.get(name, (M, N)))
    if kind == "sparse_csr" and wrong.dim() != 2:
        pytest.skip("CSR tensors have two dimensions")
    wrong = {
        "sparse": lambda: wrong.to_sparse(),
        "sparse_csr": lambda: wrong.to_sparse_csr(),
        "meta": lambda: wrong.to("meta"),
    }.get(kind, lambda: pretend_on(torch, wrong, kind))()
    refuse(
        on_torch,
        lambda a: STEPS[step](a, **{name: wrong}),
        TypeError,
        rf"^{name} is a {kind.partition('_')[0]} tensor.*; pass .",
    )


def pretend_on(torch, tensor, device):
    """A tensor in host memory that says that it lies on another device."""
    kind = type("Elsewhere", (torch.Tensor,), {"device": property(lambda self: torch.device(device))})
    return tensor.as_subclass(kind)


@pytest.mark.parametrize(("step", "name"), EACH_OPERAND)
def test_refused_devices_apart(torch, on_torch, step, name):
    if name == FIRST[step]:
        pytest.skip("the device of the first operand is the call's")
    other = pretend_on(torch, torch.ones(SHAPES.get(name, (M, N))), "cuda:1")
    refuse(on_torch, lambda a: STEPS[step](a, **{name: other}), ValueError, rf"^{name} is on GPU 1, .* is on the host")


def test_refused_output_on_another_device(torch, on_torch):
    other = pretend_on(torch, torch.ones(M, N), "cuda:1")
    refuse(on_torch, lambda a: fwd(a, out=other), ValueError, r"^out is on GPU 1, x is on the host")


@pytest.mark.gpu
@pytest.mark.parametrize(("step", "name"), EACH_OPERAND)
def test_refused_host_and_gpu(step, name):
    if name == FIRST[step]:
        pytest.skip("the device of the first operand is the call's")
    a = Operands(_cupy_backend())
    other = np.ones(SHAPES.get(name, (M, N)), np.float32)
    refuse(a, lambda a: STEPS[step](a, **{name: other}), ValueError, rf"^{name} is on the host, .* is on GPU \d")


@pytest.mark.multi_gpu
def test_refused_two_gpus():
    import cupy

    a = Operands(_cupy_backend())
    with cupy.cuda.Device(1):
        other = cupy.ones(N, cupy.float32)
    refuse(a, lambda a: fwd(a, weight=other), ValueError, r"^weight is on GPU 1, x is on GPU 0")


def test_refused_negated_output(torch, on_torch):
    """A lazily negated tensor has its values in no memory: nothing can be written in place."""
    negated = torch.full((M, N), 1 + 1j).conj().imag
    assert negated.is_neg()
    refuse(on_torch, lambda a: fwd(a, out=negated), ValueError, r"^out ")
    assert torch.equal(negated, torch.full((M, N), -1.0))


# ------------------------------------------------------------------------------------------------ gradients


def needs_gradient(a, *names):
    for name in names:
        getattr(a, name).requires_grad_()


UNDIFFERENTIABLE = {
    "rmsnorm_fwd": (fwd_step, ("x", "weight", "bias", "y")),
    "fused_add_rmsnorm_fwd": (fused_fwd_step, ("x", "residual", "weight", "bias", "y", "total")),
    "rmsnorm_bwd": (bwd, ("x", "weight", "dout", "rstd", "bias", "dx", "dweight")),
    "fused_add_rmsnorm_bwd": (fused_bwd, ("x", "weight", "dout", "rstd", "dresidual_out", "bias", "dx", "dweight")),
}
EACH_UNDIFFERENTIABLE = [(step, name) for step, (_, names) in UNDIFFERENTIABLE.items() for name in names]


@pytest.mark.parametrize(("step", "name"), EACH_UNDIFFERENTIABLE)
def test_steps_refuse_what_needs_a_gradient(torch, on_torch, step, name):
    call = UNDIFFERENTIABLE[step][0]
    needs_gradient(on_torch, name)
    refuse(on_torch, call, RuntimeError, rf"{step}.*not differentiable.*requires a gradient.*no_grad")
    with torch.no_grad():
        call(on_torch)
    written = on_torch.dx if step.endswith("bwd") else on_torch.y
    assert not torch.equal(written, torch.full((M, N), POISON)), "under no_grad it must run"


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("step", ["fwd", "fused"])
def test_a_numpy_x_would_lose_the_gradient(torch, step, name):
    a = Operands(_numpy_backend())
    parameter = torch.full((N,), 2.0, requires_grad=True)
    refuse(
        a, lambda a: STEPS[step](a, **{name: parameter}), RuntimeError, r"(?s)x .*numpy.*gradient.*(to_torch|no_grad)"
    )
    with torch.no_grad():
        STEPS[step](a, **{name: parameter})
    assert not np.any(a.y == POISON)


def test_a_numpy_x_would_lose_the_residuals_gradient(torch):
    a = Operands(_numpy_backend())
    residual = torch.ones(M, N, requires_grad=True)
    refuse(a, lambda a: fused(a, residual=residual), RuntimeError, r"(?s)x .*numpy.*gradient")


@pytest.mark.parametrize("name", ["x", "weight", "bias"])
@pytest.mark.parametrize("given", ["out", "residual_out"])
def test_outputs_are_refused_where_a_gradient_is_needed(on_torch, name, given):
    needs_gradient(on_torch, name)
    if given == "out":
        refuse(on_torch, lambda a: fwd(a), RuntimeError, r"^out .*gradient.*no_grad")
        refuse(on_torch, lambda a: fused(a, residual_out=None), RuntimeError, r"^out .*gradient.*no_grad")
    else:
        refuse(on_torch, lambda a: fused(a, out=None), RuntimeError, r"^residual_out .*gradient.*no_grad")


@pytest.mark.parametrize("leaf", [True, False])
def test_an_output_that_requires_a_gradient_is_refused(torch, on_torch, leaf):
    """Its history would no longer tell how its values came about."""
    out = on_torch.y.requires_grad_() if leaf else on_torch.keep(on_torch.y.clone().requires_grad_() * 1.0)
    refuse(on_torch, lambda a: fwd(a, out=out), RuntimeError, r"^out .*gradient")


@pytest.mark.parametrize("step", STEPS)
def test_autograd_learns_of_what_was_overwritten(torch, on_torch, step):
    """A tensor that a graph has saved is written as an output: torch's own in-place operations count such writes, and
    its backward then refuses. Uncounted, the gradient would be silently wrong."""
    saved = {"fwd": "y", "fused": "total", "bwd": "dx", "fused_bwd": "dweight"}[step]
    leaf = torch.ones_like(getattr(on_torch, saved), requires_grad=True)
    middle = leaf * 2
    loss = (middle * middle).sum()
    with torch.no_grad():
        setattr(on_torch, saved, middle.detach())
        STEPS[step](on_torch)
    assert not torch.equal(middle, torch.full_like(middle, 2.0)), "nothing was overwritten"
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
        loss.backward()


def _differentiable():
    """What the tables above refuse must be refused alike where autograd stands in between."""
    yield "weight-shape", lambda a: fwd(a, weight=a.new((N + 1,))), ValueError, r"^weight .*14.*13"
    yield "weight-list", lambda a: fwd(a, weight=[1.0] * N), TypeError, r"^weight is a .*list.*NumPy"
    yield "weight-int", lambda a: fwd(a, weight=a.new((N,), "int32")), TypeError, r"^weight is int32"
    yield "weight-meta", lambda a: fwd(a, weight=a.weight.to("meta")), TypeError, r"^weight is a meta tensor"
    yield "weight-sparse", lambda a: fwd(a, weight=a.weight.to_sparse()), TypeError, r"^weight is a sparse tensor"
    yield (
        "weight-float64",
        lambda a: fwd(a, weight=a.new((N,), "float64")),
        TypeError,
        r"^weight is float64, x is float32",
    )
    yield "eps-negative", lambda a: fwd(a, eps=-1e-6), ValueError, r"^eps is -1e-06"
    yield "eps-str", lambda a: fwd(a, eps="small"), TypeError, r"^eps is 'small'"
    yield "weight_offset-str", lambda a: fwd(a, weight_offset="one"), TypeError, r"^weight_offset is 'one'"
    yield "casting", lambda a: fwd(a, casting="fp16"), ValueError, r"^casting is 'fp16'"
    yield "casting-fused", lambda a: fused(a, casting="fp16"), ValueError, r"^casting is 'fp16'"
    yield "out_dtype", lambda a: fwd(a, out_dtype="int8"), TypeError, r"^out_dtype is int8"
    yield "out_dtype-torch", lambda a: fwd(a, out_dtype=_torch_dtype("int8")), TypeError, r"^out_dtype is int8"
    yield "out_dtype-float64", lambda a: fwd(a, out_dtype="float64"), TypeError, r"^out_dtype is float64, x is float32"
    yield "residual_dtype", lambda a: fused(a, residual_dtype="int8"), TypeError, r"^residual_dtype is int8"
    yield (
        "residual-shape",
        lambda a: fused(a, residual=a.new((M, N - 1))),
        ValueError,
        r"^residual .*\(3, 12\).*\(3, 13\)",
    )
    yield "residual-list", lambda a: fused(a, residual=[1.0]), TypeError, r"^residual is a .*list.*NumPy"
    yield "residual-None", lambda a: fused(a, residual=None), ValueError, r"residual.*None.*\brmsnorm\b"
    yield "residual_rounding", lambda a: fused(a, residual_rounding="up"), ValueError, r"^residual_rounding is 'up'"
    yield "no-columns", lambda a: fwd(a, x=a.new((M, 0)).requires_grad_()), ValueError, r"^x .*\(3, 0\)"
    yield "0-d", lambda a: fwd(a, x=a.new(()).requires_grad_()), ValueError, r"^x .*0-d"
    yield "complex", lambda a: fwd(a, x=a.new((M, N), "complex64").requires_grad_()), TypeError, r"^x is complex64"


def _torch_dtype(name):
    import torch

    return getattr(torch, name)


@_cases(_differentiable())
def test_refused_where_autograd_stands_between(on_torch, call, error, pattern):
    needs_gradient(on_torch, "x")
    on_torch.y = on_torch.total = None
    refuse(on_torch, call, error, pattern)


@pytest.mark.parametrize("step", ["fwd", "fused"])
@pytest.mark.parametrize("constant", [True, False], ids=["constant-dout", "dout-in-the-graph"])
def test_a_second_derivative_raises(torch, on_torch, step, constant):
    needs_gradient(on_torch, "x", "weight")
    outputs = {"out": None} if step == "fwd" else {"out": None, "residual_out": None, "prenorm": False}
    y = STEPS[step](on_torch, bias=None, **outputs)
    value = y.sum() if constant else (y * y).sum()
    (dx,) = torch.autograd.grad(value, on_torch.x, create_graph=True)
    normed = on_torch.x.detach() + (on_torch.residual if step == "fused" else 0)
    dout = np.ones((M, N)) if constant else 2 * y.detach().numpy()
    assert_rows_close(dx.detach(), reference.backward(normed, on_torch.weight.detach(), dout).dx, "float32", "dx")
    with pytest.raises(RuntimeError, match=r"second derivative|not differentiable|twice"):
        torch.autograd.grad((dx * dx).sum(), on_torch.x)


# ------------------------------------------------------------------------------------------------ what a machine lacks


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    """A machine without any C++ compiler, and nothing compiled in earlier tests."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "ziglang" else find(name, *rest)
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("RMSNORM_RAW_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(host, "_compiled", Compiled())
    calls.forget()
    host._compiler.cache_clear()
    yield
    host._compiler.cache_clear()


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("step", STEPS)
def test_no_compiler(step):
    a = Operands(_numpy_backend())
    refuse(a, STEPS[step], RuntimeError, r"(?s)compiler.*g\+\+.*clang\+\+.*ziglang.*pip install 'rmsnorm-raw\[host\]'")


@pytest.mark.usefixtures("no_compiler")
def test_no_compiler_names_what_cxx_says(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler --fast")
    a = Operands(_numpy_backend())
    refuse(a, fwd, RuntimeError, r"no-such-compiler --fast.*g\+\+")


@pytest.mark.parametrize("step", ["bwd", "fused_bwd"])
def test_a_second_program_that_cannot_be_built(monkeypatch, step):
    """A backward runs two programs. Where the second cannot be had, the first has not written dx either."""
    load = host._load

    def fail(program):
        if program.kernel == "dweight_reduce":
            raise RuntimeError("no space left for dweight_reduce")
        return load(program)

    monkeypatch.setattr(host, "_compiled", Compiled())
    calls.forget()
    monkeypatch.setattr(host, "_load", fail)
    a = Operands(_numpy_backend())
    refuse(a, STEPS[step], RuntimeError, "no space left for dweight_reduce")


NO_CUPY = r"(?s)^(?=.*GPU)(?=.*CuPy).*pip install 'rmsnorm-raw\["


@pytest.fixture
def no_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    gpu_device.require_cupy.cache_clear()
    gpu_device.traits.cache_clear()
    yield
    gpu_device.require_cupy.cache_clear()
    gpu_device.traits.cache_clear()


@pytest.mark.usefixtures("no_cupy")
@pytest.mark.parametrize("step", STEPS)
def test_no_cupy(torch, on_torch, step):
    for name in ("x", "residual", "weight", "bias", "dout", "dresidual_out", "rstd"):
        setattr(on_torch, name, pretend_on(torch, getattr(on_torch, name), "cuda:0"))
    for name in ("y", "total", "dx", "dweight", "dbias"):
        setattr(on_torch, name, pretend_on(torch, getattr(on_torch, name), "cuda:0"))
    refuse(on_torch, STEPS[step], RuntimeError, NO_CUPY)


class OnDevice:
    """A DLPack object that says that it lies on a device of some type."""

    def __init__(self, device):
        self.device = device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **_):
        raise AssertionError("must not be exported")


@pytest.mark.usefixtures("no_cupy")
@pytest.mark.parametrize("kind", [2, 10])
def test_no_cupy_for_a_dlpack_object(kind):
    with pytest.raises(RuntimeError, match=NO_CUPY):
        rmsnorm_raw.rmsnorm(OnDevice((kind, 0)))


@pytest.mark.parametrize("kind", [4, 8, 14])
def test_dlpack_device_of_another_type(kind):
    with pytest.raises(TypeError, match=rf"^x .*\b{kind}\b.*NumPy.*CuPy.*torch"):
        rmsnorm_raw.rmsnorm(OnDevice((kind, 0)))
    a = Operands(_numpy_backend())
    refuse(a, lambda a: fwd(a, weight=OnDevice((kind, 0))), TypeError, rf"^weight .*\b{kind}\b")


def test_no_gpu_runtime(torch, on_torch):
    """CuPy is there, a driver or card is not."""
    pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)
    if gpu_count():
        pytest.skip("this machine has a GPU")
    for name in ("x", "weight", "bias", "y"):
        setattr(on_torch, name, pretend_on(torch, getattr(on_torch, name), "cuda:0"))
    gpu_device.traits.cache_clear()
    with pytest.raises(RuntimeError, match=r"(?i)(driver|GPU|device)") as caught:
        fwd(on_torch)
    assert re.search(r"(?i)install|check|update|nvidia-smi|rocminfo", str(caught.value)), f"no advice in {caught.value}"
    on_torch.assert_untouched()


def test_no_hipcc(monkeypatch, tmp_path):
    """CuPy starts hipcc by itself, and its own message does not say so."""
    from rmsnorm_raw import plan
    from rmsnorm_raw.program import program

    amd = plan.Traits("amd", "gfx942:sramecc+:xnack-", wave=64, units=304)
    forward = plan.plan_forward(M, N, amd, x="float32", y="float32")
    monkeypatch.setattr(gpu_device, "traits", lambda index: amd)
    cupy = SimpleNamespace(cuda=SimpleNamespace(Device=contextlib.nullcontext))
    monkeypatch.setattr(gpu_device, "require_cupy", lambda: cupy)
    monkeypatch.setattr(gpu_device, "_compiled", Compiled())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"hipcc.*PATH.*Install.*export PATH="):
        gpu_device.compile(program(forward.kernel, forward.constants), 0)


# ------------------------------------------------------------------------------------------------ allowed


@pytest.mark.parametrize("step", STEPS)
def test_exactly_in_place_is_allowed(backend, step):
    a, b = Operands(backend), Operands(backend)
    _, a.rstd = rmsnorm_raw.rmsnorm_fwd(a.x, a.weight, store_rstd=True)
    b.rstd = a.rstd
    in_place = {
        "fwd": {"out": a.x},
        "fused": {"out": a.x, "residual_out": a.residual},
        "bwd": {"out": (a.x, a.dweight, a.dbias)},
        "fused_bwd": {"out": (a.x, None, a.dweight, a.dbias)},
    }[step]
    STEPS[step](b)
    STEPS[step](a, **in_place)
    pairs = {
        "fwd": [(a.x, b.y)],
        "fused": [(a.x, b.y), (a.residual, b.total)],
        "bwd": [(a.x, b.dx), (a.dweight, b.dweight), (a.dbias, b.dbias)],
        "fused_bwd": [(a.x, b.dx), (a.dweight, b.dweight), (a.dbias, b.dbias)],
    }[step]
    for actual, expected in pairs:
        np.testing.assert_array_equal(backend.get(actual), backend.get(expected))
        assert not np.any(backend.get(actual) == POISON)


def test_columns_of_one_base_are_apart(backend):
    """x, residual and both outputs as four column blocks of one array, odd columns between them untouched."""
    a = Operands(backend)
    base = np.full((M, 4 * N + 3), POISON, np.float32)
    blocks = [slice(i * (N + 1), i * (N + 1) + N) for i in range(4)]
    base[:, blocks[0]], base[:, blocks[1]] = backend.get(a.x), backend.get(a.residual)
    shared = backend.put(base.copy())
    x, residual, out, total = (shared[:, block] for block in blocks)
    rmsnorm_raw.fused_add_rmsnorm(x, residual, a.weight, bias=a.bias, out=out, residual_out=total)
    fused(a)
    base[:, blocks[2]], base[:, blocks[3]] = backend.get(a.y), backend.get(a.total)
    np.testing.assert_array_equal(backend.get(shared), base)


def test_one_column_too_many_is_an_overlap(backend):
    """The neighbour of the test above: blocks that share their last and first column."""
    base = backend.put(random((M, 2 * N - 1), "float32", 8))
    before = backend.get(base).copy()
    with pytest.raises(ValueError, match=r"\bout overlaps x\b"):
        rmsnorm_raw.rmsnorm(base[:, :N], out=base[:, N - 1 :])
    with pytest.raises(ValueError, match=r"\bout overlaps x\b"):
        rmsnorm_raw.rmsnorm(base[:, N - 1 :], out=base[:, :N])
    np.testing.assert_array_equal(backend.get(base), before)
