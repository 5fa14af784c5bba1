"""Run in the stand-in's environment: from rmsnorm(CuPy-ROCm arrays) to right numbers, and what was asked on the way.

Knows: the public functions, CuPy, hip-python. One function for each thing to be shown; the arguments name those to run.
Must not: pass where the stand-in was not used: every check counts launches.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from pathlib import Path

import cupy
import lanes
import numpy as np
import pytest
from conftest import DTYPES, assert_rows_close, assert_sums_close, random

import rmsnorm_raw as rr
from rmsnorm_raw import cache, reference
from rmsnorm_raw.devices import cupy as device
from rmsnorm_raw.devices import hip
from rmsnorm_raw.plan import plan_forward
from rmsnorm_raw.program import program

from .card import TRAITS, Card

EPS = 1e-6
ARCH = "gfx942:sramecc+:xnack-"
PLANNED = ("--std=c++17", "-fcuda-flush-denormals-to-zero", f"--offload-arch={ARCH}")

card = Card()


class Operands:
    """Device arrays whose rows lie `pitch` elements apart, `offset` elements from where an allocation begins."""

    def __init__(self, rows: int, cols: int, pitch: int = 0, offset: int = 0):
        self.rows, self.cols, self.pitch, self.offset = rows, cols, pitch or cols, offset
        self.outputs: list[tuple[cupy.ndarray, cupy.ndarray]] = []

    def _view(self, flat: cupy.ndarray, rows: int) -> cupy.ndarray:
        return flat[self.offset :].reshape(rows, self.pitch)[:, : self.cols]

    def put(self, host: np.ndarray) -> cupy.ndarray:
        padded = np.zeros((len(host), self.pitch), host.dtype)
        padded[:, : self.cols] = host
        flat = np.concatenate([np.zeros(self.offset, host.dtype), padded.ravel()])
        return self._view(cupy.asarray(flat), len(host))

    def weight(self, host: np.ndarray) -> cupy.ndarray:
        return cupy.asarray(np.concatenate([np.zeros(self.offset, host.dtype), host]))[self.offset :]

    def output(self, dtype: str) -> cupy.ndarray:
        flat = cupy.asarray(lanes.poisoned((self.offset + self.rows * self.pitch,), DTYPES[dtype]))
        view = self._view(flat, self.rows)
        self.outputs.append((view, flat))
        return view

    def get(self, output: cupy.ndarray) -> np.ndarray:
        """An output's values; nothing may have been written beside them."""
        (flat,) = (flat for view, flat in self.outputs if view is output)
        host = cupy.asnumpy(flat)
        whole = host[self.offset :].reshape(self.rows, self.pitch)
        assert lanes.is_poison(host[: self.offset]), "something was written before an output"
        assert lanes.is_poison(whole[:, self.cols :]), "something was written between the rows of an output"
        return whole[:, : self.cols]


# Rows × columns with tails, both below and above a wave's reach: contiguous, padded to 16 bytes, and off by one.
LAYOUTS = {
    "40": Operands(37, 40),
    "769": Operands(11, 769),
    "769, padded": Operands(11, 769, pitch=784),
    "769, off by one": Operands(7, 769, pitch=771, offset=1),
    "4096": Operands(5, 4096),
}
CASES = [("bfloat16", name) for name in LAYOUTS]
CASES += [("float16", "40"), ("float32", "769, padded"), ("float64", "769, off by one")]


def numbers() -> None:
    """Forward with rstd, fused forward, backward, fused backward: every output against float64."""
    assert device.traits(0) == TRAITS
    start = len(card.launches)
    for dtype, layout in CASES:
        before = len(card.launches)
        with cupy.cuda.using_allocator(None):  # no pool: every array is an allocation, whose end is watched
            _numbers(dtype, LAYOUTS[layout])
        kernels = [launch.kernel for launch in card.launches[before:]]
        assert kernels.count("rmsnorm_fwd") == 2, kernels
        assert kernels.count("rmsnorm_bwd") == 2, kernels
        print(f"  {dtype} {layout}")
    reduced = [launch for launch in card.launches[start:] if launch.kernel == "dweight_reduce"]
    assert len(reduced) >= len(CASES), "few rows may need no second kernel, the others do"


