"""What a code object says of itself, and what the assembly of its kernel does.

Knows: ELF, the msgpack note of AMD's code objects, the shape of clang's -S text and AMD's instruction names.
Must not: compile, or know plans and norms: what is allowed is for others to say.

`read` gives registers, spills, LDS and arguments from the binary itself; `Listing` gives instructions, loops and memory
accesses from the assembly, since disassemblers are rarely there.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

# ------------------------------------------------------------------------------------------------ the binary


@dataclass(frozen=True)
class Argument:
    offset: int
    size: int
    kind: str  # "global_buffer", "by_value", or what the runtime adds: "hidden_…"


@dataclass(frozen=True)
class Facts:
    """The note's figures for one kernel. Registers are for each lane; bytes are for a block, scratch for a lane."""

    name: str
    arch: str
    wave: int
    block: int  # the flat work-group size that the launch must not exceed
    vgprs: int  # AGPRs included where the two share a file (gfx90a and later)
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch_bytes: int
    lds_bytes: int
    kernarg_bytes: int
    arguments: tuple[Argument, ...]


def read(code: bytes) -> tuple[Facts, ...]:
    """The kernels of an AMD code object."""
    note = _note(code)
    arch = note["amdhsa.target"].rpartition("--")[2]
    return tuple(_facts(kernel, arch) for kernel in note["amdhsa.kernels"])


def _facts(kernel: dict[str, Any], arch: str) -> Facts:
    arguments = tuple(Argument(a[".offset"], a[".size"], a[".value_kind"]) for a in kernel[".args"])
    return Facts(
        name=kernel[".name"],
        arch=arch,
        wave=kernel[".wavefront_size"],
        block=kernel[".max_flat_workgroup_size"],
        vgprs=kernel[".vgpr_count"],
        agprs=kernel.get(".agpr_count", 0),
        sgprs=kernel[".sgpr_count"],
        vgpr_spills=kernel[".vgpr_spill_count"],
        sgpr_spills=kernel[".sgpr_spill_count"],
        scratch_bytes=kernel[".private_segment_fixed_size"],
        lds_bytes=kernel[".group_segment_fixed_size"],
        kernarg_bytes=kernel[".kernarg_segment_size"],
        arguments=arguments,
    )


@dataclass(frozen=True)
class Section:
    name: str
    kind: int
    info: int
    offset: int
    size: int


def sections(code: bytes) -> tuple[Section, ...]:
    """The sections of a 64-bit little-endian ELF file, of AMD or NVIDIA."""
    if code[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"not a 64-bit ELF file: it starts with {code[:6]!r}")
    (table,) = struct.unpack_from("<Q", code, 0x28)
    entry, count, names = struct.unpack_from("<HHH", code, 0x3A)
    raw = [struct.unpack_from("<IIQQQQII", code, table + i * entry) for i in range(count)]
    start = raw[names][4]
    found = []
    for name, kind, _, _, offset, size, _, info in raw:
        end = code.index(b"\0", start + name)
        found.append(Section(code[start + name : end].decode(), kind, info, offset, size))
    return tuple(found)


AMD, NVIDIA = 224, 190  # ELF's numbers of machines


def machine(code: bytes) -> int:
    """Whose code it is: AMD or NVIDIA."""
    (number,) = struct.unpack_from("<H", code, 18)
    return number


def _note(code: bytes) -> dict[str, Any]:
    SHT_NOTE, NT_AMDGPU_METADATA = 7, 32
    for section in sections(code):
        at = section.offset
        while section.kind == SHT_NOTE and at < section.offset + section.size:
            name_size, size, kind = struct.unpack_from("<III", code, at)
            at += 12 + _to_words(name_size)
            if kind == NT_AMDGPU_METADATA:
                return _Msgpack(code[at : at + size]).value()
            at += _to_words(size)
    raise ValueError("this ELF file has no AMDGPU metadata note")


def _to_words(size: int) -> int:
    return (size + 3) // 4 * 4


