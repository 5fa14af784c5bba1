"""Runs programs as a GPU would, on this machine: compiles a text with lanes.h, links machine.cpp, launches it.

Knows: compiler flags, the launch's format (machine.cpp reads it), how to turn code addresses into kernel lines.
Must not: know norms. A launch is a process of its own, so that a kernel's fault or a sanitizer's report ends only that.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from rmsnorm_raw import cache
from rmsnorm_raw.plan import Constants, Traits
from rmsnorm_raw.program import program, read_source

HERE = Path(__file__).resolve().parent

DEVICES = {
    "gfx942": Traits("amd", "gfx942:sramecc+:xnack-", wave=64, units=304),
    "gfx950": Traits("amd", "gfx950:sramecc+:xnack-", wave=64, units=256),
    "gfx1100": Traits("amd", "gfx1100", wave=32, units=48),
    # Less shared memory than the card has, so that rows are kept there whole, in part and not at all.
    "sm_90": Traits("nvidia", "sm_90", wave=32, units=132, shared_bytes=96 << 10),
    "sm_90_whole": Traits("nvidia", "sm_90", wave=32, units=132, shared_bytes=227 << 10),
}
WAVES = ("gfx942", "gfx1100", "sm_90")  # one of each text of wave_sum and width

# Optimisation would copy a barrier into both sides of a branch, two places where the text has one, and would spare
# accesses that a sanitizer is to see; without it compiling is five times as fast. GNU's addr2line takes some file names
# of DWARF 5 for others.
FLAGS = ("-std=c++17", "-O0", "-g1", "-gdwarf-4", "-march=x86-64-v3", "-ffp-contract=off", "-no-pie", "-w")
KERNEL_FLAGS: dict[str | None, tuple[str, ...]] = {
    None: (),
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fsanitize-sections=lanes_shared"),
    "thread": ("-fsanitize=thread",),
}
MACHINE_FLAGS: dict[str | None, tuple[str, ...]] = {
    None: ("-O2",),
    "address": ("-O2", "-DLANES_ASAN"),
    "thread": ("-O2", "-DLANES_TSAN"),
}
SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}


class Fault(Exception):
    """What the machine or a sanitizer reported, with kernel lines."""


def missing() -> str:
    """Why nothing can run here; empty where it can."""
    if platform.machine() != "x86_64":
        return f"the lanes machine switches stacks on x86-64 only, and is untested on {platform.machine()}"
    return "" if shutil.which("g++") else "the lanes machine needs g++"


# ------------------------------------------------------------------------------------------------ programs


def text_of(kernel: str, constants: Constants, source: str | None = None) -> str:
    """The program that a GPU would get; or its constants and prelude with another kernel's `source`."""
    if source is None:
        return program(kernel, constants).text
    ahead, _, _ = program("rmsnorm_fwd", constants).text.partition('#line 1 "rmsnorm_fwd.hip"')
    return f'{ahead}#line 1 "{kernel}.hip"\n{source}\n#line 1 "entry"\nENTRY({kernel})\n'


@functools.cache
def parameters(kernel: str, source: str | None = None) -> tuple[tuple[str, str, bool], ...]:
    """A kernel's parameters as its text declares them: (name, code as in SIGNATURES, whether it may be written)."""
    declared = re.search(rf"KERNEL\s+{kernel}\((.*?)\)\s*{{", source or read_source(f"{kernel}.hip"), re.DOTALL)
    assert declared, f"no KERNEL {kernel}"
    codes = {"int64": "q", "int": "i", "real": "r"}
    found = []
    for words in (parameter.split() for parameter in declared[1].split(",")):
        pointer = words[-2].endswith("*")
        found.append((words[-1], "P" if pointer else codes[words[-2]], pointer and words[0] != "const"))
    return tuple(found)


@functools.cache
def _compiler() -> str:
    done = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True)
    return done.stdout.partition("\n")[0]


