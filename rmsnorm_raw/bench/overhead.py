"""The host's time per call: what Python and the drivers cost before a kernel runs.

Knows: the public functions, and how torch, CuPy and the peers are called by their users.
Must not: wait for the device inside a timed loop; kernels at this size take less than their launch.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import environment, ops
from .cases import EPS, numpy_dtype
from .timing import COPY_THREADS, copy_kernel

ROWS, COLS = 4, 1024
BATCHES = 21
BATCH_SECONDS = 30e-3


@dataclass(frozen=True)
class Entry:
    """The median time of a call, and its ratio to the sum of other entries, by name. `target`: what the ratio shall be
    at most, or the seconds where there is nothing to compare with."""

    name: str
    seconds: float
    against: tuple[str, ...] = ()
    ratio: float | None = None
    target: float | None = None


@dataclass(frozen=True)
class Call:
    """A call to time; `against` names the calls whose times together it is compared with, `target` the ratio wanted."""

    run: Callable[[], Any]
    against: tuple[str, ...] = ()
    target: float | None = None
    hops: bool = False  # to autograd's thread and back


def measure() -> tuple[list[Entry], dict[str, str]]:
    """Whatever is installed, and why the rest is left out."""
    calls: dict[str, Call] = {}
    absent: dict[str, str] = {}
    torch = None
    if importlib.util.find_spec("torch") is None:
        absent["torch"] = "not installed"
    else:
        import torch  # before CuPy, as ROCm wants it

    why = environment.find_gpus()[1] or environment.try_device("gpu")
    wait: Callable[[], Any] = _nothing
    on_gpu = why is None
    if why is not None:
        absent["GPU"] = why
    else:
        from ..devices.cupy import require_cupy

        cupy = require_cupy()
        wait = cupy.cuda.runtime.deviceSynchronize
        if torch is not None and torch.cuda.is_available():
            _add_torch(calls, torch, "cuda", "")
            for name, add in (("liger", _add_liger), ("quack", _add_quack)):
                _try(lambda add=add: add(calls, torch), name, absent)
        elif torch is not None:
            absent["torch on the GPU"] = "torch sees no GPU"
        _try(lambda: _add_cupy(calls, cupy), "CuPy", absent)
    why = environment.try_device("host")
    if why is not None:
        absent["host"] = why
    else:
        _add_numpy(calls)
        if torch is not None:
            _add_torch(calls, torch, "cpu", ", CPU")
    entries = _time(calls, wait, absent)
    hopping = {name: call for name, call in calls.items() if call.hops and name not in absent}
    if hopping:
        with _one_core(absent) as pinned:
            entries += _time(_renamed(hopping, ", one core"), wait, absent) if pinned else []
    return entries + _start(on_gpu, absent), absent


def _nothing() -> None:
    pass


def _try(add: Callable[[], Any], name: str, absent: dict[str, str]) -> bool:
    try:
        add()
    except Exception as error:  # packages fail in ways of their own; the others are timed all the same
        missing = isinstance(error, ModuleNotFoundError)
        absent[name] = "not installed" if missing else f"{type(error).__name__}: {str(error).strip()[:200]}"
    return name not in absent


# ------------------------------------------------------------------------------------------------ what is called


def _operands(torch: Any, device: str) -> tuple[Any, Any, Any, Any]:
    """x, residual, dout, weight."""
    shapes = ((ROWS, COLS), (ROWS, COLS), (ROWS, COLS), (COLS,))
    x, residual, dout, weight = (torch.randn(shape, device=device).to(torch.bfloat16) for shape in shapes)
    return x, residual, dout, weight


def _training(norm: Callable[..., Any], inputs: tuple[Any, ...], gradients: tuple[Any, ...]) -> Callable[[], None]:
    """Forward, then backward into fresh .grad."""
    import torch

    leaves = tuple(tensor.detach().clone().requires_grad_() for tensor in inputs)

    def step() -> None:
        outputs = norm(*leaves)
        torch.autograd.backward(outputs, gradients)
        for leaf in leaves:
            leaf.grad = None

    return step


def _add_torch(calls: dict[str, Call], torch: Any, device: str, where: str) -> None:
    x, residual, dout, weight = _operands(torch, device)
    out = torch.empty_like(x)
    functional = torch.nn.functional.rms_norm

    def rms_norm(x: Any, weight: Any) -> Any:
        return functional(x, (COLS,), weight, EPS)

    def add_rms_norm(x: Any, residual: Any, weight: Any) -> Any:
        total = x + residual
        return functional(total, (COLS,), weight, EPS), total

    one, fused, both = (x, weight), (x, residual, weight), (dout, residual)
    bare, step, fused_step = f"F.rms_norm{where}", f"F.rms_norm{where}, f+b", f"x + residual, F.rms_norm{where}, f+b"
    calls[f"rmsnorm(torch{where})"] = Call(lambda: ops.rmsnorm(x, weight, EPS), (bare,), 1.0)
    calls[f"rmsnorm(torch{where}, out=)"] = Call(lambda: ops.rmsnorm(x, weight, EPS, out=out), (bare,))
    calls[bare] = Call(lambda: rms_norm(x, weight))
    hops = device != "cpu"
    calls[f"rmsnorm(torch{where}), f+b"] = Call(_training(ops.rmsnorm, one, (dout,)), (step,), 1.0, hops)
    calls[step] = Call(_training(rms_norm, one, (dout,)), hops=hops)
    calls[f"fused_add_rmsnorm(torch{where}), f+b"] = Call(
        _training(ops.fused_add_rmsnorm, fused, both), (fused_step,), 0.8, hops
    )
    calls[fused_step] = Call(_training(add_rms_norm, fused, both), hops=hops)


def _add_liger(calls: dict[str, Call], torch: Any) -> None:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    x, residual, dout, weight = _operands(torch, "cuda")
    norm, fused = LigerRMSNormFunction.apply, LigerFusedAddRMSNormFunction.apply
    calls["liger"] = Call(lambda: norm(x, weight, EPS))
    calls["liger, f+b"] = Call(_training(lambda x, w: norm(x, w, EPS), (x, weight), (dout,)), hops=True)
    calls["liger fused add, f+b"] = Call(
        _training(lambda x, r, w: fused(x, r, w, EPS), (x, residual, weight), (dout.clone(), residual)), hops=True
    )


def _add_quack(calls: dict[str, Call], torch: Any) -> None:
    from quack.rmsnorm import rmsnorm, rmsnorm_fwd

    x, residual, dout, weight = _operands(torch, "cuda")
    calls["quack rmsnorm_fwd"] = Call(lambda: rmsnorm_fwd(x, weight, eps=EPS))
    calls["quack"] = Call(lambda: rmsnorm(x, weight, eps=EPS))
    calls["quack, f+b"] = Call(_training(lambda x, w: rmsnorm(x, w, eps=EPS), (x, weight), (dout,)), hops=True)

    def fused(x: Any, residual: Any, weight: Any) -> Any:
        return rmsnorm(x, weight, residual=residual, eps=EPS, prenorm=True)

    calls["quack fused add, f+b"] = Call(_training(fused, (x, residual, weight), (dout, residual)), hops=True)


def _add_cupy(calls: dict[str, Call], cupy: Any) -> None:
    x, weight = (cupy.asarray(array) for array in _numpy_operands(ROWS, COLS))
    out, kernel = cupy.empty_like(x), copy_kernel(cupy, 1)
    packs = x.nbytes // 16
    blocks = -(-packs // COPY_THREADS)
    calls["rmsnorm(CuPy)"] = Call(lambda: ops.rmsnorm(x, weight, EPS), ("RawKernel launch", "cupy.empty"), 1.5)
    calls["rmsnorm(CuPy, out=)"] = Call(lambda: ops.rmsnorm(x, weight, EPS, out=out), ("RawKernel launch",), 1.2)
    calls["RawKernel launch"] = Call(lambda: kernel((blocks,), (COPY_THREADS,), (x, out, packs)))
    calls["cupy.empty"] = Call(lambda: cupy.empty((ROWS, COLS), x.dtype))


def _add_numpy(calls: dict[str, Call]) -> None:
    for rows, cols in ((ROWS, COLS), (1, 16)):  # the second is hardly any work
        x, weight = _numpy_operands(rows, cols)
        out = np.empty_like(x)
        shape = "" if cols == COLS else f" {rows}x{cols}"
        target = None if cols == COLS else 15e-6  # that one is about the call itself
        calls[f"rmsnorm(NumPy{shape})"] = Call(lambda x=x, w=weight: ops.rmsnorm(x, w, EPS), target=target)
        calls[f"rmsnorm(NumPy{shape}, out=)"] = Call(lambda x=x, w=weight, out=out: ops.rmsnorm(x, w, EPS, out=out))


def _numpy_operands(rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
    rng, dtype = np.random.default_rng(0), numpy_dtype("bfloat16")
    return rng.standard_normal((rows, cols)).astype(dtype), rng.standard_normal(cols).astype(dtype)


# ------------------------------------------------------------------------------------------------ timing


def _time(calls: dict[str, Call], wait: Callable[[], Any], absent: dict[str, str]) -> list[Entry]:
    """Batches of all calls in turn, so that a slow spell of the machine meets them all."""
    counts = {name: count for name, call in calls.items() if (count := _batch_size(name, call, wait, absent))}
    samples: dict[str, list[float]] = {name: [] for name in counts}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(BATCHES):
            for name, count in counts.items():
                run = calls[name].run
                for _ in range(max(3, count // 4)):  # autograd's thread has slept since the last batch of its kind
                    run()
                began = time.perf_counter()
                for _ in range(count):
                    run()
                samples[name].append((time.perf_counter() - began) / count)
                wait()
            gc.collect()
    finally:
        if collecting:
            gc.enable()
    medians = {name: statistics.median(taken) for name, taken in samples.items()}
    return [_entry(name, medians, calls[name]) for name in medians]


def _renamed(calls: dict[str, Call], suffix: str) -> dict[str, Call]:
    return {
        name + suffix: replace(call, against=tuple(other + suffix for other in call.against))
        for name, call in calls.items()
    }


@contextmanager
def _one_core(absent: dict[str, str]) -> Iterator[bool]:
    """All threads of the process on one core, and whether that worked. There a hop between two threads costs what it
    costs the system; across cores, whatever waking the other one takes at the time."""
    if not hasattr(os, "sched_setaffinity"):
        absent["one core"] = "this system does not let a process choose its cores"
        yield False
        return
    core = {max(os.sched_getaffinity(0))}
    before: dict[int, set[int]] = {}
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):  # it has ended
            before[thread] = os.sched_getaffinity(thread)
    try:
        _set_affinity(dict.fromkeys(before, core))
        yield True
    finally:
        later = {int(thread) for thread in os.listdir("/proc/self/task")} - set(before)
        _set_affinity({**before, **dict.fromkeys(later, before[os.getpid()])})


def _set_affinity(by_thread: dict[int, set[int]]) -> None:
    for thread, allowed in by_thread.items():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(thread, allowed)


def _batch_size(name: str, call: Call, wait: Callable[[], Any], absent: dict[str, str]) -> int:
    """Calls that take about BATCH_SECONDS; 0, and the reason in `absent`, where it does not work."""

    def repeat(times: Iterable[int]) -> None:
        for _ in times:
            call.run()
        wait()

    if not _try(lambda: repeat(range(30)), name, absent):
        return 0
    began = time.perf_counter()
    repeat(range(10))
    return max(5, min(5000, int(10 * BATCH_SECONDS / (time.perf_counter() - began))))


def _entry(name: str, medians: dict[str, float], call: Call) -> Entry:
    if call.against and all(other in medians for other in call.against):
        ratio = medians[name] / sum(medians[other] for other in call.against)
        return Entry(name, medians[name], call.against, ratio, call.target)
    return Entry(name, medians[name], target=None if call.against else call.target)


# ------------------------------------------------------------------------------------------------ a fresh process

_FRESH = """
import sys, time, numpy
started = time.perf_counter()
import rmsnorm_raw
times = [time.perf_counter() - started]
library, wait = numpy, int
if sys.argv[1] == "gpu":
    import cupy as library
    wait = library.cuda.runtime.deviceSynchronize