def _numbers(dtype: str, at: Operands) -> None:
    real = "float64" if dtype == "float64" else "float32"
    x, residual, dout, added = (random((at.rows, at.cols), dtype, seed) for seed in range(4))
    weight = random((at.cols,), dtype, 4)
    y, total = at.output(dtype), at.output(dtype)

    expected = reference.forward(x, weight, EPS)
    _, rstd = rr.rmsnorm_fwd(at.put(x), at.weight(weight), EPS, True, out=y)
    card.check()
    assert_rows_close(at.get(y), expected.y, dtype, "y")
    assert_rows_close(cupy.asnumpy(rstd)[:, None], expected.rstd[:, None], real, "rstd")

    expected = reference.forward(x, weight, EPS, residual=residual, residual_dtype=DTYPES[dtype])
    y = at.output(dtype)
    rr.fused_add_rmsnorm_fwd(at.put(x), at.put(residual), at.weight(weight), EPS, True, out=y, residual_out=total)
    card.check()
    assert_rows_close(at.get(total), expected.normed, dtype, "residual_out")
    assert_rows_close(at.get(y), expected.y, dtype, "fused y")

    dout_max = float(np.abs(dout.astype(np.float64)).max())
    for incoming in (None, added):
        expected = reference.backward(x, weight, dout, EPS, dresidual_out=incoming)
        arrays = (at.put(x), at.weight(weight), at.put(dout), rstd)
        dx = at.output(dtype)
        if incoming is None:
            _, dweight = rr.rmsnorm_bwd(*arrays, out=(dx, None))
        else:
            _, _, dweight = rr.fused_add_rmsnorm_bwd(*arrays, at.put(incoming), out=(dx, None, None))
        card.check()
        assert_rows_close(at.get(dx), expected.dx, dtype, "dx")
        assert_sums_close(cupy.asnumpy(dweight), expected.dweight, dtype, at.rows, dout_max)


def calls() -> None:
    """Of one call: the text, hipRTC's options, the file that is loaded, the grid, each argument, stream and device."""
    at = Operands(11, 769, pitch=784)
    x, weight = at.put(random((11, 769), "bfloat16", 1)), at.weight(random((769,), "bfloat16", 2))
    stream = cupy.cuda.Stream(non_blocking=True)
    card.record()
    with stream:
        y, rstd = rr.rmsnorm_fwd(x, weight, 1e-5, True, weight_offset=1.0)
    card.check()
    launch = card.launches[-1]

    planned = plan_forward(
        11, 769, TRAITS, x="bfloat16", y="bfloat16", weight="bfloat16", vector=1, offset_weight=True
    )  # y is contiguous: 769 columns align to nothing
    text = program(planned.kernel, planned.constants).text
    assert launch.text == text
    assert (launch.grid, launch.block) == (planned.blocks, planned.threads)
    assert (launch.stream, launch.device) == (stream.ptr, 0)
    expected = {
        "x": x.data.ptr, "residual": 0, "weight": weight.data.ptr, "bias": 0, "y": y.data.ptr, "residual_out": 0,
        "rstd": rstd.data.ptr, "rows": 11, "x_pitch": 784, "y_pitch": 769,
        "eps": float(np.float32(1e-5)), "weight_offset": 1.0, "blocks": planned.blocks,
    }  # fmt: skip
    given = {name: value for name, value in launch.arguments.items() if name in expected}
    assert given == expected, f"{given} instead of {expected}"
    absent = launch.arguments.keys() - expected
    assert absent == {"residual_pitch", "residual_out_pitch"}, "pitches of what is not there may be anything"

    record = card.record()
    assert [line[1:] for line in record if line[0] == "hiprtcCompileProgram"] == [list(PLANNED)], record
    (loaded,) = (line[1:] for line in record if line[0] == "hipModuleLoad")
    assert loaded[1] == "0", loaded
    file = Path(loaded[0])
    assert file.parent == cache.temporary_folder()
    assert file.read_bytes() == text.encode() + b"\0", "the code object, with nothing behind it"
    assert cache.read(file.name) == file.read_bytes(), "and kept on disk for other processes"
    assert not [line for line in record if line[0] == "refused"], record

    rr.rmsnorm_fwd(x, weight, 1e-5, True, weight_offset=1.0)
    card.check()
    assert card.launches[-1].stream == 0
    assert card.record() == [], "a second call compiles and loads nothing"


def devices() -> None:
    """Arrays on a device that is not current: launched there, with the same code object, loaded there."""
    x = random((3, 40), "float32", 1)
    with cupy.cuda.Device(1):
        there = cupy.asarray(x)
    here = cupy.asarray(x)
    card.record()
    for array in (here, there):
        y = rr.rmsnorm(array)
        card.check()
        assert card.launches[-1].device == array.device.id == y.device.id
        with array.device:
            assert_rows_close(cupy.asnumpy(y), reference.forward(x).y, "float32", "y")
    assert cupy.cuda.runtime.getDevice() == 0
    record = [line for line in card.record() if line[0] in ("hiprtcCompileProgram", "hipModuleLoad")]
    assert len([line for line in record if line[0] == "hiprtcCompileProgram"]) <= 1, record
    assert [line[2] for line in record if line[0] == "hipModuleLoad"] == ["0", "1"], record


