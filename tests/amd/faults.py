"""Faults planted into sound programs, each with the complaint that it must cause.

Knows: what the kernels' texts say where they are changed; a text that changed fails the test, not silently.
Must not: compile.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    name: str
    variant: str  # of variants.py
    changes: tuple[tuple[str, str], ...]
    complaint: str  # how it begins
    archs: tuple[str, ...] = ("gfx942", "gfx1100")  # one of each family

    def __str__(self) -> str:
        return self.name

    def planted_in(self, text: str) -> str:
        for old, new in self.changes:
            # However clang-format breaks the lines.
            pattern = r"[\s\\]*".join(re.escape(word) for word in old.split())
            text, count = re.subn(pattern, lambda _, new=new: new, text, count=1)
            if not count:
                raise ValueError(f"{self.name}: the text has no {old!r} any more")
        return text


FORWARD, BACKWARD, REDUCE = "forward bfloat16 4096", "backward bfloat16 4096", "reduce bfloat16"
CDNA, BOTH = ("gfx942",), ("gfx942", "gfx1100")


def at_start(name: str, variant: str, statement: str, complaint: str, archs: tuple[str, ...] = BOTH) -> Fault:
    """A statement planted at the beginning of a kernel over rows."""
    start = "    Place at = place(rows, blocks);\n"
    return Fault(name, variant, ((start, f"{start}    {statement}\n"),), complaint, archs)


def with_slots(name: str, count: int, archs: tuple[str, ...]) -> Fault:
    """More LDS for the sum over a row: `count` sets of slots, all of them in use."""
    changes = (("real scratch[2][", f"real scratch[{count}]["), ("scratch[turn & 1]", "scratch[turn]"))
    return Fault(name, FORWARD, changes, "LDS", archs)


WAIT = 'asm volatile("s_waitcnt lgkmcnt(0)" ::: "memory");'
COPY = "*reinterpret_cast<Chunk<COUNT, T>*>(to) = *reinterpret_cast<const Chunk<COUNT, T>*>(from);"
COPY_BY_8 = (
    "for (int i = 0; i < int(COUNT * sizeof(T) / 8); ++i)\n"
    "        ((unsigned long long*)to)[i] = ((const volatile unsigned long long*)from)[i];"
)
SIZE = "amdgpu_flat_work_group_size( THREADS, THREADS)"
HALF = "amdgpu_flat_work_group_size(THREADS / 2, THREADS / 2)"
CONTRACT = (("#pragma clang fp contract(off)", "#pragma clang fp contract(fast)"),)
ADD = "__hip_atomic_fetch_add(dweight_partials, 1.0f, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);"
SWAP = "int was = 0; __hip_atomic_compare_exchange_strong((int*)rstd, &was, 1, 0, 0, __HIP_MEMORY_SCOPE_AGENT);"
LOAD = "__hip_atomic_load((int*)rstd, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT)"

FAULTS = (
    Fault("bare barrier", FORWARD, ((WAIT, ""),), "fences"),
    Fault(
        "two barriers a row",
        FORWARD,
        (("    sync();\n        v = ", "    sync();\n sync();\n        v = "),),
        "barriers",
    ),
    Fault("spill", BACKWARD, (("waves_per_eu(WAVES_PER_SIMD)", "waves_per_eu(8)"),), "spills", CDNA),
    at_start("array in scratch", FORWARD, "volatile float m[4] = {eps}; eps = m[blocks & 3];", "scratch"),
    at_start("too many registers", BACKWARD, 'asm volatile("" ::: "v200");', "VGPRs", ("gfx942", "gfx1030")),
    at_start("AGPRs", BACKWARD, 'asm volatile("" ::: "a3");', "AGPRs", CDNA),
    Fault("8-byte access", FORWARD, ((COPY, COPY_BY_8),), "accesses"),
    at_start("flat access", FORWARD, "if (eps < 0) *(volatile float*)(unsigned long long)(rows * 4) = 1;", "accesses"),
    with_slots("LDS overflow", 2500, ("gfx950",)),  # elsewhere the compiler refuses it
    with_slots("LDS for fewer blocks", 600, BOTH),
    Fault("half a block", FORWARD, ((SIZE, HALF),), "block"),
    at_start("floating-point atomic", BACKWARD, ADD, "atomics"),
    at_start("compare and swap", FORWARD, SWAP, "atomics"),
    at_start("polling", FORWARD, f"while (!{LOAD}) {{}}", "polling"),
    at_start("polling a volatile", FORWARD, "while (!*(volatile int*)rstd) {}", "polling"),
    Fault(
        "scalar load of partials",
        REDUCE,
        (
            ("const real* partials,", "const real* __restrict__ partials,"),
            ("wide sums[WIDES] = {};", "wide sums[WIDES] = {spread(partials[block_index()])};"),
        ),
        "scalar loads",
    ),
    Fault("contraction", "llama with bias", CONTRACT, "contraction"),
    Fault("contraction in backward", "fused backward float32 4096", CONTRACT, "contraction"),
)
