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
    shared_bytes: int = 0  # that a launch may name for one block, beyond what programs declare


HOST = Traits("host", "host", wave=1, units=1)


@dataclass(frozen=True)
class Constants:
    """The constexpr block of a program: `cols` is COLS in the kernels. Dtypes are names; None is an absent operand."""

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
    prefetch: bool = False  # the next row is loaded before this one is reduced
    unpack_again: bool = False  # after the sum, instead of keeping the values: fewer registers
    early_weight: bool = False  # loaded once before the rows, else for each row after its sum
    stashed: int = 0  # packs of a row that stay in shared memory, behind those kept
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
    dweight: str | None = None  # and dbias
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
    sums_in_shared: bool = False  # a block's share of dweight, in shared memory instead of registers

    @property
    def shared_bytes(self) -> int:
        """Of shared memory that a launch has to name."""
        elements = self.threads_per_row * self.rows_per_block * self.pack  # of one pack of all threads
        if self.x is not None and self.dout is not None:
            sums = self.sums_in_shared * self.packs * SIZES[self.compute]
            return elements * (sums + self.stashed * (SIZES[self.x] + SIZES[self.dout]))
        held = _held(self.x, self.residual_out, self.compute, self.add_residual, self.round_residual)
        return self.stashed * elements * SIZES[held] if held else 0


def _held(x: str | None, residual_out: str | None, compute: str, added: bool, rounded: bool) -> str | None:
    """The dtype of what a forward takes the sum of squares from: HELD in the kernel."""
    return x if not added else residual_out if rounded else compute


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


def _threads_for(packs: int, packs_per_thread: int, wave: int, most: int) -> int:
    """Threads for a row: a power of two below a wave, whole waves above it, so that few lanes idle at the row's end."""
    threads = _ceil(packs, packs_per_thread)
    return _power_of_two_from(threads) if threads <= wave else min(_ceil(threads, wave) * wave, most)