class _Msgpack:
    """As much of msgpack as the note uses: maps, lists, strings, integers, booleans, nil."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def value(self) -> Any:
        kind = self._number("B")
        if kind < 0x80:
            return kind
        if kind < 0x90:
            return self._map(kind & 0x0F)
        if kind < 0xA0:
            return self._list(kind & 0x0F)
        if kind < 0xC0:
            return self._string(kind & 0x1F)
        if kind >= 0xE0:
            return kind - 0x100
        if kind in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[kind]
        if 0xCC <= kind <= 0xD3:
            return self._number("BHIQbhiq"[kind - 0xCC])
        if 0xD9 <= kind <= 0xDB:
            return self._string(self._number("BHI"[kind - 0xD9]))
        if kind in (0xDC, 0xDD):
            return self._list(self._number("HI"[kind - 0xDC]))
        if kind in (0xDE, 0xDF):
            return self._map(self._number("HI"[kind - 0xDE]))
        raise ValueError(f"msgpack type {kind:#x} at byte {self.at - 1} of the metadata note")

    def _number(self, code: str) -> int:
        (number,) = struct.unpack_from(">" + code, self.data, self.at)
        self.at += struct.calcsize(code)
        return number

    def _string(self, size: int) -> str:
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def _list(self, count: int) -> list[Any]:
        return [self.value() for _ in range(count)]

    def _map(self, count: int) -> dict[Any, Any]:
        return {self.value(): self.value() for _ in range(count)}


def read_cubin(code: bytes, kernel: str) -> tuple[int, int, int]:
    """(registers of a thread, its stack's bytes, a block's static shared bytes) of an NVIDIA cubin with one kernel.
    Since sm_90 the shared bytes include 1024 of the system's own."""
    REGISTERS, STACK, WITH_SIZE = 0x2F, 0x12, 4
    found, shared = {}, 0
    for section in sections(code):
        if section.name == f".nv.shared.{kernel}":
            shared = section.size
        at = section.offset
        while section.name == ".nv.info" and at < section.offset + section.size:
            form, attribute, size = struct.unpack_from("<BBH", code, at)
            if form == WITH_SIZE and size == 8:
                found[attribute] = struct.unpack_from("<I", code, at + 8)[0]
            at += 4 + (size if form == WITH_SIZE else 0)
    return found.get(REGISTERS, 0), found.get(STACK, 0), shared


# ------------------------------------------------------------------------------------------------ what a card holds


