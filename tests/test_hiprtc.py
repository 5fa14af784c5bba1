"""Every kind of program through a real hipRTC, which needs no card: Debian's, of ROCm 5.2, through hip-python.

An older compiler than any user has: it shows that the text stands on nothing newer, and that devices/hip.py drives a
real library. It ends the process when it does not know an architecture: only those listed, in processes of their own.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import fake_rocm
import pytest
from amd.variants import traits_of, variants

from rmsnorm_raw.devices import hip
from rmsnorm_raw.plan import plan_forward
from rmsnorm_raw.program import program, read_source

ARCHS = ("gfx906", "gfx908", "gfx90a", "gfx1030")

LIBRARY = next(iter(sorted(Path("/usr/lib").glob("*/libamdhip64.so.5"))), None)
INSTALL = "real hipRTC is not installed: apt-get install --no-install-recommends libamdhip64-5"

pytestmark = [pytest.mark.amd, pytest.mark.skipif(LIBRARY is None, reason=INSTALL)]


# ------------------------------------------------------------------------------------------------ in their own process


def compile_all(arch: str) -> None:
    assert "hipRTC" in hip.version()
    assert "libamdhip64.so.5" in hip.version(), "the library's file is part of the version"
    compiled = 0
    for variant in variants(traits_of(arch)):
        kernel = variant.plan.kernel
        try:
            check(hip.compile(program(kernel, variant.plan.constants).text, arch), kernel)
        except Exception as error:
            raise AssertionError(f"{variant} for {arch}: {error}") from error
        compiled += 1
    print(compiled)


def check(code: bytes, kernel: str) -> None:
    """An ELF image for AMD's GPUs, with the kernel's descriptor in it."""
    assert code[:4] == b"\x7fELF"
    assert struct.unpack_from("<H", code, 18)[0] == 224, "EM_AMDGPU"
    assert f"{kernel}.kd".encode() in code


def full_name(arch: str) -> None:
    """As a card calls itself, "gfx90a:sramecc+:xnack-": the target's features are in the code object's flags."""
    text = forward(arch)
    flags = {}
    for name in (arch, f"{arch}:sramecc+:xnack-", f"{arch}:sramecc+:xnack+"):
        code = hip.compile(text, name)
        check(code, "rmsnorm_fwd")
        flags[name] = struct.unpack_from("<I", code, 48)[0]
    assert len(set(flags.values())) == 3, flags


def broken(arch: str) -> None:
    text = forward(arch).replace("Place at = place(rows, blocks);", "Place at = plaice(rows, blocks);", 1)
    lines = read_source("rmsnorm_fwd.hip").splitlines()
    line = next(number for number, words in enumerate(lines, 1) if "place(rows, blocks)" in words)
    with pytest.raises(RuntimeError) as raised:
        hip.compile(text, arch)
    for word in (f"rmsnorm_fwd.hip:{line}:", "plaice", f"--offload-arch={arch}"):
        assert word in str(raised.value)


def forward(arch: str) -> str:
    plan = plan_forward(64, 4096, traits_of(arch), x="bfloat16", y="bfloat16", weight="bfloat16", vector=8)
    return program(plan.kernel, plan.constants).text


# ------------------------------------------------------------------------------------------------ the tests


@pytest.fixture
def run(pytestconfig, tmp_path):
    """Runs a function of this file in a process that finds hip-python and, under the name that it asks for, hipRTC."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libhiprtc.so").symlink_to(LIBRARY)

    def run(function: str, arch: str, major: str) -> str:
        packages = fake_rocm.hip_python(fake_rocm.wheels(pytestconfig), major)
        paths = (packages, fake_rocm.ROOT, fake_rocm.HERE.parent)
        variables = {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "LD_LIBRARY_PATH": str(tmp_path / "lib"),  # where 7.x looks
            "ROCM_PATH": str(tmp_path),  # where 10.x looks first
        }
        done = subprocess.run(
            [sys.executable, __file__, function, arch], capture_output=True, text=True, check=False,
            env={**os.environ, **variables}, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, f"{function} {arch} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout

    return run


@pytest.mark.parametrize("arch", ARCHS)
def test_every_program_compiles(run, arch):
    major = "10" if arch == "gfx1030" else "7"
    assert int(run("compile_all", arch, major)) >= 100


@pytest.mark.parametrize("major", list(fake_rocm.HIP_PYTHON))
def test_full_architecture_names(run, major):
    run("full_name", "gfx90a", major)


@pytest.mark.parametrize("major", list(fake_rocm.HIP_PYTHON))
def test_a_fault_in_a_kernel_is_reported_at_its_line(run, major):
    run("broken", "gfx90a", major)


if __name__ == "__main__":
    {"compile_all": compile_all, "full_name": full_name, "broken": broken}[sys.argv[1]](sys.argv[2])
