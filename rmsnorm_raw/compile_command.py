"""The commands `compile` (code objects without a device, and what they hold) and `show` (a program's text or assembly).

Knows: plans, programs, the compilers that need no device, how a terminal shows a table.
Must not: run a kernel, or need CuPy or torch.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from . import codeobject
from .devices import clang
from .plan import SIZES, Plan, Traits, plan_backward, plan_forward, plan_reduce
from .program import program

# Only for compiling without a device: at run time the runtime says how many units there are.
UNITS = {
    "gfx908": 120, "gfx90a": 104, "gfx942": 304, "gfx950": 256, "gfx1030": 40,
    "gfx1100": 48, "gfx1151": 20, "gfx1201": 32,
    "sm_80": 108, "sm_86": 84, "sm_89": 128, "sm_90": 132, "sm_100": 148, "sm_120": 170,
}  # fmt: skip
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
# Of shared memory that a block may have on NVIDIA's, where it is not 99 KB.
SHARED_KB = {"sm_70": 96, "sm_75": 64, "sm_80": 163, "sm_87": 163, "sm_90": 227, "sm_100": 227, "sm_103": 227}
OPERATIONS = ("forward", "fused-forward", "backward", "fused-backward")


def add_commands(commands: Any) -> None:
    """Adds both to the parser of rmsnorm-raw."""
    compile_ = commands.add_parser(
        "compile",
        help="code objects of all kernels for any GPU, without one, and what they hold",
        description=(
            "Compiles every kernel that the operations use at a shape, for AMD by hipRTC where it is installed, else "
            "by the clang of the ziglang package, for NVIDIA by NVRTC (cuda-core). Writes DIR/*.hsaco or *.cubin and "
            "DIR/report.json, and prints registers, LDS, scratch, spills, waves and widths of memory accesses."
        ),
    )
    compile_.add_argument("--arch", required=True, help="gfx942, gfx1100, sm_90, …; several with commas between")
    compile_.add_argument("--out", required=True, type=Path, metavar="DIR")
    compile_.add_argument(
        "--with", dest="compiler", choices=("auto", "hiprtc", "clang"), default="auto", help="for gfx (default: auto)"
    )
    _add_shape(compile_, dtype="bf16,fp32")
    compile_.set_defaults(run=_compile)

    show = commands.add_parser(
        "show",
        help="the text of the programs of an operation, or their assembly",
        description="Prints the exact text that the compiler gets for each kernel of an operation, or its assembly.",
    )
    show.add_argument("operation", nargs="?", choices=OPERATIONS, default="forward")
    show.add_argument("--arch", default="gfx942", help="gfx942 (default), gfx1100, sm_90, …")
    show.add_argument(
        "--isa", action="store_true", help="the assembly: by clang for gfx, by nvdisasm or cuobjdump for sm"
    )
    _add_shape(show, dtype="bf16")
    show.set_defaults(run=_show)


def _add_shape(parser: argparse.ArgumentParser, dtype: str) -> None:
    parser.add_argument("--shape", type=_shape, default="4096x4096", metavar="MxN", help="rows x columns (4096x4096)")
    parser.add_argument("--dtype", type=_dtypes, default=dtype, help=f"of {', '.join(DTYPES)}; default {dtype}")
    parser.add_argument("--units", type=int, help="multiprocessors, CUs or WGPs (default: of the usual card)")


def _shape(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)[x×](\d+)", text)
    if found is None or not int(found[1]) or not int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape; rows x columns, as 4096x4096")
    return int(found[1]), int(found[2])


def _dtypes(text: str) -> list[str]:
    for word in text.split(","):
        if word not in DTYPES and word not in SIZES:
            raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(DTYPES)}")
    return [DTYPES.get(word, word) for word in text.split(",")]


# ------------------------------------------------------------------------------------------------ what is compiled


@dataclass(frozen=True)
class Job:
    """One kernel of one operation."""

    operation: str
    dtype: str
    rows: int
    cols: int
    traits: Traits
    plan: Plan

    @property
    def arch(self) -> str:
        return self.traits.arch

    @property
    def text(self) -> str:
        return program(self.plan.kernel, self.plan.constants).text


def traits_of(arch: str, units: int | None = None) -> Traits:
    """A card of that architecture; ValueError if the name is none."""
    name = arch.partition(":")[0]
    if re.fullmatch(r"gfx[0-9a-f]+", name):
        return Traits("amd", arch, clang.wave_of(arch), units or UNITS.get(name, 64))
    if re.fullmatch(r"sm_\d+[af]?", arch):
        number = arch.rstrip("af")
        return Traits("nvidia", arch, 32, units or UNITS.get(number, 128), SHARED_KB.get(number, 99) << 10)
    raise ValueError(f"{arch!r} is no architecture; gfx942, gfx1100, sm_90, …")


def jobs(operation: str, dtype: str, rows: int, cols: int, traits: Traits) -> Iterator[Job]:
    """The kernels of an operation on contiguous arrays, in the order of their launches."""
    vector = 16
    while cols % vector:
        vector //= 2
    common: dict[str, Any] = {"x": dtype, "weight": dtype, "vector": vector}
    if operation == "forward":
        plans = [plan_forward(rows, cols, traits, **common, y=dtype)]
    elif operation == "fused-forward":
        plans = [plan_forward(rows, cols, traits, **common, y=dtype, residual=dtype, residual_out=dtype)]
    else:
        added = dtype if operation == "fused-backward" else None
        backward = plan_backward(rows, cols, traits, **common, dout=dtype, dx=dtype, dresidual_out=added)
        compute = "float64" if dtype == "float64" else "float32"
        plans = [*backward.launches]
        if not backward.direct:
            plans.append(plan_reduce(cols, traits, weight=dtype, compute=compute))
    for plan in plans:
        yield Job(operation, dtype, rows, cols, traits, plan)


# ------------------------------------------------------------------------------------------------ compilers


@dataclass(frozen=True)
class Made:
    code: bytes
    assembly: str | None
    compiler: str


@lru_cache(maxsize=256)
def make(text: str, arch: str, compiler: str = "auto") -> Made:
    """A program's code object for an architecture; RuntimeError where no compiler for it is installed."""
    if arch.startswith("sm_"):
        return _by_nvrtc(text, arch)
    if compiler != "clang":
        code, why = _by_hiprtc(text, arch)
        if code is not None:
            return Made(code, None, "hipRTC")
        if compiler == "hiprtc":
            raise RuntimeError(f"hipRTC does not compile for {arch}: {why}")
    built_with = clang.find()
    built = built_with.build(text, arch)
    return Made(built.code, built.assembly, f"clang {built_with.version}")


