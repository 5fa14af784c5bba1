"""torch: gradients against float64 and torch's own, what is and is not computed, modules, torch.compile."""

from __future__ import annotations

import gc
import importlib
import sys
import types

import numpy as np
import pytest
from conftest import assert_rows_close

import rmsnorm_raw as rr
from rmsnorm_raw import calls, libraries, ops, reference

torch = pytest.importorskip("torch", reason="torch is not installed")
autograd = importlib.import_module("rmsnorm_raw.autograd")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


def leaf(*shape, device="cpu", dtype=torch.float32, seed=0, grad=True):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_(grad)


def test_gradcheck_in_float64(device):
    x, residual, weight, bias = (
        leaf(*s, device=device, dtype=torch.float64, seed=i)
        for i, s in enumerate([(3, 4, 10), (3, 4, 10), (10,), (10,)])
    )
    assert torch.autograd.gradcheck(lambda x, w: rr.rmsnorm(x, w, 1e-5), (x, weight), fast_mode=False)
    assert torch.autograd.gradcheck(lambda x: rr.rmsnorm(x, None, 1e-5), (x,))
    assert torch.autograd.gradcheck(
        lambda x, r, w, b: rr.fused_add_rmsnorm(x, r, w, 1e-5, bias=b, weight_offset=1.0), (x, residual, weight, bias)
    )
    heads = leaf(4, 10, device=device, dtype=torch.float64, seed=7)
    assert torch.autograd.gradcheck(lambda x, w: rr.rmsnorm(x, w, 1e-5), (x, heads))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_deep_residual_stream_equals_eager_torch(device, dtype):
    def stream(norm, x, weights):
        y, residual = x, torch.zeros_like(x)
        for weight in weights:
            y, residual = norm(torch.tanh(y), residual, weight)
        return (y * y + residual).float().sum()

    def eager(y, residual, weight):
        residual = y + residual
        return torch.nn.functional.rms_norm(residual.double(), (64,), weight.double(), 1e-6).to(dtype), residual

    results = []
    for norm in (eager, lambda y, r, w: rr.fused_add_rmsnorm(y, r, w, 1e-6)):
        x = leaf(2, 5, 64, device=device, dtype=dtype)
        weights = [leaf(64, device=device, dtype=dtype, seed=i) for i in range(3)]
        loss = stream(norm, x, weights)
        loss.backward()
        results.append([loss.detach(), x.grad, *(w.grad for w in weights)])
    for ours, theirs in zip(*results, strict=True):
        scale = theirs.abs().max().float()
        assert (ours.float() - theirs.float()).abs().max() <= scale * (3e-6 if dtype == torch.float32 else 4e-2)


def noted_backward(monkeypatch):
    """What backwards from here on are asked to compute: (dx, dweight)."""
    asked, backward = [], ops._backward
    calls.forget()
    monkeypatch.setattr(ops, "_backward", lambda *a: asked.append(a[8:10]) or backward(*a))
    return asked


@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, False, True), (True, True, True)]
)
@pytest.mark.parametrize("used", ["y", "residual_out", "both"])
def test_no_needed_gradient_is_missing_and_no_other_computed(device, needs, used, monkeypatch):
    x, residual, weight = (
        leaf(*shape, device=device, seed=i, grad=grad)
        for i, (shape, grad) in enumerate(zip([(6, 32), (6, 32), (32,)], needs, strict=True))
    )
    asked = noted_backward(monkeypatch)
    y, total = rr.fused_add_rmsnorm(x, residual, weight, 1e-6)
    loss = {"y": y.sum(), "residual_out": total.sum(), "both": y.sum() + 2 * total.sum()}[used]
    loss.backward()
    dout = np.ones((6, 32), np.float32)
    added = None if used == "y" else dout * (2 if used == "both" else 1)
    h = (x + residual).detach().cpu().numpy()
    expected = reference.backward(
        h, weight.detach().cpu().numpy(), dout if used != "residual_out" else 0 * dout, dresidual_out=added
    )
    for tensor, needed in zip((x, residual), needs[:2], strict=True):
        assert (tensor.grad is not None) == needed
        if needed:
            assert_rows_close(tensor.grad.cpu().numpy(), expected.dx, "float32", "gradient")
    if needs[2] and used != "residual_out":
        np.testing.assert_allclose(weight.grad.cpu().numpy(), expected.dweight, atol=1e-4)
    else:
        assert weight.grad is None or not weight.grad.any()
    if used == "residual_out":
        assert asked == []  # the gradient passes through unchanged: no kernel, no zeros
    else:
        assert asked == [(needs[0] or needs[1], needs[2])]


