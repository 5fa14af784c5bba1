"""The host: a program through the machine's C++ compiler into a shared library, its blocks over a few threads.

Knows: compilers, flags, the object cache, threads.
Must not: know arrays or norms. Results never depend on the number of threads: the plan divides the rows.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from .. import cache
from ..plan import HOST, Traits
from ..program import Program
from . import Compiled, Launch

# Contraction is off so that every compiler, every tail and every option rounds alike; the kernels say fma where they
# mean it. The other two let g++ vectorise square roots and selections.
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")

# Below this many elements a second thread costs more than it brings (about 20 µs).
INLINE_ELEMENTS = 1 << 16


def traits(index: int = 0) -> Traits:
    return HOST


# ------------------------------------------------------------------------------------------------ compiling


@dataclass(frozen=True)
class Compiler:
    command: tuple[str, ...]
    version: str

    @property
    def is_zig(self) -> bool:
        return "ziglang" in self.command

    def build(self, source: Path, target: Path) -> None:
        """Source to shared library; a failure carries the compiler's own words."""
        if not self.is_zig:
            self._run(*FLAGS, "-march=native", "-shared", str(source), "-o", str(target))
            return
        # zig's own c++ driver would first build a C++ library for a minute; the text needs none.
        made = str(target) + ".o"
        machine = f"{platform.machine()}-linux-gnu"
        self._run("clang", *FLAGS, "-march=native", "-target", machine, "-nostdinc", "-c", str(source), "-o", made)
        self._run("ld.lld", "-shared", made, "-o", str(target))

    def _run(self, *arguments: str) -> None:
        done = subprocess.run([*self.command, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(self.command)} could not compile {arguments[-3]}:\n{done.stderr}")


def compiler() -> Compiler:
    """$CXX, c++, g++, clang++, then the ziglang package: the first that answers."""
    return _compiler(os.environ.get("CXX"))


@lru_cache(maxsize=8)
def _compiler(cxx: str | None) -> Compiler:
    tried = []
    for words in ([_words(cxx)] if cxx and cxx.strip() else []) + [["c++"], ["g++"], ["clang++"]]:
        tried.append(shlex.join(words))
        if shutil.which(words[0]):
            done = subprocess.run([*words, "--version"], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return Compiler(tuple(words), done.stdout.partition("\n")[0])
    spec = importlib.util.find_spec("ziglang")
    if spec is not None:
        from importlib.metadata import version

        return Compiler((sys.executable, "-m", "ziglang"), f"ziglang {version('ziglang')}")
    raise RuntimeError(
        f"no C++ compiler for the host: tried {', '.join(tried)} and the ziglang package. Install g++ or clang++, "
        "or run: pip install 'rmsnorm-raw[host]'"
    )


def _words(cxx: str) -> list[str]:
    try:
        return shlex.split(cxx)
    except ValueError as error:
        raise RuntimeError(f"CXX is {cxx!r}, which is no command ({error})") from None


@lru_cache(maxsize=1)
def cpu() -> str:
    """The CPU's model and instruction sets: -march=native objects are only for its like."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        wanted = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
        return "\n".join(dict.fromkeys(wanted))
    except OSError:
        return platform.processor() or platform.machine()


_compiled = Compiled()


def compile(program: Program, index: int = 0) -> Any:
    """The program's entry, compiled once for this text, compiler and CPU, and kept in memory and on disk."""
    return _compiled.get(program, lambda: _load(program))


def _load(program: Program) -> Any:
    built_with = compiler()
    key = "\n".join((program.text, *built_with.command, built_with.version, *FLAGS, cpu()))
    name = f"{program.kernel}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.so"
    path = cache.find(name)
    if path is None:
        path = cache.keep(name, _build(program, built_with))
    try:
        library = ctypes.CDLL(str(path))
    except OSError:  # a folder mounted noexec
        path = cache.keep(name, path.read_bytes(), where=cache.temporary_folder())
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise RuntimeError(
                f"no compiled kernel can be loaded from {cache.folder()} or {path.parent} ({error}); set "
                "RMSNORM_RAW_CACHE_DIR to a folder that is not mounted noexec"
            ) from error
    entry = getattr(library, f"{program.kernel}_blocks")
    entry.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_int)
    entry.restype = None
    return entry


def _build(program: Program, built_with: Compiler) -> bytes:
    with tempfile.TemporaryDirectory(prefix="rmsnorm_raw-") as folder:
        source, target = Path(folder) / f"{program.kernel}.cpp", Path(folder) / "kernel.so"
        source.write_text(program.text)
        built_with.build(source, target)
        return target.read_bytes()


# ------------------------------------------------------------------------------------------------ threads

_threads: int | None = None
_pool: ThreadPoolExecutor | None = None
_pool_size = 0
_lock = threading.Lock()


def get_num_threads() -> int:
    """Threads that a host call may use: set_num_threads, else RMSNORM_RAW_THREADS, else the process's CPUs."""
    global _threads
    if _threads is None:
        given = os.environ.get("RMSNORM_RAW_THREADS")
        if given is not None and not (given.isascii() and given.isdigit() and int(given) > 0):
            raise ValueError(f"RMSNORM_RAW_THREADS is {given!r}; it must be a positive whole number")
        _threads = int(given) if given else len(os.sched_getaffinity(0))
    return _threads


def set_num_threads(count: int | None) -> None:
    """Sets the threads of host calls; None goes back to the default. Results do not depend on it."""
    global _threads
    if count is not None and (not isinstance(count, int) or count < 1):
        raise ValueError(f"count is {count!r}; it must be a positive whole number or None")
    _threads = count


def _executor(size: int) -> ThreadPoolExecutor:
    global _pool, _pool_size
    with _lock:
        if _pool is None or _pool_size < size:
            _pool, _pool_size = ThreadPoolExecutor(size, thread_name_prefix="rmsnorm_raw"), size
        return _pool


def _forget_threads() -> None:
    """A forked child has none of its parent's threads, and may have copied a held lock."""
    global _pool, _pool_size, _lock
    _pool, _pool_size, _lock = None, 0, threading.Lock()


os.register_at_fork(after_in_child=_forget_threads)


def place() -> None:
    """There is one host, and it is always current."""


def prepare(program: Program, blocks: int, elements: int, index: int = 0) -> Launch:
    """Compiles. The host has no use for streams."""
    kernel, pack = compile(program), program.pack_arguments
    return Launch(lambda arguments, stream: run(kernel, blocks, pack(arguments), elements))


def run(kernel: Any, blocks: int, packed: bytes, elements: int) -> None:
    """Runs all blocks, in this thread and, where `elements` make it worth while, in others beside it."""
    threads = min(get_num_threads(), blocks) if elements >= INLINE_ELEMENTS else 1
    if threads == 1:
        kernel(packed, 0, blocks)
        return
    edges = [blocks * i // threads for i in range(threads + 1)]
    pool = _executor(threads - 1)
    others = [pool.submit(kernel, packed, edges[i], edges[i + 1]) for i in range(1, threads)]
    kernel(packed, edges[0], edges[1])
    for other in others:
        other.result()
