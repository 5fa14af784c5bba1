"""Clocks: the device's time by replayed graphs, the host's by repeated calls, and a copy as the yardstick of both.

Knows: CuPy's and torch's streams, events and graphs. A sampler is a call that returns the seconds of one operation.
Must not: know operations or peers. CuPy and torch load only where a GPU is timed, or a peer's tensors are wanted.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from ..bridge import to_cupy, to_numpy, to_torch

Sampler = Callable[[], float]

# Together the buffers of a case exceed every L2; on AMD also the Infinity Cache, 256 MB, which no attribute tells.
ROTATE_BYTES = {False: 240 << 20, True: 768 << 20}
MOST_SETS = 64
GRAPH_SECONDS = 1.5e-3  # of one replay at least: long beside the events' resolution, half a microsecond
MOST_LAUNCHES = 2000
HOST_SAMPLE_SECONDS = 2e-3
HOST_PAUSE_SECONDS = 5e-3  # OpenMP's threads spin on for milliseconds after a peer's call, on the cores of the next one

# The best copy measured on this card, bytes read and written.
BANDWIDTHS = {"NVIDIA H200": 4.25e12}

COPY = r"""
extern "C" __global__ void copy_packs(const uint4* source, uint4* target, long long count) {
    const long long first = (long long)blockIdx.x * (blockDim.x * UNROLL) + threadIdx.x;
    uint4 packs[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i)
        if (first + i * blockDim.x < count) packs[i] = source[first + i * blockDim.x];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i)
        if (first + i * blockDim.x < count) target[first + i * blockDim.x] = packs[i];
}
"""
COPY_THREADS = 256


def copy_kernel(cupy: Any, unroll: int) -> Any:
    return cupy.RawKernel(COPY.replace("UNROLL", str(unroll)), "copy_packs")


class OnGpu:
    """The first GPU: median device time over rotating buffers, launches in a graph."""

    on_gpu = True
    method = "device time by graph replay over rotating buffers"

    def __init__(self, name: str):
        from ..devices.cupy import require_cupy

        self.name = name
        self.xp = require_cupy()
        self.compilers = min(8, len(os.sched_getaffinity(0)))
        runtime = self.xp.cuda.runtime
        self._is_hip = bool(runtime.is_hip)
        properties = runtime.getDeviceProperties(0)
        self._rotate = max(ROTATE_BYTES[self._is_hip], 2 * int(properties.get("l2CacheSize", 0)))
        self.bandwidth = BANDWIDTHS.get(properties["name"].decode())
        self._copies = [copy_kernel(self.xp, unroll) for unroll in (1, 4)]

    def sets_for(self, size: int) -> int:
        """Sets of operands to rotate among, of `size` bytes each."""
        return max(1, min(MOST_SETS, math.ceil(self._rotate / size)))

    def normal(self, shape: tuple[int, ...], seed: int) -> Any:
        return self.xp.random.default_rng(seed).standard_normal(shape, dtype=np.float32)

    def get(self, array: Any) -> np.ndarray:
        return self.xp.asnumpy(array)

    def clean(self) -> None:
        """Gives memory back, so that CuPy and torch do not starve each other."""
        import gc
        import sys

        gc.collect()
        self.xp.cuda.Device().synchronize()
        self.xp.get_default_memory_pool().free_all_blocks()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _rounds(self, calls: int, size: int) -> int:
        expected = max(2e-6, size / 4e12) * calls
        return max(1, min(math.ceil(GRAPH_SECONDS / expected), MOST_LAUNCHES // calls))

    def sampler(self, calls: Sequence[Callable[[], Any]], size: int) -> Sampler:
        """Calls that launch through CuPy and allocate nothing, captured on a stream of their own."""
        stream = self.xp.cuda.Stream(non_blocking=True)
        rounds = self._rounds(len(calls), size)

        def once() -> None:
            for _ in range(rounds):
                for call in calls:
                    call()

        self.xp.cuda.Device().synchronize()  # operands were made on another stream
        with stream:
            calls[0]()
            stream.synchronize()
            if self._is_hip:  # CuPy captures no graphs on ROCm: the launches are queued one by one
                return self._timed(once, stream, rounds * len(calls))
            stream.begin_capture()
            try:
                once()
            except BaseException:
                with suppress(Exception):  # that the capture is void is no news
                    stream.end_capture()
                raise
            graph = stream.end_capture()
        return self._timed(lambda: graph.launch(stream=stream), stream, rounds * len(calls))

    def copies(self, size: int, sets: Sequence[dict[str, Any]]) -> list[Sampler]:
        """Copies of size / 2 bytes, so that as many move: a pack a thread, or four. The faster one counts."""
        xp, packs = self.xp, max(1, size // 32)
        data = sets[0]["x"].view(np.uint8).reshape(-1)
        pairs = []
        for _ in sets:
            source, target = xp.empty(packs * 16, np.uint8), xp.empty(packs * 16, np.uint8)
            for start in range(0, source.size, data.size):  # the operands' values: zeros could be faster
                source[start : start + data.size] = data[: source.size - start]
            pairs.append((source, target))

        def sampler(kernel: Any, unroll: int) -> Sampler:
            blocks = math.ceil(packs / (COPY_THREADS * unroll))
            calls = [partial(kernel, (blocks,), (COPY_THREADS,), (*pair, packs)) for pair in pairs]
            return self.sampler(calls, size)

        return [sampler(kernel, unroll) for kernel, unroll in zip(self._copies, (1, 4), strict=True)]

    def on_torch(
        self, prepare: Callable[[dict[str, Any]], Callable[[], Any]], sets: Sequence[dict[str, Any]], checker: Any
    ) -> tuple[Any, float]:
        """A peer's calls over the same memory, prepared and called once on the stream that will be captured, and how
        far its results are from what they must be."""
        import torch

        self.xp.cuda.Device().synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            calls = [prepare(_tensors(one)) for one in sets]
            results = calls[0]()
            stream.synchronize()
            distance = checker.distance(tuple(to_cupy(result.detach()) for result in results))
            del results
            for call in calls[1:3]:  # compilers that specialise on alignment see another set
                call()
            stream.synchronize()
        return (stream, calls), distance

    def torch_sampler(self, prepared: Any, size: int) -> Sampler:
        """The same graph through torch. A result is let go when its set comes round again, so that the memory written
        rotates as the memory read."""
        import torch

        stream, calls = prepared
        rounds = self._rounds(len(calls), size)
        graph = torch.cuda.CUDAGraph()
        kept: list[Any] = [None] * len(calls)
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="relaxed")
            try:
                for _ in range(rounds):
                    for i, call in enumerate(calls):
                        kept[i] = call()
            except BaseException:
                with suppress(Exception):
                    graph.capture_end()
                raise
            graph.capture_end()

        def launch(keep: Any = (kept, calls)) -> None:
            with torch.cuda.stream(stream):
                graph.replay()

        return self._timed(launch, self.xp.cuda.ExternalStream(stream.cuda_stream), rounds * len(calls))

    def _timed(self, launch: Callable[[], None], stream: Any, launches: int) -> Sampler:
        began, ended = self.xp.cuda.Event(), self.xp.cuda.Event()

        def sample() -> float:
            # The first replay keeps the device busy while the host queues the rest, and warms what must be warm.
            with stream:
                launch()
                began.record(stream)
                launch()
                ended.record(stream)
                ended.synchronize()
            return self.xp.cuda.get_elapsed_time(began, ended) / 1e3 / launches

        return sample


class OnHost:
    """The CPU: wall time of calls on one set of operands, outputs given."""

    on_gpu = False
    method = "wall time of repeated calls"
    bandwidth = None
    compilers = 2

    def __init__(self, name: str):
        from ..devices import host

        self.name = name
        self.xp = np
        self.threads = host.get_num_threads()

    def sets_for(self, size: int) -> int:
        return 1

    def normal(self, shape: tuple[int, ...], seed: int) -> Any:
        return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)

    def get(self, array: Any) -> np.ndarray:
        return np.asarray(array)

    def clean(self) -> None:
        pass

    def sampler(self, calls: Sequence[Callable[[], Any]], size: int) -> Sampler:
        call = calls[0]
        call()
        began = time.perf_counter()
        call()
        repeats = max(1, min(1000, int(HOST_SAMPLE_SECONDS / (time.perf_counter() - began))))

        def sample() -> float:
            time.sleep(HOST_PAUSE_SECONDS)
            if repeats > 1:
                call()
            began = time.perf_counter()
            for _ in range(repeats):
                call()
            return (time.perf_counter() - began) / repeats

        return sample

    def copies(self, size: int, sets: Sequence[dict[str, Any]]) -> list[Sampler]:
        """A copy of size / 2 bytes by as many threads as the calls may use, and by one: small copies are faster so."""
        half = max(1, size // 2)
        source, target = np.resize(sets[0]["x"].view(np.uint8).reshape(-1), half), np.empty(half, np.uint8)
        pool = ThreadPoolExecutor(self.threads)
        edges = [half * i // self.threads for i in range(self.threads + 1)]
        parts = [slice(a, b) for a, b in pairwise(edges)]

        def together() -> None:
            for done in [pool.submit(np.copyto, target[part], source[part]) for part in parts]:
                done.result()

        return [self.sampler([call], size) for call in (partial(np.copyto, target, source), together)]

    def on_torch(
        self, prepare: Callable[[dict[str, Any]], Callable[[], Any]], sets: Sequence[dict[str, Any]], checker: Any
    ) -> tuple[Any, float]:
        import torch

        torch.set_num_threads(self.threads)
        call = prepare(_tensors(sets[0]))
        return [call], checker.distance(tuple(to_numpy(result.detach()) for result in call()))

    def torch_sampler(self, prepared: Any, size: int) -> Sampler:
        return self.sampler(prepared, size)


Clock = OnGpu | OnHost


def _tensors(operands: dict[str, Any]) -> dict[str, Any]:
    """The same memory as torch tensors."""
    names = ("x", "residual", "dout", "dresidual_out", "weight")
    return {name: to_torch(operands[name]) for name in names if name in operands}
