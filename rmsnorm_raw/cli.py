"""The command rmsnorm-raw: `demo` checks and times every operation, `info` tells what the machine has and lacks.

Knows: the public operations, the float64 reference, how a terminal shows them. Rich and CuPy load inside the commands.
Must not: look into kernels, plans or devices; what is found on a machine is environment's to find.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import bench, compile_command, environment, ops, reference

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

# ------------------------------------------------------------------------------------------------ the command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit status is 0, 1 (a case is off, or no device works) or 2 (it could not run)."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 2
    return options.run(options)


def _parser() -> argparse.ArgumentParser:
    from . import __version__

    parser = argparse.ArgumentParser(
        prog="rmsnorm-raw",
        description="RMSNorm kernels as raw HIP C: forward, backward, fused residual-add; for AMD, NVIDIA and the CPU.",
        epilog="Start with `rmsnorm-raw demo`. Where it finds no GPU or no compiler, `rmsnorm-raw info` says why.",
    )
    parser.add_argument("--version", action="version", version=f"rmsnorm_raw {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")

    demo = commands.add_parser(
        "demo",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        help="check every operation against float64 at shapes of real models, and time it",
        description=(
            "Runs forward, backward, fused-add forward and fused-add backward at shapes of real models\n"
            f"(hidden {', '.join(map(str, HIDDEN))}; {', '.join(map(str, TOKENS))} tokens; {', '.join(DTYPES)}),\n"
            "compares every value with float64, and times each. The exit status is 1 if a single case is off."
        ),
        epilog=(
            "examples:\n"
            "  rmsnorm-raw demo                  all 180 cases on the GPU, or on the host where there is none\n"
            "  rmsnorm-raw demo --quick          60 of them\n"
            "  rmsnorm-raw demo --device host    on the CPU, whatever else is there"
        ),
    )
    demo.add_argument(
        "--device",
        choices=("auto", "gpu", "host"),
        default="auto",
        help="gpu: through CuPy; host: the CPU, through NumPy; auto: the GPU if a call on it works (default)",
    )
    demo.add_argument("--quick", action="store_true", help="a third of the cases: five of the fifteen shapes")
    demo.set_defaults(run=_demo)

    info = commands.add_parser(
        "info",
        help="what was found on this machine, what is missing, and the command that mends it",
        description=(
            "Shows versions, GPUs, the C++ compiler, threads and caches, then what is missing, doubled or wrong, "
            "each with the command that mends it. Makes one small call on each device to see whether it works."
        ),
    )
    info.add_argument("--check", action="store_true", help="exit with status 1 if no device works at all")
    info.set_defaults(run=_info)
    bench.add_command(commands)
    compile_command.add_commands(commands)
    return parser


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


# ------------------------------------------------------------------------------------------------ info


def _info(options: argparse.Namespace) -> int:
    found = environment.survey()
    print_survey(found, _console())
    return 1 if options.check and not found.working else 0


def print_survey(found: environment.Survey, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    facts = Table.grid(padding=(0, 2))
    for label, value in found.facts:
        facts.add_row(Text(label, style="bold"), Text(value, overflow="fold"))  # paths whole, to be copied
    facts.add_row(Text("works", style="bold"), Text(", ".join(found.working) or "nothing"))
    console.print(facts)
    console.print()
    if not found.findings:
        console.print("Everything is fine.", style="green")
    for finding in found.findings:
        # Unwrapped, so that a command can be copied as one line.
        console.print(Text(finding.text, style="yellow"), soft_wrap=True)
        console.print(Text(f"    {finding.remedy}"), soft_wrap=True)


# ------------------------------------------------------------------------------------------------ demo: cases

HIDDEN = (896, 2880, 4096, 5120, 8192)  # Qwen2.5 0.5B, gpt-oss, Llama 3 8B, Qwen3 32B, Llama 3 70B
TOKENS = (1, 128, 2048)  # decoding one sequence, a batch of them, a prompt or a training step
SHAPES = tuple((tokens, hidden) for hidden in HIDDEN for tokens in TOKENS)
QUICK_SHAPES = ((1, 896), (128, 896), (1, 4096), (128, 4096), (2048, 4096))  # two widths: two fifths of the compiling
EPS = 1e-6

# What is right. For y, dx and residual_out |Δ| ≤ u·|ref| + c·max|ref of the row|: the dtype's own rounding, and that of
# float32 sums. For dweight, a sum over the rows, 5e-6·√rows·max|dout|, or two roundings of its largest value.
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
ROW_TOLERANCE = {"fp32": (2.0**-22, 1e-5), "fp16": (2.0**-10, 1e-6), "bf16": (2.0**-7, 1e-6)}
EPSILON = {"fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-7}


@dataclass(frozen=True)
class Case:
    operation: str
    tokens: int
    hidden: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.operation}, {self.tokens} × {self.hidden}, {self.dtype}"


@dataclass(frozen=True)
class Error:
    """The largest difference from float64 in one result, and the largest share of what is allowed there."""

    result: str
    difference: float
    share: float

    @property
    def is_off(self) -> bool:
        return not self.share <= 1.0


@dataclass(frozen=True)
class Outcome:
    error: Error
    seconds: float
    bytes: int

    @property
    def gigabytes_per_second(self) -> float:
        return self.bytes / self.seconds / 1e9


class Operand(NamedTuple):
    """The same values on the device and, for the reference, as a NumPy array."""

    there: Any
    here: np.ndarray


@dataclass(frozen=True)
class Operands:
    """What the operations take at one shape and dtype."""

    device: Device
    x: Operand
    residual: Operand
    dout: Operand
    dresidual: Operand
    weight: Operand

    def unwritten(self, like: Operand) -> Any:
        """An output full of NaN, which no comparison passes: in every float format all bits set is one."""
        return self.device.bits(like.here.nbytes).view(like.here.dtype).reshape(like.here.shape)


@dataclass(frozen=True)
class Prepared:
    """An operation at one shape: the call to time, its results by name, and what they should be at some of the rows,
    with what those rows add to dweight."""

    call: Callable[[], Any]
    results: dict[str, Any]
    expect: Callable[[slice], tuple[dict[str, np.ndarray], np.ndarray | None]]


def _forward(o: Operands) -> Prepared:
    y = o.unwritten(o.x)

    def expect(rows: slice):
        return {"y": reference.forward(o.x.here[rows], o.weight.here, EPS).y}, None

    return Prepared(partial(ops.rmsnorm_fwd, o.x.there, o.weight.there, EPS, True, out=y), {"y": y}, expect)


def _fused_add_forward(o: Operands) -> Prepared:
    y, total = o.unwritten(o.x), o.unwritten(o.residual)
    operands = (o.x.there, o.residual.there, o.weight.there)
    call = partial(ops.fused_add_rmsnorm_fwd, *operands, EPS, True, out=y, residual_out=total)

    def expect(rows: slice):
        x, residual = o.x.here[rows], o.residual.here[rows]
        right = reference.forward(x, o.weight.here, EPS, residual=residual, residual_dtype=residual.dtype)
        return {"y": right.y, "residual_out": right.normed}, None

    return Prepared(call, {"y": y, "residual_out": total}, expect)


def _backward(o: Operands) -> Prepared:
    call, results = _prepare_backward(o, ops.rmsnorm_bwd)

    def expect(rows: slice):
        right = reference.backward(o.x.here[rows], o.weight.here, o.dout.here[rows], EPS)
        return {"dx": right.dx}, right.dweight

    return Prepared(lambda: call(out=(results["dx"], results["dweight"])), results, expect)


def _fused_add_backward(o: Operands) -> Prepared:
    # residual_out can be any array, so x stands for it.
    call, results = _prepare_backward(o, ops.fused_add_rmsnorm_bwd)

    def expect(rows: slice):
        added = o.dresidual.here[rows]
        right = reference.backward(o.x.here[rows], o.weight.here, o.dout.here[rows], EPS, dresidual_out=added)
        return {"dx": right.dx}, right.dweight

    out = (results["dx"], None, results["dweight"])
    return Prepared(lambda: call(o.dresidual.there, out=out), results, expect)


def _prepare_backward(o: Operands, operation: Callable) -> tuple[Callable, dict[str, Any]]:
    """What both backwards share: rstd and scratch, made before the call that is timed, and outputs."""
    x, weight = o.x.there, o.weight.there
    _, rstd = ops.rmsnorm_fwd(x, weight, EPS, True)
    workspace = o.device.bits(ops.workspace_bytes(x, weight))
    results = {"dx": o.unwritten(o.x), "dweight": o.unwritten(o.weight)}
    return partial(operation, x, weight, o.dout.there, rstd, workspace=workspace), results


@dataclass(frozen=True)
class Operation:
    prepare: Callable[[Operands], Prepared]
    flow: str
    arrays: int  # of tokens × hidden in `flow`, each read or written once


OPERATIONS = {
    "forward": Operation(_forward, "x → y", 2),
    "backward": Operation(_backward, "x, dout → dx, dweight", 3),
    "fused-add forward": Operation(_fused_add_forward, "x, residual → y, residual_out", 4),
    "fused-add backward": Operation(_fused_add_backward, "residual_out, dout, dresidual_out → dx, dw", 4),
}


# ------------------------------------------------------------------------------------------------ demo: devices


class OnHost:
    """The CPU, through NumPy."""

    label = "host"
    timing = "the median of repeated calls"

    def __init__(self) -> None:
        from .devices import host

        threads = host.get_num_threads()
        self.name = f"{environment.cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"

    def put(self, array: np.ndarray) -> Any:
        return array

    def get(self, array: Any) -> np.ndarray:
        return array

    def bits(self, count: int) -> Any:
        return np.full(count, 0xFF, np.uint8)

    def time(self, call: Callable[[], Any]) -> float:
        """The median of as many calls as take about 15 ms, at least 3."""
        samples = []
        while len(samples) < 3 or (sum(samples) < 0.015 and len(samples) < 50):
            began = time.perf_counter()
            call()
            samples.append(time.perf_counter() - began)
        return statistics.median(samples)


class OnGpu:
    """The first GPU, through CuPy."""

    label = "GPU 0"
    timing = "the median on the device, launches not counted and caches cold"

    def __init__(self, gpu: environment.Gpu) -> None:
        from .devices.cupy import require_cupy

        self.name = str(gpu)
        self._cupy = require_cupy()
        free, _ = self._cupy.cuda.runtime.memGetInfo()
        self._other = self._cupy.empty(min(1 << 30, free // 8), np.uint8)
        self._fill_seconds = min(self._elapsed(lambda: self._other.fill(0)) for _ in range(3))

    def put(self, array: np.ndarray) -> Any:
        return self._cupy.asarray(array)

    def get(self, array: Any) -> np.ndarray:
        return self._cupy.asnumpy(array)

    def bits(self, count: int) -> Any:
        return self._cupy.full(count, 0xFF, np.uint8)

    def time(self, call: Callable[[], Any]) -> float:
        """The median of ten, by events. Each call is queued behind fills of other memory that take twice as long as the
        host takes to launch it, so that the launch is not what is timed; they leave cold caches, too."""
        began = time.perf_counter()
        call()
        fills = 1 + int(2 * (time.perf_counter() - began) / self._fill_seconds)
        return statistics.median(self._elapsed(call, fills) for _ in range(10))

    def _elapsed(self, call: Callable[[], Any], fills: int = 0) -> float:
        began, ended = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        for _ in range(fills):
            self._other.fill(0)
        began.record()
        call()
        ended.record()
        ended.synchronize()
        return self._cupy.cuda.get_elapsed_time(began, ended) / 1e3


Device = OnHost | OnGpu


def choose_device(wanted: str, console: Console) -> Device | None:
    """The device of --device; None, with the reasons printed, where it does not work."""
    reasons = []
    if wanted != "host":
        gpus, why = environment.find_gpus()
        why = why or environment.try_device("gpu")
        if why is None:
            return OnGpu(gpus[0])
        reasons.append(f"no GPU: {why}")
    if wanted != "gpu":
        why = environment.try_device("host")
        if why is None:
            for reason in reasons:
                console.print(f"{reason}; running on the host", style="dim", markup=False, soft_wrap=True)
            return OnHost()
        reasons.append(f"no host: {why}")
    for reason in reasons:
        console.print(reason, style="red", markup=False, soft_wrap=True)
    console.print("Nothing to run on; `rmsnorm-raw info` says what to install.")
    return None


# ------------------------------------------------------------------------------------------------ demo: running


def _demo(options: argparse.Namespace) -> int:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = _console()
    device = choose_device(options.device, console)
    if device is None:
        return 2
    shapes = QUICK_SHAPES if options.quick else SHAPES
    columns = (TextColumn("{task.description:<38}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    began = time.perf_counter()
    with Progress(*columns, console=console, transient=True) as progress:
        compile_all(device, shapes, progress)
        compiled = time.perf_counter()
        outcomes = run_cases(device, shapes, progress)
    seconds = time.perf_counter() - began
    print_outcomes(outcomes, device, console)
    off = {case: outcome.error for case, outcome in outcomes.items() if outcome.error.is_off}
    print_summary(outcomes, off, device, seconds, compiled - began, console)
    return 1 if off else 0


def compile_all(device: Device, shapes: Sequence[tuple[int, int]], progress: Progress) -> None:
    """Calls every operation once on a single row: programs do not depend on the rows. Threads, since a compiler runs
    outside of Python."""

    def call(hidden: int, dtype: str) -> None:
        operands = _operands(device, _flat_operands(device, hidden, dtype), 1, hidden)
        for operation in OPERATIONS.values():
            operation.prepare(operands).call()

    widths = sorted({hidden for _, hidden in shapes})
    task = progress.add_task("compiling", total=len(widths) * len(DTYPES))
    with ThreadPoolExecutor(_cpus()) as pool:
        pending = [pool.submit(call, hidden, dtype) for hidden in widths for dtype in DTYPES]
        try:
            for done in as_completed(pending):
                done.result()
                progress.advance(task)
        finally:
            pool.shutdown(cancel_futures=True)


def _cpus() -> int:
    return min(8, len(os.sched_getaffinity(0)))


def run_cases(device: Device, shapes: Sequence[tuple[int, int]], progress: Progress) -> dict[Case, Outcome]:
    task = progress.add_task("checking", total=len(shapes) * len(DTYPES) * len(OPERATIONS))
    outcomes = {}
    for dtype in DTYPES:
        flat = _flat_operands(device, max(tokens * hidden for tokens, hidden in shapes), dtype)
        for tokens, hidden in shapes:
            operands = _operands(device, flat, tokens, hidden)
            for name, operation in OPERATIONS.items():
                case = Case(name, tokens, hidden, dtype)
                progress.update(task, description=str(case))
                prepared = operation.prepare(operands)
                prepared.call()
                error = largest_error(operands, prepared, dtype)
                size = operation.arrays * operands.x.here.nbytes
                outcomes[case] = Outcome(error, device.time(prepared.call), size)
                progress.advance(task)
    return outcomes


def _flat_operands(device: Device, count: int, dtype: str) -> dict[str, Operand]:
    """Normal values for the largest shape, of which the others take the beginning."""
    rng = np.random.default_rng(0)
    flat = {}
    for name in ("x", "residual", "dout", "dresidual"):
        here = rng.standard_normal(count, np.float32).astype(_numpy_dtype(dtype))
        flat[name] = Operand(device.put(here), here)
    return flat


def _operands(device: Device, flat: dict[str, Operand], tokens: int, hidden: int) -> Operands:
    count, shape = tokens * hidden, (tokens, hidden)
    cut = {
        name: Operand(there[:count].reshape(shape), here[:count].reshape(shape)) for name, (there, here) in flat.items()
    }
    some = cut["dout"].here[0]
    weight = (1.0 + 0.25 * some.astype(np.float32)).astype(some.dtype)
    return Operands(device, **cut, weight=Operand(device.put(weight), weight))


def _numpy_dtype(dtype: str) -> np.dtype:
    if dtype == "bf16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(DTYPES[dtype])


def largest_error(o: Operands, prepared: Prepared, dtype: str) -> Error:
    """Every value of every result against float64, some rows at a time so that float64 stays in cache."""
    got = {name: o.device.get(result) for name, result in prepared.results.items()}

    def compare(rows: slice):
        expected, part = prepared.expect(rows)
        return [_row_error(name, got[name][rows], right, dtype) for name, right in expected.items()], part

    with ThreadPoolExecutor(_cpus()) as pool:
        compared = list(pool.map(compare, _stretches(o.x.here)))
    errors = [error for some, _ in compared for error in some]
    parts = [part for _, part in compared if part is not None]
    if parts:
        dweight = np.sum(parts, axis=0)
        rows, largest = len(o.dout.here), float(np.abs(o.dout.here).max())
        allowed = max(5e-6 * math.sqrt(rows) * largest, 2 * EPSILON[dtype] * float(np.abs(dweight).max()))
        errors.append(_error("dweight", np.abs(got["dweight"].astype(np.float64) - dweight), np.float64(allowed)))
    return max(errors, key=lambda error: error.share)


def _stretches(array: np.ndarray) -> Iterator[slice]:
    rows, step = len(array), max(1, 65536 // array.shape[1])
    return (slice(start, start + step) for start in range(0, rows, step))


def _row_error(name: str, got: np.ndarray, expected: np.ndarray, dtype: str) -> Error:
    u, c = ROW_TOLERANCE[dtype]
    size = np.abs(expected)
    return _error(name, np.abs(got.astype(np.float64) - expected), u * size + c * size.max(axis=-1, keepdims=True))


def _error(name: str, difference: np.ndarray, allowed: Any) -> Error:
    with np.errstate(all="ignore"):
        shares = np.where(difference == 0, 0.0, difference / allowed)
    share = float(shares.max())  # NaN if a single one is
    return Error(name, float(difference.max()), math.inf if math.isnan(share) else share)


# ------------------------------------------------------------------------------------------------ demo: printing


def print_outcomes(outcomes: dict[Case, Outcome], device: Device, console: Console) -> None:
    """One table for each operation: a row for each shape, three columns for each dtype."""
    console.print(f"{device.label}: {device.name}", style="bold", markup=False, soft_wrap=True)
    for name, operation in OPERATIONS.items():
        table = _table(f"[bold]{name}[/] on {device.label}: {operation.flow}")
        for tokens, hidden in dict.fromkeys((case.tokens, case.hidden) for case in outcomes):
            cells = [f"{tokens} × {hidden}"]
            for dtype in DTYPES:
                outcome = outcomes[Case(name, tokens, hidden, dtype)]
                style = "bold red" if outcome.error.is_off else "green"
                cells.append(f"[{style}]{_percent(outcome.error.share)}[/]")
                cells += [_duration(outcome.seconds), _three_digits(outcome.gigabytes_per_second)]
            table.add_row(*cells)
        console.print()
        console.print(table)
    console.print(
        "\nerror: the largest difference from float64, as a share of what is allowed; up to 100 % is right. "
        f"time: {device.timing}. GB/s: each tokens × hidden array of the operation read or written once.",
        style="dim",
    )


def _table(title: str) -> Table:
    """Fits 80 columns."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        title_style="",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        show_edge=False,
    )
    table.add_column("tokens ×\nhidden", justify="right", no_wrap=True)
    for dtype in DTYPES:
        table.add_column(f"{dtype}\nerror", justify="right", min_width=5, no_wrap=True)
        table.add_column("\ntime", justify="right", min_width=7, no_wrap=True)
        table.add_column("\nGB/s", justify="right", min_width=4, no_wrap=True)
    return table


def print_summary(
    outcomes: dict[Case, Outcome],
    off: dict[Case, Error],
    device: Device,
    seconds: float,
    compiling: float,
    console: Console,
) -> None:
    for case, error in off.items():
        text = f"{case}: {error.result} is off by up to {error.difference:.3g}, {_percent(error.share)} of the allowed"
        console.print(text, style="red", markup=False, soft_wrap=True)
    took = f"{seconds:.0f} s, {compiling:.0f} s of them compiling"
    if off:
        console.print(f"{len(off)} of {len(outcomes)} cases are off on {device.label} ({took}).", style="bold red")
    else:
        text = f"All {len(outcomes)} cases agree with float64 on {device.label} ({took})."
        console.print(text, style="bold green")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share < 9.995 else ">999%"


def _duration(seconds: float) -> str:
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        if seconds * factor < 999.5:
            return f"{_three_digits(seconds * factor)} {unit}"
    return f"{_three_digits(seconds)} s"


def _three_digits(value: float) -> str:
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"
