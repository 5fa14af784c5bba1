"""Plans: from rows, columns, dtypes, options and a device's traits to a program's constants and a grid.

Knows: what a device can hold and how the kernels divide their work. Pure: the same question gives the same answer.
Must not: import a GPU library, touch memory, or look at the machine.

The reduction tree of a row (pack, lanes, threads_per_row) follows from the columns, the dtype that is normed and the
device alone, so that a row's result never depends on the rows around it, on alignment or on what else is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

# HIP keeps grid × block in 32 bits. Rows beyond the grid go through the kernels' row loop.
MAX_GRID_THREADS = 2**31


@dataclass(frozen=True)
class Traits:
    """What a plan needs to know of a device. `units` are multiprocessors, or CUs or WGPs as the ROCm runtime counts."""

    vendor: str  # "nvidia", "amd" or "host"
    arch: str  # "sm_90", "gfx942:sramecc+:xnack-", or the host's CPU
    wave: int
    units: int


HOST = Traits("host", "host", wave=1, units=1)


@dataclass(frozen=True)
class Constants:
    """The constexpr block of a program: field `cols` is COLS in the kernels. Dtypes are names; None is an absent operand."""

    # how a row is divided
    cols: int  # 0: given at run time
    heads: int
    wave: int
    threads_per_row: int
    rows_per_block: int
    blocks_per_unit: int  # resident at once: bounds the registers
    pack: int  # elements that a thread handles together
    vector: int  # elements of one memory access, the pack unless something is misaligned
    packs: int  # of one thread in one row
    batch: int  # packs in flight together
    section: int  # packs between two folds of the accumulators
    lanes: int  # accumulators of a thread
    kept: int  # packs of a row that stay in registers between its two uses
    interleaved: bool  # rows dealt to blocks in turn; else one stretch for each block
    prefetch: str = "NO_PREFETCH"  # or NEXT_ROW: into registers of its own before this row is reduced;
    # or SAME_REGISTERS: pack by pack as this row's are done with
    unpack_again: bool = False  # after the sum, instead of keeping the values: fewer registers
    early_weight: bool = False  # loaded once before the rows, else for each row after its sum
    tiles: int = 1  # blocks that share a row's columns
    # operands
    compute: str = "float32"
    x: str | None = None
    residual: str | None = None
    weight: str | None = None
    bias: str | None = None
    y: str | None = None
    residual_out: str | None = None
    dout: str | None = None
    dresidual_out: str | None = None
    dx: str | None = None
    dresidual: str | None = None
    # options
    add_residual: bool = False
    round_residual: bool = True
    offset_weight: bool = False
    llama: bool = False
    product: str | None = None  # llama: the dtype in which the normed row and the weight are multiplied
    need_dx: bool = False
    need_dweight: bool = False
    need_dbias: bool = False
    mean_only: bool = False  # of the two launches for long rows, the first: the mean of g · x̂
    mean_given: bool = False  # the second
    direct: bool = False  # one block for each head: it writes dweight itself


@dataclass(frozen=True)
class Plan:
    """One launch: the kernel's name, its constants and the grid in blocks."""

    kernel: str
    constants: Constants
    blocks: int

    @property
    def threads(self) -> int:
        return self.constants.threads_per_row * self.constants.rows_per_block


@dataclass(frozen=True)
class BackwardPlan:
    """The launches of a backward: `means` only for long rows, then `main`; partials are added by plan_reduce's."""

    means: Plan | None
    main: Plan
    partials_rows: int  # of all heads together; 0 where no sums are wanted or the main launch writes them itself
    partials_pitch: int  # elements from one of them to the next: whole packs, 16-byte aligned

    @property
    def launches(self) -> tuple[Plan, ...]:
        """Those over the rows, in order."""
        return (self.main,) if self.means is None else (self.means, self.main)

    @property
    def direct(self) -> bool:
        return self.main.constants.direct

    def scratch_elements(self, rows: int, sums: int) -> tuple[int, int]:
        """Elements of the means and of each sum's partials."""
        return (rows if self.means else 0), self.partials_rows * self.partials_pitch * (sums > 0)


