"""GPUs through cupy.RawModule: NVRTC on CUDA, hipRTC on ROCm, one code path.

Knows: CuPy. Imported only when an operand lies on a GPU.
Must not: know arrays or norms; streams and devices come in as numbers.
"""

from __future__ import annotations

import shutil
from functools import lru_cache
from typing import Any

import numpy as np

from ..plan import Traits
from ..program import SIGNATURES, Program
from . import Compiled

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
    return Traits(vendor, arch, wave=properties["warpSize"], units=properties["multiProcessorCount"])


_compiled = Compiled()


def compile(program: Program, index: int) -> Any:
    """The program's kernel on that device. One for all devices of an architecture: CuPy loads it for each."""
    return _compiled.get((program, traits(index).arch), lambda: _build(program, index))


def _build(program: Program, index: int) -> Any:
    cupy = require_cupy()
    vendor, arch = traits(index).vendor, traits(index).arch
    options = _OPTIONS[vendor]
    if vendor == "amd":
        if shutil.which("hipcc") is None:
            raise RuntimeError(
                "CuPy runs hipcc before every hipRTC compilation, and hipcc is not on PATH. Install ROCm's HIP "
                "compiler and add it, usually: export PATH=/opt/rocm/bin:$PATH"
            )
        options += (f"--offload-arch={arch}",)  # CuPy passes none, and its cache would mix architectures
    with cupy.cuda.Device(index):
        return cupy.RawModule(code=program.text, options=options, backend="nvrtc").get_function(program.kernel)


class _Stream:
    """A stream of any library, as CuPy's launch wants it."""

    def __init__(self, pointer: int):
        self.ptr = pointer


_WIDTHS = {"P": int, "q": int, "i": np.int32}


def launch(kernel: Any, program: Program, blocks: int, arguments: tuple, index: int, stream: int) -> None:
    """Launches on a device's stream, whatever device is current. Python integers pass as 8 bytes, the rest by type."""
    cupy = require_cupy()
    constants = program.constants
    real = np.float64 if constants.compute == "float64" else np.float32
    kinds = SIGNATURES[program.kernel]
    typed = tuple(_WIDTHS.get(kind, real)(value) for kind, value in zip(kinds, arguments, strict=True))
    threads = constants.threads_per_row * constants.rows_per_block
    with cupy.cuda.Device(index):
        kernel((blocks,), (threads,), typed, stream=_Stream(stream))


def order(before: int, after: int, index: int) -> None:
    """What is on stream `before` now comes before what is launched on stream `after` next."""
    cupy = require_cupy()
    with cupy.cuda.Device(index):
        event = cupy.cuda.Event(block=False, disable_timing=True)
        cupy.cuda.runtime.eventRecord(event.ptr, before)
        cupy.cuda.runtime.streamWaitEvent(after, event.ptr)