def threads() -> None:
    """Streams are each thread's own, and so are the arguments on their way."""
    x = random((3, 40), "float32", 1)
    before = len(card.launches)

    def call() -> None:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            y = rr.rmsnorm(cupy.asarray(x))
            streams.append((y.data.ptr, stream.ptr))
            results.append(y)

    streams, results = [], []
    running = [threading.Thread(target=call) for _ in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    card.check()
    launches = card.launches[before:]
    assert sorted(streams) == sorted((launch.arguments["y"], launch.stream) for launch in launches)
    assert len({stream for _, stream in streams}) == 4
    for y in results:
        assert_rows_close(cupy.asnumpy(y), reference.forward(x).y, "float32", "y")


def dlpack() -> None:
    """ROCm's device type is 10, out of CuPy and into the package."""

    class Foreign:
        """An array of a library that only speaks DLPack."""

        def __init__(self, array: cupy.ndarray):
            self.array = array

        def __dlpack__(self, **keywords):
            return self.array.__dlpack__(**keywords)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    x = random((7, 40), "float32", 1)
    array = cupy.asarray(x)
    assert tuple(map(int, array.__dlpack_device__())) == (10, 0)
    y = rr.rmsnorm(Foreign(array))
    card.check()
    assert card.launches[-1].arguments["x"] == array.data.ptr, "x was copied"
    assert_rows_close(cupy.asnumpy(cupy.from_dlpack(y)), reference.forward(x).y, "float32", "y")
    back = rr.to_cupy(Foreign(array))
    assert isinstance(back, cupy.ndarray)
    assert back.data.ptr == array.data.ptr
    np.testing.assert_array_equal(rr.to_numpy(array), x)


def errors() -> None:
    """The compiler's log is the error's text."""
    with pytest.raises(RuntimeError) as raised:
        hip.compile('#line 1 "constants"\n#error planted', ARCH)
    for word in ("error: planted", ARCH, "-fcuda-flush-denormals-to-zero"):
        assert word in str(raised.value)


def _compilations() -> int:
    card.record()
    numbers()
    return [line[0] for line in card.record()].count("hiprtcCompileProgram")


def from_disk() -> None:
    """A later process: nothing is compiled again."""
    assert _compilations() == 0


def from_damaged_disk() -> None:
    """A truncated object in the cache is compiled again, and it alone."""
    assert _compilations() == 1


def public_launch() -> None:
    """The launch through CuPy's documented RawKernel, for a CuPy that has no driver.launchKernel."""
    cupy.cuda.driver.launchKernel = None
    numbers()


def cupys_own_way() -> None:
    """Without hip-python: RawModule(code=…), with hipcc. The architecture is this package's, the rest CuPy's."""
    card.record()
    at = LAYOUTS["769, padded"]
    _numbers("bfloat16", at)
    record = card.record()
    options = {tuple(line[1:]) for line in record if line[0] == "hiprtcCompileProgram"}
    assert len(options) == 1, options
    given = [option for option in options.pop() if not option.startswith("-I")]
    assert given == ["--std=c++17", f"--offload-arch={ARCH}", "-fcuda-flush-denormals-to-zero"], given
    assert set(given) == set(PLANNED), "both ways compile alike"
    assert [line for line in record if line[0] == "hipModuleLoadData"]
    assert not [line for line in record if line[0] == "hipModuleLoad"]


def _refused(words: tuple[str, ...]) -> None:
    with pytest.raises(RuntimeError) as raised:
        rr.rmsnorm(cupy.asarray(random((3, 40), "float32", 1)))
    for word in words:
        assert word in str(raised.value)
    assert not card.launches


def no_compiler() -> None:
    """Neither hip-python nor hipcc."""
    _refused(("hipcc", "PATH", "hip-python", "pip install 'rmsnorm-raw[rocm]'"))


def no_hiprtc() -> None:
    """hip-python, but no library for it; nor hipcc."""
    _refused(("hipcc", "hip-python finds no hipRTC", "libhiprtc.so", "LD_LIBRARY_PATH=/opt/rocm/lib"))


def two_runtimes() -> None:
    """Another HIP runtime in the process, as torch brings one."""
    other = os.environ["OTHER_RUNTIME"]
    ctypes.CDLL(other)
    _refused(("2 HIP runtimes", other, "import torch before cupy"))


def info() -> None:
    """`rmsnorm-raw info`, for the test to read."""
    from rmsnorm_raw import ops
    from rmsnorm_raw.cli import main

    # Its trial call has eps = 0: rows of the block that are not there then make 0 · inf, which nobody stores, but which
    # the machine of lanes takes for arithmetic on poison.
    rmsnorm = ops.rmsnorm
    ops.rmsnorm = lambda x, eps: rmsnorm(x, eps=1e-12 if isinstance(x, cupy.ndarray) else eps)
    status = main(["info"])
    card.check()
    raise SystemExit(status)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
        print(name)
