"""As much of CuPy as devices/cupy.py uses, without a GPU: what it is asked for is remembered.

Knows: the two ways to launch, and the layout in which arguments are packed.
Must not: run kernels (fake_rocm does, below the real CuPy).
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from rmsnorm_raw.program import SIGNATURES


class FakeCupy:
    """As much of CuPy as is used; it remembers what is compiled and launched, and for which device."""

    def __init__(self, arches, by_driver):
        self.compiled, self.launched, self.current, self.functions = [], [], 0, []
        self.has_context, self.failure = True, 0
        is_hip = arches[0].startswith("gfx")

        def properties(index):
            common = {"major": 9, "minor": 0, "warpSize": 64 if is_hip else 32, "multiProcessorCount": 60}
            return common | {"gcnArchName": arches[index].encode()}

        runtime = SimpleNamespace(
            is_hip=is_hip, getDeviceProperties=properties, getDevice=lambda: self.current, runtimeGetVersion=lambda: 1,
            getDeviceCount=lambda: len(arches), setDevice=self.set_device, CUDARuntimeError=RuntimeError,
        )  # fmt: skip
        driver = SimpleNamespace(CUDADriverError=DriverError)
        if by_driver:
            driver.launchKernel = self.launch_by_driver
        self.cuda = SimpleNamespace(runtime=runtime, driver=driver, Device=self.device)

    def set_device(self, index):
        self.current, self.has_context = index, True

    @contextmanager
    def device(self, index):
        before, self.current = self.current, index
        yield
        self.current = before

    def RawModule(self, **given):
        self.compiled.append((self.current, given))
        text = given.get("code") or Path(given["path"]).read_text()
        return SimpleNamespace(get_function=lambda name: FakeKernel(self, name, text))

    def launch_by_driver(self, function, gx, gy, gz, bx, by, bz, shared, stream, pointers, extra):
        """Reads the arguments as the kernel would, each at its own width."""
        if not self.has_context:
            raise DriverError(201)
        kernel = self.functions[function]
        kinds = SIGNATURES[kernel.name]
        real = ctypes.c_double if "COMPUTE = F64" in kernel.text else ctypes.c_float
        widths = {"P": ctypes.c_uint64, "q": ctypes.c_int64, "i": ctypes.c_int32, "r": real}
        table = (ctypes.c_void_p * len(kinds)).from_address(pointers)
        arguments = [widths[kind].from_address(place).value for kind, place in zip(kinds, table, strict=True)]
        self.record(kernel, (gx, gy, gz), (bx, by, bz), shared, stream, arguments)

    def record(self, kernel, grid, block, shared, stream, arguments):
        if self.failure:
            raise DriverError(self.failure)
        self.launched.append(SimpleNamespace(
            name=kernel.name, device=self.current, grid=grid, block=block, shared=shared, stream=stream,
            arguments=arguments,
        ))  # fmt: skip


class DriverError(RuntimeError):
    def __init__(self, status):
        super().__init__(f"driver error {status}")
        self.status = status


class FakeKernel:
    """Takes launches; anything that is set on it is a fault, as it is with CuPy on ROCm."""

    __slots__ = ("fake", "kernel", "name", "text")

    def __init__(self, fake, name, text):
        fake.functions.append(self)
        values = {"fake": fake, "name": name, "text": text, "kernel": SimpleNamespace(ptr=len(fake.functions) - 1)}
        for key, value in values.items():
            object.__setattr__(self, key, value)

    def __setattr__(self, name, value):
        raise RuntimeError(f"hipErrorNotSupported: {name}")

    def __call__(self, grid, block, arguments, shared_mem=0, stream=None):
        real = np.float64 if "COMPUTE = F64" in self.text else np.float32
        for argument, kind in zip(arguments, SIGNATURES[self.name], strict=True):
            assert type(argument) in {"P": (int, np.uint64), "q": (int, np.int64), "i": (np.int32,), "r": (real,)}[kind]
        grid, block = ((*sizes, 1, 1)[:3] for sizes in (grid, block))
        self.fake.record(self, grid, block, shared_mem, stream.ptr, [argument + 0 for argument in arguments])