_CHILD = """
import sys
from rmsnorm_raw.devices import hip
sys.stdout.buffer.write(hip.compile(sys.stdin.read(), sys.argv[1]))
"""


@lru_cache(maxsize=1)
def _why_no_hiprtc() -> str | None:
    from .devices import hip

    try:
        hip.require_hiprtc()
    except RuntimeError as error:
        return str(error)
    return None


def _by_hiprtc(text: str, arch: str) -> tuple[bytes | None, str]:
    """In a process of its own: an old hipRTC ends the process when it does not know the architecture."""
    why = _why_no_hiprtc()
    if why is not None:
        return None, why
    command = [sys.executable, "-c", _CHILD, arch]
    done = subprocess.run(command, input=text.encode(), capture_output=True, check=False)
    if done.returncode == 0 and done.stdout:
        return done.stdout, ""
    return None, done.stderr.decode(errors="replace").strip()[-2000:] or f"it ended with status {done.returncode}"


def _by_nvrtc(text: str, arch: str) -> Made:
    try:
        from cuda.core import Program, ProgramOptions  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError as error:
        raise RuntimeError(
            f"compiling for {arch} takes NVRTC through cuda-core ({error}): "
            "pip install cuda-core nvidia-cuda-nvrtc nvidia-cuda-runtime"
        ) from error
    options = ProgramOptions(arch=arch, std="c++17", fma=False, ftz=True)
    return Made(bytes(Program(text, "c++", options).compile("cubin").code), None, "NVRTC")


