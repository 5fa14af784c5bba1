"""AMD code objects by hipRTC, through hip-python; needs no AMD card.

Knows: hip-python (7.x and 10.x, which differ only in where they look for libhiprtc.so), hipRTC's options and log.
Must not: know devices, arrays or norms, or load what it compiles: CuPy does. Importing this file imports no hip-python.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

# What CuPy passes for its own users. Contraction is switched off in the prelude: hipRTC does not know that option.
OPTIONS = ("--std=c++17", "-fcuda-flush-denormals-to-zero")


@lru_cache(maxsize=1)
def require_hiprtc() -> Any:
    """hip-python's hipRTC with its library loaded, or a RuntimeError that says what to install."""
    try:
        import hip  # binds only the parts that are installed

        hiprtc: Any = getattr(hip, "hiprtc")  # noqa: B009
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"hip-python, which compiles for AMD cards, cannot be imported ({error}). Install the one of your ROCm's "
            "major version: pip install 'rmsnorm-raw[rocm]' for ROCm 7, pip install 'hip-python>=10,<11' for ROCm 10"
        ) from error
    try:
        hiprtc.hiprtcVersion()  # hip-python opens the library at the first call
    except RuntimeError as error:
        raise RuntimeError(
            f"hip-python finds no hipRTC ({error}). Install ROCm; where it is installed: "
            "export LD_LIBRARY_PATH=/opt/rocm/lib:$LD_LIBRARY_PATH"
        ) from error
    return hiprtc


@lru_cache(maxsize=1)
def version() -> str:
    """hipRTC's version for cache keys: with the library's file, since hiprtcVersion says 9.0 in every ROCm since 5."""
    _, major, minor = require_hiprtc().hiprtcVersion()
    mapped = {line.split(None, 5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "/lib" in line}
    # Before ROCm 6 hipRTC lay inside the runtime's library.
    libraries = sorted(path for path in mapped if Path(path).name.startswith(("libhiprtc.so", "libamdhip64.so")))
    return "\n".join((f"hipRTC {major}.{minor}", *map(_identity, libraries)))


def compile(text: str, arch: str) -> bytes:
    """A program's code object for one architecture, "gfx942" or in full "gfx942:sramecc+:xnack-".

    Raises RuntimeError, with the compiler's log where the text does not compile. hipRTC before ROCm 6 ends the process
    when it does not know the architecture.
    """
    hiprtc = require_hiprtc()
    options = [option.encode() for option in (*OPTIONS, f"--offload-arch={arch}")]
    status, program = hiprtc.hiprtcCreateProgram(text.encode(), b"rmsnorm_raw.hip", 0, [], [])
    _check(status, "hiprtcCreateProgram")
    try:
        (status,) = hiprtc.hiprtcCompileProgram(program, len(options), options)
        if int(status):
            words = " ".join(option.decode() for option in options)
            log = _log(hiprtc, program) or "(hipRTC gave no log: does it know this architecture?)"
            raise RuntimeError(f"hipRTC could not compile for {arch} ({status.name}; options {words}):\n{log}")
        status, size = hiprtc.hiprtcGetCodeSize(program)
        _check(status, "hiprtcGetCodeSize")
        code = bytearray(size)
        _check(hiprtc.hiprtcGetCode(program, code)[0], "hiprtcGetCode")
        return bytes(code)
    finally:
        hiprtc.hiprtcDestroyProgram(program.createRef())


def _log(hiprtc: Any, program: Any) -> str:
    status, size = hiprtc.hiprtcGetProgramLogSize(program)
    if int(status) or not size:
        return ""
    log = bytearray(size)
    (status,) = hiprtc.hiprtcGetProgramLog(program, log)
    return "" if int(status) else log.rstrip(b"\0").decode(errors="replace").rstrip()


def _check(status: Any, call: str) -> None:
    if int(status):
        raise RuntimeError(f"{call} failed: {status.name}")


def _identity(path: str) -> str:
    try:
        state = Path(path).stat()
    except OSError:  # replaced while it was in use
        return path
    return f"{path} {state.st_size} {state.st_mtime_ns}"
