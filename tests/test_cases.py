"""Public bug reports about norm kernels, CuPy, DLPack and torch that this package must not repeat: one test or more for
each, named by the case's id. The numbers are worked out in float64 (16-bit values rounded to nearest even).

Cases of NVIDIA cards run wherever CuPy finds one. Cases of AMD cards are tried by what can be had without one: the
plans' arithmetic, the text of the programs, and their machine code, which ziglang's clang compiles for any card.
"""

from __future__ import annotations

import itertools
import mmap
import os
import re
import struct
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from conftest import DTYPES, assert_rows_close, assert_sums_close, random
from fake_cupy import FakeCupy

import rmsnorm_raw as rr
from rmsnorm_raw import cache, calls, compile_command, libraries, reference
from rmsnorm_raw.devices import Compiled, clang, hip, host
from rmsnorm_raw.devices import cupy as gpu
from rmsnorm_raw.plan import Traits, plan_backward, plan_forward, plan_reduce
from rmsnorm_raw.program import SIGNATURES, program, read_source

IDS = [
    "B01", "B03", "B04", "B06", "B07", "B08", "B10", "B12", "B14", "B15",
    "B16", "B17", "B19", "B21", "B22", "B23", "B26", "B28", "B29", "B30",
    "B31", "B33", "B34", "B37", "B38", "B41", "B42", "B44", "B45", "B47",
    "B48", "B50", "B51", "B53", "B54", "B55", "B56", "B58", "B60", "B61",
    "B63", "B65", "B67", "B68", "B71", "B72", "B73", "B74", "B75", "B77",
    "B78", "B79", "B80", "B82", "B83", "B84", "B86", "B87", "B88",
]  # fmt: skip

ROOT = Path(rr.__file__).resolve().parent.parent
NVIDIA = {"sm_90": Traits("nvidia", "sm_90", wave=32, units=132)}
AMD = {
    "gfx90a": Traits("amd", "gfx90a:sramecc+:xnack-", wave=64, units=104),
    "gfx942": Traits("amd", "gfx942:sramecc+:xnack-", wave=64, units=304),
    "gfx1100": Traits("amd", "gfx1100", wave=32, units=48),
}
CARDS = {**NVIDIA, **AMD}
FLOATS = ("float16", "bfloat16", "float32")


# ------------------------------------------------------------------------------------------------ what many tests need


def array(values, dtype="float32"):
    return np.array(values, np.float64).astype(DTYPES[dtype])


def float64(values):
    return np.asarray(values).astype(np.float64)


def assert_close(actual, expected, rtol=1e-5, atol=1e-6):
    np.testing.assert_allclose(float64(actual), expected, rtol=rtol, atol=atol)


def assert_same(actual, expected):
    """Equal to the bit, result by result, NaN for NaN."""
    assert actual.keys() == expected.keys()
    for name in actual:
        assert actual[name].dtype == expected[name].dtype, name
        np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)


def all_results(get, x, weight, dout, eps=1e-6, residual=None, dresidual_out=None, call=None):
    """Every result of forward and backward, in NumPy, by name."""
    call = call or (lambda function, *arguments: function(*arguments))
    if residual is None:
        y, rstd = call(rr.rmsnorm_fwd, x, weight, eps, True)
        dx, dweight = call(rr.rmsnorm_bwd, x, weight, dout, rstd)
        results = {"y": y, "rstd": rstd, "dx": dx, "dweight": dweight}
    else:
        y, total, rstd = call(rr.fused_add_rmsnorm_fwd, x, residual, weight, eps, True)
        dx, _, dweight = call(rr.fused_add_rmsnorm_bwd, total, weight, dout, rstd, dresidual_out)
        results = {"y": y, "residual_out": total, "rstd": rstd, "dx": dx, "dweight": dweight}
    return {name: get(result) for name, result in results.items() if result is not None}


def on_card(card, sanitizer=None):
    """Calls as a card would run them: each thread, wave and barrier of it on the host."""
    lanes = pytest.importorskip("lanes", reason="tests/lanes, which runs a card's waves on the host, is missing")
    if lanes.missing():
        pytest.skip(lanes.missing())
    from lanes.device import Device

    return Device(CARDS[card], sanitizer)


GUARD = 77.0


def guarded(backend, shape, dtype, gap=0, before=16):
    """An output inside memory full of 77, `gap` elements between its rows; and a check of what lies around it."""
    size = int(np.prod(shape))
    pitch = shape[-1] + gap
    rows = size // shape[-1]
    base = backend.put(np.full(before + rows * pitch + 64, GUARD).astype(DTYPES[dtype]))
    view = base[before : before + rows * pitch].reshape(rows, pitch)[:, : shape[-1]]

    def check():
        around = float64(backend.get(base))
        around[before : before + rows * pitch].reshape(rows, pitch)[:, : shape[-1]] = GUARD
        assert (around == GUARD).all(), "something was written outside the output"

    return view[0] if len(shape) == 1 else view.reshape(shape), check


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, torch):
    return request.param


def leaf(torch, values, device="cpu", dtype=None, grad=True):
    tensor = torch.tensor(values, dtype=torch.float64) if isinstance(values, list) else torch.from_numpy(values)
    return tensor.to(device, dtype or torch.float32).requires_grad_(grad)


def plans(traits, rows, cols, dtype="float32", vector=1):
    """Each kind of launch, for an operand of those rows and columns."""
    common = {"x": dtype, "weight": dtype, "vector": vector}
    real = "float64" if dtype == "float64" else "float32"
    yield plan_forward(rows, cols, traits, y=dtype, **common)
    yield plan_forward(rows, cols, traits, y=dtype, residual=dtype, residual_out=dtype, **common)
    backward = {"dout": dtype, "dx": dtype, **common}
    yield from plan_backward(rows, cols, traits, **backward).launches
    yield from plan_backward(rows, cols, traits, dresidual_out=dtype, need_dbias=True, **backward).launches
    yield plan_reduce(cols, traits, weight=dtype, compute=real)


def text_of(plan):
    return program(plan.kernel, plan.constants).text


def some_texts(traits):
    """A program of each kernel, with rows in registers and without."""
    return sorted({text_of(plan) for cols in (769, 4096, 131072) for plan in plans(traits, 64, cols, "bfloat16")})


