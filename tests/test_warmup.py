"""warmup: what it compiles is what the calls need, neither less nor more, and nothing is launched."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import random

import rmsnorm_raw as rr
from rmsnorm_raw import calls
from rmsnorm_raw.devices import Compiled, host


@pytest.fixture
def built(monkeypatch, array_backend):
    """The programs built so far, on a device that has built nothing."""
    programs = []
    if array_backend.name == "numpy":
        device, name = host, "_load"
    else:
        from rmsnorm_raw.devices import cupy as device

        name = "_build"
    build = getattr(device, name)

    def count(program, *more):
        programs.append(program)
        return build(program, *more)

    monkeypatch.setattr(device, "_compiled", Compiled())
    monkeypatch.setattr(device, name, count)
    calls.forget()
    return programs


def everything(backend, shape, dtype, weight_dtype=None, **options):
    """All steps of both operations, as a model takes them."""
    put = backend.put
    x, residual, dout = (put(random(shape, dtype, seed)) for seed in (1, 2, 3))
    weight = put(random(shape[-1:], weight_dtype or dtype, 4))
    _, rstd = rr.rmsnorm_fwd(x, weight, 1e-6, True, **options)
    rr.rmsnorm_bwd(x, weight, dout, rstd, **options)
    _, total, rstd = rr.fused_add_rmsnorm_fwd(x, residual, weight, 1e-6, True, **options)
    for added in (None, dout):
        rr.fused_add_rmsnorm_bwd(total, weight, dout, rstd, added, **options)


@pytest.mark.parametrize("shape", [(4, 64), (2, 3, 769), (300, 256)])
@pytest.mark.parametrize(
    ("dtype", "options"), [("bfloat16", {}), ("float32", {"weight_offset": 1.0}), ("float16", {"casting": "llama"})]
)
def test_calls_compile_nothing_more(array_backend, built, shape, dtype, options):
    device = "host" if array_backend.name == "numpy" else "gpu"
    count = rr.warmup([shape], dtype, device=device, progress=False, **options)
    assert len(built) == len(set(built)) == count
    everything(array_backend, shape, dtype, **options)
    assert len(built) == count


def test_every_program_is_used(array_backend, built):
    everything(array_backend, (6, 48), "float16", "float32")
    needed = set(built)
    rr.warmup([(6, 48)], np.float16, weight_dtype="float32", progress=False, device=_name(array_backend))
    assert set(built) == needed


def _name(backend):
    return "host" if backend.name == "numpy" else "gpu"


def test_parts(array_backend, built):
    options = {"device": _name(array_backend), "progress": False}
    assert rr.warmup([(6, 48)], "float32", fused=False, backward=False, **options) == 1
    assert rr.warmup(iter([(6, 48), (6, 80)]), ["float32", np.float16], fused=False, backward=False, **options) == 4
    assert len(built) == 4
    assert rr.warmup([(0, 48)], "float32", **options) == 0
    assert rr.warmup([(6, 48)], "float32", weight=False, fused=False, need_dweight=False, **options) == 2


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (([(4, 64)], "int8"), {}, TypeError, "int8"),
        (([()],), {}, ValueError, "0-d"),
        (([(4, 0)],), {}, ValueError, "0 columns"),
        (([(4, 64)],), {"heads": 3}, ValueError, r"\(3, 64\)"),
        (([(4, 64)],), {"casting": "bf16"}, ValueError, "casting"),
        (([(4, 64)],), {"device": "tpu"}, ValueError, "tpu"),
    ],
)
def test_refused(arguments, options, error, message):
    with pytest.raises(error, match=message):
        rr.warmup(*arguments, **{"device": "host", "progress": False, **options})


def test_no_gpu(monkeypatch):
    from rmsnorm_raw.devices import cupy as gpu

    def missing():
        raise RuntimeError("CuPy cannot be imported")

    monkeypatch.setattr(gpu, "require_cupy", missing)
    with pytest.raises(RuntimeError, match="CuPy cannot be imported"):
        rr.warmup([(4, 64)], device="gpu", progress=False)
    assert rr.warmup([(4, 64)], "float32", fused=False, backward=False, progress=False) == 1  # the host


def test_a_program_that_does_not_compile(monkeypatch):
    def fail(program):
        raise RuntimeError(f"could not compile {program.kernel}")

    monkeypatch.setattr(host, "_compiled", Compiled())
    monkeypatch.setattr(host, "_load", fail)
    with pytest.raises(RuntimeError, match="could not compile"):
        rr.warmup([(4, 64)], device="host", progress=False)


def test_a_deep_model_needs_six_programs(array_backend, built):
    """32 layers, each with a norm and a fused norm, forward and backward."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    device = "cpu" if array_backend.name == "numpy" else "cuda"
    x = torch.randn(4, 16, 128, device=device, requires_grad=True)
    norms = [rr.RMSNorm(128, device=device) for _ in range(32)]
    fused = [rr.FusedAddRMSNorm(128, device=device) for _ in range(32)]
    for _ in range(2):
        hidden, stream = x, x
        for norm, add in zip(norms, fused, strict=True):
            hidden, stream = add(norm(hidden), stream)
        (hidden + stream).sum().backward()
    assert len(built) <= 6, [program.kernel for program in built]
