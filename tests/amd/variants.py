"""Every kind of program that a plan for an AMD card can ask for, and the cards that plans are tested with.

Knows: plans and their operands.
Must not: compile.
"""

from __future__ import annotations

from dataclasses import dataclass

from rmsnorm_raw.devices.clang import wave_of
from rmsnorm_raw.plan import Plan, Traits, plan_backward, plan_forward, plan_reduce

# Units as the ROCm runtime counts them: CUs, on RDNA WGPs.
CARDS = {
    "MI210": Traits("amd", "gfx90a:sramecc+:xnack-", 64, 104),
    "MI250X": Traits("amd", "gfx90a:sramecc+:xnack-", 64, 110),
    "MI300X": Traits("amd", "gfx942:sramecc+:xnack-", 64, 304),
    "MI300X CPX": Traits("amd", "gfx942:sramecc+:xnack-", 64, 38),
    "MI308X": Traits("amd", "gfx942:sramecc+:xnack-", 64, 80),
    "MI300A": Traits("amd", "gfx942:sramecc+:xnack-", 64, 228),
    "MI355X": Traits("amd", "gfx950:sramecc+:xnack-", 64, 256),
    "RX 7900 XTX": Traits("amd", "gfx1100", 32, 48),
    "RX 9070 XT": Traits("amd", "gfx1201", 32, 32),
}
ARCHS = {"gfx90a": 104, "gfx942": 304, "gfx950": 256, "gfx1030": 40, "gfx1100": 48, "gfx1201": 32}

MANY, FEW = 1 << 15, 64  # rows: beyond and below the thresholds of persistent forward grids


@dataclass(frozen=True)
class Variant:
    name: str
    plan: Plan

    def __str__(self) -> str:
        return self.name


def traits_of(arch: str) -> Traits:
    return Traits("amd", arch, wave_of(arch), ARCHS.get(arch, 64))


def variants(traits: Traits) -> list[Variant]:
    """Those of all widths in bf16, and of some in the other dtypes; no program twice."""
    found: dict[tuple, Variant] = {}

    def add(name: str, *plans: Plan) -> None:
        for n, plan in enumerate(plans):
            label = name if len(plans) == 1 else f"{name}, launch {n + 1}"
            found.setdefault((plan.kernel, plan.constants), Variant(label, plan))

    for dtype, widths in WIDTHS.items():
        for cols in widths:
            operations(add, traits, dtype, cols)
    for weight in ("bfloat16", "float16", "float32"):
        add(f"reduce {weight}", plan_reduce(4096, traits, weight=weight, compute="float32"))
    add("reduce float64", plan_reduce(4096, traits, weight="float64", compute="float64"))
    options(add, traits)
    return list(found.values())


# One at least of each shape that plans have: lanes idle, several rows a block, odd widths, one to four packs a thread,
# blocks that are no power of two, blocks of 512 and 1024 threads, rows in tiles, rows of which little is kept.
WIDTHS = {
    "bfloat16": (40, 769, 1024, 2048, 4096, 5120, 8192, 16384, 32768, 131072),
    "float16": (256, 4096),
    "float32": (769, 4096, 16384, 131072),
    "float64": (1024,),
}


def operations(add, traits: Traits, dtype: str, cols: int) -> None:
    """Forward and backward, plain and fused, each at the alignment that contiguous rows of that width have."""
    vector = 8
    while cols % vector:
        vector //= 2
    name = f"{dtype} {cols}"
    plain = {"x": dtype, "y": dtype, "weight": dtype, "vector": vector}
    fused = plain | {"residual": dtype, "residual_out": dtype}
    back = {"x": dtype, "dout": dtype, "dx": dtype, "weight": dtype, "vector": vector}
    add(f"forward {name}", plan_forward(MANY, cols, traits, **plain))
    add(f"fused forward {name}", plan_forward(MANY, cols, traits, **fused))
    if dtype == "bfloat16":
        add(f"forward of few rows {name}", plan_forward(FEW, cols, traits, **plain))
        add(f"fused forward of few rows {name}", plan_forward(FEW, cols, traits, **fused))
    add(f"backward {name}", *plan_backward(MANY, cols, traits, **back).launches)
    add(f"fused backward {name}", *plan_backward(MANY, cols, traits, **back, dresidual_out=dtype).launches)
    if dtype == "bfloat16":
        alone = plan_backward(MANY, cols, traits, **back, need_dweight=False)
        add(f"backward without dweight {name}", *alone.launches)


def options(add, traits: Traits) -> None:
    """One of each option, and mixed dtypes."""
    bf16, fp32 = "bfloat16", "float32"
    mixed = {"x": bf16, "y": bf16, "weight": fp32, "vector": 8}
    add("forward, fp32 weight", plan_forward(MANY, 4096, traits, **mixed))
    add("llama with bias", plan_forward(MANY, 1024, traits, **mixed, bias=fp32, llama=True, offset_weight=True))
    add("unrounded fp32 residual", plan_forward(MANY, 4096, traits, x=bf16, y=bf16, weight=bf16, residual=fp32,
                                                residual_out=fp32, round_residual=False, vector=8))  # fmt: skip
    add("heads", plan_forward(MANY, 128, traits, x=bf16, y=bf16, weight=bf16, heads=8, vector=8))
    back = {"x": bf16, "dout": bf16, "dx": bf16, "weight": bf16, "vector": 8}
    add("backward of heads", *plan_backward(MANY, 128, traits, **back, heads=8).launches)
    add("backward with dbias", *plan_backward(MANY, 4096, traits, **back, need_dbias=True, offset_weight=True).launches)
    both = back | {"dresidual_out": bf16, "need_dbias": True}
    for cols in (1024, 4096, 16384):
        add(f"fused backward with dbias {cols}", *plan_backward(MANY, cols, traits, **both).launches)
    add("backward without dx", *plan_backward(MANY, 4096, traits, **(back | {"dx": None})).launches)
    add("backward of one block", *plan_backward(1, 4096, traits, **back).launches)
    add("backward of fp32 residual", *plan_backward(MANY, 4096, traits, x=fp32, dout=bf16, dx=bf16, dresidual=fp32,
                                                    dresidual_out=fp32, weight=fp32, vector=8).launches)  # fmt: skip
