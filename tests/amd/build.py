"""The two clangs that are tested with, and what each has built in this session.

Knows: where the second one is found.
Must not: judge what was built.
"""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache

import pytest

from amd.variants import Variant
from rmsnorm_raw.codeobject import Facts, Listing, read
from rmsnorm_raw.devices import clang
from rmsnorm_raw.plan import Plan
from rmsnorm_raw.program import program

# The Python of another environment, whose ziglang is the second compiler: clang 20 is the base of ROCm 7.0.
SECOND = "RMSNORM_RAW_CLANG20_PYTHON"
COMPILERS = ("own", "clang 20")


@cache
def compiler(which: str) -> clang.Clang:
    """Skips the test, with the reason, where it is not installed."""
    if which == "own":
        pytest.importorskip("ziglang", reason="the ziglang package, which holds clang, is not installed")
        return clang.find()
    python = os.environ.get(SECOND)
    if not python:
        pytest.skip(f"{SECOND} names no Python with ziglang 0.15.2, whose clang 20 is the second compiler")
    code = "import os, ziglang; print(os.path.join(os.path.dirname(ziglang.__file__), 'zig'))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    second = clang.at(found.stdout.strip())
    assert second.version.startswith("20."), f"{SECOND} has clang {second.version}, not 20"
    return second


@lru_cache(maxsize=4096)
def build_text(which: str, arch: str, kernel: str, text: str) -> tuple[Facts, Listing]:
    built = compiler(which).build(text, arch)
    (facts,) = read(built.code)
    assert facts.name == kernel
    return facts, Listing(built.assembly, kernel)


def build(which: str, arch: str, plan: Plan) -> tuple[Facts, Listing]:
    return build_text(which, arch, plan.kernel, program(plan.kernel, plan.constants).text)


def build_all(which: str, arch: str, variants: list[Variant]) -> list[tuple[Facts, Listing]]:
    """In two threads: each compiler is a process of its own."""
    compiler(which)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda variant: build(which, arch, variant.plan), variants))