def _rows_for(threads: int, block: int, wave: int) -> int:
    """Rows of a block of about `block` threads: a power of two, and at least a wave together."""
    return max(_power_of_two_from(block // threads + 1) // 2, _ceil(wave, threads), 1)


# AMD, where nothing has been timed: threads that shall be resident on a unit follow from registers and latency. A CU of
# CDNA, and a WGP of RDNA, has 131072 registers, 128 each for 1024 threads. What each shape takes, compiled by clang 20
# and 22 (tests/test_amd.py), has to fit with a tenth to spare. Memory that answers after 0.9 µs keeps 16 KB a CU in
# flight on an MI300X (5.3 TB/s, 304 CUs) and 28 KB on an MI355X (8 TB/s, 256); 1024 threads with one operand's four
# packs have 64 KB, those with one pack of x and dout 32 KB.


def _forward_residency_on_amd(packs: int, prefetch: bool, fused: bool) -> int:
    if packs == 1:
        return 1024 if prefetch else 1536 if fused else 2048  # 50, 38 and 34 registers
    return 768 if prefetch and fused and packs > 2 else 1024  # up to 114, with the next row's to come


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
    compute = "float64" if x == "float64" else "float32"
    held = _held(x, residual_out, compute, residual is not None, round_residual) or normed
    shape = (
        _on_host(cols, pack)
        if traits.vendor == "host"
        else _forward_on_gpu(rows, cols, pack, traits, residual is not None, held)
    )
    constants = Constants(
        cols=cols,
        heads=heads,
        wave=traits.wave,
        pack=pack,
        vector=pack if traits.vendor == "host" else min(vector, pack),
        compute=compute,
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
        if constants.prefetch:  # a persistent grid
            blocks = min(blocks, traits.units * constants.blocks_per_unit)
    threads = constants.threads_per_row * constants.rows_per_block
    return Plan("rmsnorm_fwd", constants, _limit_grid(blocks, threads, heads))


def _forward_on_gpu(rows: int, cols: int, pack: int, traits: Traits, fused: bool, held: str) -> dict:
    # H200, bf16, µs at 256 MB a tensor and more, best of a search over threads, rows, residency and prefetch. Four
    # packs a thread (64 bytes of row) are the best at every width: 128×2 (threads × rows) 129 at 4096 columns where
    # 256×1 with two packs has 142; 256 threads 258 at 8192 (512: 323); 512 threads 257 at 16384 (1024: 361).
    row_packs = _ceil(cols, pack)
    if row_packs <= 64:
        threads = _threads_for(row_packs, 1, traits.wave, 64)
    else:
        # AMD: 1024 threads have 128 registers each and no more, too few for the longest rows (clang 20 spills).
        most = 512 if row_packs <= 4096 or traits.vendor == "amd" else 1024
        threads = max(64, _threads_for(row_packs, 2 if 128 < row_packs <= 256 else 4, traits.wave, most))
    packs = _ceil(row_packs, threads)
    rows_per_block = _rows_for(threads, 128 if packs <= 2 else 256, traits.wave)
    block = threads * rows_per_block
    shape = {
        "threads_per_row": threads,
        "rows_per_block": rows_per_block,
        "packs": packs,
        "section": packs,
        "lanes": min(2, pack),
        "interleaved": True,
    }
    if packs <= 4:
        # Few rows are worth a persistent grid: 3.0 instead of 3.2 at 512×2048; from about 16 rows a unit on it loses.
        prefetch = rows <= 8 * traits.units and threads <= 256
        if traits.vendor == "amd":
            resident = _forward_residency_on_amd(packs, prefetch, fused)
        elif threads > 256:
            resident = 1024
        else:
            resident = 512 if prefetch or threads == 256 else 768 if fused else 1024
        # From 8192 columns a block's registers are dear: the weight comes late, from L1. At 2048 columns 64.7 late,
        # 64.9 early; at 4096 and 2880 with 64 registers 18.7 and 14.9 late, 18.0 and 13.2 early.
        nvidia = traits.vendor == "nvidia"
        early = threads < 256 and not (nvidia and packs == 2 and threads > 64 and not prefetch)
        tight = nvidia and packs > 2 and resident == 1024 and cols % (threads * pack) != 0
        return shape | {
            "kept": packs,
            "batch": packs if early else min(2, packs),
            "blocks_per_unit": max(1, resident // block),
            "prefetch": prefetch,
            "early_weight": early,
            "unpack_again": not early or tight,
        }
    # Longer rows. NVIDIA: what registers do not keep stays in shared memory: 260 and 275 µs at 65536 and 131072
    # columns, fused 529 and 533; read again from L2 264 and 329, fused 594 and 673. Up to 32768 columns two blocks
    # overlap; the fused add does better with one that keeps its row in registers (519, not 523).
    stashed = 0
    if traits.vendor == "amd":
        kept = (8 if pack == 4 else 4) if packs > 16 else min(packs, 8) if fused or packs > 8 else 2
        batch, blocks_per_unit = (4, 1) if packs > 16 or kept == 8 else (2, 2)
    elif fused and threads <= 512:
        kept, batch, blocks_per_unit = packs, 4, 1
    else:
        kept, batch, blocks_per_unit = (4, 2, 2) if threads <= 512 else (4, 2, 1) if fused else (4, 4, 1)
        room = max(0, traits.shared_bytes // blocks_per_unit - 1024) // (threads * pack * SIZES[held])
        stashed = min(_ceil(packs - kept, batch), room // batch) * batch
    return shape | {
        "kept": min(kept, packs),
        "stashed": stashed,
        "batch": batch,
        "blocks_per_unit": blocks_per_unit,
        "early_weight": False,
        "unpack_again": True,
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
    dweight: str | None = None,
    heads: int = 1,
    vector: int = 16,
    offset_weight: bool = False,
    need_dweight: bool = True,
    need_dbias: bool = False,
) -> BackwardPlan:
    """The backward: dx (None: not wanted), and rows of partials for dweight and dbias.

    `dresidual` is the dtype of a second copy of dx, None where one array serves both; `dweight` that of dweight and
    dbias, by default the weight's.
    """
    pack = elements_per_pack(x, traits)
    on_host = traits.vendor == "host"
    sums = need_dweight + need_dbias
    compute = "float64" if x == "float64" else "float32"
    shape = (
        _on_host(cols, pack)
        if on_host
        else _backward_on_gpu(cols, x, dout, traits, sums, need_dbias, dresidual_out is not None, dx is not None)
    )
    tiles = shape.get("tiles", 1)
    common = Constants(
        cols=cols,
        heads=heads,
        wave=traits.wave,
        pack=pack,
        vector=pack if on_host else min(vector, pack),
        compute=compute,
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
        # A persistent grid. A block's partials cost 8 bytes a column and sum (written, read again): at most half of the
        # rows' own bytes, which only few rows on many units reach.
        affordable = max(1, 3 * rows * SIZES[x] // (16 * sums)) if sums else rows
        resident = max(1, traits.units * common.blocks_per_unit // tiles)
        groups = min(resident, _ceil(rows, common.rows_per_block), affordable)
    threads = common.threads_per_row * common.rows_per_block
    blocks = _limit_grid(groups * tiles, threads, heads * tiles)
    two_launches = tiles > 1 and dx is not None
    direct = sums > 0 and not on_host and blocks == heads * tiles
    constants = replace(
        common,
        dresidual_out=dresidual_out,
        dx=dx,
        dresidual=dresidual,
        dweight=(dweight or weight) if direct else None,
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


def _backward_on_gpu(
    cols: int, x: str, dout: str, traits: Traits, sums: int, dbias: bool, added: bool, need_dx: bool
) -> dict:
    # H200, bf16, µs at 256 MB a tensor: one pack a thread up to 2048 columns (256×1: 100.7 at 2048, 128×1: 102.5), two
    # up to 8192 (256×1: 198.6 at 4096), four at 16384 without prefetch (512×1: 400; in two launches 624).
    amd = traits.vendor == "amd"
    pack, real_bytes = elements_per_pack(x, traits), 8 if x == "float64" else 4
    row_packs = _ceil(cols, pack)
    # Five packs (of four elements eight) for each of 512 threads fit in registers where dweight's sums do not, too.
    long = 2048 < row_packs <= {8: 2560, 4: 4096}.get(pack, 0) and not amd and not dbias
    room = _ceil(row_packs, 512) * 512 * pack * real_bytes + 2048 <= traits.shared_bytes
    in_shared = long and sums == 1 and room
    in_registers = row_packs <= 2048 or in_shared or (long and not sums)
    if need_dx and pack >= 4 and not (in_registers or dbias):
        most = 4 if sums or added else 6
        stashed = _stashed_backward(row_packs, pack * (SIZES[x] + SIZES[dout]), sums * pack * real_bytes, traits, most)
        if stashed:
            return stashed
    tiles = 1 if in_registers else _ceil(row_packs, 1024)
    tile_packs = _ceil(row_packs, tiles)
    # AMD: from 8192 columns 1024 threads, so that two packs a thread and the next row's stay in registers at any width.
    # NVIDIA, float32: a pack is four elements, so that twice the threads share a row.
    wide = pack == 4 and not amd and tile_packs <= 1024
    most = 1024 if (amd and tiles == 1) or wide else 512
    threads = _threads_for(tile_packs, 1 if tile_packs <= 256 or wide else 2, traits.wave, most)
    packs = _ceil(tile_packs, threads)
    rows_per_block = 1
    if threads <= 128 and tiles == 1:
        # Row groups meet in LDS at the end. A second incoming gradient leaves registers for fewer threads: at 1024
        # columns 67.7 with 128×2, 3 a unit; 98 with 128×4, 2.
        rows_per_block = _rows_for(threads, 256 if added else 512, traits.wave)
    block = threads * rows_per_block
    # Two packs with everything in registers take about 118 of them, with a second gradient all of 128.
    if amd:
        # One pack takes 76, with a second gradient 90. Two take 136, so that 768 threads fit; if unpacked again 112.
        tight = packs == 2 and block >= (513 if added and tiles == 1 else 512)
        resident = 1024 if tight or (packs == 1 and added) else 1280 if packs == 1 else 768
        blocks_per_unit = max(1, resident // block)
        unpack_again = packs > 2 or tight or (added and sums == 2)
    else:
        resident = {1: 768 if added else 1024, 2: 512}.get(packs, 512)
        blocks_per_unit = max(1, (resident + block // 2) // block)
        tight = packs == 2 and 65536 // (blocks_per_unit * block) < 120
        unpack_again = packs > (3 if added or (x == "float16" and not sums) else 4) or tight
    return {
        "threads_per_row": threads,
        "rows_per_block": rows_per_block,
        "blocks_per_unit": blocks_per_unit,
        "packs": packs,
        "batch": packs,
        "section": packs,
        "lanes": min(2, pack),
        "kept": packs,
        "interleaved": True,
        "prefetch": (packs <= 2 and not (tight and added)) or (packs <= 4 and not (sums or added)),
        "unpack_again": unpack_again,
        "early_weight": packs <= 2 and (pack != 4 or amd),  # float32 on an H200: 99.8 late, 109 early at 1024 columns
        "tiles": tiles,
        "sums_in_shared": in_shared,
    }


def _stashed_backward(row_packs: int, pair_bytes: int, sums_bytes: int, traits: Traits, most: int) -> dict | None:
    """Rows of which the last packs of x and dout, `most` at most, stay in registers and the others in shared memory,
    beside dweight's sums; None where that does not hold them. `pair_bytes` and `sums_bytes` are those of a pack."""
    # H200, bf16, µs at 512 MB a tensor, in brackets by two launches: 32768 columns 467 (622), with a second gradient
    # 521 (738); frozen 389 (618), at 65536 418 (622). Fewer packs in registers, or fewer at a time, are slower.
    threads, batch = 512, 4  # as many share a row in the first of two launches: the same order of its sum
    packs = _ceil(row_packs, threads)
    room = (traits.shared_bytes - 1024 - packs * threads * sums_bytes) // (threads * pair_bytes)
    stashed = min(packs, room) // batch * batch
    if stashed <= 0 or packs - stashed > most:
        return None
    return {
        "threads_per_row": threads,
        "rows_per_block": 1,
        "blocks_per_unit": 1,
        "packs": packs,
        "batch": batch,
        "section": packs,
        "lanes": 2,
        "kept": packs - stashed,
        "stashed": stashed,
        "interleaved": True,
        "unpack_again": True,
        "sums_in_shared": sums_bytes > 0,
    }


def _plan_means(rows: int, cols: int, common: Constants, traits: Traits) -> Plan:
    """The first of two launches for long rows: a block streams a whole row and keeps nothing of it."""
    threads = min(512, _ceil(_ceil(cols, common.pack), traits.wave) * traits.wave)
    packs = _ceil(cols, threads * common.pack)
    constants = replace(
        common,
        threads_per_row=threads,
        rows_per_block=1,
        blocks_per_unit=1 if traits.vendor == "amd" else 2,
        packs=packs,
        batch=4 if common.pack == 8 else 2,
        section=packs,
        kept=0,
        prefetch=False,
        unpack_again=False,
        early_weight=False,
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