def _gpp(*arguments: str) -> None:
    done = subprocess.run(["g++", *FLAGS, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"g++ {' '.join((*FLAGS, *arguments))}:\n{done.stderr[-4000:]}")


def _kept(name: str, parts: tuple[str, ...], make: Callable[[Path], None]) -> Path:
    """What `make` writes to the path that it is given, from the cache if these parts made it before."""
    key = hashlib.sha256("\n".join((_compiler(), *FLAGS, *parts)).encode()).hexdigest()[:32]
    path = cache.find(f"lanes-{name}-{key}")
    if path is None:
        with tempfile.TemporaryDirectory(prefix="rmsnorm_raw-") as folder:
            target = Path(folder) / "target"
            make(target)
            path = cache.keep(f"lanes-{name}-{key}", target.read_bytes())
    return path


@functools.cache
def _machine(sanitizer: str | None) -> Path:
    source, flags = HERE / "machine.cpp", MACHINE_FLAGS[sanitizer]
    return _kept(
        "machine", (source.read_text(), *flags), lambda target: _gpp(*flags, "-c", str(source), "-o", str(target))
    )


@functools.cache
def build(kernel: str, text: str, traits: Traits, sanitizer: str | None = None) -> Path:
    """A program's executable, for one launch at a time."""
    machine, header = _machine(sanitizer), HERE / "lanes.h"
    flags = [*KERNEL_FLAGS[sanitizer], "-DRMSNORM_RAW_LANES", f"-DLANES_{traits.vendor.upper()}"]
    if traits.arch.startswith("gfx9"):
        flags.append("-D__GFX9__")  # as clang does

    def make(target: Path) -> None:
        source = target.with_name(f"{kernel}.cpp")
        source.write_text(text)
        _gpp(*flags, "-include", str(header), str(source), str(machine), "-o", str(target))

    return _kept(kernel, (text, header.read_text(), machine.name, *flags), make)


# ------------------------------------------------------------------------------------------------ launches


def launch(
    executable: Path,
    declared: tuple[tuple[str, str, bool], ...],
    arguments_format: str,
    arguments: tuple,
    areas: Iterable[tuple[int, int]],
    blocks: int,
    seed: int = 1,
) -> None:
    """Runs the blocks, in an order drawn by `seed`, on copies of the memory that the arguments point to; what a kernel
    may write is copied back. Raises Fault.

    `areas` (first, end) are the allocations. One that several arguments point into is cut at each of them; every piece
    is guarded for itself, and as far from 16-byte alignment as it is here. Other pointers become null.
    """
    users: dict[int, list[int]] = {}  # of an address: the parameters that hold it
    for i, (_, code, _) in enumerate(declared):
        if code == "P" and arguments[i]:
            users.setdefault(arguments[i], []).append(i)
    places, pieces, written = [], [], []
    for first, end in sorted(set(areas)):
        starts = sorted(address for address in users if first <= address < end)
        for start, stop in zip(starts, [*starts[1:], end][: len(starts)], strict=True):
            holders = users.pop(start)
            places += [(struct.calcsize(arguments_format[: i + 2]) - 8, len(pieces)) for i in holders]
            output = any(declared[i][2] for i in holders)
            head = struct.pack("@24sqii", declared[holders[0]][0].encode(), stop - start, start % 16, output)
            pieces.append(head + ctypes.string_at(start, stop - start))
            if output:
                written.append((start, stop - start))

    nulls = [0 if code == "P" else value for (_, code, _), value in zip(declared, arguments, strict=True)]
    packed = struct.pack(arguments_format, *nulls)
    request = [struct.pack("@iiiii", blocks, seed, len(packed), len(places), len(pieces)), packed]
    request += [struct.pack("@ii", *place) for place in places]
    done = subprocess.run(
        [str(executable)],
        input=b"".join(request + pieces),
        capture_output=True,
        timeout=240,
        env={**os.environ, **SANITIZER_OPTIONS},
        check=False,
    )
    if done.returncode or done.stderr:
        raise Fault(f"{declared[0][0]}… ended with {done.returncode}:\n{_with_lines(executable, done.stderr.decode())}")
    at = 0
    for start, size in written:
        ctypes.memmove(start, done.stdout[at : at + size], size)
        at += size


def _with_lines(executable: Path, report: str) -> str:
    """Code addresses of the machine's own messages as kernel lines, the innermost inlined function first."""

    def lines(match: re.Match) -> str:
        command = ["addr2line", "-f", "-i", "-C", "-s", "-e", str(executable), match[1]]
        words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
        places = [
            f"{place.split(' ')[0]} ({function})" for function, place in zip(words[::2], words[1::2], strict=False)
        ]
        return "at " + " < ".join(places)

    return re.sub(r"pc=(0x[0-9a-f]+)", lines, report)


# ------------------------------------------------------------------------------------------------ memory


def poisoned(shape: tuple[int, ...], dtype: np.dtype, offset: int = 0) -> np.ndarray:
    """An array, `offset` bytes from 16-byte alignment, that nobody has written: signalling NaNs (of fp64, or of bf16
    and fp32 alike), so that arithmetic on them is a fault."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    room = np.empty(size + 32, np.uint8)
    start = -room.ctypes.data % 16 + offset
    array = room[start : start + size].view(dtype).reshape(shape)
    array.view(np.uint16)[...] = _poison(array.dtype)
    return array


def is_poison(array: np.ndarray) -> bool:
    """Whether nobody has written any of it."""
    return bool(np.all(np.ascontiguousarray(array).view(np.uint16) == _poison(array.dtype)))


def _poison(dtype: np.dtype) -> int:
    return 0x7FF4 if dtype == np.float64 else 0x7FA0