@dataclass(frozen=True)
class Unit:
    """What the ROCm runtime counts as one multiprocessor: a CU of four SIMDs, on RDNA a WGP of four."""

    vgprs: int  # of a SIMD, for each lane of a wave
    granule: int  # in which they are given out
    waves: int  # at most on a SIMD
    blocks: int  # at most at once, if they have more than a wave
    lds_bytes: int
    simds: int = 4

    def waves_by_vgprs(self, vgprs: int) -> int:
        """Waves that a SIMD holds at once."""
        return min(self.waves, self.vgprs // (-(-max(vgprs, 1) // self.granule) * self.granule))

    def waves_at_once(self, vgprs: int, lds_bytes: int, waves_per_block: int) -> float:
        """Waves on a SIMD, in whole blocks, that fit by registers, LDS and the number of blocks."""
        blocks = self.waves_by_vgprs(vgprs) * self.simds // waves_per_block
        if lds_bytes:
            blocks = min(blocks, self.lds_bytes // lds_bytes)
        if waves_per_block > 1:
            blocks = min(blocks, self.blocks)
        return blocks * waves_per_block / self.simds

    def vgprs_for(self, waves: int) -> int:
        """The most VGPRs with which a SIMD holds so many waves; an instruction can name 256 (512 with AGPRs)."""
        return self.vgprs // waves // self.granule * self.granule


def unit_of(arch: str) -> Unit:
    """By architecture, in its usual wave (64 on GFX9, else 32). The numbers are LLVM's."""
    name = arch.partition(":")[0]
    if name in ("gfx90a", "gfx942"):
        return Unit(vgprs=512, granule=8, waves=8, blocks=16, lds_bytes=64 << 10)
    if name == "gfx950":
        return Unit(vgprs=512, granule=8, waves=8, blocks=16, lds_bytes=160 << 10)
    if name.startswith("gfx9"):
        return Unit(vgprs=256, granule=4, waves=10, blocks=16, lds_bytes=64 << 10)
    if name in ("gfx1100", "gfx1101", "gfx1151") or name.startswith("gfx120"):
        return Unit(vgprs=1536, granule=24, waves=16, blocks=32, lds_bytes=128 << 10)
    if name.startswith(("gfx103", "gfx11")):
        return Unit(vgprs=1024, granule=16, waves=16, blocks=32, lds_bytes=128 << 10)
    if name.startswith("gfx101"):
        return Unit(vgprs=1024, granule=8, waves=20, blocks=32, lds_bytes=128 << 10)
    return Unit(vgprs=1024, granule=16, waves=16, blocks=32, lds_bytes=128 << 10)


# ------------------------------------------------------------------------------------------------ the assembly

_WIDTHS = (
    (16, r"(dwordx4|b128)$"),
    (12, r"(dwordx3|b96)$"),
    (8, r"(dwordx2|b64)$"),
    (2, r"(short|ushort|sshort|short_d16|short_d16_hi|u16|i16|b16|d16_b16|d16_hi_b16)$"),
    (1, r"(byte|ubyte|sbyte|[us]?byte_d16|[us]?byte_d16_hi|[uib]8|d16_(hi_)?[ui]8)$"),
    (4, r"(dword|b32)$"),
)
_MODIFIED = re.compile(r"\b(glc|slc|dlc|sc0|sc1|scope:SCOPE_(SE|DEV|SYS))\b")
# Not v_mad and v_mac, which round the product: a multiplication and an addition in one instruction.
_FMA = re.compile(r"v_(dual_)?(fma|fmac|fmaak|fmamk|fma_mix)\w*_f(32|64)\b")


@dataclass(frozen=True)
class Instruction:
    name: str
    operands: str

    @property
    def is_vector(self) -> bool:
        return self.name.startswith("v_")

    @property
    def is_barrier(self) -> bool:
        """The point where a wave says that it has come; waiting for the others may be an instruction of its own."""
        return self.name in ("s_barrier", "s_barrier_signal")

    @property
    def is_load(self) -> bool:
        return re.match(r"(global|flat|buffer)_load_", self.name) is not None

    @property
    def is_store(self) -> bool:
        return re.match(r"(global|flat|buffer)_store_", self.name) is not None

    @property
    def is_atomic(self) -> bool:
        return (
            "_atomic_" in self.name
            or re.match(r"ds_(add|sub|inc|dec|min|max|and|or|xor|cmpst|cmpstore|wrxchg|storexchg|pk_add)_", self.name)
            is not None
        )

    @property
    def is_coherent(self) -> bool:
        """A load that shall see what other blocks write while this one runs."""
        return self.is_load and _MODIFIED.search(self.operands) is not None

    @property
    def is_lds_store(self) -> bool:
        return re.match(r"ds_(write|store)", self.name) is not None

    @property
    def is_lane_move(self) -> bool:
        """Values between lanes without LDS."""
        dpp = r"\b(quad_perm|row_\w+|wave_\w+|dpp8):?"
        return self.is_vector and (
            self.name.startswith(("v_readlane", "v_permlane")) or bool(re.search(dpp, self.operands))
        )

    @property
    def bytes(self) -> int:
        """Of one lane's load or store."""
        return next((size for size, pattern in _WIDTHS if re.search(pattern, self.name)), 0)

    @property
    def fmas(self) -> int:
        """Fused multiply-adds for each lane: packed ones are two, a dual instruction may hold two."""
        names = [self.name, *re.findall(r"::\s*(v_\w+)", self.operands)]
        return sum(
            (2 if name.startswith("v_pk_") else 1)
            for name in names
            if _FMA.match(re.sub(r"_(e32|e64|dpp)$", "", name.replace("v_pk_", "v_")))
        )

    def waits_for_lds(self) -> bool:
        """Whether no LDS operation is under way after it."""
        if self.name == "s_waitcnt":
            return "lgkmcnt(0)" in self.operands or self.operands.strip() in ("0", "0x0")
        return self.name in ("s_wait_dscnt", "s_wait_loadcnt_dscnt", "s_wait_storecnt_dscnt", "s_wait_idle") and (
            self.name == "s_wait_idle" or int(self.operands, 0) & 0x3F == 0
        )

    def loads_left(self) -> int | None:
        """How many vector memory operations may still be under way after it; None where it does not say."""
        if self.name == "s_waitcnt":
            found = re.search(r"vmcnt\((\d+)\)", self.operands)
            return int(found.group(1)) if found else None
        if self.name == "s_wait_loadcnt":
            return int(self.operands, 0)
        if self.name == "s_wait_loadcnt_dscnt":
            return int(self.operands, 0) >> 8
        return None


def as_listing(disassembly: str, kernel: str) -> str:
    """llvm-objdump's text as clang's -S would put it: labels instead of addresses."""
    body = re.search(rf"<{kernel}>:\n(.*?)(?=^\S|\Z)", disassembly, re.M | re.S)
    if body is None:
        raise ValueError(f"the disassembly has no {kernel}")
    lines, targets = [], set()
    for line in body.group(1).splitlines():
        code, _, comment = line.partition("//")
        address = re.match(r"\s*([0-9A-Fa-f]+):", comment)
        target = re.search(rf"<{kernel}\+0x([0-9a-f]+)>", comment)
        if code.strip() and address:
            lines.append((int(address[1], 16), code.strip(), int(target[1], 16) if target else None))
            targets |= {lines[-1][2]}
    start = lines[0][0] if lines else 0
    text = [f"{kernel}:"]
    for address, code, target in lines:
        if address - start in targets:
            text.append(f".L{address - start}:")
        text.append(f"\t{code.split()[0]} .L{target}" if target is not None else f"\t{code}")
    return "\n".join(text) + "\n"


def _scalars(operand: str) -> tuple[int, ...]:
    """The scalar registers of an operand: s5 or s[4:7]."""
    found = re.fullmatch(r"s(\d+)|s\[(\d+):(\d+)\]", operand)
    if found is None:
        return ()
    return (int(found[1]),) if found[1] else tuple(range(int(found[2]), int(found[3]) + 1))


class Listing:
    """The instructions of the one kernel in clang's -S text, in order, with their flow."""

    def __init__(self, text: str, kernel: str) -> None:
        self.instructions: list[Instruction] = []
        self._labels: dict[str, int] = {}
        body = re.search(rf"^{kernel}:.*?^\s*\.section|^{kernel}:.*", text, re.M | re.S)
        if body is None:
            raise ValueError(f"the assembly has no {kernel}")
        for line in body.group(0).splitlines()[1:]:
            code = line.partition(";")[0].strip()
            label = re.match(r"([.\w$]+):$", code)
            if label:
                self._labels[label.group(1)] = len(self.instructions)
            elif code and not code.startswith("."):
                name, _, operands = code.replace("\t", " ").partition(" ")
                self.instructions.append(Instruction(name, operands.strip()))
        directives = re.findall(r"^\s*\.amdhsa_(\w+)\s+(\d+)\s*$", text, re.M)
        self.directives = {name: int(value) for name, value in directives}

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)

    # ---- flow

    def _after(self, i: int) -> list[int]:
        """Where control can go from instruction i."""
        one = self.instructions[i]
        if one.name in ("s_endpgm", "s_setpc_b64"):
            return []
        target = self._labels.get(one.operands) if one.name.startswith(("s_branch", "s_cbranch")) else None
        if one.name == "s_branch" and target is not None:
            return [target] if target < len(self.instructions) else []
        following = [i + 1] if i + 1 < len(self.instructions) else []
        return following + ([target] if target is not None and target < len(self.instructions) else [])

    @cached_property
    def loops(self) -> list[list[Instruction]]:
        """The outermost loops: what control can come back to, as instructions in order."""
        return [[self.instructions[i] for i in sorted(loop)] for loop in self._loops]

    @cached_property
    def _loops(self) -> list[set[int]]:
        # Tarjan's strongly connected components, without recursion: kernels have thousands of instructions.
        index: dict[int, int] = {}
        low: dict[int, int] = {}
        stack: list[int] = []
        on_stack: set[int] = set()
        found: list[set[int]] = []
        work = [(0, iter(self._after(0)))] if self.instructions else []
        if work:
            index[0] = low[0] = 0
            stack.append(0)
            on_stack.add(0)
        while work:
            node, rest = work[-1]
            for other in rest:
                if other not in index:
                    index[other] = low[other] = len(index)
                    stack.append(other)
                    on_stack.add(other)
                    work.append((other, iter(self._after(other))))
                    break
                if other in on_stack:
                    low[node] = min(low[node], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    members = set()
                    while True:
                        member = stack.pop()
                        on_stack.discard(member)
                        members.add(member)
                        if member == node:
                            break
                    if len(members) > 1 or node in self._after(node):
                        found.append(members)
        return sorted(found, key=min)

    @cached_property
    def main_loop(self) -> list[Instruction]:
        """The loop that moves most bytes; empty if none does."""
        moved = [sum(i.bytes for i in loop if i.is_load or i.is_store) for loop in self.loops]
        return self.loops[moved.index(max(moved))] if any(moved) else []

    # ---- questions

    def widths(self) -> tuple[Counter[int], Counter[int]]:
        """How many loads and how many stores there are of each width in bytes."""
        loads = Counter(i.bytes for i in self if i.is_load)
        return loads, Counter(i.bytes for i in self if i.is_store)

    def unwaited_barriers(self) -> int:
        """Barriers that a wave can reach with LDS stores of its own still under way."""
        pending = [False] * len(self.instructions)  # before each instruction, on some way to it
        todo, seen, bad = [0], set(), set()
        while todo:
            i = todo.pop()
            one, state = self.instructions[i], pending[i]
            if one.is_barrier and state:
                bad.add(i)
            state = (state or one.is_lds_store) and not one.waits_for_lds()
            for after in self._after(i):
                if after not in seen or (state and not pending[after]):
                    seen.add(after)
                    pending[after] = pending[after] or state
                    todo.append(after)
        return len(bad)

    def scalar_data_loads(self) -> list[Instruction]:
        """Scalar loads of anything but the kernel's arguments."""
        # The argument pointer comes in after the pointers that the kernel asks for and before all others.
        first = 4 * self.directives.get("user_sgpr_private_segment_buffer", 0)
        first += 2 * self.directives.get("user_sgpr_dispatch_ptr", 0) + 2 * self.directives.get(
            "user_sgpr_queue_ptr", 0
        )
        pointers = {(first, first + 1)}
        found = []
        for one in self:
            operands = [part.strip() for part in one.operands.split(",")]
            written = _scalars(operands[0])
            if re.match(r"s_(buffer_)?load_", one.name):
                if _scalars(operands[1]) not in pointers:
                    found.append(one)
            elif one.name == "s_mov_b64" and _scalars(operands[1]) in pointers:
                pointers = {pair for pair in pointers if not set(pair) & set(written)} | {written}
                continue
            if one.name.startswith("s_") and not one.name.startswith(("s_cmp", "s_cbranch", "s_bitcmp")):
                pointers = {pair for pair in pointers if not set(pair) & set(written)}
        return found

    def polling(self) -> list[Instruction]:
        """What waits for another block: coherent loads and atomics inside loops, and sleeping."""
        return [i for loop in self.loops for i in loop if i.is_coherent or i.is_atomic or i.name == "s_sleep"]

    def loads_in_flight(self) -> list[int]:
        """For each barrier of the main loop (of the whole kernel without one) the loads under way there, when waves do
        all the work that the code can ask of them and the loop has come round once."""
        pairs = zip(self._loops, self.loops, strict=True)
        loop = next((where for where, body in pairs if body is self.main_loop), None)
        if loop is None or not any(self.instructions[i].is_barrier for i in loop):
            return self._in_flight([self.instructions[i] for i in self._busy_path(0, None)])
        entries = {after for i in range(len(self.instructions)) if i not in loop for after in self._after(i)}
        start = next((i for i in sorted(loop) if i in entries), min(loop))
        path = [self.instructions[i] for i in self._busy_path(start, loop)]
        found = self._in_flight(path + path)
        return found[len(found) // 2 :]

    def loads_before_waiting(self) -> int:
        """Loads that a wave has under way when it waits for the first of them."""
        body = [self.instructions[i] for i in self._busy_path(0, None)]
        first = next((i for i, one in enumerate(body) if one.is_load), 0)
        waits = (i for i, one in enumerate(body) if i > first and one.loads_left() is not None)
        return sum(one.is_load for one in body[: next(waits, len(body))])

    def _busy_path(self, start: int, inside: set[int] | None) -> list[int]:
        """From `start`, never skipping what a branch may skip, until control has been there before."""
        path, seen, i = [], set(), start
        while i not in seen:
            path.append(i)
            seen.add(i)
            following = [after for after in self._after(i) if inside is None or after in inside]
            if not following:
                break
            if len(following) == 2 and self.instructions[i + 1].name == "s_branch":
                following.reverse()  # what is skipped stands behind the skip
            i = next((after for after in following if after not in seen), following[0])
        return path

    def _in_flight(self, path: list[Instruction]) -> list[int]:
        under_way: list[bool] = []  # in order; True for a load. GFX9 counts stores too, later cards apart.
        found = []
        for one in path:
            if one.is_load or (one.is_store and self._is_gfx9):
                under_way.append(one.is_load)
            left = one.loads_left()
            if left is not None and left < len(under_way):
                under_way = under_way[len(under_way) - left :]
            if one.is_barrier:
                found.append(sum(under_way))
        return found

    @property
    def _is_gfx9(self) -> bool:
        return not any(i.name.startswith(("s_waitcnt_vscnt", "s_wait_storecnt")) for i in self)