# ------------------------------------------------------------------------------------------------ compile


def _compile(options: argparse.Namespace) -> int:
    rows, cols = options.shape
    todo: list[Job] = []
    try:
        for arch in options.arch.split(","):
            traits = traits_of(arch, options.units)
            for dtype in options.dtype:
                todo += [job for operation in OPERATIONS for job in jobs(operation, dtype, rows, cols, traits)]
        options.out.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(2) as pool:
            report = list(pool.map(lambda job: _report(job, options), todo))
    except (ValueError, RuntimeError, OSError) as error:
        print(f"rmsnorm-raw compile: {error}", file=sys.stderr)
        return 2
    (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    _print(report, f"{rows} × {cols}")
    print(f"{len({line['file'] for line in report})} code objects and report.json are in {options.out}")
    return 0


def _report(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Compiles, writes the code object, and tells what is in it."""
    made = make(job.text, job.arch, options.compiler)
    constants = job.plan.constants
    ending = "cubin" if job.traits.vendor == "nvidia" else "hsaco"
    key = program(job.plan.kernel, constants).key
    file = f"{job.plan.kernel}-{job.arch.replace(':', '_')}-{key[:12]}.{ending}"
    (options.out / file).write_bytes(made.code)
    line: dict[str, Any] = {
        "operation": job.operation,
        "kernel": job.plan.kernel,
        "dtype": job.dtype,
        "rows": job.rows,
        "cols": job.cols,
        "arch": job.arch,
        "compiler": made.compiler,
        "file": file,
        "block": job.plan.threads,
        "blocks": job.plan.blocks,
        "wave": job.traits.wave,
        "rows_per_block": constants.rows_per_block,
    }
    if job.traits.vendor == "nvidia":
        registers, stack, shared = codeobject.read_cubin(made.code, job.plan.kernel)
        return line | {"registers": registers, "scratch_bytes": stack, "lds_bytes": shared + constants.shared_bytes}
    (facts,) = codeobject.read(made.code)
    unit = codeobject.unit_of(job.arch)
    line |= {
        "vgprs": facts.vgprs,
        "agprs": facts.agprs,
        "sgprs": facts.sgprs,
        "vgpr_spills": facts.vgpr_spills,
        "sgpr_spills": facts.sgpr_spills,
        "scratch_bytes": facts.scratch_bytes,
        "lds_bytes": facts.lds_bytes,
        "kernarg_bytes": facts.kernarg_bytes,
        "waves_per_simd": unit.waves_at_once(facts.vgprs, facts.lds_bytes, -(-facts.block // facts.wave)),
    }
    assembly = made.assembly or _disassembled(made.code, job.plan.kernel)
    return line if assembly is None else line | _figures(job, codeobject.Listing(assembly, job.plan.kernel))


def _figures(job: Job, listing: codeobject.Listing) -> dict[str, Any]:
    """What the assembly tells. Instructions are counted for each row: in the row loop of a grid that is persistent
    (which its plan makes smaller than the rows), else in the whole kernel, whose loop runs once."""
    constants = job.plan.constants
    loads, stores = listing.widths()
    persistent = job.plan.blocks * constants.rows_per_block < job.rows * constants.tiles
    counted = listing.main_loop if persistent and listing.main_loop else listing.instructions
    figures: dict[str, Any] = {
        "loads_by_bytes": {str(size): loads[size] for size in sorted(loads, reverse=True)},
        "stores_by_bytes": {str(size): stores[size] for size in sorted(stores, reverse=True)},
        "instructions": len(listing.instructions),
    }
    if constants.cols and constants.kept == constants.packs:  # else loops repeat what stands once in the code
        elements = job.cols * constants.rows_per_block / constants.tiles
        vector = sum(one.is_vector for one in counted)
        figures |= {
            "counted": "row loop" if counted is not listing.instructions else "kernel",
            "instructions_per_element": round(len(counted) * job.plan.threads / elements, 2),
            "valu_per_element": round(vector * job.plan.threads / elements, 2),
            "barriers": sum(one.is_barrier for one in counted),
            "lane_moves": sum(one.is_lane_move for one in counted),
            "loads_in_flight": listing.loads_in_flight(),  # at each barrier
            "loads_before_waiting": listing.loads_before_waiting(),
        }
    return figures


def _print(report: list[dict[str, Any]], shape: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"kernels at {shape}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("operation", "kernel", "dtype", "arch"):
        table.add_column(name, no_wrap=True)
    for name in ("VGPR", "SGPR", "LDS", "scratch", "spills", "block", "waves", "loads", "stores"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in report:
        spills = line["vgpr_spills"] + line["sgpr_spills"] if "vgpr_spills" in line else "–"
        cells = [line["operation"], line["kernel"], line["dtype"], line["arch"].partition(":")[0]]
        cells += [line.get("vgprs", line.get("registers")), line.get("sgprs", "–"), line["lds_bytes"]]
        cells += [line.get("scratch_bytes", "–"), spills, line["block"], line.get("waves_per_simd", "–")]
        cells += [_widths(line.get("loads_by_bytes")), _widths(line.get("stores_by_bytes"))]
        table.add_row(*map(str, cells))
    console = Console(highlight=False)
    # Into a file or a pipe every column is written, however wide; a terminal has its own width.
    console.width = max(console.width, 170) if not console.is_terminal else console.width
    console.print(table)
    console.print(
        "LDS, scratch in bytes; waves: at once on a SIMD, as registers and LDS allow. loads, stores: how many "
        "instructions × their bytes.",
        style="dim",
    )


def _widths(counts: dict[str, int] | None) -> str:
    return "–" if counts is None else " ".join(f"{count}×{size}" for size, count in counts.items()) or "none"


# ------------------------------------------------------------------------------------------------ show


def _show(options: argparse.Namespace) -> int:
    rows, cols = options.shape
    try:
        traits = traits_of(options.arch, options.units)
        found = [job for dtype in options.dtype for job in jobs(options.operation, dtype, rows, cols, traits)]
        for job in found:
            print(_assembly(job) if options.isa else job.text)
    except (ValueError, RuntimeError) as error:
        print(f"rmsnorm-raw show: {error}", file=sys.stderr)
        return 2
    return 0


def _assembly(job: Job) -> str:
    # clang even where hipRTC is: it gives its assembly without a disassembler.
    made = make(job.text, job.arch, "clang")
    text = made.assembly or _disassembled(made.code, job.plan.kernel)
    if text is None:
        raise RuntimeError(
            f"showing the assembly for {job.arch} takes nvdisasm or cuobjdump, and neither is on PATH; they come with "
            "the CUDA toolkit"
        )
    return text


def _disassembled(code: bytes, kernel: str) -> str | None:
    """By the vendor's disassembler, in the shape of an assembly listing; None where there is none."""
    nvidia = not code or codeobject.machine(code) == codeobject.NVIDIA
    if nvidia:
        commands = [("nvdisasm", "-c"), ("cuobjdump", "-sass")]
    else:
        commands = [("llvm-objdump", "-d", "--no-show-raw-insn"), ("/opt/rocm/llvm/bin/llvm-objdump", "-d")]
    for command in commands:
        if shutil.which(command[0]):
            with tempfile.NamedTemporaryFile(suffix=".cubin" if nvidia else ".hsaco") as file:
                file.write(code)
                file.flush()
                done = subprocess.run([*command, file.name], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return done.stdout if nvidia else codeobject.as_listing(done.stdout, kernel)
    return None