def test_a_frozen_weight_and_a_constant_input_skip_their_work(device, monkeypatch):
    asked = noted_backward(monkeypatch)
    x, weight = leaf(6, 32, device=device), leaf(32, device=device, seed=1)
    rr.rmsnorm(x, weight.detach()).sum().backward()
    rr.rmsnorm(x.detach(), weight).sum().backward()
    assert asked == [(True, False), (False, True)]


def test_leaves_never_share_a_gradient(device):
    x, residual = leaf(6, 32, device=device), leaf(6, 32, device=device, seed=1)
    y, total = rr.fused_add_rmsnorm(x, residual)
    (y.sum() + total.sum()).backward()
    before = residual.grad.clone()
    x.grad.zero_()
    assert torch.equal(residual.grad, before)


def test_gradients_are_one_array_but_for_leaves(device):
    """torch would copy one of two equal gradients that come as one array to two leaves."""
    a, b, weight = leaf(6, 32, device=device), leaf(6, 32, device=device, seed=1), leaf(32, device=device, seed=2)
    for _ in range(4):
        for x, residual, arrays in ((a, b, 2), (a * 1, b * 1, 1), (a, b * 1, 1), (a, b.detach(), 1)):
            outputs = rr.fused_add_rmsnorm(x, residual, weight)
            needed = [tensor for tensor in (x, residual) if tensor.requires_grad]
            gradients = torch.autograd.grad(outputs, needed, [torch.ones_like(y) for y in outputs])
            assert len({gradient.data_ptr() for gradient in gradients}) == arrays
            assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


def test_the_incoming_gradient_is_never_written(device):
    x, weight = leaf(6, 32, device=device), leaf(32, device=device, seed=1)
    y = rr.rmsnorm(x, weight)
    dout = torch.randn_like(y)
    kept = dout.clone()
    first = torch.autograd.grad(y, x, dout, retain_graph=True)[0].clone()
    second = torch.autograd.grad(y, x, dout)[0]
    assert torch.equal(dout, kept)
    assert torch.equal(first, second)


@pytest.mark.parametrize("layout", ["expanded", "sliced", "transposed"])
def test_gradients_of_any_layout(device, layout):
    x, weight = leaf(8, 32, device=device), leaf(32, device=device, seed=1)
    dout = {
        "expanded": lambda: torch.ones(1, 1, device=device).expand(8, 32),
        "sliced": lambda: leaf(8, 64, device=device, grad=False)[:, 16:48],
        "transposed": lambda: leaf(32, 8, device=device, grad=False).t(),
    }[layout]()
    strided = torch.autograd.grad(rr.rmsnorm(x, weight), (x, weight), dout)
    plain = torch.autograd.grad(rr.rmsnorm(x, weight), (x, weight), dout.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(strided, plain, strict=True))


def test_parameters_sliced_inputs_and_more_dimensions(device):
    x = leaf(2, 3, 4, 32, device=device)
    weight = torch.nn.Parameter(leaf(64, device=device, seed=1, grad=False))[::2]
    y = rr.rmsnorm(x[:, 1:], weight)
    y.sum().backward()
    assert y.shape == (2, 2, 4, 32)
    assert x.grad[:, 0].eq(0).all()


def test_eps_reaches_the_kernel(device):
    x = leaf(4, 64, device=device) * 1e-3
    outputs = [rr.RMSNormFunction.apply(x, None, eps) for eps in (1e-5, 1e-6, 1e-2)]
    for eps, y in zip((1e-5, 1e-6, 1e-2), outputs, strict=True):
        assert_rows_close(y.detach().cpu().numpy(), reference.forward(x.detach().cpu().numpy(), None, eps).y, "float32")
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_the_second_derivative_is_refused_even_beside_another_term(device):
    x, weight = leaf(6, 32, device=device), leaf(32, device=device, seed=1)
    for y in (rr.rmsnorm(x, weight), rr.fused_add_rmsnorm(x, x * 2, weight)[0]):
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivative"):
            torch.autograd.grad(gradient.sum() + (x**3).sum(), x)


