"""Recorded calls: the next call like it goes straight to the kernels, and one that is not like it never does."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import test_refusals as refusals
from conftest import assert_rows_close, random
from test_refusals import STEPS, Operands

import rmsnorm_raw as rr
from rmsnorm_raw import calls, libraries, ops, reference


@pytest.fixture(params=["as it is", "without torch's guards"])
def any_guard(request, backend, monkeypatch):
    """The backend; torch's also by attributes, as where torch has no such guards."""
    if request.param != "as it is":
        if not backend.name.startswith("torch"):
            pytest.skip("only torch has guards")
        monkeypatch.setattr(libraries, "_tensor_guard", lambda torch, tensors: None)
    monkeypatch.setattr(calls, "_KNOWN", {})
    return backend


@pytest.fixture
def straight(monkeypatch):
    """From when it is called on, calls that go the long way fail."""

    def only() -> None:
        def door(*_):
            raise AssertionError("this call went the long way")

        monkeypatch.setattr(ops, "Door", door)

    return only


TABLES = (
    refusals._wrong_shapes, refusals._wrong_dtypes, refusals._wrong_kinds, refusals._wrong_outputs,
    refusals._overlaps, refusals._wrong_values,
)  # fmt: skip


def test_refused_after_a_thousand_good_calls(any_guard):
    good = Operands(any_guard)
    for call in STEPS.values():
        for _ in range(1000):
            call(good)
    for table in TABLES:
        for name, call, error, pattern in table():
            try:
                refusals.refuse(Operands(any_guard), call, error, pattern)
            except pytest.skip.Exception:
                continue
            except BaseException as failure:
                failure.add_note(f"in the case {name}")
                raise


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("given", [True, False], ids=["out=", "allocated"])
def test_the_third_call_goes_straight(any_guard, straight, step, given):
    a = Operands(any_guard)
    changes = {} if given else {"out": None, **({"residual_out": None} if step == "fused" else {})}
    first = STEPS[step](a, **changes)
    expected = [None if result is None else any_guard.get(result).copy() for result in _tuple(first)]
    STEPS[step](a, **changes)
    straight()
    again = STEPS[step](a, **changes)
    for result, wanted in zip(_tuple(again), expected, strict=True):
        assert (result is None) == (wanted is None)
        if wanted is not None:
            np.testing.assert_array_equal(any_guard.get(result), wanted)


def _tuple(results):
    return results if isinstance(results, tuple) else (results,)


def test_eps_and_offset_are_those_of_the_call(any_guard, straight):
    x, weight = random((6, 64), "float32", 1), random((64,), "float32", 2)
    there = any_guard.put(x), any_guard.put(weight)
    for _ in range(2):
        rr.rmsnorm(*there, 1e-3, weight_offset=0.5)
    straight()
    for eps, offset in ((1e-6, 1.0), (None, 0.25), (0.5, 0.5)):
        y = rr.rmsnorm(*there, eps, weight_offset=offset)
        expected = reference.forward(x, weight + np.float32(offset), ops.FLOAT32_EPS if eps is None else eps).y
        assert_rows_close(any_guard.get(y), expected, "float32")


def test_another_alignment_is_another_call(any_guard):
    base, weight = random((6 * 64 + 8,), "float32", 1), random((64,), "float32", 2)
    there, w = any_guard.put(base), any_guard.put(weight)
    for start in (0, 1, 0, 2, 4, 3, 0):
        x = there[start : start + 6 * 64].reshape(6, 64)
        for _ in range(4):
            y = any_guard.get(rr.rmsnorm(x, w, 1e-6))
        expected = reference.forward(base[start : start + 6 * 64].reshape(6, 64), weight).y
        assert_rows_close(y, expected, "float32")


@pytest.mark.parametrize("given", ["dx", "dresidual", "both"])
def test_one_gradient_given_as_either(any_guard, straight, given):
    a = Operands(any_guard)

    def call(dx, dresidual):
        return refusals.fused_bwd(a, out=(dx, dresidual, a.dweight, a.dbias))

    arrays = {"dx": (a.dx, None), "dresidual": (None, a.dx), "both": (a.dx, a.dx)}[given]
    expected = any_guard.get(call(None, None)[0]).copy()
    for attempt in range(4):
        dx, dresidual, *_ = call(*arrays)
        assert dx is dresidual is a.dx
        np.testing.assert_array_equal(any_guard.get(dx), expected)
        if attempt == 1:
            with pytest.raises(ValueError, match="one array"):
                call(a.dx, a.dresidual)
            straight()


@pytest.mark.parametrize("dresidual", [True, False])
def test_two_gradients_are_two_arrays(any_guard, dresidual):
    """Of two dtypes: what was given for one must not be taken for the other."""
    a = Operands(any_guard)
    own = a.new((refusals.M, refusals.N), "float16") if dresidual else None
    for _ in range(4):
        dx, other, *_ = refusals.fused_bwd(
            a, dresidual_dtype="float16", out=(None if dresidual else a.dx, own, None, None)
        )
        assert dx is not other
        assert (other is own) == dresidual
        assert str(dx.dtype).endswith("float32")
        assert str(other.dtype).endswith("float16")
        np.testing.assert_allclose(any_guard.get(dx), any_guard.get(other).astype(np.float32), rtol=1e-3, atol=1e-3)


