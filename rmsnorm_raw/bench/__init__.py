"""The command `rmsnorm-raw bench`: correctness first, then time, against the memory's limit and against peers.

Knows: the command's options and the order of its steps. Light to import: NumPy and the standard library.
Must not: time or draw anything itself. cases.py has the operations and their checks, timing.py the clocks, peers.py the
other packages, overhead.py the host's time per call, show.py tables, files and plots.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress

    from .cases import Case
    from .show import Record
    from .timing import Clock

PEERS = ("torch", "liger", "quack", "compile")
OPERATIONS = ("fwd", "bwd", "fused_fwd", "fused_bwd", "bwd_frozen")
DTYPES = ("bfloat16", "float16", "float32")

# rows × columns from decoding one token to rows of 131072 columns
TABLE = (
    (1, 4096),
    (128, 8192),
    (512, 2048),
    (1024, 8192),
    (4096, 2880),
    (4096, 4096),
    (32768, 256),
    (32768, 1024),
    (32768, 2048),
    (32768, 4096),
    (32768, 5120),
    (32768, 8192),
    (16384, 16384),
    (8192, 32768),
    (4096, 65536),
    (2048, 131072),
)
HOST_SHAPES = ((1, 4096), (512, 2048), (4096, 4096))
REPEATS = 9  # timed samples of everything that is compared, taken in turn


# ------------------------------------------------------------------------------------------------ options


def add_command(commands: Any) -> None:
    """Adds `bench` to the subparsers of the command line."""
    bench = commands.add_parser(
        "bench",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        help="time every operation on the device, against a copy and against other packages",
        description=(
            "Checks each operation against float64 at each shape, then times it: on a GPU the device's own time over\n"
            "buffers larger than its cache, on the host wall time. Compares with a copy of as many bytes and with the\n"
            "peers that are installed. The exit status is 1 if a result is wrong."
        ),
        epilog=(
            "examples:\n"
            "  rmsnorm-raw bench                                  forward and backward at the 16 shapes of the table\n"
            "  rmsnorm-raw bench --op bwd --shapes 32768x4096 --dtype bfloat16,float32\n"
            "  rmsnorm-raw bench --against torch,compile --out results\n"
            "  rmsnorm-raw bench --host                           microseconds of Python for each call"
        ),
    )
    bench.add_argument(
        "--op",
        type=_words(OPERATIONS),
        default=OPERATIONS[:4],
        metavar="OP,…",
        help=f"of {', '.join(OPERATIONS)}; the last is a backward without dweight (default: all but it)",
    )
    bench.add_argument(
        "--shapes",
        type=_shapes,
        metavar="MxN,…",
        help="rows × columns, or table: the 16 of the table (default on a GPU; three of them on the host)",
    )
    bench.add_argument(
        "--dtype",
        type=_words(DTYPES),
        metavar="DTYPE,…",
        help=f"of {', '.join(DTYPES)} (default: bfloat16; on the host also float32)",
    )
    bench.add_argument(
        "--against",
        type=_words(PEERS, "none"),
        default=PEERS[:3],
        metavar="PEER,…",
        help=f"of {', '.join(PEERS)}, or none; compile, torch.compile of the formula, takes seconds a shape "
        "(default: all but it)",
    )
    bench.add_argument("--device", choices=("auto", "gpu", "host"), default="auto", help="as for demo (default: auto)")
    bench.add_argument("--out", type=Path, metavar="DIR", help="folder for bench.csv, bench.json and bench.png")
    bench.add_argument(
        "--host", action="store_true", help="instead: the host's time per call in a tight loop at 4x1024, in bfloat16"
    )
    bench.set_defaults(run=run)


def _words(choices: tuple[str, ...], nothing: str | None = None) -> Any:
    def parse(text: str) -> tuple[str, ...]:
        if text == nothing:
            return ()
        words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
        unknown = [word for word in words if word not in choices]
        if unknown or not words:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown) or 'nothing'} is not of {', '.join(choices)}")
        return words

    return parse


def _shapes(text: str) -> tuple[tuple[int, int], ...]:
    shapes: list[tuple[int, int]] = []
    for word in text.split(","):
        if word.strip() == "table":
            shapes += TABLE
            continue
        rows, _, cols = word.strip().partition("x")
        if not (rows.isdecimal() and cols.isdecimal() and int(rows) and int(cols)):
            raise argparse.ArgumentTypeError(f"{word!r} is not rows x columns, as 32768x4096, and not table")
        shapes.append((int(rows), int(cols)))
    return tuple(dict.fromkeys(shapes))


# ------------------------------------------------------------------------------------------------ the steps


def run(options: argparse.Namespace) -> int:
    """The exit status: 0, 1 (a result is wrong) or 2 (nothing to run on)."""
    from ..cli import OnGpu, choose_device
    from . import peers, show, timing
    from .cases import Case

    console = show.console()
    if options.host:
        from . import overhead

        entries, absent = overhead.measure()
        show.print_overhead(entries, absent, console)
        show.write_overhead(entries, absent, options.out)
        return 0

    peers.load_torch(options.against)  # on ROCm torch has to come before CuPy
    device = choose_device(options.device, console)
    if device is None:
        return 2
    on_gpu = isinstance(device, OnGpu)
    clock = timing.OnGpu(device.name) if on_gpu else timing.OnHost(device.name)
    del device
    shapes = options.shapes or (TABLE if on_gpu else HOST_SHAPES)
    dtypes = options.dtype or (DTYPES[:1] if on_gpu else ("bfloat16", "float32"))
    rivals, absent = peers.find(options.against, on_gpu)
    cases = [Case(op, rows, cols, dtype) for dtype in dtypes for op in options.op for rows, cols in shapes]

    show.print_head(clock, rivals, absent, console)
    records: list[Record] = []
    with show.progress(console) as progress:
        compile_all(clock, cases, progress)
        task = progress.add_task("timing", total=len(cases))
        for i, case in enumerate(cases):
            progress.update(task, description=str(case))
            records.append(measure(clock, case, rivals))
            # Files and tables follow the run, so that a run that is cut short leaves what it has.
            show.write_files(records, clock, absent, options.out)
            progress.advance(task)
            if i + 1 == len(cases) or (cases[i + 1].op, cases[i + 1].dtype) != (case.op, case.dtype):
                same = [r for r in records if (r.case.op, r.case.dtype) == (case.op, case.dtype)]
                show.print_records(same, clock, list(rivals), console)
    show.print_means(records, list(rivals), console)
    if options.out is not None:
        show.plot(records, clock, list(rivals), options.out, console)
    wrong = [record for record in records if record.wrong]
    show.print_wrong(wrong, len(records), console)
    return 1 if wrong else 0


def compile_all(clock: Clock, cases: list[Case], progress: Progress) -> None:
    """Calls every case once, several at a time, since a compiler runs outside of Python. What fails here fails again,
    and is told, when its turn comes."""

    def call(case: Case) -> None:
        rows = case.rows if clock.on_gpu else 1  # on the host programs do not depend on the rows
        case.operation.call(case.unfilled(clock, rows))

    task = progress.add_task("compiling", total=len(cases))
    with ThreadPoolExecutor(clock.compilers) as pool:
        for _ in as_completed([pool.submit(call, case) for case in cases]):
            progress.advance(task)
    clock.clean()
    progress.remove_task(task)


def measure(clock: Clock, case: Case, rivals: dict[str, Any]) -> Record:
    """One line of the table, whatever happens."""
    from .show import Record

    record = Record(case)
    try:
        _measure(clock, record, rivals)
    except Exception as error:  # out of memory, or a refused shape: the other cases go on
        record.wrong = f"failed: {_first_line(error)}"
    clock.clean()
    return record


def _measure(clock: Clock, record: Record, rivals: dict[str, Any]) -> None:
    """Checks, captures everything, samples all in turn, and checks again what the timed calls wrote."""
    from .cases import Checker

    case = record.case
    record.sets = clock.sets_for(case.bytes)
    sets = case.filled(clock, record.sets)
    checker = Checker(clock, case, sets[0])
    checker.poison(sets[0])
    case.operation.call(sets[0])
    record.check(checker.error(sets[0]))
    if record.wrong:
        return
    for one in sets:
        checker.poison(one)
    samplers = {
        "copy": clock.copies(case.bytes, sets),
        "package": [clock.sampler([partial(case.operation.call, one) for one in sets], case.bytes)],
    }
    for name, rival in rivals.items():
        try:
            calls, distance = clock.on_torch(partial(rival, case.op), sets, checker)
            # More loosely than for our own results, since packages round in different places.
            if not distance <= 0.02:
                raise ValueError(f"its result is off by {distance:.1%}")
            samplers[name] = [clock.torch_sampler(calls, case.bytes)]
        except Exception as error:  # a peer may fail in any way; the others go on
            record.peers[name] = f"failed: {_first_line(error)}"
    samples: dict[str, list[list[float]]] = {name: [[] for _ in some] for name, some in samplers.items()}
    for _ in range(REPEATS):
        for name, some in samplers.items():
            for sampler, taken in zip(some, samples[name], strict=True):
                taken.append(sampler())
    record.times(samples)
    record.floor = case.bytes / clock.bandwidth if clock.bandwidth else None
    record.check(checker.error(sets[-1]))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