x, weight, rstd = (library.zeros(shape, library.float32) for shape in ((4, 1024), (1024,), (4,)))
wait()
for call in (lambda: rmsnorm_raw.rmsnorm(x, weight), lambda: rmsnorm_raw.rmsnorm_bwd(x, weight, x, rstd)):
    started = time.perf_counter()
    call()
    wait()
    times.append(time.perf_counter() - started)
print(*times)
"""


def _start(on_gpu: bool, absent: dict[str, str]) -> list[Entry]:
    """What a fresh process waits for, after NumPy's import, CuPy's and its context."""
    where = "gpu" if on_gpu else "host"
    with tempfile.TemporaryDirectory(prefix="rmsnorm_raw-") as folder:
        caches = {"RMSNORM_RAW_CACHE_DIR": folder, "CUPY_CACHE_DIR": folder}
        settings = os.environ | caches | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        # As pip installs it: with its bytecode, which the first run writes here.
        settings |= {"PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
        runs: list[list[float]] = []
        for _ in range(4):  # the first on empty caches
            command = [sys.executable, "-c", _FRESH, where]
            done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
            if done.returncode:
                absent["a fresh process"] = done.stderr.strip()[-200:]
                return []
            runs.append([float(word) for word in done.stdout.split()])
    imported, called = (statistics.median(run[i] for run in runs[1:]) for i in (0, 1))
    return [
        Entry("import rmsnorm_raw", imported, target=60e-3),
        Entry(f"first call, warm cache ({where})", called, target=200e-3),
        Entry(f"first call that compiles a program ({where})", max(runs[0][1:]), target=1.0),
    ]