def preprocessed(text, *defines):
    """The branch of the text that a compiler with these macros sees, without comments."""
    built_with = host.compiler()
    command = [*built_with.command, *(["clang"] if built_with.is_zig else [])]
    done = subprocess.run(
        [*command, "-x", "c++", "-E", "-P", *(f"-D{name}" for name in defines), "-"],
        input=text, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


def amd_text(text):
    return preprocessed(text, "__HIP_DEVICE_COMPILE__", "__HIPCC__")


def cuda_text(text):
    return preprocessed(text, "__CUDACC__", "__CUDA_ARCH__=900")


def amd_assembly(arch, text):
    """The machine code of a program for an AMD card, with the compiler alone: no ROCm, no header, nothing on PATH."""
    pytest.importorskip("ziglang", reason="the ziglang package, whose clang compiles for AMD cards, is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "")
        return clang.find().build(text, arch).assembly


def of_code(assembly, name):
    """A number of a code object's note."""
    return int(re.search(rf"^\s*\.{name}:\s*(\d+)", assembly, re.MULTILINE)[1])


def nvidia_code(text, arch="sm_90"):
    pytest.importorskip("cuda.core", reason="cuda-core, which compiles without a GPU, is not installed")
    pytest.importorskip("cuda.bindings.nvrtc", reason="the NVRTC bindings are not installed")
    return compile_command.make(text, arch).code


UNCACHED_TRAITS = gpu.traits.__wrapped__


@pytest.fixture(params=["driver", "RawKernel"])
def fake_cupy(request, monkeypatch, tmp_path):
    """CuPy with the given architectures, one a device, and both ways to launch; on ROCm with hipRTC by `hiprtc`."""

    def install(*arches, hiprtc="hip-python"):
        fake = FakeCupy(arches, request.param == "driver")
        monkeypatch.setattr(gpu, "require_cupy", lambda: fake)
        monkeypatch.setattr(gpu, "traits", UNCACHED_TRAITS)
        monkeypatch.setattr(gpu, "_compiled", Compiled())
        monkeypatch.setenv("RMSNORM_RAW_CACHE_DIR", str(tmp_path / "cache"))
        if hiprtc == "hip-python":
            monkeypatch.setattr(hip, "version", lambda: "a fake one")
            monkeypatch.setattr(hip, "compile", lambda text, arch: text.encode())
        else:

            def missing():
                raise RuntimeError("hip-python is missing")

            monkeypatch.setattr(hip, "version", missing)
            (tmp_path / "hipcc").touch(mode=0o755)
            monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        return fake

    return install


def options_of(fake):
    return [option for _, given in fake.compiled for option in given.get("options", ())]


def launch_on(plan, index=0, **values):
    """A launch of the plan's program, with a value for each kind of argument."""
    kinds = {"P": 0, "q": 2**40, "i": plan.blocks, "r": 1e-6} | values
    signature = SIGNATURES[plan.kernel]
    arguments = [f"p_{i}" if kind == "P" else kinds[kind] for i, kind in enumerate(signature)]
    pointers = {str(i): kinds["P"] for i, kind in enumerate(signature) if kind == "P"}
    launch = gpu.prepare(program(plan.kernel, plan.constants), plan.blocks, 64, index)
    where = libraries.Device("gpu", index)
    calls.Call(libraries._NUMPY, where, gpu.place(), [], None, [(launch, arguments)], pointers, {}).run(pointers)


def python(code, *arguments, **environment):
    """Starts a new process with this package; it prints what it found."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )  # fmt: skip


def printed(process):
    out, error = process.communicate(timeout=200)
    assert process.returncode == 0, error[-3000:]
    return out


# ================================================================================================ layout


@pytest.mark.parametrize("dtype", FLOATS)
def test_B01_a_transposed_x(backend, dtype):
    """ModelTC/LightLLM#1467: the inner stride was honoured by the sum but not by the scaling."""
    base = backend.put(array([[1, 2], [3, 4], [5, 6]], dtype))
    y = backend.get(rr.rmsnorm(base.T, backend.put(np.ones(3, DTYPES[dtype])), 1e-6))
    expected = [[0.292770, 0.878310, 1.463850], [0.462910, 0.925820, 1.388730]]
    assert_close(y, expected, rtol={"float16": 2**-11, "bfloat16": 2**-8}.get(dtype, 2e-6))


@pytest.mark.parametrize("operand", ["x", "weight", "dout", "residual", "dresidual_out"])
def test_B01_every_operand_with_another_inner_stride(backend, operand):
    shapes = {"x": (6, 8), "dout": (6, 8), "residual": (6, 8), "dresidual_out": (6, 8), "weight": (8,)}
    values = {name: random(shape, "float32", seed) for seed, (name, shape) in enumerate(shapes.items())}
    plain = {name: backend.put(value) for name, value in values.items()}
    if operand == "weight":
        other = backend.put(np.repeat(values["weight"], 3))[::3]
    else:
        other = backend.put(np.ascontiguousarray(values[operand].T)).T
    assert_same(all_results(backend.get, **{**plain, operand: other}), all_results(backend.get, **plain))


def test_B03_three_dimensions_with_a_row_pitch(backend):
    """vllm-project/vllm-xpu-kernels#397: the first stride was taken for the pitch of all rows."""
    base, dout = random((2, 3, 16), "float32", 1), random((2, 3, 8), "float32", 2)
    weight = backend.put(random((8,), "float32", 3))
    x = backend.put(base)[..., :8]
    contiguous = all_results(backend.get, backend.put(base[..., :8].copy()), weight, backend.put(dout))
    assert_same(all_results(backend.get, x, weight, backend.put(dout)), contiguous)
    out, check = guarded(backend, (2, 3, 8), "float32", gap=8)
    assert rr.rmsnorm(x, weight, out=out) is out
    np.testing.assert_array_equal(backend.get(out), contiguous["y"])
    check()
    # Rows that do not step evenly: the first two of every three.
    uneven = all_results(backend.get, backend.put(base)[:, :2, :8], weight, backend.put(dout[:, :2].copy()))
    np.testing.assert_array_equal(uneven["y"], contiguous["y"][:, :2])
    np.testing.assert_array_equal(uneven["dx"], contiguous["dx"][:, :2])


@pytest.mark.parametrize("pitches", [p for p in itertools.permutations((8, 16, 24, 40), 4) if p[0] in (8, 16)], ids=str)
def test_B04_every_operand_and_output_has_a_pitch_of_its_own(array_backend, pitches):
    """NVIDIA/TensorRT-LLM#14810: x's pitch was used for the residual and for both outputs."""
    put, get = array_backend.put, array_backend.get
    x, residual, dout, added = (random((4, 8), "float32", seed) for seed in range(4))
    weight = put(random((8,), "float32", 5))

    def spread(values, pitch):
        base = np.full((4, pitch), GUARD, np.float32)
        base[:, :8] = values
        return put(base)[:, :8]

    expected = all_results(get, put(x), weight, put(dout), residual=put(residual), dresidual_out=put(added))
    a, b, c, d = pitches
    y, check_y = guarded(array_backend, (4, 8), "float32", gap=c - 8)
    total, check_total = guarded(array_backend, (4, 8), "float32", gap=d - 8)
    rr.fused_add_rmsnorm(spread(x, a), spread(residual, b), weight, out=y, residual_out=total)
    np.testing.assert_array_equal(get(y), expected["y"])
    np.testing.assert_array_equal(get(total), expected["residual_out"])
    dx, check_dx = guarded(array_backend, (4, 8), "float32", gap=d - 8)
    rr.fused_add_rmsnorm_bwd(
        spread(expected["residual_out"], a), weight, spread(dout, b), put(expected["rstd"]), spread(added, c),
        out=(dx, None, None),
    )  # fmt: skip
    np.testing.assert_array_equal(get(dx), expected["dx"])
    for check in (check_y, check_total, check_dx):
        check()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("offset", [1, 2, 3, 4, 7])
def test_B06_a_base_that_is_not_aligned(array_backend, dtype, offset):
    """pytorch/pytorch#186235: a contiguous slice with a storage offset was read by aligned vector loads."""
    shapes = {"x": (4, 8), "dout": (4, 8), "residual": (4, 8), "dresidual_out": (4, 8), "weight": (8,)}
    values = {name: random(shape, dtype, seed) for seed, (name, shape) in enumerate(shapes.items())}

    def moved(name):
        flat = np.concatenate([np.zeros(offset, DTYPES[dtype]), values[name].reshape(-1)])
        return array_backend.put(flat)[offset:].reshape(shapes[name])

    aligned = {name: array_backend.put(value) for name, value in values.items()}
    plain = {name: aligned[name] for name in ("x", "weight", "dout")}
    for operands in (plain, aligned):
        expected = all_results(array_backend.get, **operands)
        for name in operands:
            assert_same(all_results(array_backend.get, **{**operands, name: moved(name)}), expected)
    y, check = guarded(array_backend, (4, 8), dtype, before=offset)
    total, check_total = guarded(array_backend, (4, 8), dtype, before=offset + 1)
    rr.fused_add_rmsnorm(aligned["x"], aligned["residual"], aligned["weight"], out=y, residual_out=total)
    np.testing.assert_array_equal(array_backend.get(y), expected["y"])
    np.testing.assert_array_equal(array_backend.get(total), expected["residual_out"])
    check()
    check_total()


@pytest.mark.lanes
@pytest.mark.parametrize("card", ["gfx942", "sm_90"])
@pytest.mark.parametrize(("cols", "pitch", "offset"), [(33, 48, 0), (48, 48, 1), (48, 49, 0)])
def test_B06_only_aligned_memory_is_read_and_written_in_packs(card, cols, pitch, offset):
    """Rows of x that are padded to whole packs beside results that are not, and the other way round."""

    def laid_out(values):
        base = np.zeros(values.shape[0] * pitch + 16, values.dtype)
        start = offset + -base.ctypes.data % 16 // values.itemsize
        view = base[start : start + values.shape[0] * pitch].reshape(-1, pitch)[:, :cols]
        view[...] = values
        return view

    x, residual, dout, added = (laid_out(random((3, cols), "bfloat16", seed)) for seed in range(4))
    weight = laid_out(random((1, cols), "bfloat16", 4))[0]
    for others in ({}, {"residual": residual, "dresidual_out": added}):
        expected = all_results(np.asarray, x, weight, dout, **others)
        got = all_results(np.asarray, x, weight, dout, **others, call=on_card(card, "address"))
        for name in ("y", "dx", *(["residual_out"] if others else [])):
            assert_rows_close(got[name], float64(expected[name]), "bfloat16", name)


def test_B07_no_shared_memory_of_a_size_that_is_chosen_at_launch(fake_cupy):
    """flashinfer-ai/flashinfer#634: behind one float a warp a buffer was aligned only for some counts of warps."""
    assert not any(re.search(r"extern\s+(SHARED|__shared__)", read_source(f"{name}.hip")) for name in SIGNATURES)
    fake = fake_cupy("sm_90")
    for plan in plans(NVIDIA["sm_90"], 64, 3584, "float16"):
        launch_on(plan)
    assert {launch.shared for launch in fake.launched} == {0}


@pytest.mark.parametrize("cols", [3584, *(pytest.param(n, marks=pytest.mark.gpu) for n in (1280, 2304))])
def test_B07_columns_whose_warps_are_no_multiple_of_four(array_backend, cols):
    check_fused(array_backend, 5, cols, "float16")


def check_fused(backend, rows, cols, dtype, eps=1e-6):
    """Fused-add forward and backward against float64."""
    x, residual, dout, added = (random((rows, cols), dtype, seed) for seed in range(4))
    weight = random((cols,), dtype, 5)
    got = all_results(backend.get, *map(backend.put, (x, weight, dout)), eps, *map(backend.put, (residual, added)))
    expected = reference.forward(x, weight, eps, residual=residual, residual_dtype=DTYPES[dtype])
    assert_rows_close(got["y"], expected.y, dtype, "y")
    expected = reference.backward(got["residual_out"], weight, dout, eps, dresidual_out=added)
    assert_rows_close(got["dx"], expected.dx, dtype, "dx")
    assert_sums_close(got["dweight"], expected.dweight, dtype, rows, np.abs(float64(dout)).max())


@pytest.mark.parametrize("cols", [1, 3, 5, 7, 513, 768, 769])
def test_B08_odd_columns_stay_in_their_row(array_backend, cols):
    """ROCm/aiter#5044: the vector that holds an odd row's end ran on into the next row."""
    put, get = array_backend.put, array_backend.get
    eps = 1.0 if cols == 1 else 1e-6  # one column: dx is a difference of equal numbers where eps is small
    x, residual, dout = (random((7, cols), "float16", seed) for seed in range(3))
    weight = random((cols,), "float16", 3)
    outputs = [guarded(array_backend, shape, "float16") for shape in [(7, cols)] * 3 + [(cols,)]]
    y, total, dx, dweight = (output for output, _ in outputs)
    rstd = rr.fused_add_rmsnorm_fwd(put(x), put(residual), put(weight), eps, True, out=y, residual_out=total)[2]
    rr.fused_add_rmsnorm_bwd(total, put(weight), put(dout), rstd, out=(dx, None, dweight))
    for _, check in outputs:
        check()
    expected = reference.forward(x, weight, eps, residual=residual, residual_dtype=np.float16)
    np.testing.assert_array_equal(get(total), expected.normed)
    assert_rows_close(get(y), expected.y, "float16", "y")
    gradients = reference.backward(get(total), weight, dout, eps)
    assert_rows_close(get(dx), gradients.dx, "float16", "dx")
    assert_sums_close(get(dweight), gradients.dweight, "float16", 7, np.abs(float64(dout)).max())


def test_B10_a_backward_of_three_dimensions(backend):
    """flagos-ai/FlagGems#5392: a 3-d input was taken for a matrix: dw wrong, and written past its end."""
    x, weight = backend.put(random((2, 3, 8), "float32", 1)), backend.put(random((8,), "float32", 2))
    dout = backend.put(np.ones((2, 3, 8), np.float32))
    _, rstd = rr.rmsnorm_fwd(x, weight, 1e-6, True)
    dweight, check = guarded(backend, (8,), "float32")
    dx, _ = rr.rmsnorm_bwd(x, weight, dout, rstd, out=(None, dweight))
    check()
    flat = all_results(backend.get, x.reshape(6, 8), weight, dout.reshape(6, 8))
    np.testing.assert_array_equal(backend.get(dx), flat["dx"].reshape(2, 3, 8))
    np.testing.assert_array_equal(backend.get(dweight), flat["dweight"])
    if backend.name.startswith("torch"):
        a, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        rr.rmsnorm(a, w, 1e-6).sum().backward()
        np.testing.assert_array_equal(backend.get(a.grad), backend.get(dx))
        np.testing.assert_array_equal(backend.get(w.grad), backend.get(dweight))


# ================================================================================================ size, grid, launch


@pytest.mark.gpu
def test_B12_more_than_2_31_elements():
    """linkedin/Liger-Kernel#1483: row times pitch was counted in 32 bits."""
    import cupy

    rows = 2**23 + 16
    if cupy.cuda.runtime.memGetInfo()[0] < 14 << 30:
        pytest.skip("needs 14 GB of free GPU memory")
    x = cupy.zeros((rows, 256), np.uint16)
    x[-1] = 0x3F80
    x = x.view(DTYPES["bfloat16"])
    weight = cupy.full(256, 0x3F80, np.uint16).view(DTYPES["bfloat16"])
    y, rstd = rr.rmsnorm_fwd(x, weight, 1e-6, True)
    bits = y.view(np.uint16)
    assert not bits[:-1].any()
    assert (bits[-1] == 0x3F80).all()
    dout = cupy.broadcast_to(weight, (rows, 256))
    _, dweight = rr.rmsnorm_bwd(x, weight, dout, rstd, out=(y, None))
    assert (bits[:-1] == int(array(1000.0, "bfloat16").view(np.uint16))).all()
    assert (cupy.asnumpy(dweight).astype(np.float32) == 1).all()
    del x, y, bits
    cupy.get_default_memory_pool().free_all_blocks()


def sparse_rows(rows, cols, pitch, dtype, backwards=False):
    """Rows far apart in memory that is only there where it is touched."""
    dtype = DTYPES[dtype]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        memory = mmap.mmap(-1, ((rows - 1) * pitch + cols) * dtype.itemsize, flags=flags)
    except (OSError, ValueError) as error:
        pytest.skip(f"the system gives no address space of this size: {error}")
    flat = np.frombuffer(memory, np.uint8).view(dtype)
    view = np.lib.stride_tricks.as_strided(flat, (rows, cols), (pitch * dtype.itemsize, dtype.itemsize))
    return view[::-1] if backwards else view


@pytest.mark.parametrize("backwards", [False, True])
def test_B12_rows_further_apart_than_2_31_elements(backwards):
    values = [random((3, 256), "bfloat16", seed) for seed in range(3)]
    weight = random((256,), "bfloat16", 3)
    far = [sparse_rows(3, 256, 2**31 + 8, "bfloat16", backwards) for _ in values]
    for view, value in zip(far, values, strict=True):
        view[...] = value
    x, residual, dout = values
    expected = all_results(np.asarray, x, weight, dout, residual=residual, dresidual_out=x)
    out = sparse_rows(3, 256, 2**31 + 8, "bfloat16", backwards)
    y, total, rstd = rr.fused_add_rmsnorm_fwd(far[0], far[1], weight, 1e-6, True, out=out, residual_out=far[1])
    np.testing.assert_array_equal(y, expected["y"])
    np.testing.assert_array_equal(total, expected["residual_out"])
    dx, _, dweight = rr.fused_add_rmsnorm_bwd(total, weight, far[2], rstd, far[0], out=(out, None, None))
    np.testing.assert_array_equal(dx, expected["dx"])
    np.testing.assert_array_equal(dweight, expected["dweight"])


def test_B14_the_pitch_of_a_single_row(torch):
    """flashinfer-ai/flashinfer#3005: a pitch of 2^31, which a single row may have, became a negative number."""
    values, weight = random((1, 128), "float32", 1), random((128,), "float32", 2)
    expected = rr.rmsnorm(values, weight)
    for shape, strides in (((1, 128), (2**31, 1)), ((1, 1, 128), (2**40, 2**31, 1)), ((1, 128), (-(2**31), 1))):
        x = np.lib.stride_tricks.as_strided(values, shape, [4 * stride for stride in strides])
        np.testing.assert_array_equal(rr.rmsnorm(x, weight), expected.reshape(shape))
        if min(strides) > 0:
            x = torch.as_strided(torch.from_numpy(values), shape, strides)
            np.testing.assert_array_equal(rr.rmsnorm(x, torch.from_numpy(weight)).numpy(), expected.reshape(shape))


@pytest.mark.parametrize("kernel", SIGNATURES)
def test_B14_rows_and_pitches_have_64_bits_all_the_way(kernel):
    declared = re.search(rf"KERNEL\s+{kernel}\((.*?)\)\s*{{", read_source(f"{kernel}.hip"), re.DOTALL)[1]
    types = {words[-1]: words[-2] for words in (parameter.split() for parameter in declared.split(","))}
    wide = {name: kind for name, kind in types.items() if "pitch" in name or "rows" in name}
    assert wide
    assert set(wide.values()) == {"int64"}
    codes = dict(zip(types, SIGNATURES[kernel], strict=True))
    assert {codes[name] for name in wide} == {"q"}
    plan = next(p for p in plans(NVIDIA["sm_90"], 4, 128) if p.kernel == kernel)
    text = program(kernel, plan.constants)
    values = tuple({"P": 2**47, "q": -(2**31) - 8, "i": 3, "r": 0.5}[code] for code in SIGNATURES[kernel])
    assert struct.unpack(text.arguments_format, text.pack_arguments(values)) == values


@pytest.mark.parametrize("rows", [65535, 65536, 65537])
def test_B15_more_rows_than_the_grids_other_dimensions_hold(array_backend, rows):
    """NVIDIA/apex#411, PaddlePaddle/Paddle#31144, facebookincubator/AITemplate#708: rows lay along grid.y or grid.z."""
    base, weight = random((97, 4), "float32", 1), random((4,), "float32", 2)
    turns = -(-rows // 97)
    x = array_backend.put(np.tile(base, (turns, 1))[:rows])
    weight = array_backend.put(weight)
    few = all_results(array_backend.get, array_backend.put(base), weight, array_backend.put(base))
    many = all_results(array_backend.get, x, weight, x)
    for name in ("y", "rstd", "dx"):
        np.testing.assert_array_equal(many[name], np.concatenate([few[name]] * turns)[:rows])
    alone = all_results(array_backend.get, array_backend.put(base[:1]), weight, array_backend.put(base[:1]))
    for name in ("y", "rstd", "dx"):
        np.testing.assert_array_equal(alone[name], few[name][:1])


@pytest.mark.parametrize("card", CARDS)
def test_B16_grid_times_block_fits_32_bits(card):
    """pytorch/pytorch#184826, cupy/cupy#4461, ROCm/rocm-systems#2372: beyond it rows were silently left out."""
    for rows in (1, 2**16, 2**22, 2**24, 2**31, 2**33, 2**40):
        for cols in (1, 3, 128, 1024, 4096, 16384, 131072):
            for dtype in (*FLOATS, "float64"):
                for plan in plans(CARDS[card], rows, cols, dtype):
                    assert 0 < plan.blocks * plan.threads < 2**32, (rows, cols, plan.kernel)
                    assert plan.blocks < 2**31
            heads = plan_forward(rows * 6, cols, CARDS[card], x="bfloat16", y="bfloat16", weight="bfloat16", heads=6)
            assert heads.blocks * heads.threads < 2**32
            assert heads.blocks % 6 == 0


@pytest.mark.gpu
def test_B16_16_million_short_rows():
    import cupy

    base = random((4096, 3), "bfloat16", 1)
    x = cupy.tile(cupy.asarray(base.view(np.uint16)), (2**12, 1)).view(base.dtype)
    out = cupy.full(x.shape, 0x7FC0, np.uint16).view(base.dtype)
    rr.rmsnorm(x, None, 1e-6, out=out)
    expected = rr.rmsnorm(cupy.asarray(base), None, 1e-6)
    assert (out.view(np.uint16).reshape(2**12, 4096, 3) == expected.view(np.uint16)).all()


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (0, 3, 8)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_B17_no_rows(backend, shape, dtype, monkeypatch):
    """PaddlePaddle/Paddle#78065, NVIDIA/cuCollections#75, numba/numba#4140: a grid of no blocks, or a null pointer."""
    x = backend.put(np.empty(shape, DTYPES[dtype]))
    weight = backend.put(np.ones(8, DTYPES[dtype]))
    with monkeypatch.context() as patch:
        for library in (host, gpu):
            patch.setattr(library, "prepare", lambda *_: pytest.fail("something was launched"))
        for residual in (None, x):
            got = all_results(backend.get, x, weight, x, residual=residual)
            assert got["rstd"].shape == shape[:-1]
            assert all(got[name].shape == shape for name in got if name not in ("rstd", "dweight"))
            assert all(value.dtype == DTYPES[dtype] for name, value in got.items() if name != "rstd")
            np.testing.assert_array_equal(float64(got["dweight"]), np.zeros(8))
        dweight = backend.put(np.full(8, GUARD).astype(DTYPES[dtype]))
        rr.rmsnorm_bwd(x, weight, x, rr.rmsnorm_fwd(x, weight, store_rstd=True)[1], out=(None, dweight))
        assert not float64(backend.get(dweight)).any()
    ones = np.ones((2, 8), DTYPES[dtype])
    assert_close(backend.get(rr.rmsnorm(backend.put(ones), weight)), ones)
    if backend.name.startswith("torch"):
        operands = [tensor.clone().requires_grad_() for tensor in (x, x, weight)]
        y, total = rr.fused_add_rmsnorm(*operands)
        (y.sum() + total.sum()).backward()
        assert [tuple(tensor.grad.shape) for tensor in operands] == [shape, shape, (8,)]
        assert not operands[2].grad.any()


@pytest.mark.parametrize(("cols", "dtype"), [(16384, "float16"), (16384, "float32"), (12288, "float32")])
def test_B19_rows_of_48_KB_and_more(array_backend, cols, dtype):
    """flashinfer-ai/flashinfer#718, NVIDIA/numba-cuda-mlir#143: over 48 KB of shared memory has to be asked for."""
    check_fused(array_backend, 3, cols, dtype)


def test_B19_shared_memory_fits_without_leave():
    for cols in (12288, 16384):
        for plan in plans(NVIDIA["sm_90"], 3, cols):
            assert len(nvidia_code(text_of(plan))) > 1000  # ptxas refuses more than 48 KB of static shared memory
        for plan in plans(AMD["gfx942"], 3, cols):
            assert of_code(amd_assembly("gfx942", text_of(plan)), "group_segment_fixed_size") <= 65536


def test_B21_no_attribute_of_a_kernel_is_set_on_rocm(fake_cupy):
    """cupy/cupy#9961: on ROCm CuPy raises where the limit of dynamic shared memory is set, to 0 too."""
    fake = fake_cupy("gfx942:sramecc+:xnack-")
    assert gpu.traits(0).shared_bytes == 0, "plans for it would ask for what cannot be set"
    for cols in (64, 16384, 131072):
        for plan in plans(gpu.traits(0), 64, cols):
            launch_on(plan)
    assert len(fake.launched) >= 15
    assert not any(launch.shared for launch in fake.launched)


@pytest.mark.parametrize("card", CARDS)
def test_B22_at_most_1024_threads(card):
    """linkedin/Liger-Kernel#231, triton-lang/triton#4128, openxla/xla#35026: 32 warps of 64 lanes are 2048 threads."""
    around_powers = [2**k + d for k in range(9, 21) for d in (-1, 0, 1)]
    for cols in (*range(1, 300), *around_powers, 3000, 5000, 7168, 12288, 100000):
        for dtype in (*FLOATS, "float64"):
            for plan in plans(CARDS[card], 4096, cols, dtype):
                assert plan.threads <= 1024
                row = plan.constants.threads_per_row
                assert plan.constants.wave % row == 0 if row < plan.constants.wave else row % plan.constants.wave == 0


@pytest.mark.parametrize("cols", [256, 2048, 16384])
def test_B23_every_kernel_declares_its_block(cols, fake_cupy):
    """ROCm/hip#1745, ggml-org/llama.cpp#10610: ROCm takes blocks for 256 threads unless the kernel says more."""
    for name in ("gfx942", "gfx1100"):
        for plan in plans(AMD[name], 4, cols):
            declared = of_code(amd_assembly(name, text_of(plan)), "max_flat_workgroup_size")
            assert declared == plan.threads
    fake = fake_cupy("gfx942:sramecc+:xnack-")
    for plan in plans(AMD["gfx942"], 4, cols):
        launch_on(plan)
        assert fake.launched[-1].block == (plan.threads, 1, 1)
        assert fake.launched[-1].grid == (plan.blocks, 1, 1)


def test_B23_blocks_of_all_sizes(array_backend):
    x = random((4, 8192), "float32", 1)
    for cols in (1024, 2048, 4096, 8192):
        y = rr.rmsnorm(array_backend.put(x[:, :cols].copy()))
        assert_rows_close(array_backend.get(y), reference.forward(x[:, :cols]).y, "float32")


# ================================================================================================ waves and barriers


@pytest.mark.parametrize("cols", [64, 256, 1024])
def test_B26_the_sum_takes_every_lane(array_backend, cols):
    """Luce-Org/lucebox#500, cupy/cupy#6523, vllm-project/vllm#3321: a wave of 32 was assumed where it has 64."""
    x = np.arange(1, cols + 1, dtype=np.float32)[None]
    y, rstd = rr.rmsnorm_fwd(array_backend.put(x), None, 1e-6, True)
    expected = reference.forward(x)
    assert_rows_close(array_backend.get(y), expected.y, "float32")
    np.testing.assert_allclose(array_backend.get(rstd), expected.rstd, rtol=1e-6)


@pytest.mark.lanes
@pytest.mark.parametrize("card", ["gfx942", "gfx1100", "sm_90"])
@pytest.mark.parametrize("cols", [64, 256, 1024])
def test_B26_the_sum_takes_every_lane_at_wave_32_and_64(card, cols):
    x = np.arange(1, cols + 1, dtype=np.float32)[None]
    assert plan_forward(1, cols, CARDS[card], x="float32", y="float32").constants.wave == CARDS[card].wave
    assert_rows_close(on_card(card)(rr.rmsnorm, x), reference.forward(x).y, "float32")


def test_B28_shuffles_have_the_mask_of_their_vendor():
    """ROCm/hip#3667, vllm-project/vllm#45055: HIP's shuffles with a mask want 64 bits of it, CUDA's want 32."""
    for text in some_texts(AMD["gfx942"]):
        assert not re.findall(r"\w+_sync\s*\(", amd_text(text))
    for text in some_texts(NVIDIA["sm_90"]):
        shuffles = re.findall(r"(__shfl\w*|__reduce\w*)\s*\(([^,]*),", cuda_text(text))
        assert all(name.endswith("_sync") and not mask.lower().endswith("ll") for name, mask in shuffles)
        assert all(len(mask.strip("uU")) <= 10 for _, mask in shuffles)


@pytest.mark.parametrize("arch", AMD)
def test_B28_every_kernel_compiles_for_wave_32_and_64(arch):
    for cols, dtype in ((5, "float16"), (1024, "bfloat16"), (300, "float64"), (131072, "float16")):
        for plan in plans(AMD[arch], 64, cols, dtype, vector=1 if cols == 5 else 8):
            assembly = amd_assembly(arch, text_of(plan))
            assert of_code(assembly, "wavefront_size") == plan.constants.wave
            assert f"{plan.kernel}:" in assembly


def test_B29_no_program_asks_the_compiler_for_the_waves_width():
    """vllm-project/vllm#20330, ROCm/legacy-rocm-build#4121: warpSize is no constant any more, and the macro is gone."""
    for text in {*some_texts(AMD["gfx942"]), *some_texts(AMD["gfx1100"]), *some_texts(NVIDIA["sm_90"])}:
        assert not re.search(r"\bwarpSize\b|WAVEFRONT_SIZE|__AMDGCN_WAVE", preprocessed(text))
        assert not re.search(r"^[^/\n]*(\bwarpSize\b|WAVEFRONT_SIZE|__AMDGCN_WAVE)", text, re.MULTILINE)
        assert re.search(r"^constexpr int WAVE = (32|64);$", text, re.MULTILINE)


def test_B30_many_rows_a_block_100_times(array_backend):
    """PaddlePaddle/Paddle#56100, flashinfer-ai/flashinfer#3607, NVIDIA/apex#1184, ml-explore/mlx#2340: shared memory
    was written anew before slow warps had read it. The race itself is looked for with sanitizers (test_sanitize.py)."""
    repeats = 100 if array_backend.name == "cupy" else 10
    x, dout = (array_backend.put(random((1024, 2048), "float32", seed)) for seed in (1, 2))
    weight = array_backend.put(random((2048,), "float32", 3))
    first = all_results(array_backend.get, x, weight, dout)
    for _ in range(repeats):
        assert_same(all_results(array_backend.get, x, weight, dout), first)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_B31_dweight_is_the_same_in_every_run(array_backend, dtype):
    """karpathy/llm.c#445, ROCm/FlyDSL#795, #855, RL-Align/RL-Kernel#145: float atomics add up in any order."""
    rows = 4096 if array_backend.name == "cupy" else 1024
    x, dout = (array_backend.put(random((rows, 4096), dtype, seed)) for seed in (1, 2))
    weight = array_backend.put(random((4096,), dtype, 3))
    _, rstd = rr.rmsnorm_fwd(x, weight, 1e-6, True)
    seen = []
    try:
        for threads in (1, 2, 3, None):
            rr.set_num_threads(threads)
            _, dweight, dbias = rr.rmsnorm_bwd(x, weight, dout, rstd, bias=weight, need_dx=False)
            seen.append({"dweight": array_backend.get(dweight), "dbias": array_backend.get(dbias)})
    finally:
        rr.set_num_threads(None)
    for again in seen[1:]:
        assert_same(again, seen[0])


def test_B33_no_atomic_adds_of_floats(fake_cupy):
    """ROCm/hipamd#19: the option for unsafe floating-point atomics loses adds in managed memory."""
    fake = fake_cupy("gfx90a:sramecc+:xnack-", hiprtc="CuPy's")
    for plan in plans(AMD["gfx90a"], 64, 4096):
        launch_on(plan)
        assembly = amd_assembly("gfx90a", text_of(plan))
        assert not re.findall(r"\w*atomic\w*_(?:pk_)?add_(?:rtn_)?(?:f|bf)\d+", assembly)
    assert not any("atomic" in option for option in (*options_of(fake), *hip.OPTIONS))


@pytest.mark.skip(reason="needs an MI200 card: a workspace in managed memory, with unsafe atomics asked for")
def test_B33_a_workspace_in_managed_memory():
    raise AssertionError


# ================================================================================================ numbers


@pytest.mark.parametrize("dtype", FLOATS)
def test_B34_squares_beyond_the_range_of_fp16(backend, dtype):
    """pytorch/pytorch#133085: x squared was kept in fp16."""
    weight = backend.put(np.ones(8, DTYPES[dtype]))
    for value in (300.0, 60000.0):
        x = backend.put(np.full((1, 8), value).astype(DTYPES[dtype]))
        half = backend.put(np.full((1, 8), value / 2).astype(DTYPES[dtype]))
        assert (float64(backend.get(rr.rmsnorm(x, weight, 1e-6))) == 1.0).all()
        assert (float64(backend.get(rr.fused_add_rmsnorm(half, half, weight, 1e-6, prenorm=False))) == 1.0).all()


ROWS_BEYOND_FLOAT32 = {
    "all": np.full((1, 4), 1e20),
    "one": np.array([[1e20, 1.0, -1.0, 0.0]]),
    "largest": np.full((1, 4), np.finfo(np.float32).max),
    "sum": np.full((1, 4096), 3e18),  # each square fits, their sum does not
}


@pytest.mark.parametrize("row", ROWS_BEYOND_FLOAT32)
def test_B37_a_sum_of_squares_beyond_float32(array_backend, row):
    """microsoft/onnxruntime#28463: a large, finite row gave NaN. Here it gives 0, forward and backward."""
    x = ROWS_BEYOND_FLOAT32[row].astype(np.float32)
    weight = array_backend.put(random(x.shape[1:], "float32", 1))
    for residual in (None, array_backend.put(np.zeros_like(x))):
        got = all_results(
            array_backend.get, array_backend.put(x), weight, array_backend.put(np.ones_like(x)), residual=residual
        )
        assert all((got[name] == 0).all() for name in ("y", "rstd", "dx", "dweight"))
    exact = rr.rmsnorm(array_backend.put(x.astype(np.float64)), None)
    assert_close(array_backend.get(exact), reference.forward(x.astype(np.float64)).y)


def test_B38_the_default_eps_is_float32s(backend):
    """pytorch/pytorch#189581, #173039, #155527: the epsilon of a 16-bit dtype drowned small rows."""
    for dtype in FLOATS:
        x = np.full((1, 32), 0.058).astype(DTYPES[dtype])
        y = backend.get(rr.rmsnorm(backend.put(x), eps=None, out_dtype="float32"))
        np.testing.assert_allclose(y, 0.99998, atol=1e-5)
        np.testing.assert_allclose(y, reference.forward(x, None, 2.0**-23).y, rtol=1e-6)
    x = np.full((1, 32), 1e-7)
    np.testing.assert_allclose(
        backend.get(rr.rmsnorm(backend.put(x), eps=None)), reference.forward(x, None, 2.0**-52).y, rtol=1e-12
    )
    if backend.name.startswith("torch"):
        x = backend.put(np.full((1, 32), 0.058).astype(DTYPES["bfloat16"]))
        y = rr.RMSNorm(32, device=x.device, dtype=x.dtype)(x)
        assert (backend.get(y).astype(np.float32) == 1.0).all()


@pytest.mark.parametrize(
    ("casting", "expected"), [(None, [1.8359375, 2.0]), ("fp32", [1.8359375, 2.0]), ("llama", [1.828125, 2.015625])]
)
def test_B41_one_rounding_or_two(backend, casting, expected):
    """NVIDIA/TransformerEngine#1132, vllm-project/vllm#42379, vllm-project/vllm-xpu-kernels#536: when y is rounded."""
    x, weight = (backend.put(array(v, "bfloat16")) for v in ([[1, 1.09375]], [1.921875, 1.921875]))
    option = {} if casting is None else {"casting": casting}
    y = rr.rmsnorm(x, weight, 1e-6, **option)
    assert float64(backend.get(y)).tolist() == [expected]


@pytest.mark.parametrize(
    ("rounding", "expected"),
    [(None, [0.27734375, 1.390625]), ("stored", [0.27734375, 1.390625]), ("fp32", [0.27929688, 1.3828125])],
)
def test_B42_the_norm_of_the_stored_sum(backend, rounding, expected):
    """vllm-project/vllm#52104, vllm-project/vllm-omni#6878: which sum is normed, the stored one or the exact one."""
    x, residual, weight = (backend.put(array(v, "bfloat16")) for v in ([[1, 1]], [[2**-8, 4]], [1, 1]))
    option = {} if rounding is None else {"residual_rounding": rounding}
    y, total = rr.fused_add_rmsnorm(x, residual, weight, 1e-6, **option)
    assert float64(backend.get(total)).tolist() == [[1, 5]]
    assert_close(backend.get(y), [expected], rtol=1e-7)


MIXES = [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float32", "float32")]


@pytest.mark.parametrize(("dtype", "weight_dtype"), [*MIXES, ("float16", "float32"), ("float16", "bfloat16")])
def test_B44_each_result_has_its_own_operands_dtype(backend, dtype, weight_dtype):
    """Dao-AILab/quack#12, pytorch/pytorch#167308: mixed dtypes were refused, or the output was promoted in silence."""
    x, dout, weight = random((2, 3, 8), dtype, 1), random((2, 3, 8), dtype, 2), random((8,), weight_dtype, 3)
    x_there, weight_there, dout_there = map(backend.put, (x, weight, dout))
    got = all_results(backend.get, x_there, weight_there, dout_there)
    assert got["y"].dtype == got["dx"].dtype == DTYPES[dtype]
    assert got["dweight"].dtype == DTYPES[weight_dtype]
    assert got["rstd"].dtype == np.float32
    assert_rows_close(got["y"], reference.forward(x, weight).y, dtype)
    expected = reference.backward(x, weight, dout)
    assert_rows_close(got["dx"], expected.dx, dtype)
    largest = np.abs(float64(dout)).max()
    assert_sums_close(got["dweight"], expected.dweight, weight_dtype, 6, largest)
    # dbias has the weight's dtype too, whatever the bias's; without a weight its own.
    rstd = backend.put(got["rstd"])
    for bias_dtype, weight_or_none in (("float32", weight_there), ("float16", weight_there), ("float16", None)):
        bias = backend.put(random((8,), bias_dtype, 4))
        dbias = backend.get(rr.rmsnorm_bwd(x_there, weight_or_none, dout_there, rstd, bias=bias)[2])
        sum_dtype = weight_dtype if weight_or_none is not None else bias_dtype
        assert dbias.dtype == DTYPES[sum_dtype]
        assert_sums_close(dbias, float64(dout).sum(axis=(0, 1)), sum_dtype, 6, largest, what="dbias")


@pytest.mark.lanes
@pytest.mark.parametrize("card", ["gfx942", "sm_90"])
@pytest.mark.parametrize(("weight_dtype", "bias_dtype"), [*MIXES, (None, "bfloat16"), (None, "float32")])
def test_B44_sums_of_few_rows_on_a_card(card, weight_dtype, bias_dtype):
    """Where one block sees all rows it writes the sums itself, in their dtype."""
    x, dout, bias = random((3, 40), "bfloat16", 1), random((3, 40), "bfloat16", 2), random((40,), bias_dtype, 3)
    weight = None if weight_dtype is None else random((40,), weight_dtype, 4)
    rstd = reference.forward(x).rstd.astype(np.float32)
    dx, dweight, dbias = on_card(card)(rr.rmsnorm_bwd, x, weight, dout, rstd, bias=bias)
    expected = reference.backward(x, weight, dout)
    assert_rows_close(dx, expected.dx, "bfloat16")
    dtype, largest = weight_dtype or bias_dtype, np.abs(float64(dout)).max()
    assert dbias.dtype == DTYPES[dtype]
    assert_sums_close(dbias, float64(dout).sum(axis=0), dtype, 3, largest, what="dbias")
    if weight is not None:
        assert dweight.dtype == DTYPES[dtype]
        assert_sums_close(dweight, expected.dweight, dtype, 3, largest)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_B45_sums_over_rows_are_not_kept_in_16_bits(backend, dtype):
    """linkedin/Liger-Kernel#950, pytorch/helion#3595: a running sum in bf16 stops at 256."""
    x, weight = backend.put(np.ones((4096, 8), DTYPES[dtype])), backend.put(np.ones(8, DTYPES[dtype]))
    _, rstd = rr.rmsnorm_fwd(x, weight, 1e-6, True)
    _, dweight, dbias = rr.rmsnorm_bwd(x, weight, x, rstd, bias=weight)
    assert (float64(backend.get(dweight)) == 4096).all()
    assert (float64(backend.get(dbias)) == 4096).all()


def test_B47_a_weight_of_zero(backend):
    """ServiceNow/Fast-LLM#220: the normed row was won back as y / w."""
    x, weight, dout = (backend.put(array(v)) for v in ([[1, 2]], [0, 1], [[1, 1]]))
    got = all_results(backend.get, x, weight, dout)
    assert_close(got["dx"], [[-0.252982, 0.126491]])
    assert_close(got["dweight"], [0.632455, 1.264911])


def test_B48_the_weight_in_the_gradients_second_term(backend):
    """NVIDIA/Megatron-LM#6859, karpathy/llm.c#763: it was there twice, or not at all."""
    x, weight, dout = (backend.put(array(v)) for v in ([[1.5, 1]], [2, 1], [[1, 1]]))
    assert_close(all_results(backend.get, x, weight, dout)["dx"], [[0.120688, -0.181030]], rtol=1e-5)


def test_B50_a_one_dimensional_row_of_zeros(backend):
    """Dao-AILab/flash-attention#781, RL-Align/RL-Kernel#383, tracel-ai/burn#1992: garbage in dw, NaN in dx."""
    x, weight, dout = (backend.put(np.full(4, value, np.float32)) for value in (0, 1, -1))
    for _ in range(10):
        got = all_results(backend.get, x, weight, dout, 1e-5)
        assert got["rstd"].shape == ()
        assert (got["y"] == 0).all()
        np.testing.assert_allclose(got["dx"], np.full(4, -316.2278), rtol=1e-6)
        assert (got["dweight"] == 0).all()


def test_B51_eps_of_zero(backend):
    """local-inference-lab/b12x#121: a row of zeros then has no norm; other rows do."""
    x = backend.put(array([[0, 0, 0, 0], [1, 2, 3, 4]]))
    y = backend.get(rr.rmsnorm(x, None, 0.0))
    assert np.isnan(y[0]).all()
    assert_close(y[1], reference.forward([1, 2, 3, 4], None, 0.0).y)
    out = backend.put(np.full((2, 4), GUARD, np.float32))
    for eps in (-1e-6, float("nan"), -1):
        with pytest.raises(ValueError, match="eps"):
            rr.rmsnorm(x, None, eps, out=out)
    assert (backend.get(out) == GUARD).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_B53_inf_and_nan_stay_in_their_rows(backend, dtype):
    """pytorch/pytorch#173885: rows with Inf or NaN differed from the formula."""
    x = array([[np.inf, 1], [np.nan, 1], [1, 1]], dtype)
    weight, dout = np.ones(2, DTYPES[dtype]), np.ones((3, 2), DTYPES[dtype])
    for residual in (None, backend.put(np.zeros_like(x))):
        got = all_results(backend.get, *map(backend.put, (x, weight, dout)), residual=residual)
        assert_close(got["y"], [[np.nan, 0], [np.nan, np.nan], [1, 1]], rtol=2e-6)
        np.testing.assert_array_equal(np.isfinite(float64(got["dx"])).all(axis=1), [False, False, True])
        assert np.isnan(float64(got["dweight"][0]))
        last = None if residual is None else residual[2:]
        alone = all_results(backend.get, *map(backend.put, (x[2:], weight, dout[2:])), residual=last)
        for name in ("y", "dx", "rstd"):
            np.testing.assert_array_equal(got[name][2:], alone[name])
        if residual is not None:
            np.testing.assert_array_equal(float64(got["residual_out"]), float64(x))


def test_B53_no_fast_arithmetic_is_asked_for(fake_cupy):
    fake = fake_cupy("sm_90")
    for plan in plans(NVIDIA["sm_90"], 4, 64):
        launch_on(plan)
    options = [*host.FLAGS, *options_of(fake), *hip.OPTIONS]
    assert not [option for option in options if re.search("fast[-_]math|finite-math|Ofast|prec-|associative", option)]


@pytest.mark.parametrize(("dtype", "largest_rounded_up"), [("bfloat16", 0x7F7FFFFF), ("float16", 0x477FF000)])
def test_B54_rounding_to_16_bits(array_backend, dtype, largest_rounded_up):
    """tile-ai/tilelang#2690, Comfy-Org/comfy-kitchen#74, ROCm/composable_kernel#1812, stillwater-sc/universal#1133:
    NaN became Inf or -0, values were cut off instead of rounded."""
    finite = largest_rounded_up - 0x10000
    bits = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, largest_rounded_up, finite], np.uint32)
    weight = np.concatenate([bits.view(np.float32), np.array([0.26914088, -0.26914088, 1.0], np.float32)])
    x = array_backend.put(np.ones((1, 8), np.float32))
    y = array_backend.get(rr.rmsnorm(x, array_backend.put(weight), 0.0, out_dtype=dtype))[0]
    with np.errstate(all="ignore"):
        expected = weight.astype(DTYPES[dtype])
    assert np.isnan(float64(y[:3])).all()
    assert float64(y[3]) == np.inf
    np.testing.assert_array_equal(float64(y), float64(expected))
    if dtype == "bfloat16":
        assert float64(y[5:7]).tolist() == [0.26953125, -0.26953125]


def test_B55_float32_subnormals(array_backend):
    """cupy/cupy#9622: CuPy has subnormals flushed on both vendors' cards; the host keeps them."""
    y = array_backend.get(rr.rmsnorm(array_backend.put(np.full((1, 4), 1e-40, np.float32)), None, 1e-6))
    if array_backend.name == "cupy":
        assert (y == 0).all()
    else:
        np.testing.assert_allclose(y, 1e-37, rtol=1e-4)


# ================================================================================================ autograd


def test_B56_a_gradient_that_repeats_one_element(torch, device):
    """pytorch/pytorch#70992, #64529, #195210, unslothai/unsloth#10617, flagos-ai/FlagGems#1068: the gradient of a sum
    has strides of 0, and was read past its only element."""
    x, weight = leaf(torch, [[1, 2, 2, 4]], device), leaf(torch, [1, 1, 1, 1], device)
    rr.rmsnorm(x, weight, 1e-6).sum().backward()
    assert_close(x.grad.cpu(), [[0.256, 0.112, 0.112, -0.176]])
    assert_close(weight.grad.cpu(), [0.4, 0.8, 0.8, 1.6])
    x, weight = (leaf(torch, random(shape, "float32", 1), device) for shape in ((5, 8), (8,)))
    ones = torch.ones(5, 8, device=device)
    row, column = torch.randn(1, 8, device=device), torch.randn(5, 1, device=device)
    for dout in (ones[:1, :1].expand(5, 8), row.expand(5, 8), column.expand(5, 8)):
        strided = torch.autograd.grad(rr.rmsnorm(x, weight), (x, weight), dout)
        plain = torch.autograd.grad(rr.rmsnorm(x, weight), (x, weight), dout.contiguous())
        assert all(torch.equal(a, b) for a, b in zip(strided, plain, strict=True))


def test_B58_the_incoming_gradient_is_only_read(torch, device):
    """linkedin/Liger-Kernel#370, #272, #254, #1305: dx was written over the gradient that came in."""
    x, residual = (leaf(torch, random((5, 8), "float32", seed), device) for seed in (1, 2))
    weight = leaf(torch, random((8,), "float32", 3), device)
    for norm in (lambda: rr.rmsnorm(x, weight), lambda: rr.fused_add_rmsnorm(x, residual, weight)[0]):
        y = norm()
        dout = torch.ones_like(y)
        first = torch.autograd.grad(y, x, dout, retain_graph=True)[0]
        second = torch.autograd.grad(y, x, dout, retain_graph=True)[0]
        assert torch.equal(dout, torch.ones_like(y))
        assert torch.equal(first, second)
        both = torch.autograd.grad((2 * y).sum() + (3 * y).sum(), x)[0]
        torch.testing.assert_close(both, 5 * first, rtol=1e-5, atol=1e-5)


def test_B60_the_residuals_gradient_is_added_after_the_norms(backend):
    """Dao-AILab/quack#53: it went through the norm's derivative too."""
    x, residual, weight, dout, added = (
        backend.put(array(v)) for v in ([[1, 2]], [[0.5, -1]], [2, 1], [[1, 1]], [[10, 0]])
    )
    got = all_results(backend.get, x, weight, dout, residual=residual, dresidual_out=added)
    assert_close(got["dx"], [[10.120688, -0.181030]])
    assert_close(got["dweight"], [1.176696, 0.784464])
    if backend.name.startswith("torch"):
        operands = [tensor.clone().requires_grad_() for tensor in (x, residual, weight)]
        y, total = rr.fused_add_rmsnorm(*operands, 1e-6)
        dx, dresidual, dweight = torch_grad((y, total), operands, (dout, added))
        assert_close(dx.cpu(), got["dx"])
        assert_close(dresidual.cpu(), got["dx"])
        assert_close(dweight.cpu(), got["dweight"])


def torch_grad(*given):
    import torch

    return torch.autograd.grad(*given)


@pytest.mark.parametrize("prenorm", [True, False])
def test_B61_the_residual_has_a_gradient_where_its_sum_is_not_used(torch, device, prenorm):
    """Dao-AILab/quack#52: without a use of the sum the residual got none."""
    x, residual = (leaf(torch, random((5, 8), "float32", seed), device) for seed in (1, 2))
    weight = leaf(torch, random((8,), "float32", 3), device)
    y = rr.fused_add_rmsnorm(x, residual, weight, prenorm=prenorm)
    (y[0] if prenorm else y).sum().backward()
    assert residual.grad is not None
    assert torch.equal(residual.grad, x.grad)
    total = (x + residual).detach().cpu().numpy()
    expected = reference.backward(total, weight.detach().cpu().numpy(), np.ones((5, 8)))
    assert_rows_close(x.grad.cpu().numpy(), expected.dx, "float32")


def test_B63_leaves_do_not_share_their_gradients(torch, device):
    """ROCm/FlyDSL#800, linkedin/Liger-Kernel#272: one buffer was both gradients. Here `.grad`s are apart;
    `autograd.grad` may return one tensor twice, which is documented."""
    x, residual = (leaf(torch, random((5, 8), "float32", seed), device) for seed in (1, 2))
    y, total = rr.fused_add_rmsnorm(x, residual)
    (y.sum() + total.sum()).backward()
    kept = residual.grad.clone()
    assert x.grad.data_ptr() != residual.grad.data_ptr()
    x.grad.mul_(0)
    assert torch.equal(residual.grad, kept)
    assert "may return one tensor twice" in " ".join(rr.FusedAddRMSNormFunction.__doc__.split()).replace("`", "")


@pytest.mark.parametrize("need_x", [False, True])
def test_B65_the_weight_has_a_gradient(torch, device, need_x):
    """unslothai/unsloth#832, #45, #4550: it was always None."""
    x = leaf(torch, random((5, 8), "float32", 1), device, grad=need_x)
    weight = leaf(torch, random((8,), "float32", 2), device)
    dout = leaf(torch, random((5, 8), "float32", 3), device, grad=False)
    expected = reference.backward(*(tensor.detach().cpu().numpy() for tensor in (x, weight, dout)))
    rr.rmsnorm(x, weight).backward(dout)
    assert_sums_close(weight.grad.cpu().numpy(), expected.dweight, "float32", 5, float(dout.abs().max()))
    assert (x.grad is not None) == need_x
    weight.grad = None
    rr.fused_add_rmsnorm(x, torch.zeros_like(x), weight, prenorm=False).backward(dout)
    assert_sums_close(weight.grad.cpu().numpy(), expected.dweight, "float32", 5, float(dout.abs().max()))


def test_B67_without_a_weight(backend):
    """cupy/cupy#9046, NVIDIA/apex#403: None became the pointer 0xffffffff, or the call failed."""
    x, dout = random((5, 8), "float32", 1), random((5, 8), "float32", 2)
    got = all_results(backend.get, backend.put(x), None, backend.put(dout))
    assert "dweight" not in got
    assert_rows_close(got["y"], reference.forward(x).y, "float32")
    assert_rows_close(got["dx"], reference.backward(x, None, dout).dx, "float32")
    if backend.name.startswith("torch"):
        leaf_x = backend.put(x).requires_grad_()
        rr.rmsnorm(leaf_x).backward(backend.put(dout))
        np.testing.assert_array_equal(backend.get(leaf_x.grad), got["dx"])


@pytest.mark.parametrize("card", ["sm_90", "gfx942:sramecc+:xnack-"])
def test_B67_an_absent_operand_is_the_number_0(fake_cupy, card):
    fake = fake_cupy(card)
    launch_on(plan_forward(4, 64, gpu.traits(0), x="float32", y="float32"), P=0)
    pointers = [a for a, kind in zip(fake.launched[0].arguments, SIGNATURES["rmsnorm_fwd"], strict=True) if kind == "P"]
    assert pointers == [0] * 7


def test_B68_a_second_derivative_is_refused(torch, device):
    """NVIDIA/apex#410, pytorch/pytorch#176234: rstd was taken for a constant."""
    x, weight = leaf(torch, random((5, 8), "float32", 1), device), leaf(torch, random((8,), "float32", 2), device)
    for y in (rr.rmsnorm(x, weight), rr.rmsnorm(x), rr.fused_add_rmsnorm(x, x * 2, weight)[0]):
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivative"):
            torch.autograd.grad(gradient.square().sum(), x)
    (gradient,) = torch.autograd.grad(rr.rmsnorm(x, weight).sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(gradient.square().sum(), x)


@pytest.mark.parametrize(("dtype", "weight_dtype"), MIXES)
def test_B71_autocast_changes_no_dtype(torch, device, dtype, weight_dtype):
    """pytorch/pytorch#188955, #191126, hao-ai-lab/FastVideo#1587: the output's dtype depended on torch's version."""
    x = leaf(torch, random((5, 8), "float32", 1), device, getattr(torch, dtype))
    weight = leaf(torch, random((8,), "float32", 2), device, getattr(torch, weight_dtype))
    results = []
    for context in (nullcontext(), torch.autocast(device, dtype=torch.bfloat16)):
        x.grad = weight.grad = None
        with context:
            y = rr.rmsnorm(x, weight)
        y.sum().backward()
        assert y.dtype == x.grad.dtype == x.dtype
        assert weight.grad.dtype == weight.dtype
        results.append((y, x.grad, weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_B72_under_torch_compile(torch, device, fullgraph):
    """Dao-AILab/flash-attention#2013: the compiler traced into a DLPack export, which has no pointer there."""
    x, weight = leaf(torch, random((5, 8), "float32", 1), device), leaf(torch, random((8,), "float32", 2), device)

    def block(x, weight):
        y, total = rr.fused_add_rmsnorm(rr.rmsnorm(x * 2, weight), x, weight)
        return y + total

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=fullgraph, backend="aot_eager")(x, weight)
    eager = block(x, weight)
    assert torch.equal(compiled, eager)
    theirs = torch.autograd.grad(eager.sum(), (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(compiled.sum(), (x, weight)), theirs, strict=True))


# ================================================================================================ CuPy, DLPack, streams


@pytest.mark.parametrize("card", ["sm_90", "gfx942:sramecc+:xnack-"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_B73_arguments_have_the_kernels_types(fake_cupy, card, dtype):
    """cupy/cupy#8485, #6940, #3186: CuPy passes a Python float as 8 bytes, whatever the kernel declares."""
    fake = fake_cupy(card)
    real = np.float64 if dtype == "float64" else np.float32
    for plan in plans(gpu.traits(0), 64, 1024, dtype):
        launch_on(plan, P=2**47 + 8, q=-(2**40))
        for argument, kind in zip(fake.launched[-1].arguments, SIGNATURES[plan.kernel], strict=True):
            assert argument == {"P": 2**47 + 8, "q": -(2**40), "i": plan.blocks, "r": real(1e-6)}[kind]


def test_B73_packed_arguments_lie_as_the_kernel_reads_them():
    for dtype in ("float32", "float64"):
        for plan in plans(AMD["gfx942"], 64, 1024, dtype):
            text = program(plan.kernel, plan.constants)
            size = of_code(amd_assembly("gfx942", text.text), "kernarg_segment_size")
            assert struct.calcsize(text.arguments_format) == size


def test_B73_float64_is_computed_in_float64(backend):
    numbers = np.random.default_rng(0)
    x, weight, dout = (numbers.standard_normal(shape) for shape in ((5, 8), (8,), (5, 8)))
    got = all_results(backend.get, *map(backend.put, (x, weight, dout)), 1e-3)
    np.testing.assert_allclose(got["y"], reference.forward(x, weight, 1e-3).y, rtol=1e-13)
    np.testing.assert_allclose(got["dx"], reference.backward(x, weight, dout, 1e-3).dx, rtol=1e-11, atol=1e-14)


ONE_CALL = """
import hashlib, sys
import numpy as np
import rmsnorm_raw as rr
if sys.argv[1] == "cupy":
    import cupy as xp
    get = xp.asnumpy
else:
    xp, get = np, np.asarray
x = xp.asarray(np.random.default_rng(0).standard_normal((6, 40), dtype=np.float32))
w = x[0].copy()
y, rstd = rr.rmsnorm_fwd(x, w, 1e-6, True)
dx, dw = rr.rmsnorm_bwd(x, w, x, rstd)
print(hashlib.sha256(b"".join(get(a).tobytes() for a in (y, dx, dw))).hexdigest())
"""


def caches(folder):
    return {"RMSNORM_RAW_CACHE_DIR": str(folder / "own"), "CUPY_CACHE_DIR": str(folder / "cupy")}


def files(folder):
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file())


def test_B74_a_second_process_compiles_nothing(array_backend, tmp_path):
    """cupy/cupy#9667: kernels that are asked for by template name are compiled anew in every process."""
    first = printed(python(ONE_CALL, array_backend.name, **caches(tmp_path)))
    made = files(tmp_path)
    assert len(made) >= 3
    assert printed(python(ONE_CALL, array_backend.name, **caches(tmp_path))) == first
    assert files(tmp_path) == made


def test_B74_kernels_have_plain_names(fake_cupy):
    """cupy/cupy#5436, #4298: names of templates are not found on ROCm."""
    fake = fake_cupy("gfx942:sramecc+:xnack-")
    for plan in plans(AMD["gfx942"], 64, 1024):
        launch_on(plan)
        assert fake.launched[-1].name == plan.kernel
        assert re.search(rf'extern "C"[^;{{]*\b{plan.kernel}\(', amd_text(text_of(plan)))
    assert not any("name_expressions" in given for _, given in fake.compiled)


def test_B75_programs_include_nothing():
    """cupy/cupy#9718, #9622, #3866, diku-dk/futhark#2480: headers that an installed hipRTC does not find."""
    for traits in CARDS.values():
        for text in some_texts(traits):
            assert "#include" not in text
    for plan in plans(AMD["gfx942"], 64, 1024):
        amd_assembly("gfx942", text_of(plan))


def test_B75_without_hipcc_the_error_says_so(fake_cupy, monkeypatch):
    fake_cupy("gfx942:sramecc+:xnack-", hiprtc="CuPy's")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"(?s)hipcc.*PATH"):
        launch_on(next(plans(AMD["gfx942"], 64, 1024)))


def test_B77_what_a_program_is_made_for_stands_in_its_text(fake_cupy):
    """ROCm/hip#2248, cupy/cupy#4997: macros of the command line were ignored, and the wrong kernel was built."""
    for card in ("gfx942:sramecc+:xnack-", "sm_90"):
        fake = fake_cupy(card, hiprtc="CuPy's")
        for plan in plans(gpu.traits(0), 64, 1024):
            launch_on(plan)
        options = (*options_of(fake), *hip.OPTIONS)
        assert not [option for option in options if option.startswith(("-D", "--define", "-U"))]
    constants = re.findall(r"^constexpr \w+ (\w+) =", text_of(next(plans(AMD["gfx942"], 64, 1024))), re.MULTILINE)
    assert {"COLS", "WAVE", "X", "Y", "ADD_RESIDUAL"} <= set(constants)


def test_B77_a_missing_constant_is_an_error():
    text = text_of(plan_forward(4, 64, host.traits(), x="float32", y="float32"))
    built_with = host.compiler()
    command = [*built_with.command, *(["clang"] if built_with.is_zig else []), "-x", "c++", "-std=c++17"]
    command += ["-fsyntax-only", "-w", "-"]
    for name in (None, "COLS", "WAVE", "Y", "ADD_RESIDUAL"):
        source = text if name is None else re.sub(rf"^constexpr \w+ {name} = .*\n", "", text, flags=re.MULTILINE)
        done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) == (name is None), name
        assert name is None or name in done.stderr


@pytest.mark.parametrize("hiprtc", ["CuPy's", "hip-python"])
@pytest.mark.parametrize("arches", [("gfx906", "gfx908"), ("gfx942:sramecc+:xnack-", "gfx942:sramecc+:xnack+")])
def test_B78_kernels_are_kept_by_the_whole_architecture(fake_cupy, arches, hiprtc):
    """cupy/cupy#9830, #9847, pytorch/pytorch#121401: two cards of one compute capability shared a binary."""
    fake = fake_cupy(*arches, hiprtc=hiprtc)
    plan = plan_forward(64, 1024, gpu.traits(0), x="float32", y="float32")
    for index in (0, 1, 0, 1):
        launch_on(plan, index)
    assert [index for index, _ in fake.compiled] == [0, 1]
    if hiprtc == "hip-python":
        first, second = (Path(given["path"]) for _, given in fake.compiled)
        assert first != second
        assert len(files(cache.folder())) == 2
    else:
        for (_, given), arch in zip(fake.compiled, arches, strict=True):
            assert f"--offload-arch={arch}" in given["options"]  # CuPy's own key has the options in it


def test_B79_many_processes_compile_at_once(array_backend, tmp_path):
    """cupy/cupy#9463, #10271, deepseek-ai/DeepGEMM#301: the first compilations raced for a file of the cache."""
    running = [python(ONE_CALL, array_backend.name, **caches(tmp_path)) for _ in range(8)]
    assert len({printed(process) for process in running}) == 1
    if array_backend.name == "numpy":
        assert not [path for path, _ in files(tmp_path) if Path(path).name.startswith(".")]
        assert len(files(tmp_path)) == 3


def test_B79_many_threads_compile_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("RMSNORM_RAW_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(host, "_compiled", Compiled())
    x = random((4, 24), "float32", 1)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: rr.rmsnorm(x), range(16)))
    assert all((y == results[0]).all() for y in results)
    assert len(files(tmp_path)) == 1


def test_B80_each_launch_is_made_on_its_own_device(fake_cupy):
    """cupy/cupy#3193, #5795, jonkhler/s2cnn#16: a function of device 0 was launched on device 1."""
    fake = fake_cupy("gfx906", "gfx908")
    fake.current = 0
    plan = plan_forward(64, 1024, gpu.traits(0), x="float32", y="float32")
    for index in (0, 1, 1, 0):
        launch_on(plan, index)
    assert [launch.device for launch in fake.launched] == [0, 1, 1, 0]
    assert [index for index, _ in fake.compiled] == [0, 1]
    assert fake.current == 0


def test_B80_a_thread_without_a_context(fake_cupy):
    """The driver's launch fails there, other than the runtime's; any other failure is the caller's to hear of."""
    fake = fake_cupy("sm_90")
    plan = plan_forward(64, 1024, gpu.traits(0), x="float32", y="float32")
    fake.has_context = not hasattr(fake.cuda.driver, "launchKernel")  # CuPy's RawKernel sees to it by itself
    for _ in range(2):
        launch_on(plan)
    assert len(fake.launched) == 2
    fake.failure = 700
    with pytest.raises(RuntimeError, match="driver error 700"):
        launch_on(plan)
    assert len(fake.launched) == 2


@pytest.mark.multi_gpu
def test_B80_two_devices_in_turn():
    import cupy

    x, weight, dout = random((6, 48), "float32", 1), random((48,), "float32", 2), random((6, 48), "float32", 3)
    results = []
    for index in (0, 1, 0, 1):
        with cupy.cuda.Device(index):
            results.append(all_results(cupy.asnumpy, *map(cupy.asarray, (x, weight, dout))))
    for again in results[1:]:
        assert_same(again, results[0])


@pytest.mark.multi_gpu
@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_B82_operands_on_a_device_that_is_not_current(library):
    """NVIDIA/apex#1736, linkedin/Liger-Kernel#21, tile-ai/TileOPs#2078: device 0 was used because it was current."""
    import cupy

    values = random((64, 4096), "float32", 1), random((4096,), "float32", 2), random((64, 4096), "float32", 3)
    if library == "torch":
        torch = pytest.importorskip("torch", reason="torch is not installed")
        here, there = ([torch.from_numpy(v).to(f"cuda:{index}") for v in values] for index in (0, 1))
        used = partial(torch.cuda.memory_allocated, 0)
        get, location = (lambda t: t.cpu().numpy()), (lambda t: t.device.index)
    else:
        with cupy.cuda.Device(1):
            there = list(map(cupy.asarray, values))
        here = list(map(cupy.asarray, values))
        used = cupy.get_default_memory_pool().used_bytes
        get, location = cupy.asnumpy, (lambda a: a.device.id)
    assert cupy.cuda.runtime.getDevice() == 0
    expected = all_results(get, *here)
    before = used()
    y, rstd = rr.rmsnorm_fwd(*there[:2], 1e-6, True)
    dx, dweight = rr.rmsnorm_bwd(*there, rstd)
    assert used() == before
    assert cupy.cuda.runtime.getDevice() == 0
    assert {location(result) for result in (y, rstd, dx, dweight)} == {1}
    assert_same({name: get(v) for name, v in (("y", y), ("rstd", rstd), ("dx", dx), ("dweight", dweight))}, expected)
    for mixed in ((here[0], there[1]), (there[0], here[1])):
        with pytest.raises(ValueError, match=r"(?s)GPU [01].*GPU [01]"):
            rr.rmsnorm(*mixed)


def test_B83_backward_in_another_thread(torch):
    """pytorch/pytorch#7601, #172798, cupy/cupy#7189: what is current in a thread is not so in autograd's own thread."""
    x, weight = leaf(torch, random((5, 8), "float32", 1)), leaf(torch, random((8,), "float32", 2))
    expected = torch.autograd.grad(rr.rmsnorm(x, weight).sum(), (x, weight))
    loss = rr.rmsnorm(x, weight).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert torch.equal(x.grad, expected[0])
    assert torch.equal(weight.grad, expected[1])


@pytest.mark.parametrize(
    "index", [pytest.param(0, marks=pytest.mark.gpu), pytest.param(1, marks=pytest.mark.multi_gpu)]
)
def test_B83_backward_is_launched_where_forward_was(torch, monkeypatch, index):
    launches, prepare = [], gpu.prepare

    def recorded(program, blocks, elements, index):
        launch = prepare(program, blocks, elements, index)

        def note(stream):
            launches.append((threading.get_ident(), (index, stream)))

        def lines(arguments, space, number):
            space["note"] = note
            return ["    note(here)", *launch.lines(arguments, space, number)]

        return SimpleNamespace(lines=lines)

    monkeypatch.setattr(gpu, "prepare", recorded)
    x = leaf(torch, random((63, 264), "float32", 1), f"cuda:{index}")  # a shape of no other test: not prepared yet
    weight = leaf(torch, random((264,), "float32", 2), f"cuda:{index}")
    stream = torch.cuda.Stream(index)
    stream.wait_stream(torch.cuda.current_stream(index))
    with torch.cuda.stream(stream):
        loss = rr.rmsnorm(x, weight).sum()
    loss.backward()
    torch.cuda.synchronize(index)
    assert len(launches) > 1
    assert {where for _, where in launches} == {(index, stream.cuda_stream)}
    assert launches[0][0] == threading.get_ident() != launches[-1][0]
    expected = reference.backward(x.detach().cpu().numpy(), weight.detach().cpu().numpy(), np.ones((63, 264)))
    assert_rows_close(x.grad.cpu().numpy(), expected.dx, "float32")
    assert_sums_close(weight.grad.cpu().numpy(), expected.dweight, "float32", 63, 1.0)


@pytest.mark.gpu
def test_B84_work_of_a_side_stream_is_waited_for(torch):
    """turboderp-org/exllamav2#590, openvdb/fvdb-core#587, c-hofer/torchph#9, NVlabs/cuHPX#11: kernels went to the
    default stream, beside the one that made their operands."""
    values, weight = random((64, 1024), "float32", 1), random((1024,), "float32", 2)
    source, weight_there = torch.from_numpy(values).cuda(), torch.from_numpy(weight).cuda()
    rr.rmsnorm(torch.zeros_like(source), weight_there)  # compiled, so that nothing waits for a compiler below
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.zeros_like(source)
        torch.cuda._sleep(100_000_000)
        x.copy_(source)
        y = rr.rmsnorm(x, weight_there)
    stream.synchronize()
    assert_rows_close(y.cpu().numpy(), reference.forward(values, weight).y, "float32")


@pytest.mark.gpu
def test_B84_captured_in_a_graph(torch):
    values, weight = random((64, 1024), "float32", 1), random((1024,), "float32", 2)
    x, w = torch.from_numpy(values).cuda(), torch.from_numpy(weight).cuda()

    def step():
        y, rstd = rr.rmsnorm_fwd(x, w, 1e-6, True)
        return y, *rr.rmsnorm_bwd(x, w, x, rstd)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (3, 4):
        x.copy_(torch.from_numpy(random((64, 1024), "float32", seed)))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


class Producer:
    """An array of no known library, on the device that it claims; remembers what consumers asked for."""

    def __init__(self, array, device=(1, 0)):
        self.array, self.device, self.asked = array, device, []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **given):
        self.asked.append(given)
        return self.array.__dlpack__(**given)


def test_B86_no_stream_number_for_the_host():
    """pytorch/pytorch#67618, #150217, #171849, cupy/cupy#5970, #5485: stream numbers differ by vendor."""
    values = random((5, 8), "float32", 1)
    producer = Producer(values)
    assert_rows_close(rr.rmsnorm(producer), reference.forward(values).y, "float32")
    assert producer.asked
    assert all(given.get("stream") is None for given in producer.asked)


@pytest.mark.parametrize("kind", [2, 10])
def test_B86_stream_numbers_are_left_to_the_library_that_knows_the_vendor(fake_cupy, kind):
    fake = fake_cupy("gfx942" if kind == 10 else "sm_90")
    imported = []

    def from_dlpack(array):
        imported.append(array)
        raise InterruptedError("imported")

    fake.from_dlpack = from_dlpack
    producer = Producer(random((5, 8), "float32", 1), (kind, 0))
    with pytest.raises(InterruptedError, match="imported"):
        rr.rmsnorm(producer)
    assert imported == [producer]
    assert producer.asked == []


@pytest.mark.gpu
@pytest.mark.parametrize("side", [False, True])
def test_B86_arrays_cross_in_order_on_default_and_side_streams(torch, side):
    import cupy

    values = random((256, 1024), "float32", 1)
    ready = torch.from_numpy(values).cuda()
    rr.rmsnorm(ready)
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.cuda.stream(torch.cuda.Stream()) if side else nullcontext():
            torch.cuda._sleep(50_000_000)
            there = rr.to_cupy(ready + 0)
            np.testing.assert_array_equal(cupy.asnumpy(there), values)
        stream = cupy.cuda.Stream(non_blocking=True) if side else cupy.cuda.Stream.null
        with stream:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)) if side else nullcontext():
                torch.cuda._sleep(50_000_000)
            back = rr.to_torch(cupy.asarray(values) + 0)
        np.testing.assert_array_equal(back.cpu().numpy(), values)
    device_type = 10 if cupy.cuda.runtime.is_hip else 2
    assert there.__dlpack_device__()[0] == back.__dlpack_device__()[0] == device_type
    # Any other library's array: CuPy asks for its own stream, by the vendor's number for the default one.
    producer = Producer(cupy.asarray(values), (device_type, 0))
    assert_rows_close(cupy.asnumpy(rr.rmsnorm(producer)), reference.forward(values).y, "float32")
    assert all(given.get("stream") != (0 if device_type == 2 else 1) for given in producer.asked)


