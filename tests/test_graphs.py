"""CUDA graphs: replay with new data, no allocation, no synchronisation, scratch of one's own, nothing sticky."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import assert_rows_close, assert_sums_close, random

import rmsnorm_raw as rr
from rmsnorm_raw import calls, reference

pytestmark = pytest.mark.gpu

M, N = 512, 1024  # enough rows for a backward with partial sums in scratch


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


def values(seed):
    """x, residual, dout, weight."""
    return tuple(random(shape, "float32", seed + i) for i, shape in enumerate(((M, N), (M, N), (M, N), (N,))))


def assert_right(x, weight, dout, y, dx, dweight):
    expected = reference.backward(x, weight, dout)
    assert_rows_close(y, reference.forward(x, weight).y, "float32", "y")
    assert_rows_close(dx, expected.dx, "float32", "dx")
    assert_sums_close(dweight, expected.dweight, "float32", M, np.abs(dout).max())


def test_the_first_call_after_warmup_may_be_captured(torch, monkeypatch):
    """Neither a compilation nor a module that is loaded then disturbs a capture."""
    calls.forget()
    shape = (96, 1536)
    rr.warmup([shape], "float32", device="gpu", progress=False)
    x, weight = torch.empty(shape, device="cuda"), torch.empty(shape[1:], device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, rstd = rr.rmsnorm_fwd(x, weight, 1e-6, True)
        dx, dweight = rr.rmsnorm_bwd(x, weight, x, rstd)
    for seed in (1, 2):
        a, b = random(shape, "float32", seed), random(shape[1:], "float32", seed + 2)
        x.copy_(torch.from_numpy(a))
        weight.copy_(torch.from_numpy(b))
        graph.replay()
        torch.cuda.synchronize()
        assert_rows_close(y.cpu().numpy(), reference.forward(a, b).y, "float32")
        expected = reference.backward(a, b, a)
        assert_rows_close(dx.cpu().numpy(), expected.dx, "float32")
        assert_sums_close(dweight.cpu().numpy(), expected.dweight, "float32", shape[0], np.abs(a).max())


def test_autograd_in_a_graph(torch):
    x, residual, dout, weight = (torch.from_numpy(v).cuda() for v in values(1))
    leaves = [tensor.requires_grad_() for tensor in (x, residual, weight)]

    def step():
        y, total = rr.fused_add_rmsnorm(x, residual, weight)
        torch.autograd.backward((rr.rmsnorm(y, weight), total), (dout, dout))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    for leaf in leaves:
        leaf.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    captured = [leaf.grad for leaf in leaves]
    for seed in (7, 11):
        with torch.no_grad():
            for tensor, new in zip((x, residual, dout, weight), values(seed), strict=True):
                tensor.copy_(torch.from_numpy(new))
        graph.replay()
        torch.cuda.synchronize()
        replayed = [gradient.clone() for gradient in captured]
        for leaf in leaves:
            leaf.grad = None
        step()
        assert all(torch.equal(leaf.grad, gradient) for leaf, gradient in zip(leaves, replayed, strict=True))


def test_what_is_captured_has_an_rstd_of_its_own(torch):
    """On a stream where calls before and between the replays share one tensor for theirs."""
    x, _, dout, weight = (torch.from_numpy(v).cuda() for v in values(1))
    x, dout = (tensor[:8].contiguous() for tensor in (x, dout))
    x.requires_grad_()
    weight.requires_grad_()
    side = torch.cuda.Stream()

    def step(x, dout):
        y = rr.rmsnorm(x, weight)
        rstd = y.grad_fn.rstd
        return rstd, torch.autograd.grad(y, (x, weight), dout)

    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(4):
            (address, _, free), _ = step(x, dout)
    assert free is not None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        rstd, captured = step(x, dout)
    assert rstd[2] is None
    assert rstd[0] != address
    for seed in (7, 11):
        with torch.no_grad(), torch.cuda.stream(side):
            for tensor, new in zip((x, dout, weight), (values(seed)[i] for i in (0, 2, 3)), strict=True):
                tensor.copy_(torch.from_numpy(new[: len(tensor)] if tensor.ndim == 2 else new))
        other = torch.full_like(x, 1e3).requires_grad_()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            alive = [rr.rmsnorm(other, weight) for _ in range(100)]
            graph.replay()
            expected = step(x, dout)[1]
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
        del alive


class Allocations:
    """Counts a block's allocations from CuPy's pool."""

    def __enter__(self):
        import cupy

        self.count = 0
        counter = self

        class Hook(cupy.cuda.MemoryHook):
            name = "count"

            def malloc_preprocess(self, **_):
                counter.count += 1

        self.hook = Hook()
        self.hook.__enter__()
        return self

    def __exit__(self, *error):
        self.hook.__exit__(*error)


def owned(put, empty):
    """A step whose every array is the caller's, and its arrays: x, dout, weight, y, dx, dweight."""
    x, _, dout, weight = (put(v) for v in values(1))
    y, dx, dweight = empty((M, N)), empty((M, N)), empty((N,))
    _, rstd = rr.rmsnorm_fwd(x, weight, 1e-6, True)
    workspace = empty((rr.workspace_bytes(x, weight) // 4,))
    assert workspace.shape[0]

    def step():
        rr.rmsnorm(x, weight, out=y)
        rr.rmsnorm_bwd(x, weight, dout, rstd, out=(dx, dweight), workspace=workspace)

    return step, (x, dout, weight, y, dx, dweight, rstd)


def test_cupy_captures_without_allocating():
    """A synchronisation inside would end the capture with an error."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        step, (x, dout, weight, y, dx, dweight, rstd) = owned(cupy.asarray, lambda shape: cupy.empty(shape, np.float32))
        step()
        stream.synchronize()
        with Allocations() as allocations:
            stream.begin_capture()
            step()
            graph = stream.end_capture()
        assert allocations.count == 0
        for seed in (5, 9):
            new, _, new_dout, new_weight = values(seed)
            for array, fresh in ((x, new), (dout, new_dout), (weight, new_weight)):
                array.set(fresh)
            rstd[...] = rr.rmsnorm_fwd(x, weight, 1e-6, True)[1]
            graph.launch(stream)
            stream.synchronize()
            assert_right(new, new_weight, new_dout, y.get(), dx.get(), dweight.get())


def test_torch_captures_without_allocating(torch):
    step, (x, dout, weight, y, dx, dweight, rstd) = owned(
        lambda v: torch.from_numpy(v).cuda(), lambda shape: torch.empty(shape, device="cuda")
    )
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        step()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    new, _, new_dout, new_weight = values(5)
    for tensor, fresh in ((x, new), (dout, new_dout), (weight, new_weight)):
        tensor.copy_(torch.from_numpy(fresh))
    rstd.copy_(rr.rmsnorm_fwd(x, weight, 1e-6, True)[1])
    graph.replay()
    torch.cuda.synchronize()
    assert_right(new, new_weight, new_dout, *(t.cpu().numpy() for t in (y, dx, dweight)))


def test_nothing_synchronises(torch):
    import cupy

    step, _ = owned(lambda v: torch.from_numpy(v).cuda(), lambda shape: torch.empty(shape, device="cuda"))
    leaf = torch.ones(M, N, device="cuda", requires_grad=True)

    def all_of_it():
        step()
        leaf.grad = None
        rr.rmsnorm(leaf).backward(leaf.detach())

    for _ in range(3):  # so that torch's pool has all it needs: cudaMalloc may wait for the device
        all_of_it()
    torch.cuda.synchronize()
    ended = torch.cuda.Event()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(1_000_000_000)  # half a second: whoever waited for the device would find it done
        ended.record()
        all_of_it()
        assert not ended.query()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.synchronize()
    assert cupy.cuda.runtime.getDevice() == 0


def test_two_replays_at_once_have_scratch_of_their_own(torch):
    """Two captured backwards, on two streams at the same time, many times over."""
    graphs, inputs, results = [], [], []
    for seed in (1, 21):
        x, _, dout, weight = (torch.from_numpy(v).cuda() for v in values(seed))
        _, rstd = rr.rmsnorm_fwd(x, weight, 1e-6, True)
        rr.rmsnorm_bwd(x, weight, dout, rstd)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                dx, dweight = rr.rmsnorm_bwd(x, weight, dout, rstd)
        graphs.append(graph)
        inputs.append((x, weight, dout, rstd))
        results.append((dx, dweight))
    expected = [rr.rmsnorm_bwd(*operands) for operands in inputs]
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for got, wanted in zip(results, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_refusals_leave_no_error_behind(torch):
    """hipGetLastError is sticky on ROCm 7: what a refused call left would break the next launch of anyone."""
    import cupy

    for library in (cupy, torch):
        x = cupy.ones((4, 64), np.float32) if library is cupy else torch.ones(4, 64, device="cuda")
        for bad in (
            lambda x=x: rr.rmsnorm(x, x[0, :63]),
            lambda x=x: rr.rmsnorm(x, np.ones(64, np.float32)),
            lambda x=x: rr.rmsnorm(x, eps=-1.0),
            lambda x=x: rr.rmsnorm(x, out=x[:3]),
            lambda x=x: rr.rmsnorm_bwd(x, None, x, x),
        ):
            for _ in range(2):
                with pytest.raises((ValueError, TypeError)):
                    bad()
                # torch reports an error that anyone left at its next launch
                torch.ones(8, device="cuda").add_(1)
                torch.cuda.synchronize()
                cupy.cuda.runtime.deviceSynchronize()
        y = rr.rmsnorm(x)
        assert abs(float(y[0, 0]) - 1) < 1e-5