def test_workspace_is_checked_in_every_call(any_guard):
    x, dout = (any_guard.put(random((300, 64), "float32", seed)) for seed in (1, 2))
    weight, rstd = any_guard.put(random((64,), "float32", 3)), any_guard.put(np.ones(300, np.float32))
    needed = rr.workspace_bytes(x, weight)
    assert needed
    workspace = any_guard.put(np.zeros(needed // 4 + 8, np.float32))
    expected = rr.rmsnorm_bwd(x, weight, dout, rstd)
    for _ in range(4):
        got = rr.rmsnorm_bwd(x, weight, dout, rstd, workspace=workspace)
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_array_equal(any_guard.get(one), any_guard.get(other))
        with pytest.raises(ValueError, match="workspace has"):
            rr.rmsnorm_bwd(x, weight, dout, rstd, workspace=workspace[:16])
        with pytest.raises(ValueError, match="workspace has"):
            rr.rmsnorm_bwd(x, weight, dout, rstd, workspace=workspace[1:])
        with pytest.raises(ValueError, match="workspace overlaps x"):
            rr.rmsnorm_bwd(x, weight, dout, rstd, workspace=x)


def test_read_only_after_writable():
    x, out = random((4, 64), "float32", 1), np.empty((4, 64), np.float32)
    for _ in range(4):
        rr.rmsnorm(x, out=out)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        rr.rmsnorm(x, out=out)


def test_a_gradient_is_refused_after_calls_without(any_guard):
    if not any_guard.name.startswith("torch"):
        pytest.skip("only torch has gradients")
    import torch

    a = Operands(any_guard)
    out = torch.empty_like(a.x).requires_grad_()
    with torch.no_grad():
        for _ in range(4):
            rr.rmsnorm(a.x, a.weight, out=out)
    with pytest.raises(RuntimeError, match="gradient"):
        rr.rmsnorm(a.x, a.weight, out=out)
    weight = torch.nn.Parameter(a.weight.clone())
    with torch.no_grad():
        for _ in range(4):
            rr.rmsnorm_fwd(a.x, weight)
    with pytest.raises(RuntimeError, match="not differentiable"):
        rr.rmsnorm_fwd(a.x, weight)
    assert rr.rmsnorm(a.x, weight).requires_grad


def test_torch_states_that_guards_tell_apart(any_guard):
    """Autocast and inference mode change a tensor's dispatch keys: other guards, the same results."""
    if not any_guard.name.startswith("torch"):
        pytest.skip("only torch has such states")
    import torch

    a = Operands(any_guard)
    expected = rr.rmsnorm(a.x, a.weight)
    for _ in range(4):
        with torch.autocast(a.x.device.type, dtype=torch.bfloat16):
            assert torch.equal(rr.rmsnorm(a.x, a.weight), expected)
        with torch.inference_mode():
            assert torch.equal(rr.rmsnorm(a.x, a.weight), expected)
            assert torch.equal(rr.rmsnorm(a.x.clone(), a.weight.clone()), expected)
        assert torch.equal(rr.rmsnorm(a.x, a.weight), expected)


def test_another_device_is_current():
    """The call switches to its own before it allocates, also where operands are absent."""
    current, launched = [0], []

    @contextlib.contextmanager
    def switch(index):
        before, current[0] = current[0], index
        yield
        current[0] = before

    def make():
        assert current == [1]
        return np.empty(3, np.float32)

    def launch(arguments, stream):
        launched.append((current[0], *arguments))

    x = np.ones(3, np.float32)
    call = calls.Call(
        libraries._NUMPY, libraries.Device("gpu", 1), (lambda: current[0], switch), [make, None], None,
        [(launch, ("p0", "p1", "q0", "q1", 7, "eps", "offset"))], (x, None), (None, None, None),
    )  # fmt: skip
    first, _ = call.run((x.ctypes.data, 0), (None, None, None), 1e-6, 0.5)
    second, _ = call.recall()(x, None, None, None, None, None, 0.5)
    results = (first.ctypes.data, second.ctypes.data)
    assert launched == [(1, x.ctypes.data, 0, y, 0, 7, eps, 0.5) for y, eps in zip(results, (1e-6, 0.0), strict=True)]
    assert current == [0]


def test_nothing_is_kept_alive(any_guard):
    """A recorded call knows arrays by their properties, not by holding them."""
    import gc
    import weakref

    a = Operands(any_guard)
    for call in STEPS.values():
        for _ in range(4):
            call(a)
    seen = [weakref.ref(array) for array in (a.x, a.weight, a.y, a.dweight)]
    del a
    gc.collect()
    assert [ref() for ref in seen] == [None] * 4


@pytest.mark.gpu
def test_launches_through_raw_kernel(monkeypatch, backend):
    """Where CuPy's driver module has no launchKernel."""
    if backend.name not in ("cupy", "torch-gpu"):
        pytest.skip("launches on a GPU")
    import cupy

    from rmsnorm_raw.devices import cupy as gpu

    prepare = gpu.prepare
    monkeypatch.setattr(calls, "_KNOWN", {})
    monkeypatch.delattr(cupy.cuda.driver, "launchKernel")
    made = []
    monkeypatch.setattr(gpu, "prepare", lambda *a: made.append(prepare(*a)) or made[-1])
    x, weight, dout = (random(shape, "bfloat16", 1) for shape in ((300, 256), (256,), (300, 256)))
    there = [backend.put(array) for array in (x, weight, dout)]
    for _ in range(2):
        y, rstd = rr.rmsnorm_fwd(*there[:2], 1e-6, True)
        dx, dweight = rr.rmsnorm_bwd(*there, rstd)
    assert made
    assert not any(hasattr(launch, "inline") for launch in made)
    assert_rows_close(backend.get(y), reference.forward(x, weight).y, "bfloat16")
    assert_rows_close(backend.get(dx), reference.backward(x, weight, dout).dx, "bfloat16")
    assert dweight is not None
