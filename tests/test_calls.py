"""Recorded calls: the next call like it goes straight to the kernels, and one that is not like it never does."""

from __future__ import annotations

import contextlib
import gc
import weakref
from functools import partial

import numpy as np
import pytest
import test_refusals as refusals
from conftest import assert_rows_close, assert_sums_close, random
from test_refusals import STEPS, Operands

import rmsnorm_raw as rr
from rmsnorm_raw import calls, libraries, ops, reference
from rmsnorm_raw.devices import Launch


@pytest.fixture(params=["as it is", "without torch's guards"])
def any_guard(request, backend, monkeypatch):
    """The backend; torch's also by attributes, as where torch has no such guards."""
    if request.param != "as it is":
        if not backend.name.startswith("torch"):
            pytest.skip("only torch has guards")
        monkeypatch.setattr(libraries, "_tensor_guard", lambda torch, tensors: None)
    calls.forget()
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
    values = ((1e-6, 1.0), (None, 0.25), (0.5, 0.5), (0.5, 0.25), (1e-6, 0.0))
    for number, (eps, offset) in enumerate(2 * values):
        if number == len(values):
            straight()
        for _ in range(3):
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


# ------------------------------------------------------------------------------------------------ under autograd


@pytest.fixture
def torch_only(any_guard):
    if not any_guard.name.startswith("torch"):
        pytest.skip("only torch has gradients")
    return any_guard


class Training:
    """A step of either operation, from values; `check` compares what it gave with the reference."""

    def __init__(self, backend, fused, shape=(6, 64), **options):
        self.backend, self.fused, self.options = backend, fused, options
        self.values = [random(s, "float32", i) for i, s in enumerate((shape, shape, shape[-1:], shape, shape))]
        self.x, self.residual, self.weight = (backend.put(v).requires_grad_() for v in self.values[:3])
        self.dout, self.added = (backend.put(v) for v in self.values[3:])

    def forward(self):
        if self.fused:
            return rr.fused_add_rmsnorm(self.x, self.residual, self.weight, 1e-6, **self.options)
        return rr.rmsnorm(self.x, self.weight, 1e-6, **self.options)

    def backward(self, outputs, **options):
        import torch

        torch.autograd.backward(outputs, (self.dout, self.added) if self.fused else self.dout, **options)

    def clear(self):
        for leaf in (self.x, self.residual, self.weight):
            leaf.grad = None

    def step(self):
        self.clear()
        outputs = self.forward()
        self.backward(outputs)
        return outputs

    def check(self, outputs):
        x, residual, weight, dout, added = self.values
        h = x + residual if self.fused else x
        expected = reference.backward(h, weight, dout, dresidual_out=added if self.fused else None)
        y = outputs[0] if self.fused else outputs
        assert_rows_close(self.backend.get(y), reference.forward(h, weight).y, "float32", "y")
        for leaf in (self.x, self.residual) if self.fused else (self.x,):
            assert_rows_close(self.backend.get(leaf.grad), expected.dx, "float32", "dx")
        rows = self.values[0].shape[0]
        assert_sums_close(self.backend.get(self.weight.grad), expected.dweight, "float32", rows, np.abs(dout).max())


@pytest.fixture(params=[False, True], ids=["plain", "fused"])
def recorded(torch_only, request):
    """A training step of which both directions are recorded."""
    training = Training(torch_only, request.param)
    for _ in range(4):
        training.check(training.step())
    return training


def test_training_goes_straight(recorded, straight):
    straight()
    recorded.check(recorded.step())
    other = Training(recorded.backend, recorded.fused)
    other.check(other.step())


def test_what_needs_a_gradient_is_seen_in_every_call(recorded):
    """Frozen and thawed leaves, modes, and a graph that is asked for, all after calls that went straight."""
    import torch

    a = recorded
    a.weight.requires_grad_(False)
    for _ in range(4):
        a.step()
        assert a.weight.grad is None
        assert a.x.grad is not None
    a.weight.requires_grad_()
    a.x.requires_grad_(False)
    for _ in range(4):
        outputs = a.step()
        assert a.x.grad is None
        assert a.weight.grad is not None
    a.x.requires_grad_()
    with torch.no_grad():
        for _ in range(4):
            outputs = a.forward()
            assert not any(tensor.requires_grad for tensor in _tuple(outputs))
    with torch.inference_mode():
        for _ in range(4):
            assert not any(tensor.requires_grad for tensor in _tuple(a.forward()))
    outputs = a.forward()
    gradient = torch.autograd.grad(_tuple(outputs)[0], a.x, a.dout, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="second derivative"):
        gradient.sum().backward()
    a.check(a.step())


def test_a_gradient_is_asked_for_in_part(recorded):
    import torch

    a = recorded
    for wanted in (a.x, a.weight, a.x, a.weight):
        outputs = _tuple(a.forward())
        douts = (a.dout, a.added)[: len(outputs)]
        (gradient,) = torch.autograd.grad(outputs, wanted, douts)
        a.step()
        assert torch.equal(gradient, wanted.grad)
    a.check(a.step())