WITHOUT_ML_DTYPES = """
import sys
device = sys.argv[1]
if device != "cpu":
    import cupy  # itself wants a real ml_dtypes, or none at all, while it is imported
sys.modules["ml_dtypes"] = None
import torch
import rmsnorm_raw as rr
x = torch.linspace(-2, 2, 48).reshape(6, 8).to(device, torch.bfloat16)
w = torch.linspace(1, 2, 8).to(device, torch.bfloat16).requires_grad_()
y = rr.rmsnorm(x, w, 1e-6)
y.sum().backward()
f = x.float()
expected = (f / (f.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w.detach().float()).to(torch.bfloat16)
assert y.dtype == w.grad.dtype == torch.bfloat16
assert (y.float() - expected.float()).abs().max() <= 2**-6
bits = rr.to_numpy(x) if device == "cpu" else rr.to_cupy(x)
assert bits.dtype == "uint16"
assert torch.equal(rr.to_torch(bits, dtype="bfloat16"), x)
print("done")
"""


def test_B87_bfloat16_without_ml_dtypes(device):
    """cupy/cupy#8801, #9670, #9630: bf16 through DLPack crashed, or wanted a package that nobody had installed."""
    assert printed(python(WITHOUT_ML_DTYPES, device)) == "done\n"


def test_B87_bfloat16_across_libraries(backend):
    x = random((5, 8), "bfloat16", 1)
    y = backend.get(rr.rmsnorm(backend.put(x)))
    assert y.dtype == ml_dtypes.bfloat16
    assert_rows_close(y, reference.forward(x).y, "bfloat16")
    np.testing.assert_array_equal(rr.to_numpy(backend.put(x)).view(np.uint16), x.view(np.uint16))


