"""The real cupy-rocm-7-0 and hip-python on a machine without ROCm: their wheels, and a stand-in for ROCm's libraries.

Knows: which distributions are installed where, which symbols the wheel wants, how the stand-in is compiled.
Must not: import CuPy or hip-python: a test's process may have another CuPy. road.py and others run in their own.

The wheels (about 800 MB unpacked) come from the package index once, and stay where pytest keeps its cache.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rmsnorm_raw.environment import ROCM_FOR_MORE

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

BASE = ("cupy-rocm-7-0>=14,<15", "numpy>=2.1.2", "ml_dtypes", "rich", "pytest")
HIP_PYTHON = {"7": "hip-python>=7,<8", "10": "hip-python>=10,<11"}

RUNTIME = "libamdhip64.so.7"
# The name under which each library is opened, by its soname or by what CuPy and hip-python ask the loader for.
LINKS = {"libamdhip64.so": RUNTIME, "libhiprtc.so": "libhiprtc.so.7"}


def missing() -> str:
    """Why nothing can run here; empty where it can."""
    tools = [name for name in ("g++", "nm", "ldd") if shutil.which(name) is None]
    if tools:
        return f"the stand-in for ROCm needs {' and '.join(tools)}"
    return "" if platform.system() == "Linux" else "ROCm's wheels are for Linux"


# ------------------------------------------------------------------------------------------------ wheels


def wheels(config: Any) -> Path:
    """Where the wheels are kept from one run of pytest to the next."""
    return Path(config.cache.mkdir("rocm"))


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{' '.join(command)} failed, without network? {done.stderr.strip()[-300:]}")


def _once(folder: Path, name: str, make: Callable[[Path], None]) -> Path:
    """folder/name, made by the first process that asks while the others wait."""
    target = folder / name
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (target / "complete").exists():
            make(target)
            (target / "complete").touch()
    return target


def hip_python(folder: Path, major: str) -> Path:
    """A folder for PYTHONPATH that holds hip-python of that major."""
    return _once(
        folder, f"hip{major}", lambda to: _pip("install", "-q", "--no-compile", "--target", str(to), HIP_PYTHON[major])
    )


def python(folder: Path) -> Path:
    """The interpreter of an environment with cupy-rocm-7-0 and without any other CuPy, torch or hip-python."""

    def make(target: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(target)], check=True)
        _pip("--python", str(target / "bin" / "python"), "install", "-q", "--no-compile", *BASE)

    return _once(folder, "cupy", make) / "bin" / "python"


def _modules(folder: Path) -> list[str]:
    """The extension modules of the CuPy wheel."""
    python(folder)
    (site,) = folder.glob("cupy/lib/python*/site-packages")
    return [str(path) for name in ("cupy", "cupy_backends") for path in sorted((site / name).rglob("*.so"))]


# ------------------------------------------------------------------------------------------------ the stand-in


def build(folder: Path, target: Path) -> Path:
    """Compiles the stand-in's libraries into `target`; `folder` holds the wheel that says which symbols it wants.

    What the wheel wants and runtime.cpp has not becomes a function that refuses. Versions are those that it wants.
    """
    target.mkdir(parents=True)
    versions: dict[str, set[str]] = {}
    for symbol, version in re.findall(r" U (\w+)@(hip_\S+)", _nm("--undefined-only", *_modules(folder))):
        versions.setdefault(version, set()).add(symbol)
    wanted = set().union(*versions.values())
    compiled = str(target / "runtime.o")
    _gpp("-c", str(HERE / "runtime.cpp"), "-o", compiled)
    written = set(re.findall(r" T (hip\w+)", _nm("--defined-only", compiled, dynamic=False)))
    refusing = ['extern "C" int stand_in_refuse(const char*);']
    for name in sorted(wanted - written):
        refusing.append(f'extern "C" int {name}() {{ return stand_in_refuse("{name}"); }}')
    versions["stand_in"] = (written - wanted) | {"stand_in_*"}
    (target / "refusing.cpp").write_text("\n".join(refusing))
    _library(target, RUNTIME, compiled, str(target / "refusing.cpp"), _versions(target / "runtime.versions", versions))
    _library(target, "libhiprtc.so.7", str(HERE / "hiprtc.cpp"), str(target / RUNTIME))
    tracer, tracing = target / "roctracer.cpp", ("roctracer_start", "roctracer_stop")
    tracer.write_text("".join(f'extern "C" void {name}() {{}}\n' for name in tracing))
    script = _versions(target / "roctracer.versions", {"ROCTRACER_4.0": tracing})
    _library(target, "libroctracer64.so.4", str(tracer), script)
    for name in ("librocfft.so.0", *ROCM_FOR_MORE):
        empty(target, name)
    for link, to in LINKS.items():
        (target / link).symlink_to(to)
    return target


def empty(target: Path, name: str) -> None:
    """A library of that name with nothing in it: enough for a module that is linked against it and not imported."""
    _library(target, name, "-x", "c++", "/dev/null")


def _versions(script: Path, versions: Mapping[str, Iterable[str]]) -> str:
    """The linker's option that gives each symbol its version."""
    with open(script, "w") as file:
        for version, names in versions.items():
            file.write(f"{version} {{ {' '.join(f'{name};' for name in sorted(names))} }};\n")
    return f"-Wl,--version-script={script}"


def _library(target: Path, name: str, *inputs: str) -> None:
    _gpp("-shared", f"-Wl,-soname,{name}", *inputs, "-o", str(target / name))


def _gpp(*arguments: str) -> None:
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-Wall", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stderr[-4000:]}")


def _nm(kind: str, *files: str, dynamic: bool = True) -> str:
    command = ["nm", *(["-D"] if dynamic else []), kind, *files]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# ------------------------------------------------------------------------------------------------ processes


def run(
    interpreter: Path, libraries: Path | None, *arguments: str, packages: Iterable[Path] = (), **variables: str
) -> subprocess.CompletedProcess:
    """A process of that interpreter with the stand-in's libraries, this checkout and further packages."""
    kept = ("PATH", "HOME", "TMPDIR", "LANG")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, HERE.parent, *packages)))
    if libraries is not None:
        environment["LD_LIBRARY_PATH"] = str(libraries)
    environment |= variables
    return subprocess.run(
        [str(interpreter), *arguments], capture_output=True, text=True, env=environment, timeout=240, check=False
    )
