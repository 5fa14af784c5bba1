"""What this machine has for the package, what is missing or doubled, and how to mend it.

Knows: distributions, drivers, the ROCm libraries that CuPy wants, /proc/self/maps. The `check_…` functions are pure:
findings from what they are given; `survey` looks at the machine and asks them all.
Must not: import torch (a version is read from its metadata), print, or change anything but the caches of a trial call.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

# The CuPy distribution of each of this package's extras.
EXTRAS = {"cuda12": "cupy-cuda12x", "cuda13": "cupy-cuda13x", "rocm": "cupy-rocm-7-0"}

# What cupy-rocm-7-0 links: readelf -d over the wheel's extension modules. `import cupy` fails without the first three;
# the others belong to modules that load later, on first use, and that no kernel of this package uses.
ROCM_TO_IMPORT = ("libamdhip64.so.7", "librocfft.so.0", "libroctracer64.so.4")
ROCM_FOR_MORE = (
    "libhipblas.so.3",
    "libhipfft.so.0",
    "libhiprand.so.1",
    "libhipsparse.so.4",
    "librccl.so.1",
    "librocblas.so.5",
    "librocsolver.so.0",
    "libroctx64.so.4",
)

NO_IMPORT = "CuPy cannot be imported"


@dataclass(frozen=True)
class Finding:
    """Something missing, doubled or wrong, and the command or the step that mends it."""

    text: str
    remedy: str


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    arch: str
    wave: int
    units: int

    @property
    def unit_name(self) -> str:
        if not self.arch.startswith("gfx"):
            return "multiprocessors"
        return "WGPs" if self.arch.startswith(("gfx10", "gfx11", "gfx12")) else "CUs"  # as the ROCm runtime counts

    def __str__(self) -> str:
        wave = f"{'waves' if self.arch.startswith('gfx') else 'warps'} of {self.wave}"
        return f"{self.name}, {self.arch}, {wave}, {self.units} {self.unit_name}"


@dataclass(frozen=True)
class CacheState:
    folder: Path
    writable: bool
    entries: int
    bytes: int

    def __str__(self) -> str:
        writable = "writable" if self.writable else "not writable"
        return f"{self.folder}, {writable}, {self.entries} objects, {self.bytes / 1e6:.1f} MB"


@dataclass
class Survey:
    """Facts in the order of printing, findings, and the devices on which a call gave the right values."""

    facts: list[tuple[str, str]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    working: list[str] = field(default_factory=list)


# ------------------------------------------------------------------------------------------------ findings, pure


def cupy_distributions(installed: Iterable[str]) -> list[str]:
    """Those of the installed distributions that bring the module cupy."""
    names = {re.sub(r"[-_.]+", "-", name).lower() for name in installed}
    return sorted(name for name in names if re.fullmatch(r"(amd-)?cupy|cupy-(cuda|rocm)[\dx-]+", name))


def fitting_extra(cuda_driver: int | None, has_amd: bool) -> str | None:
    """The extra for the machine's card: by CUDA's driver version (13000 is 13.0) or an AMD card; None is not known."""
    if (cuda_driver is None) == (not has_amd):
        return None
    if cuda_driver is None:
        return "rocm"
    return "cuda13" if cuda_driver >= 13000 else "cuda12"


def check_cupy(distributions: Sequence[str], version: str | None, extra: str | None) -> list[Finding]:
    """CuPy absent, doubled, for other cards, or too old."""
    install = f"pip install 'rmsnorm-raw[{extra or 'cuda13'}]'"
    if extra is None:
        install += "  # by your card: cuda13, cuda12 or rocm"
    if not distributions:
        return [Finding("CuPy is not installed: arrays on a GPU are refused; NumPy and torch CPU arrays work", install)]
    remove = f"pip uninstall -y {' '.join(distributions)}"
    if len(distributions) > 1:
        keep = f"keep {EXTRAS[extra]} alone" if extra else "keep the one for your card alone"
        text = f"{' and '.join(distributions)} are installed and overwrite each other's files; {keep}"
        return [Finding(text, f"{remove} && {install}")]
    found = []
    name = distributions[0]
    kind = "rocm" if "rocm" in name or name == "amd-cupy" else "cuda" if "cuda" in name else None
    if extra and kind and not extra.startswith(kind):
        card = "an AMD" if extra == "rocm" else "an NVIDIA"
        found.append(Finding(f"{name} is installed, but this machine has {card} card", f"{remove} && {install}"))
    elif extra == "cuda12" and name == EXTRAS["cuda13"]:
        found.append(Finding(f"{name} is installed, but the driver is older than CUDA 13", f"{remove} && {install}"))
    if version is not None and numbers(version) < (14,):
        found.append(Finding(f"CuPy {version} is installed; 14 or newer is needed", f"pip install --upgrade {name}"))
    return found


def check_numpy(version: str | None, distributions: Sequence[str]) -> list[Finding]:
    if not distributions or version is None or numbers(version) >= (2, 1, 2):
        return []
    text = f"NumPy is {version}; bfloat16 CuPy arrays need 2.1.2 or newer"
    return [Finding(text, "pip install --upgrade 'numpy>=2.1.2'")]


def check_rocm_libraries(distributions: Sequence[str], load: Callable[[str], Any] = ctypes.CDLL) -> list[Finding]:
    """The ROCm libraries that an installed cupy-rocm-7-0 wants and the loader does not find."""
    if EXTRAS["rocm"] not in distributions:
        return []

    def missing(names: Sequence[str]) -> list[str]:
        lost = []
        for name in names:
            try:
                load(name)
            except OSError:
                lost.append(name)
        return lost

    remedy = "install ROCm 7; where it is installed: export LD_LIBRARY_PATH=/opt/rocm/lib:$LD_LIBRARY_PATH"
    found = []
    if lost := missing(ROCM_TO_IMPORT):
        found.append(Finding(f"{NO_IMPORT} without {', '.join(lost)}", remedy))
    if lost := missing(ROCM_FOR_MORE):
        text = f"not found: {', '.join(lost)}; parts of CuPy that this package does not use will fail without them"
        found.append(Finding(text, remedy))
    return found


def check_hipcc(distributions: Sequence[str], path: str | None) -> list[Finding]:
    """CuPy on ROCm runs hipcc before each compilation, even of hipRTC; this package by hip-python does not."""
    if path or "hip-python" in distributions or not any("rocm" in name or name == "amd-cupy" for name in distributions):
        return []
    remedy = "install ROCm's HIP compiler; where it is installed: export PATH=/opt/rocm/bin:$PATH"
    return [Finding("hipcc is not on PATH, and CuPy on ROCm runs it before every compilation", remedy)]


def hip_runtimes(maps: str) -> list[str]:
    """The distinct HIP runtimes in a /proc/self/maps."""
    paths = {line.split(None, 5)[5].removesuffix(" (deleted)") for line in maps.splitlines() if "/libamdhip64" in line}
    return sorted(path for path in paths if re.match(r"libamdhip64[-.\w]*\.so", path.rpartition("/")[2]))


def check_hip_runtimes(paths: Sequence[str]) -> list[Finding]:
    """Two runtimes do not know each other's streams and memory, and the second one may find no GPU at all."""
    if len(paths) < 2:
        return []
    text = f"{len(paths)} HIP runtimes are loaded in this process: {' and '.join(paths)}"
    return [Finding(text, "import torch before cupy, or let torch and CuPy use one ROCm")]


