"""clang and lld of the ziglang package: program texts to AMD code objects, without card or ROCm.

Knows: the compiler's commands and options, and which architectures have waves of 64.
Must not: launch anything, read what it made (codeobject does) or know kernels and plans.

The steps and options are those of hipRTC and CuPy: text to bitcode, bitcode to code, both at -O3, fp32 denormals
flushed. In between stands the assembly, so that what is read in it is what the code object holds.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

# Code objects of version 5 are what ROCm 6 and 7 load by default.
FRONT = ("-std=c++17", "-O3", "-mcode-object-version=5", "-fcuda-flush-denormals-to-zero")
BACK = ("-O3", "-mcode-object-version=5")


@dataclass(frozen=True)
class Built:
    """A code object, and the assembly that it was made from."""

    code: bytes
    assembly: str


@dataclass(frozen=True)
class Clang:
    """A zig binary, which holds clang and lld."""

    zig: str
    version: str

    def build(self, text: str, arch: str) -> Built:
        """The program for `arch` (a gcnArchName: gfx942, gfx90a:xnack-, …); a failure carries clang's own words."""
        with tempfile.TemporaryDirectory(prefix="rmsnorm_raw-") as name:
            folder = Path(name)
            (folder / "k.hip").write_text(text)
            hip = ("-x", "hip", f"--offload-arch={arch}", "--cuda-device-only", "--no-gpu-bundle-output")
            none = ("-nogpulib", "-nogpuinc")  # the text needs neither headers nor device libraries
            target = ("-target", "amdgcn-amd-amdhsa", f"-mcpu={arch}")
            self._run(folder, "clang", *hip, *none, *FRONT, "-emit-llvm", "-c", "k.hip", "-o", "k.bc")
            self._run(folder, "clang", *target, "-nogpulib", *BACK, "-S", "k.bc", "-o", "k.s")
            self._run(folder, "clang", *target, *BACK, "-c", "k.s", "-o", "k.o")
            self._run(folder, "ld.lld", "-shared", "--no-undefined", "k.o", "-o", "k.hsaco")
            return Built((folder / "k.hsaco").read_bytes(), (folder / "k.s").read_text())

    def _run(self, folder: Path, *arguments: str) -> None:
        command = (self.zig, *arguments)
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr}")


def find() -> Clang:
    """The ziglang package of this Python; RuntimeError with the remedy where it is missing."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(
            "compiling for AMD cards without ROCm takes the clang of the ziglang package, which is not installed: "
            "pip install 'rmsnorm-raw[host]'"
        )
    return at(str(Path(next(iter(spec.submodule_search_locations))) / "zig"))


@lru_cache(maxsize=8)
def at(zig: str) -> Clang:
    """The clang of a certain zig binary."""
    if not os.access(zig, os.X_OK):
        raise RuntimeError(f"there is no zig binary at {zig}: install ziglang again")
    done = subprocess.run([zig, "clang", "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"clang version (\S+)", done.stdout)
    if done.returncode or found is None:
        raise RuntimeError(f"{zig} clang --version failed:\n{done.stderr}")
    return Clang(zig, found.group(1))


def wave_of(arch: str) -> int:
    """Lanes of a wave as hipRTC compiles for it: 64 on GFX9 (Instinct), 32 since."""
    return 64 if re.match(r"gfx9[0-9a-f]{2}(:|$)", arch) else 32