def test_gradients_come_in_all_layouts(recorded):
    """A gradient that is expanded, transposed, or off a multiple of 16 bytes, after those that went straight."""
    import torch

    a = recorded
    plain = a.dout
    off = torch.empty(plain.numel() + 1, device=plain.device)[1:].view(plain.shape).copy_(plain)
    for dout in (plain.t().contiguous().t(), off, plain):
        for _ in range(4):
            a.dout = dout
            a.check(a.step())
    ones = torch.ones_like(plain)
    expanded, contiguous = (
        torch.autograd.grad(_tuple(a.forward())[0], a.x, dout)[0] for dout in (ones[:1, :1].expand(6, 64), ones)
    )
    assert torch.equal(expanded, contiguous)


def test_one_result_is_used_in_turn(torch_only, straight):
    """The layers of a model share what is recorded, but the last one's residual_out is of no use to anyone."""
    import torch

    a = Training(torch_only, True)
    expected = {}
    for turn in range(8):
        if turn == 6:
            straight()
        for use in ("both", "y"):
            y, total = a.forward()
            outputs, douts = ((y, total), (a.dout, a.added)) if use == "both" else ((y,), (a.dout,))
            gradients = torch.autograd.grad(outputs, (a.x, a.weight), douts)
            for one, other in zip(gradients, expected.setdefault(use, gradients), strict=True):
                assert torch.equal(one, other)
    assert not torch.equal(expected["both"][0], expected["y"][0])
    y, total = a.forward()
    (gradient,) = torch.autograd.grad(total, a.residual, a.added)
    assert torch.equal(gradient, a.added)


def test_saved_tensors_are_watched(recorded):
    """A write to what a backward needs, and memory that was exchanged behind autograd's back."""
    import torch

    a = recorded
    outputs = a.forward()
    with torch.no_grad():
        a.weight.mul_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        a.backward(outputs)
    outputs = a.forward()
    a.weight.data = torch.full((32,), 2.0, device=a.weight.device)
    with pytest.raises((ValueError, RuntimeError)):
        a.backward(outputs)
    a.weight.data = a.backend.put(a.values[2])
    a.check(a.step())
    outputs = a.forward()
    a.backward(outputs, retain_graph=True)
    a.clear()
    a.backward(outputs)
    a.check(outputs)


def test_transforms_are_refused_after_calls_that_went_straight(recorded):
    """torch refuses Functions of this kind under its transforms, of operands that are plain tensors too."""
    import torch

    def loss(x):
        return x.sum() + _tuple(recorded.forward())[0].sum()

    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(loss)(torch.ones(3))
    recorded.check(recorded.step())


def test_a_tangent_is_refused_after_calls_that_went_straight(recorded):
    import torch
    from torch.autograd import forward_ad

    a = recorded
    weight, rstd = a.weight.detach(), torch.ones(6, device=a.x.device)
    calls_of = (
        lambda x: rr.rmsnorm(x, weight), lambda x: rr.fused_add_rmsnorm(a.dout, x, weight),
        lambda x: rr.rmsnorm_fwd(x, weight), lambda x: rr.rmsnorm_bwd(x, weight, a.dout, rstd),
        lambda x: rr.rmsnorm(x, a.weight), lambda x: rr.rmsnorm(a.dout, x[0]),
    )  # fmt: skip
    for call in calls_of:
        for _ in range(4):
            call(a.added)
        with forward_ad.dual_level():
            call(a.added)  # no tangent
            with pytest.raises(RuntimeError, match="has a tangent"):
                call(forward_ad.make_dual(a.added, a.dout))
        call(a.added)


def test_functions_by_themselves(torch_only, straight):
    """`RMSNormFunction.apply` as others' modules call it."""
    import torch

    a = Training(torch_only, True)
    for turn in range(6):
        if turn == 4:
            straight()
        a.clear()
        outputs = rr.FusedAddRMSNormFunction.apply(a.x, a.residual, a.weight, 1e-6)
        a.backward(outputs)
        a.check(outputs)
        y = rr.RMSNormFunction.apply(a.x, a.weight, 1e-6)
        (gradient,) = torch.autograd.grad(y, a.weight, a.dout)
        assert gradient.shape == a.weight.shape


def test_a_compiled_backward_of_an_eager_forward(recorded):
    """torch's compiled autograd reads the contexts of Functions, and gives them tensors that have no memory."""
    import torch

    for _ in range(2):
        recorded.clear()
        outputs = recorded.forward()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
            recorded.backward(outputs)
        recorded.check(outputs)
    recorded.check(recorded.step())