def check_cache(state: CacheState) -> list[Finding]:
    if state.writable:
        return []
    text = f"the cache folder {state.folder} cannot be written: each process compiles again"
    return [Finding(text, "export RMSNORM_RAW_CACHE_DIR=/a/folder/that/can/be/written")]


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "14.2.0rc1" is (14, 2, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def hip_or_cuda_version(number: int, is_hip: bool) -> str:
    """The runtimes' own numbering, readable: 13020 is CUDA 13.2, 70051831 is HIP 7.0.51831."""
    if is_hip:
        return f"{number // 10_000_000}.{number // 100_000 % 100}.{number % 100_000}"
    return f"{number // 1000}.{number % 1000 // 10}"


# ------------------------------------------------------------------------------------------------ looking


def installed_distributions() -> list[str]:
    return [name for found in importlib.metadata.distributions() if (name := found.metadata["Name"])]


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def cuda_driver_version() -> int | None:
    """What NVIDIA's driver supports, 13000 for CUDA 13.0; None without one. Needs neither CuPy nor a context."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int(0)
    return version.value if library.cuDriverGetVersion(ctypes.byref(version)) == 0 and version.value else None


def has_amd_driver() -> bool:
    return Path("/dev/kfd").exists()


def find_gpus() -> tuple[list[Gpu], str | None]:
    """The GPUs that CuPy sees, or why it sees none."""
    from .devices import cupy as device

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns of doubled installations, which check_cupy tells better
        try:
            cupy = device.require_cupy()
        except RuntimeError as error:
            return [], essence(error.__cause__ or error)
    try:
        found = []
        for index in range(cupy.cuda.runtime.getDeviceCount()):
            name = cupy.cuda.runtime.getDeviceProperties(index)["name"].decode()
            traits = device.traits(index)
            found.append(Gpu(index, name, traits.arch, traits.wave, traits.units))
    except Exception as error:  # CuPy's errors have no common base; whatever it says is what the user needs
        return [], essence(error)
    return found, None if found else "the driver lists no GPU"


def essence(error: BaseException) -> str:
    """An error's text in one line; of CuPy's framed page about a failed import only the original error."""
    text = str(error).rpartition("Original error:")[2]
    return " ".join(word for word in text.split() if set(word) != {"="}) or type(error).__name__


def try_device(kind: str) -> str | None:
    """One call of two values on "host" or "gpu": None if it gave what it must, else what went wrong."""
    from . import ops

    try:
        array: Any = np.array([[3.0, 4.0]], np.float32)
        if kind == "gpu":
            from .devices.cupy import require_cupy

            array = require_cupy().asarray(array)
        y = ops.rmsnorm(array, eps=1e-12)
        got = np.asarray(y if kind == "host" else y.get())
    except Exception as error:
        return str(error).strip() or type(error).__name__
    expected = np.array([[3.0, 4.0]]) / np.sqrt(12.5)
    return None if np.allclose(got, expected, rtol=1e-5) else f"rmsnorm of [3, 4] gave {got[0].tolist()}"


def cpu_name() -> str:
    from .devices import host

    names = [line.partition(":")[2].strip() for line in host.cpu().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cache_state(folder: Path) -> CacheState:
    """A folder that does not exist yet is writable if its nearest parent is."""
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    writable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    sizes = []
    if folder.is_dir() and os.access(folder, os.R_OK):
        for path in folder.iterdir():
            try:
                if path.is_file():
                    sizes.append(path.stat().st_size)
            except OSError:  # another process has just replaced it
                continue
    return CacheState(folder, writable, len(sizes), sum(sizes))


def survey() -> Survey:
    """Everything that `rmsnorm-raw info` prints."""
    from . import __version__

    found = Survey()
    found.facts += [("rmsnorm_raw", __version__), ("Python", f"{platform.python_version()}, {platform.platform()}")]
    for name in ("numpy", "ml_dtypes", "torch", "hip-python"):
        found.facts.append((name, version_of(name) or "not installed"))
    distributions = cupy_distributions(installed_distributions())
    versions = {name: version_of(name) for name in distributions}
    listed = ", ".join(f"{version} ({name})" for name, version in versions.items())
    found.facts.append(("cupy", listed or "not installed"))
    # The libraries come before CuPy: its failed import says less, and leaves half of it behind.
    found.findings += check_cupy(
        distributions,
        versions[distributions[0]] if distributions else None,
        fitting_extra(cuda_driver_version(), has_amd_driver()),
    )
    found.findings += check_numpy(version_of("numpy"), distributions)
    lost = check_rocm_libraries(distributions)
    found.findings += lost
    found.findings += check_hipcc(distributions, shutil.which("hipcc"))
    _survey_gpus(found, distributions, explained=any(NO_IMPORT in finding.text for finding in lost))
    _survey_host(found)
    return found


def _survey_gpus(found: Survey, distributions: Sequence[str], explained: bool) -> None:
    """`explained`: the libraries found missing are why CuPy cannot be imported."""
    gpus, error = find_gpus() if distributions else ([], None)
    for gpu in gpus:
        found.facts.append((f"GPU {gpu.index}", str(gpu)))
    if gpus:
        from .devices.cupy import require_cupy

        runtime = require_cupy().cuda.runtime
        driver, own = runtime.driverGetVersion(), runtime.runtimeGetVersion()
        is_hip = runtime.is_hip
        found.facts.append((
            "HIP" if is_hip else "CUDA",
            f"driver {hip_or_cuda_version(driver, is_hip)}, runtime {hip_or_cuda_version(own, is_hip)}",
        ))  # fmt: skip
        kept = os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache"
        found.facts.append(("GPU's cache", f"{cache_state(Path(kept))} (CuPy's own, all its programs)"))
        failure = try_device("gpu")
        if failure is None:
            found.working.append("GPU")
        else:
            remedy = "if the message does not say: reinstall CuPy, the one for the card and its driver"
            found.findings.append(Finding(f"a call on the GPU failed: {failure}", remedy))
    else:
        found.facts.append(("GPU", "none"))
        if error and not explained:
            remedy = "install the card's driver; without a card pass NumPy or torch CPU arrays, which need no GPU"
            found.findings.append(Finding(f"CuPy finds no GPU: {error}", remedy))
    try:
        runtimes = hip_runtimes(Path("/proc/self/maps").read_text())
    except OSError:
        runtimes = []
    for path in runtimes:
        found.facts.append(("HIP runtime", path))
    found.findings += check_hip_runtimes(runtimes)
    if "rocm" in (version_of("torch") or ""):
        # Loaded only when torch is imported, which is not for this command to do.
        folder = Path(str(importlib.metadata.distribution("torch").locate_file("torch/lib")))
        for path in sorted(folder.glob("libamdhip64.so*")):
            found.facts.append(("torch's HIP runtime", f"{path}; import torch before cupy"))


def _survey_host(found: Survey) -> None:
    from . import cache
    from .devices import host

    try:
        compiler = host.compiler()
    except RuntimeError as error:
        found.facts.append(("C++ compiler", "none"))
        text = str(error).partition(". Install")[0]
        found.findings.append(Finding(text, "pip install 'rmsnorm-raw[host]'  # or install g++ or clang++"))
    else:
        found.facts.append(("C++ compiler", f"{shlex.join(compiler.command)}: {compiler.version}"))
        failure = try_device("host")
        if failure is None:
            found.working.append("host")
        else:
            remedy = "if the message does not say: try another compiler, CXX=clang++ rmsnorm-raw info"
            found.findings.append(Finding(f"a call on the host failed: {failure}", remedy))
    try:
        threads = str(host.get_num_threads())
    except ValueError as error:
        threads = "invalid"
        found.findings.append(Finding(str(error), "unset RMSNORM_RAW_THREADS"))
    found.facts.append(("host", f"{cpu_name()}, {threads} threads"))
    state = cache_state(cache.folder())
    found.facts.append(("host's cache", str(state)))
    found.findings += check_cache(state)
