"""GPUs through cupy.RawModule: NVRTC on CUDA, hipRTC on ROCm (through hip-python where it is installed, else CuPy's).

Knows: CuPy. Imported only when an operand lies on a GPU.
Must not: know arrays or norms; streams and devices come in as numbers.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import cache
from ..plan import Traits
from ..program import SIGNATURES, Program
from . import Compiled, Launch

# One tuple for all programs of a vendor: CuPy compiles a dummy for each distinct one. Contraction is off as on the
# host; for AMD the prelude says so itself, since hipRTC does not know the option.
_OPTIONS = {"nvidia": ("--std=c++17", "--fmad=false"), "amd": ("--std=c++17",)}


@lru_cache(maxsize=1)
def require_cupy() -> Any:
    """CuPy, or a RuntimeError that says what to install."""
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError(
            f"CuPy cannot be imported, and arrays on a GPU need it ({error}). Install the one for your card: "
            "pip install 'rmsnorm-raw[cuda13]', '[cuda12]' or '[rocm]'"
        ) from error
    return cupy


@lru_cache(maxsize=64)
def traits(index: int) -> Traits:
    cupy = require_cupy()
    try:
        properties = cupy.cuda.runtime.getDeviceProperties(index)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise RuntimeError(
            f"CuPy finds no usable GPU {index} ({error}). Check the driver with nvidia-smi (rocminfo on ROCm), and "
            "that the CuPy installed is the one for your card: rmsnorm-raw info"
        ) from error
    if cupy.cuda.runtime.is_hip:
        arch, vendor = properties["gcnArchName"].decode(), "amd"
    else:
        arch, vendor = f"sm_{properties['major']}{properties['minor']}", "nvidia"
    shared = properties.get("sharedMemPerBlockOptin", 0) if vendor == "nvidia" else 0  # on ROCm CuPy cannot ask for it
    return Traits(vendor, arch, properties["warpSize"], properties["multiProcessorCount"], shared)


_compiled = Compiled()


def compile(program: Program, index: int) -> Any:
    """The program's kernel on that device. One for all devices of an architecture: CuPy loads it for each."""
    return _compiled.get((program, traits(index).arch), lambda: _build(program, index))


def _build(program: Program, index: int) -> Any:
    cupy = require_cupy()
    vendor, arch = traits(index).vendor, traits(index).arch
    with cupy.cuda.Device(index):
        if vendor == "amd":
            module = _module_on_rocm(cupy, program, arch)
        else:
            module = cupy.RawModule(code=program.text, options=_OPTIONS[vendor], backend="nvrtc")
        return module.get_function(program.kernel)


def _module_on_rocm(cupy: Any, program: Program, arch: str) -> Any:
    """By hip-python and this package's cache; without hip-python by CuPy, which runs hipcc and a dummy compilation in
    every process."""
    from . import hip

    try:
        hiprtc = hip.version()
    except RuntimeError as error:
        if shutil.which("hipcc") is None:
            raise RuntimeError(
                "hipcc is not on PATH, and CuPy runs it before every hipRTC compilation. Install ROCm's HIP compiler "
                f"and add it, usually: export PATH=/opt/rocm/bin:$PATH; or do without it: {error}"
            ) from error
        _refuse_two_runtimes()
        options = (
            *_OPTIONS["amd"],
            f"--offload-arch={arch}",
        )  # CuPy passes none, and its cache would mix architectures
        return cupy.RawModule(code=program.text, options=options, backend="nvrtc")
    _refuse_two_runtimes()
    key = "\n".join((program.text, arch, *hip.OPTIONS, hiprtc, str(cupy.cuda.runtime.runtimeGetVersion())))
    name = f"{program.kernel}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.hsaco"
    code = cache.read(name)
    if code is None:
        code = hip.compile(program.text, arch)
        cache.keep(name, code)
    # hipModuleLoad is handed the whole file, and nobody promises that it ignores a digest behind the image. The file
    # stays until the process ends: CuPy loads it again for each device.
    path = cache.temporary_folder() / name
    path.write_bytes(code)
    return cupy.RawModule(path=str(path))


def _refuse_two_runtimes() -> None:
    """Two HIP runtimes in one process do not know each other's memory and streams."""
    from .. import environment

    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return
    for finding in environment.check_hip_runtimes(environment.hip_runtimes(maps)):
        raise RuntimeError(f"{finding.text}. Do this: {finding.remedy}")


def prepare(program: Program, blocks: int, elements: int, index: int) -> Launch:
    """Compiles and loads, whatever device is current."""
    cupy = require_cupy()
    kernel = compile(program, index)
    constants = program.constants
    threads = constants.threads_per_row * constants.rows_per_block
    if getattr(cupy.cuda.driver, "launchKernel", None) is None:  # not in CuPy's reference: it may go
        return Launch(_launch_by_cupy(kernel, program, blocks, threads, index))
    with cupy.cuda.Device(index):
        if constants.shared_bytes:
            kernel.max_dynamic_shared_size_bytes = constants.shared_bytes
        return _DriverLaunch(kernel, program, blocks, threads, index)


