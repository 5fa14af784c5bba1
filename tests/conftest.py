"""Backends, random operands and tolerances that all tests share."""

from __future__ import annotations

import functools
import importlib.util
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
# |Δ| ≤ u·|ref| + c·max|ref of the row|
TOLERANCES = {
    "float32": (2.0**-22, 1e-5),
    "float16": (2.0**-10, 1e-6),
    "bfloat16": (2.0**-7, 1e-6),
    "float64": (2.0**-50, 1e-13),
}
EPSILONS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


@functools.lru_cache(maxsize=1)
def gpu_count() -> int:
    """GPUs that CuPy can use; 0 without CuPy or a driver."""
    if importlib.util.find_spec("cupy") is None:
        return 0
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount()
    except Exception:
        return 0


def pytest_collection_modifyitems(items):
    for item in items:
        needed = 2 if item.get_closest_marker("multi_gpu") else 1 if item.get_closest_marker("gpu") else 0
        if gpu_count() < needed:
            reason = f"needs {needed} GPU{'s' if needed > 1 else ''} that CuPy can use; this machine has {gpu_count()}"
            item.add_marker(pytest.mark.skip(reason=reason))


def _numpy_backend():
    return SimpleNamespace(name="numpy", put=lambda a: a, get=lambda a: a)


def _cupy_backend():
    import cupy

    return SimpleNamespace(name="cupy", put=cupy.asarray, get=cupy.asnumpy)


def _torch_backend(device):
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def put(a):
        a = np.array(a)
        if a.dtype == DTYPES["bfloat16"]:
            return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16).to(device)
        return torch.from_numpy(a).to(device)

    def get(t):
        t = t.detach().cpu()
        if t.dtype == torch.bfloat16:
            return t.view(torch.int16).numpy().view(DTYPES["bfloat16"])
        return t.numpy()

    return SimpleNamespace(name=f"torch-{device}", put=put, get=get)


@pytest.fixture(
    params=[
        "numpy",
        "torch",
        pytest.param("cupy", marks=pytest.mark.gpu),
        pytest.param("torch-gpu", marks=pytest.mark.gpu),
    ]
)
def backend(request):
    """A library to run on: `put` takes a NumPy array there, `get` brings one back."""
    if request.param == "numpy":
        return _numpy_backend()
    if request.param == "cupy":
        return _cupy_backend()
    return _torch_backend("cuda" if request.param == "torch-gpu" else "cpu")


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def array_backend(request):
    """The two kinds of device, each through one library: for tests of the kernels rather than of the door."""
    return _numpy_backend() if request.param == "numpy" else _cupy_backend()


def random(shape, dtype, seed):
    """Standard normal values, seeded by what they are for."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(DTYPES.get(dtype, dtype))


def assert_rows_close(actual, expected, dtype, what="result"):
    """The tolerance of y and dx: relative to each value, and to the largest of its row."""
    u, c = TOLERANCES[dtype]
    actual = np.asarray(actual).astype(np.float64)
    allowed = u * np.abs(expected) + c * np.abs(expected).max(axis=-1, keepdims=True, initial=0.0)
    excess = np.abs(actual - expected) - allowed
    assert actual.shape == expected.shape, f"{what} has shape {actual.shape}, expected {expected.shape}"
    if excess.size:
        worst = np.unravel_index(np.argmax(np.where(np.isnan(excess), np.inf, excess)), excess.shape)
        assert excess[worst] <= 0, f"{what}{list(map(int, worst))} is {actual[worst]}, expected {expected[worst]}"


def assert_sums_close(actual, expected, dtype, rows, dout_max, terms=None, what="dweight"):
    """The tolerance of dw: a fp32 sum's for random data; equal rows, whose roundings all go one way, add to it."""
    actual = np.asarray(actual).astype(np.float64)
    allowed = max(5e-6 * np.sqrt(rows) * dout_max, 2 * EPSILONS[dtype] * float(np.abs(expected).max(initial=0.0)))
    if terms is not None:
        allowed = allowed + 1.6e-5 * terms
    error = np.abs(actual - expected)
    assert actual.shape == expected.shape, f"{what} has shape {actual.shape}, expected {expected.shape}"
    assert np.all(error <= allowed), f"{what}: largest error {np.nanmax(error)}, allowed {np.max(allowed)}"


def assert_bits(actual, expected, what="result"):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, f"{what} has shape {actual.shape}, expected {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what} is {actual.dtype}, expected {expected.dtype}"
    same = bytewise(actual) == bytewise(expected)
    assert np.all(same), f"{what}: {np.count_nonzero(~same)} bytes differ, {actual} and {expected}"


def bytewise(array):
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