@pytest.mark.parametrize("grad", [True, False])
def test_B88_parameters(torch, device, grad):
    """cupy/cupy#7144, ROCm/FlyDSL#409, #1099, ROCm/aiter#5327: tensors that require a gradient cannot be exported."""
    weight = torch.nn.Parameter(torch.from_numpy(random((8,), "float32", 1)).to(device))
    x = torch.from_numpy(random((5, 8), "float32", 2)).to(device)
    with nullcontext() if grad else torch.no_grad():
        y = rr.rmsnorm(x, weight)
        exported = rr.to_numpy(weight)
        if device != "cpu":
            np.testing.assert_array_equal(rr.to_cupy(weight).get(), exported)
    assert_rows_close(y.detach().cpu().numpy(), reference.forward(x.cpu().numpy(), exported).y, "float32")
    assert y.requires_grad == grad
    if grad:
        y.sum().backward()
        expected = reference.backward(x.cpu().numpy(), exported, np.ones((5, 8)))
        assert_sums_close(weight.grad.cpu().numpy(), expected.dweight, "float32", 5, 1.0)


# ================================================================================================ all of them


def test_every_case_has_a_test():
    assert len(IDS) == 59
    tested = {name[5:8] for name in globals() if re.match(r"test_B\d\d_", name)}
    assert tested == set(IDS)