def test_compiled_code_does_not_watch_what_is_recorded(torch_only):
    """New shapes in eager code next to it are recorded, and must not make torch.compile start again."""
    import torch

    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x, w: rr.rmsnorm(x, w, 1e-6) * 2, backend=count, fullgraph=True)
    a = Training(torch_only, False)
    expected = rr.rmsnorm(a.x, a.weight, 1e-6) * 2
    for rows in range(1, 6):
        assert torch.equal(compiled(a.x, a.weight), expected)
        for _ in range(3):
            rr.rmsnorm(a.x[:rows], a.weight, 1e-6)
            rr.rmsnorm(a.x[:rows].detach(), a.weight.detach(), 1e-6)
    assert len(graphs) == 1


# ------------------------------------------------------------------------------------------------ options


def test_an_eps_that_may_change_is_read_in_every_call(backend):
    x, weight = (backend.put(random(shape, "float32", 1)) for shape in ((6, 64), (64,)))
    eps = np.array(1e-6)
    first = [backend.get(rr.rmsnorm(x, weight, eps)) for _ in range(4)][-1]
    eps[...] = 10.0
    second = backend.get(rr.rmsnorm(x, weight, eps))
    expected = reference.forward(random((6, 64), "float32", 1), random((64,), "float32", 1), 10.0).y
    assert_rows_close(second, expected, "float32")
    assert not np.array_equal(first, second)


def test_options_that_are_equal_but_not_the_same(backend, straight):
    """Strings that were put together at run time, numbers of other types, lists for tuples."""
    calls.forget()
    x, weight = (backend.put(random(shape, "float32", 1)) for shape in ((6, 64), (64,)))

    def llama():
        return "".join(["lla", "ma"])

    expected = backend.get(rr.rmsnorm(x, weight, casting="llama", weight_offset=1.0))
    for offset in (1.0, 1, np.float64(1.0), True, 1.0):
        for _ in range(3):
            y = rr.rmsnorm(x, weight, casting=llama(), weight_offset=offset)
            np.testing.assert_array_equal(backend.get(y), expected)
    kept = llama()
    for _ in range(2):
        rr.rmsnorm(x, weight, casting=kept, weight_offset=1.0)
    straight()
    np.testing.assert_array_equal(backend.get(rr.rmsnorm(x, weight, casting=kept, weight_offset=1.0)), expected)


# ------------------------------------------------------------------------------------------------ devices


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
    arguments = ("p_x", "p_residual", "q0", "q1", 7, 0.5)
    call = calls.Call(
        libraries._NUMPY, libraries.Device("gpu", 1), (lambda: current[0], switch), [partial(make), None], None,
        [(Launch(launch), arguments)], {"x": x, "residual": None}, {"out": None, "residual_out": None},
    )  # fmt: skip
    first, _ = call.run({"x": x.ctypes.data, "residual": 0})
    second = call.recall(calls.Written(["x"], [], "{0}"))(x)
    results = (first.ctypes.data, second.ctypes.data)
    assert launched == [(1, x.ctypes.data, 0, y, 0, 7, 0.5) for y in results]
    assert current == [0]


def test_nothing_is_kept_alive(any_guard):
    """A recorded call knows arrays by their properties, not by holding them."""
    a = Operands(any_guard)
    for call in STEPS.values():
        for _ in range(4):
            call(a)
    seen = [weakref.ref(array) for array in (a.x, a.weight, a.y, a.dweight)]
    if any_guard.name.startswith("torch"):
        trainings = [Training(any_guard, fused) for fused in (False, True)]
        for training in trainings:
            seen += [weakref.ref(tensor) for _ in range(4) for tensor in _tuple(training.step())]
            seen += [weakref.ref(tensor) for tensor in (training.x, training.weight.grad, training.dout)]
        del training, trainings
    del a
    gc.collect()
    assert [ref() for ref in seen] == [None] * len(seen)


@pytest.mark.gpu
def test_launches_through_raw_kernel(monkeypatch, backend):
    """Where CuPy's driver module has no launchKernel."""
    if backend.name not in ("cupy", "torch-gpu"):
        pytest.skip("launches on a GPU")
    import cupy

    from rmsnorm_raw.devices import cupy as gpu

    prepare = gpu.prepare
    calls.forget()
    monkeypatch.delattr(cupy.cuda.driver, "launchKernel")
    made = []
    monkeypatch.setattr(gpu, "prepare", lambda *a: made.append(prepare(*a)) or made[-1])
    x, weight, dout = (random(shape, "bfloat16", 1) for shape in ((300, 256), (256,), (300, 256)))
    there = [backend.put(array) for array in (x, weight, dout)]
    for _ in range(2):
        y, rstd = rr.rmsnorm_fwd(*there[:2], 1e-6, True)
        dx, dweight = rr.rmsnorm_bwd(*there, rstd)
    assert made
    assert {type(launch) for launch in made} == {Launch}
    assert_rows_close(backend.get(y), reference.forward(x, weight).y, "bfloat16")
    assert_rows_close(backend.get(dx), reference.backward(x, weight, dout).dx, "bfloat16")
    assert dweight is not None
