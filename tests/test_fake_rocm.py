"""The real cupy-rocm-7-0 and both hip-pythons over a stand-in for ROCm (tests/fake_rocm): from `rmsnorm(CuPy arrays)`
to right numbers at wave 64, and what users are told where something is missing.

Not shown here: that a card, its driver or a real ROCm behaves as the stand-in does.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import fake_rocm
import lanes
import pytest

pytestmark = [
    pytest.mark.amd,
    pytest.mark.skipif(bool(lanes.missing() or fake_rocm.missing()), reason=lanes.missing() or fake_rocm.missing()),
]

both_majors = pytest.mark.parametrize("major", list(fake_rocm.HIP_PYTHON))


@pytest.fixture(scope="session")
def wheels(pytestconfig) -> Path:
    return fake_rocm.wheels(pytestconfig)


@pytest.fixture(scope="session")
def rocm(wheels, tmp_path_factory) -> Path:
    return fake_rocm.build(wheels, tmp_path_factory.mktemp("fake_rocm") / "lib")


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    """Of code objects and of the executables that run them."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def walk(wheels, rocm, cache, tmp_path):
    """Runs functions of road.py over the stand-in, with a major of hip-python or none; they must end well."""

    def run(major: str | None, *names: str, succeeds: bool = True, **variables: str) -> str:
        packages = [] if major is None else [fake_rocm.hip_python(wheels, major)]
        variables |= {"RMSNORM_RAW_CACHE_DIR": str(cache), "CUPY_CACHE_DIR": str(tmp_path / "cupy")}
        arguments = ("-W", "error::DeprecationWarning", "-m", "fake_rocm.road", *names)
        done = fake_rocm.run(fake_rocm.python(wheels), rocm, *arguments, packages=packages, **variables)
        assert not succeeds or done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@both_majors
def test_from_arrays_to_numbers(walk, cache, major):
    for old in cache.glob("*.hsaco"):
        old.unlink()
    walk(major, "numbers")
    objects = sorted(cache.glob("*.hsaco"))
    assert len(objects) > 20
    objects[0].write_bytes(objects[0].read_bytes()[:-40])
    walk(major, "from_damaged_disk")
    walk(major, "from_disk")
    walk(major, "public_launch")


@both_majors
def test_what_is_asked_of_rocm(walk, cache, major):
    for old in cache.glob("*.hsaco"):
        old.unlink()
    walk(major, "calls", "devices", "threads", "dlpack", "errors")


def _hipcc(folder: Path, *search: str) -> str:
    """A PATH with a hipcc that says what CuPy asks of it: where its headers are."""
    lines = ["#include <...> search starts here:", *(f" {path}" for path in search), "End of search list."]
    folder.mkdir()
    program = folder / "hipcc"
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}' >&2\n" for line in lines))
    program.chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_cupys_own_way(walk, tmp_path):
    walk(None, "cupys_own_way", PATH=_hipcc(tmp_path / "bin", "/opt/rocm/include"))


def test_without_hip_python_and_hipcc(walk):
    walk(None, "no_compiler", PATH="/usr/bin:/bin")


def test_hip_python_without_hiprtc(walk, wheels, rocm, cache, tmp_path):
    """Where only the runtime's packages are installed CuPy finds libhiprtc.so.7; hip-python wants libhiprtc.so."""
    libraries = tmp_path / "lib"
    shutil.copytree(rocm, libraries, symlinks=True)
    (libraries / "libhiprtc.so").unlink()
    done = fake_rocm.run(
        fake_rocm.python(wheels), libraries, "-m", "fake_rocm.road", "no_hiprtc",
        packages=[fake_rocm.hip_python(wheels, "7")], RMSNORM_RAW_CACHE_DIR=str(cache), PATH="/usr/bin:/bin",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("major", [*fake_rocm.HIP_PYTHON, None])
def test_two_runtimes_are_refused(walk, tmp_path, major):
    """With and without hip-python: as torch brings one, under another soname than CuPy's."""
    (tmp_path / "torch").mkdir()
    fake_rocm.empty(tmp_path / "torch", "libamdhip64.so.6")
    other = tmp_path / "torch" / "libamdhip64.so.6"
    walk(major, "two_runtimes", OTHER_RUNTIME=str(other), PATH=_hipcc(tmp_path / "bin", "/opt/rocm/include"))


# ------------------------------------------------------------------------------------------------ rmsnorm-raw info


def _info(wheels: Path, libraries: Path | None, tmp_path: Path) -> str:
    done = fake_rocm.run(
        fake_rocm.python(wheels), libraries, "-m", "rmsnorm_raw", "info",
        RMSNORM_RAW_CACHE_DIR=str(tmp_path / "cache"), PATH="/usr/bin:/bin", COLUMNS="400",
    )  # fmt: skip
    return done.stdout + done.stderr


def test_info_over_a_whole_rocm(walk):
    said = walk("7", "info", succeeds=False, PATH="/usr/bin:/bin", COLUMNS="400")
    assert "cupy-rocm-7-0" in said
    assert "a stand-in for AMD Instinct MI300X, gfx942:sramecc+:xnack-, waves of 64, 304 CUs" in said
    assert "runtime 7.0.51831" in said
    assert "GPU, host" in said, said
    assert "not found" not in said
    assert "cannot be imported" not in said


def test_info_without_rocm(wheels, tmp_path):
    said = _info(wheels, None, tmp_path)
    assert "CuPy cannot be imported without libamdhip64.so.7, librocfft.so.0, libroctracer64.so.4" in said
    assert "LD_LIBRARY_PATH=/opt/rocm/lib" in said


@pytest.mark.parametrize("name", ["librocfft.so.0", "libroctracer64.so.4", "librccl.so.1", "libhipblas.so.3"])
def test_info_names_the_missing_library(wheels, rocm, tmp_path, name):
    libraries = tmp_path / "lib"
    shutil.copytree(rocm, libraries, symlinks=True)
    (libraries / name).unlink()
    said = _info(wheels, libraries, tmp_path)
    optional = name in fake_rocm.ROCM_FOR_MORE
    assert (f"not found: {name};" if optional else f"CuPy cannot be imported without {name}") in said
    imported = fake_rocm.run(fake_rocm.python(wheels), libraries, "-c", "import cupy")
    assert (imported.returncode == 0) == optional, "what the message says of it is so"


def test_the_stand_in_has_what_the_wheel_wants(wheels, rocm):
    """No symbol of ROCm that CuPy's runtime modules want is unresolved, and none lacks its version."""
    (site,) = wheels.glob("cupy/lib/python*/site-packages")
    for name in ("cupy_backends/cuda/api/runtime", "cupy_backends/cuda/api/driver"):
        (module,) = (site / name).parent.glob(f"{Path(name).name}.*.so")
        done = subprocess.run(
            ["ldd", "-r", str(module)], capture_output=True, text=True, check=False, env={"LD_LIBRARY_PATH": str(rocm)}
        )
        said = done.stdout + done.stderr
        assert "not found" not in said, said
        assert "no version information" not in said, said
        assert not [line for line in said.splitlines() if "undefined symbol: hip" in line], said