def elements_per_pack(normed: str, traits: Traits) -> int:
    """16 bytes of what is normed on a GPU; on the host 16 elements, the accumulators of a long sum."""
    return 16 if traits.vendor == "host" else 16 // SIZES[normed]


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_two_from(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _divide_row(cols: int, pack: int, wave: int, packs_per_thread: int, most_threads: int) -> int:
    """Threads for a row: a power of two below a wave, whole waves above it, so that few lanes idle at the row's end."""
    packs = _ceil(cols, pack)
    threads = packs if packs <= 128 else max(128, _ceil(packs, packs_per_thread))
    if threads <= wave:
        return _power_of_two_from(threads)
    return min(_ceil(threads, wave) * wave, most_threads)


def _on_host(cols: int, pack: int) -> dict:
    """One thread a row; the row is read again from cache; sums are folded every 4096 columns."""
    return {
        "threads_per_row": 1,
        "rows_per_block": 1,
        "blocks_per_unit": 1,
        "packs": _ceil(cols, pack),
        "batch": 1,
        "section": max(1, 4096 // pack),
        "lanes": pack,
        "kept": 0,
        "interleaved": False,
    }


def _limit_grid(blocks: int, threads: int, heads: int) -> int:
    """A whole number of rounds over the heads, inside HIP's limit."""
    most = max(1, MAX_GRID_THREADS // threads // heads)
    return min(max(1, _ceil(blocks, heads)), most) * heads


@lru_cache(maxsize=4096)
def plan_forward(
    rows: int,
    cols: int,
    traits: Traits,
    *,
    x: str,
    y: str,
    residual: str | None = None,
    residual_out: str | None = None,
    weight: str | None = None,
    bias: str | None = None,
    heads: int = 1,
    vector: int = 16,
    round_residual: bool = True,
    offset_weight: bool = False,
    llama: bool = False,
) -> Plan:
    """The forward of `rows` rows, plain or (with `residual`) fused-add. `vector`: elements that every operand's
    alignment allows in one access."""
    normed = residual_out if residual_out and round_residual else x
    pack = elements_per_pack(normed, traits)
    shape = _on_host(cols, pack) if traits.vendor == "host" else _forward_on_gpu(cols, pack, traits)
    constants = Constants(
        cols=cols,
        heads=heads,
        wave=traits.wave,
        pack=pack,
        vector=pack if traits.vendor == "host" else min(vector, pack),
        compute="float64" if x == "float64" else "float32",
        x=x,
        y=y,
        residual=residual,
        residual_out=residual_out,
        weight=weight,
        bias=bias,
        add_residual=residual is not None,
        round_residual=round_residual,
        offset_weight=offset_weight and weight is not None,
        llama=llama,
        product=promote(normed, weight) if llama else None,
        **shape,
    )
    if traits.vendor == "host":
        blocks = _ceil(rows, max(1, 32768 // cols))  # chunks long enough to be worth a turn
    else:
        blocks = _ceil(rows, constants.rows_per_block)
        if constants.prefetch != "NO_PREFETCH":  # a persistent grid
            blocks = min(blocks, traits.units * constants.blocks_per_unit)
    threads = constants.threads_per_row * constants.rows_per_block
    return Plan("rmsnorm_fwd", constants, _limit_grid(blocks, threads, heads))


def _forward_on_gpu(cols: int, pack: int, traits: Traits) -> dict:
    # H200, bf16: 32×8 (threads a row × rows a block) at 256 columns, 128 at 1024, 256 at 4096, 512 at 8192 and 1024
    # from 16384 are within 3 % of the best of a search; two packs a thread hide the reduction.
    threads = _divide_row(cols, pack, traits.wave, packs_per_thread=2, most_threads=1024)
    packs = _ceil(cols, threads * pack)
    kept = packs if packs <= 4 else 4
    rows_per_block = _power_of_two_from(_ceil(256, threads)) if threads < 128 else 1
    return {
        "threads_per_row": threads,
        "rows_per_block": rows_per_block,
        "blocks_per_unit": 1 if threads * rows_per_block > 512 else 2,
        "packs": packs,
        "batch": kept if kept == packs else 2,
        "section": packs,
        "lanes": min(2, pack),
        "kept": kept,
        "early_weight": packs <= 2,
        "interleaved": True,
    }


@lru_cache(maxsize=4096)
def plan_backward(
    rows: int,
    cols: int,
    traits: Traits,
    *,
    x: str,
    dout: str,
    dx: str | None,
    dresidual_out: str | None = None,
    dresidual: str | None = None,
    weight: str | None = None,
    heads: int = 1,
    vector: int = 16,
    offset_weight: bool = False,
    need_dweight: bool = True,
    need_dbias: bool = False,
) -> BackwardPlan:
    """The backward: dx (None: not wanted), and rows of partials for dweight and dbias. `dresidual` is the dtype of a
    second copy of dx, None where one array serves both."""
    pack = elements_per_pack(x, traits)
    on_host = traits.vendor == "host"
    sums = need_dweight or need_dbias
    shape = _on_host(cols, pack) if on_host else _backward_on_gpu(cols, x, pack, traits)
    tiles = shape.get("tiles", 1)
    common = Constants(
        cols=cols,
        heads=heads,
        wave=traits.wave,
        pack=pack,
        vector=pack if on_host else min(vector, pack),
        compute="float64" if x == "float64" else "float32",
        x=x,
        dout=dout,
        weight=weight,
        offset_weight=offset_weight and weight is not None,
        **shape,
    )
    if on_host:
        # At most 512 rows in one running sum; enough chunks for many threads; partials small against the rows.
        groups = _ceil(rows, min(512, max(16, _ceil(rows, 64))))
    else:
        # A persistent grid. A block's partials cost 8 bytes a column (written, read again): at most half of the rows'
        # own bytes, which only few rows on many units reach.
        affordable = max(1, 3 * rows * SIZES[x] // 16) if sums else rows
        resident = max(1, traits.units * common.blocks_per_unit // tiles)
        groups = min(resident, _ceil(rows, common.rows_per_block), affordable)
    threads = common.threads_per_row * common.rows_per_block
    blocks = _limit_grid(groups * tiles, threads, heads * tiles)
    two_launches = tiles > 1 and dx is not None
    direct = sums and not on_host and blocks == heads * tiles
    constants = replace(
        common,
        dresidual_out=dresidual_out,
        dx=dx,
        dresidual=dresidual,
        need_dx=dx is not None,
        need_dweight=need_dweight,
        need_dbias=need_dbias,
        mean_given=two_launches,
        direct=direct,
    )
    return BackwardPlan(
        means=_plan_means(rows, cols, common, traits) if two_launches else None,
        main=Plan("rmsnorm_bwd", constants, blocks),
        partials_rows=blocks // tiles if sums and not direct else 0,
        partials_pitch=_ceil(cols, pack) * pack,
    )


def _backward_on_gpu(cols: int, x: str, pack: int, traits: Traits) -> dict:
    # H200, bf16 (threads a row × rows a block, blocks a unit): 128×4, 2 at 1024 columns; 128×1, 4 at 2048; 256×1, 2 at
    # 4096; 512×1, 1 at 8192; 512×1, 1 without prefetch at 16384.
    tiles = 1 if cols * SIZES[x] <= 32768 else _ceil(cols * SIZES[x], 16384)
    width = _ceil(cols, tiles)
    most = 512 if SIZES[x] < 8 else 256
    threads = _divide_row(width, pack, traits.wave, packs_per_thread=2, most_threads=most)
    packs = _ceil(width, threads * pack)
    elements = packs * pack
    rows_per_block = 1
    if threads <= 128 and elements <= 8 and tiles == 1:
        # The row groups of a block meet in LDS at the end: half the groups' columns in fp32, at most 16 KiB.
        rows_per_block = min(_power_of_two_from(_ceil(512, threads)), max(1, 8192 // (threads * elements)))
        rows_per_block = max(rows_per_block, _ceil(traits.wave, threads))
    block = threads * rows_per_block
    resident = 1024 if elements <= 8 else 512
    return {
        "threads_per_row": threads,
        "rows_per_block": rows_per_block,
        "blocks_per_unit": max(1, resident // block),
        "packs": packs,
        "batch": packs,
        "section": packs,
        "lanes": min(2, pack),
        "kept": packs,
        "interleaved": True,
        "prefetch": "NEXT_ROW" if elements <= 16 else "SAME_REGISTERS",
        "unpack_again": elements > 16,
        "tiles": tiles,
    }


def _plan_means(rows: int, cols: int, common: Constants, traits: Traits) -> Plan:
    """The first of two launches for long rows: a block streams a whole row and keeps nothing of it."""
    threads = min(512, _ceil(_ceil(cols, common.pack), traits.wave) * traits.wave)
    packs = _ceil(cols, threads * common.pack)
    constants = replace(
        common,
        threads_per_row=threads,
        rows_per_block=1,
        blocks_per_unit=2,
        packs=packs,
        batch=2,
        section=packs,
        kept=0,
        prefetch="NO_PREFETCH",
        tiles=1,
        mean_only=True,
    )
    return Plan("rmsnorm_bwd", constants, _limit_grid(rows, threads, common.heads))


@lru_cache(maxsize=1024)
def plan_reduce(cols: int, traits: Traits, *, weight: str, compute: str, heads: int = 1) -> Plan:
    """The sum of the partials' rows, cast to the weight's dtype."""
    pack = elements_per_pack(compute, traits)
    on_host = traits.vendor == "host"
    # A tile is 128 bytes of partials wide, so that even 1024 columns occupy 32 units.
    threads = 1 if on_host else 8
    constants = Constants(
        cols=0,
        heads=1,
        wave=traits.wave,
        threads_per_row=threads,
        rows_per_block=1 if on_host else 32,
        blocks_per_unit=1,
        pack=pack,
        vector=pack,
        packs=1,
        batch=1 if on_host else 8,
        section=1,
        lanes=1,
        kept=1,
        interleaved=True,
        compute=compute,
        weight=weight,
    )
    return Plan("dweight_reduce", constants, _ceil(cols, threads * pack) * heads)


def promote(a: str, b: str | None) -> str:
    """The dtype of a product, as the frameworks promote: two unlike 16-bit formats meet in float32."""
    if b is None or a == b:
        return a
    return a if SIZES[a] > SIZES[b] else b if SIZES[b] > SIZES[a] else "float32"
