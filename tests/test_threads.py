"""Many threads and several devices at once: each call on its own thread's stream, with buffers of its own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import assert_rows_close, assert_sums_close, random

import rmsnorm_raw as rr
from rmsnorm_raw import calls, reference

THREADS, TURNS = 8, 40


def eight(work):
    """`work(number)` in eight threads that begin together; the first error is raised."""
    ready = threading.Barrier(THREADS)

    def begin(number):
        ready.wait()
        work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(begin, range(THREADS)))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    pytest.importorskip("torch", reason="torch is not installed")
    return request.param


def test_torch_on_eight_streams(device):
    """Forward and backward through autograd; the first calls of a shape too, which are recorded while others run."""
    import torch

    calls.forget()

    def work(number):
        stream = torch.cuda.Stream() if device == "cuda" else None
        for turn in range(TURNS):
            rows = 40 + turn % 5
            x, weight, dout = (random(s, "float32", 100 * number + turn) for s in ((rows, 96), (96,), (rows, 96)))
            with torch.cuda.stream(stream):
                there, w = (torch.from_numpy(v).to(device).requires_grad_() for v in (x, weight))
                y = rr.rmsnorm(there, w)
                y.backward(torch.from_numpy(dout).to(device))
                if stream is not None:
                    stream.synchronize()
            expected = reference.backward(x, weight, dout)
            assert_rows_close(y.detach().cpu().numpy(), reference.forward(x, weight).y, "float32")
            assert_rows_close(there.grad.cpu().numpy(), expected.dx, "float32")
            assert_sums_close(w.grad.cpu().numpy(), expected.dweight, "float32", rows, np.abs(dout).max())

    eight(work)


@pytest.mark.gpu
def test_cupy_on_eight_streams():
    """One recorded call in all threads, again and again: their arguments must not mix."""
    import cupy

    def work(number):
        x, weight = random((64, 512), "float32", number), random((512,), "float32", 50 + number)
        expected = reference.forward(x, weight).y
        with cupy.cuda.Stream(non_blocking=True) as stream:
            there, w = cupy.asarray(x), cupy.asarray(weight)
            outputs = [rr.rmsnorm(there, w) for _ in range(10 * TURNS)]
            stream.synchronize()
        for y in outputs[:: TURNS // 2]:
            assert_rows_close(y.get(), expected, "float32")
        assert all(bool((y == outputs[0]).all()) for y in outputs)

    eight(work)


def test_numpy_in_eight_threads():
    def work(number):
        x, weight = random((16, 96), "float32", number), random((96,), "float32", 50 + number)
        first, out = rr.rmsnorm(x, weight), np.empty_like(x)
        assert_rows_close(first, reference.forward(x, weight).y, "float32")
        for _ in range(10 * TURNS):
            np.testing.assert_array_equal(rr.rmsnorm(x, weight, out=out), first)

    eight(work)


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["cupy", "torch"])
@pytest.mark.parametrize("known", [True, False], ids=["recorded", "long way"])
def test_a_thread_that_has_not_used_the_device(library, known):
    """The driver knows no current device there; the arrays' libraries take memory that they have, and ask nobody."""
    calls.forget()
    x, weight, out = (random(shape, "float32", 1) for shape in ((5, 96), (96,), (5, 96)))
    put = pytest.importorskip("cupy", reason="CuPy is not installed").asarray
    if library == "torch":
        torch = pytest.importorskip("torch", reason="torch is not installed")
        put = lambda array: torch.from_numpy(array).cuda()  # noqa: E731
    there, w, mine = (put(array) for array in (x, weight, out))
    for _ in range(3):
        y = rr.rmsnorm(there, w)
        rr.rmsnorm(there, w, out=mine)
    if not known:
        calls.forget()
    results = []
    thread = threading.Thread(target=lambda: results.extend((rr.rmsnorm(there, w, out=mine), rr.rmsnorm(there, w))))
    thread.start()
    thread.join()
    assert len(results) == 2
    assert all(bool((result == y).all()) for result in results)


@pytest.mark.gpu
def test_backward_on_a_side_stream_in_autograds_thread(device):
    """What the backward allocates and launches is ordered on the forward's stream, though it runs in another thread."""
    import torch

    if device == "cpu":
        pytest.skip("needs streams")
    x, weight, dout = (random(s, "float32", 1) for s in ((600, 1024), (1024,), (600, 1024)))
    expected = reference.backward(x, weight, dout)
    there, w = (torch.from_numpy(v).cuda().requires_grad_() for v in (x, weight))
    gradient = torch.zeros(600, 1024, device="cuda")
    rr.rmsnorm(there, w).backward(gradient)  # compiled, so that nothing waits for a compiler below
    torch.cuda.synchronize()
    for _ in range(5):
        there.grad = w.grad = None
        gradient.zero_()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            y = rr.rmsnorm(there, w)
            torch.cuda._sleep(20_000_000)
            gradient.copy_(torch.from_numpy(dout))  # late: a launch on any other stream would read zeros
            y.backward(gradient)
        torch.cuda.current_stream().wait_stream(side)
        assert_rows_close(there.grad.cpu().numpy(), expected.dx, "float32")
        assert_sums_close(w.grad.cpu().numpy(), expected.dweight, "float32", 600, np.abs(dout).max())


@pytest.mark.multi_gpu
def test_two_gpus_in_turn_and_at_once():
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def step(index, seed):
        x, weight, dout = (random(s, "float32", seed) for s in ((300, 512), (512,), (300, 512)))
        there, w = (torch.from_numpy(v).to(f"cuda:{index}").requires_grad_() for v in (x, weight))
        y = rr.rmsnorm(there, w)
        y.backward(torch.from_numpy(dout).to(f"cuda:{index}"))
        assert y.device.index == there.grad.device.index == w.grad.device.index == index
        expected = reference.backward(x, weight, dout)
        assert_rows_close(y.detach().cpu().numpy(), reference.forward(x, weight).y, "float32")
        assert_rows_close(there.grad.cpu().numpy(), expected.dx, "float32")
        assert_sums_close(w.grad.cpu().numpy(), expected.dweight, "float32", 300, np.abs(dout).max())

    for turn in range(6):  # GPU 0 stays the current one
        step(turn % 2, turn)
    assert torch.cuda.current_device() == 0
    eight(lambda number: [step((number + turn) % 2, 10 * number + turn) for turn in range(10)])