def test_graphs_that_live_at_once_have_rstds_of_their_own(device):
    """Also one that is walked through twice, with other graphs begun and ended in between."""
    weight, seen = leaf(32, device=device, seed=999), set()

    def begin(k):
        x = (leaf(6, 32, device=device, seed=k, grad=False) * (1 + k)).requires_grad_()
        y = rr.rmsnorm(x, weight, 1e-6)
        seen.add(y.grad_fn.rstd[0])
        return x, y

    def check(x, y):
        (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
        ones = np.ones((6, 32), np.float32)
        expected = reference.backward(x.detach().cpu().numpy(), weight.detach().cpu().numpy(), ones, eps=1e-6)
        assert_rows_close(gradient.cpu().numpy(), expected.dx, "float32", "dx")

    for _ in range(3):  # until the call is known
        begin(0)
    graphs = [begin(k) for k in range(150)]
    assert len({y.grad_fn.rstd[0] for _, y in graphs}) == 150
    for graph in [*graphs[::3], *graphs[::-2]]:
        check(*graph)
        check(*begin(200))
    del graphs, graph
    gc.collect()
    again = [begin(k) for k in range(150)]
    assert {y.grad_fn.rstd[1]._base is not None for _, y in again} == {True}
    assert len(seen) <= 3 + 64 * 3


@pytest.mark.parametrize(("rows", "placed"), [(6, True), (256, True), (257, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rstds_of_few_rows_share_a_tensor(device, rows, placed, dtype):
    rows = rows if dtype == torch.float32 else -(-rows // 2)
    x, weight = leaf(rows, 32, device=device, dtype=dtype), leaf(32, device=device, dtype=dtype, seed=1)
    for _ in range(3):
        y = rr.rmsnorm(x, weight, 1e-6)
    address, tensor, free = y.grad_fn.rstd
    assert (free is not None) == placed == (tensor._base is not None)
    assert address == tensor.data_ptr()
    assert tensor.dtype == dtype
    assert tensor.numel() >= rows
    expected = reference.forward(x.detach().cpu().numpy(), None, 1e-6).rstd
    np.testing.assert_allclose(tensor[:rows].cpu().numpy(), expected, rtol=1e-5)


def test_places_are_for_so_many_streams():
    library, most = libraries.library_of(torch.empty(1), "x"), autograd._Places.STREAMS
    places = autograd._Places(library, libraries.HOST, "float32", 64)
    taken = [places.more(stream) for stream in range(most + 3)]
    assert list(places.free) == list(range(most))
    assert [free is None for *_, free in taken] == [False] * most + [True] * 3
    assert {tensor.nbytes for _, tensor, _ in taken} == {64}
    address, _, free = places.more(5)
    assert free is places.free[5]
    addresses = [address, taken[5][0], *(other for other, *_ in free)]
    assert len(set(addresses)) == len(addresses) == 2 * places.COUNT
    assert not any(other % 16 for other in addresses)


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("stream", [0, 7])
def test_a_stream_that_captures_gets_no_place(monkeypatch, capturing, stream):
    """The lines that calls on a GPU are recorded with; the default stream is never asked."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: asked.append(stream) or capturing)
    monkeypatch.setattr(autograd, "_places", lambda library, _, *of: autograd._Places(library, libraries.HOST, *of))
    library, asked = libraries.library_of(torch.empty(1), "x"), []
    call = types.SimpleNamespace(library=library, device=libraries.Device("gpu", 0))
    door = types.SimpleNamespace(x=types.SimpleNamespace(dtype="float32"), rows=6)
    placed = autograd._placed(types.SimpleNamespace(call=call, door=door))
    space = placed["space"]
    exec("\n".join(["def take(here):", *placed["made"][2], "    return r2, q2"]), space)
    taken = [space["take"](stream) for _ in range(70)]
    assert all((rstd[2] is None) == (capturing and stream != 0) for rstd, _ in taken)
    assert all(rstd[0] == pointer == rstd[1].data_ptr() for rstd, pointer in taken)
    assert len({pointer for _, pointer in taken}) == 70
    assert len(asked) == (70 if stream else 0)


def test_a_call_that_fails_half_way_leaves_nothing_behind(device, monkeypatch):
    """Saving is where hooks of others may raise, as in a checkpoint that has recomputed enough."""
    unraised = []
    monkeypatch.setattr(sys, "unraisablehook", unraised.append)
    x, weight = leaf(6, 32, device=device), leaf(32, device=device, seed=1)
    for _ in range(3):
        address, *_ = rr.rmsnorm(x, weight, 1e-6).grad_fn.rstd

    def refuse(tensor):
        raise KeyError("enough")

    with torch.autograd.graph.saved_tensors_hooks(refuse, lambda packed: packed), pytest.raises(KeyError):
        rr.rmsnorm(x, weight, 1e-6)
    autograd._RMSNorm._backward_cls()  # one without an rstd
    assert unraised == []
    assert rr.rmsnorm(x, weight, 1e-6).grad_fn.rstd[0] == address


@pytest.mark.parametrize("way", ["reentrant", "not reentrant", "offloaded"])
def test_layers_that_keep_less_have_the_same_gradients(device, way):
    """Checkpoints run a forward again inside the backward; offloading hands the backward other tensors."""
    weights = [leaf(32, device=device, seed=i) for i in (1, 2)]

    def layer(x, weight):
        y, total = rr.fused_add_rmsnorm(torch.tanh(x), x, weight, 1e-6)
        return rr.rmsnorm(torch.sigmoid(y), weight, 1e-6) + total

    def run(layer):
        leaves = [leaf(6, 32, device=device), *(weight.detach().requires_grad_() for weight in weights)]
        y = leaves[0]
        for weight in leaves[1:]:
            y = layer(y, weight)
        y.square().sum().backward()
        return [tensor.grad for tensor in leaves]

    def kept_less(x, weight):
        if way == "offloaded":
            with torch.autograd.graph.save_on_cpu():
                return layer(x, weight)
        checkpoint = importlib.import_module("torch.utils.checkpoint").checkpoint
        return checkpoint(layer, x, weight, use_reentrant=way == "reentrant")

    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(run(kept_less), run(layer), strict=True))


def test_autocast_changes_nothing(device):
    x, weight = leaf(4, 32, device=device, grad=False), leaf(32, device=device, dtype=torch.bfloat16, seed=1)
    with torch.autocast(device, dtype=torch.bfloat16):
        inside = rr.rmsnorm(x, weight)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, rr.rmsnorm(x, weight))
    inside.sum().backward()
    assert weight.grad.dtype == torch.bfloat16


class TestModules:
    @pytest.mark.parametrize("shape", [(32,), (4, 32), 32])
    def test_rmsnorm_is_a_drop_in(self, device, shape):
        theirs = torch.nn.RMSNorm(shape, eps=1e-5, device=device)
        torch.nn.init.normal_(theirs.weight)
        ours = rr.RMSNorm(shape, eps=1e-5, device=device)
        ours.load_state_dict(theirs.state_dict())
        x = leaf(3, 4, 32, device=device)
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)
        assert isinstance(ours, torch.nn.RMSNorm)
        ours(x).sum().backward()
        assert ours.weight.grad.shape == theirs.weight.shape

    def test_without_affine_and_without_eps(self, device):
        ours = rr.RMSNorm(32, elementwise_affine=False, device=device)
        x = torch.full((1, 32), 0.058, dtype=torch.bfloat16, device=device)
        assert ours.weight is None
        torch.testing.assert_close(ours(x).float(), torch.ones(1, 32, device=device), rtol=0, atol=2**-8)

    def test_fused(self, device):
        norm = rr.FusedAddRMSNorm(32, eps=1e-6, device=device)
        x, residual = leaf(3, 32, device=device), leaf(3, 32, device=device, seed=1)
        y, total = norm(x, residual)
        assert torch.equal(total, x + residual)
        assert torch.equal(norm(x, residual, prenorm=False), y)
        assert torch.equal(y, rr.rmsnorm(total, norm.weight, 1e-6))

    def test_heads(self, device):
        norm = rr.RMSNorm(32, eps=1e-6, heads=4, device=device)
        torch.nn.init.normal_(norm.weight)
        x = leaf(5, 4, 32, device=device)
        expected = torch.nn.functional.rms_norm(x, (32,), None, 1e-6) * norm.weight
        torch.testing.assert_close(norm(x), expected, rtol=1e-5, atol=1e-6)
        assert "heads=4" in repr(norm)

    def test_wrong_shapes_are_named(self, device):
        with pytest.raises(ValueError, match=r"\(3, 16\).*\(32,\)"):
            rr.RMSNorm(32, device=device)(torch.zeros(3, 16, device=device))


def _block(x, residual, weight):
    y, total = rr.fused_add_rmsnorm(x, residual, weight, 1e-6)
    return rr.rmsnorm(torch.relu(y), weight, 1e-6) + total


@pytest.mark.parametrize("grad", [True, False])
def test_compiles_without_a_graph_break(device, grad):
    operands = [
        leaf(5, 16, device=device, grad=grad),
        leaf(5, 16, device=device, seed=1, grad=grad),
        leaf(16, device=device, seed=2, grad=grad),
    ]
    compiled = torch.compile(_block, fullgraph=True, backend="aot_eager")
    expected, actual = _block(*operands), compiled(*operands)
    assert torch.equal(expected, actual)
    if grad:
        theirs = torch.autograd.grad(expected.sum(), operands)
        ours = torch.autograd.grad(actual.sum(), operands)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("weight", [True, False])
def test_operators_are_sound(device, weight):
    x, w = leaf(5, 16, device=device, grad=False), leaf(16, device=device, grad=False) if weight else None
    rstd = torch.ones(5, device=device)
    torch.library.opcheck(
        torch.ops.rmsnorm_raw.forward.default, (x, x * 2, w, None, 1e-6, 0.0, "fp32", "stored", None, None, True)
    )
    for dresidual_dtype in (torch.float32, torch.bfloat16):
        torch.library.opcheck(
            torch.ops.rmsnorm_raw.backward.default,
            (x, w, x, rstd, None, None, 0.0, True, True, True, torch.float32, dresidual_dtype),
        )