class _DriverLaunch(Launch):
    """The driver's own call. What is alike in all launches of a call lies in the buffer of its arguments already."""

    def __init__(self, kernel: Any, program: Program, blocks: int, threads: int, index: int):
        driver, runtime = require_cupy().cuda.driver, require_cupy().cuda.runtime
        start, function, shared = driver.launchKernel, kernel.kernel.ptr, program.constants.shared_bytes

        def again(error: Any, stream: int, table: int) -> None:
            if error.status != _INVALID_CONTEXT:
                raise error
            runtime.setDevice(index)
            start(function, blocks, 1, 1, threads, 1, 1, shared, stream, table, 0)

        self._kinds = program.arguments_format[1:]
        self._space = {
            "start": start, "function": function, "blocks": blocks, "threads": threads, "shared": shared,
            "Failed": driver.CUDADriverError, "again": again,
            "kernel": kernel,  # its module stays loaded
        }  # fmt: skip

    def lines(self, arguments: Sequence[str | int | float], space: dict[str, Any], number: int) -> list[str]:
        varied = [(kind, text) for kind, text in zip(self._kinds, arguments, strict=True) if isinstance(text, str)]
        kinds = "".join(kind for kind, _ in varied)
        # The driver reads the arguments while the GIL is released: a buffer belongs to a thread until it has returned.
        own = {
            "buffers": [], "fresh": partial(_argument_buffer, self._kinds, arguments),
            "pack": struct.Struct(f"@{kinds}").pack_into, **self._space,
        }  # fmt: skip
        space |= {f"{name}{number}": value for name, value in own.items()}
        names, texts = {name: f"{name}{number}" for name in own}, ", ".join(text for _, text in varied)
        return _LAUNCH.format(arguments=texts, **names).split("\n")


_LAUNCH = """\
    try: mine = {buffers}.pop()
    except IndexError: mine = {fresh}()
    {pack}(mine[0], 0, {arguments})
    try: {start}({function}, {blocks}, 1, 1, {threads}, 1, 1, {shared}, here, mine[1], 0)
    except {Failed} as error: {again}(error, here, mine[1])
    {buffers}.append(mine)"""

# What the driver answers in a thread that has not used the device yet: the runtime's calls make the context current by
# themselves, the driver's do not.
_INVALID_CONTEXT = 201


def place() -> tuple[Callable[[], int], Callable[[int], Any]] | None:
    """What tells the current device, and a context that makes another one current; None where there is but one."""
    cupy = require_cupy()
    if cupy.cuda.runtime.getDeviceCount() == 1:
        return None
    return cupy.cuda.runtime.getDevice, cupy.cuda.Device


def _launch_by_cupy(
    kernel: Any, program: Program, blocks: int, threads: int, index: int
) -> Callable[[tuple, int], None]:
    """The same through RawKernel: Python integers pass as 8 bytes, the rest by type."""
    cupy = require_cupy()
    constants = program.constants
    real = np.float64 if constants.compute == "float64" else np.float32
    types = [{"P": int, "q": int, "i": np.int32, "r": real}[kind] for kind in SIGNATURES[program.kernel]]

    def launch(arguments: tuple, stream: int) -> None:
        typed = tuple(to(value) for to, value in zip(types, arguments, strict=True))
        with cupy.cuda.Device(index):
            if constants.shared_bytes:
                kernel.max_dynamic_shared_size_bytes = constants.shared_bytes
            kernel((blocks,), (threads,), typed, shared_mem=constants.shared_bytes, stream=_Stream(stream))

    return launch


class _Stream:
    """A stream of any library, as CuPy's launch wants it."""

    def __init__(self, pointer: int):
        self.ptr = pointer


def _argument_buffer(kinds: str, arguments: Sequence[str | int | float]) -> tuple[Any, int, Any]:
    """A buffer for arguments of these `struct` kinds, the address of a table of pointers to them, and the table. Those
    that are texts come first in the buffer; the others follow and are there already."""
    buffer = ctypes.create_string_buffer(256)
    places, end = {}, 0
    for here in (True, False):
        for i, (kind, argument) in enumerate(zip(kinds, arguments, strict=True)):
            if isinstance(argument, str) is here:
                size = struct.calcsize(kind)
                places[i] = -(-end // size) * size
                end = places[i] + size
            if not (here or isinstance(argument, str)):
                struct.pack_into(f"@{kind}", buffer, places[i], argument)
    base = ctypes.addressof(buffer)
    table = (ctypes.c_void_p * len(kinds))(*(base + places[i] for i in range(len(kinds))))
    return buffer, ctypes.addressof(table), table


def order(before: int, after: int, index: int) -> None:
    """What is on stream `before` now comes before what is launched on stream `after` next."""
    cupy = require_cupy()
    with cupy.cuda.Device(index):
        event = cupy.cuda.Event(block=False, disable_timing=True)
        cupy.cuda.runtime.eventRecord(event.ptr, before)
        cupy.cuda.runtime.streamWaitEvent(after, event.ptr)
