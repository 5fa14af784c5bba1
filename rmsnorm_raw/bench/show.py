"""What a measurement looks like: records, tables, CSV and JSON files, the plot.

Knows: rich, and matplotlib where it is installed.
Must not: measure. Times are seconds here and microseconds where they are shown.
"""

from __future__ import annotations

import csv
import datetime
import json
import math
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import environment
from ..cli import Error, _three_digits
from .cases import Case
from .timing import Clock

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from .overhead import Entry

VERSIONS = ("numpy", "torch", "triton", "liger-kernel", "quack-kernels", "nvidia-cutlass-dsl")


@dataclass
class Record:
    """One case: `peers` has seconds, or why there are none; `wrong` is empty where the results are right."""

    case: Case
    wrong: str = ""
    error: float = 0.0  # the largest, as a share of what is allowed
    seconds: float = math.nan
    fastest: float = math.nan
    slowest: float = math.nan
    copy: float = math.nan
    floor: float | None = None
    sets: int = 0
    peers: dict[str, float | str] = field(default_factory=dict)

    def check(self, error: Error) -> None:
        self.error = max(self.error, error.share)
        if error.is_off:
            share = f"{100 * error.share:.0f} % of the allowed"
            self.wrong = f"{error.result} is off by up to {error.difference:.3g}, {share}"

    def times(self, samples: dict[str, list[list[float]]]) -> None:
        medians = {name: min(statistics.median(taken) for taken in some) for name, some in samples.items()}
        self.copy, self.seconds = medians.pop("copy"), medians.pop("package")
        self.fastest, self.slowest = min(samples["package"][0]), max(samples["package"][0])
        self.peers.update(medians)

    @property
    def gigabytes_per_second(self) -> float:
        return self.case.bytes / self.seconds / 1e9

    def speedup(self, peer: str) -> float | None:
        """A peer's time over ours."""
        seconds = self.peers.get(peer)
        return seconds / self.seconds if isinstance(seconds, float) and not self.wrong else None

    def speedup_of_fastest(self) -> float | None:
        return min((s for peer in self.peers if (s := self.speedup(peer)) is not None), default=None)

    def row(self, peers: Iterable[str]) -> dict[str, Any]:
        """Flat, for files: microseconds and ratios; empty where there is nothing."""
        row: dict[str, Any] = {
            "op": self.case.op,
            "rows": self.case.rows,
            "cols": self.case.cols,
            "dtype": self.case.dtype,
            "bytes": self.case.bytes,
            "sets": self.sets,
            "error": self.error,
            "wrong": self.wrong,
            "us": _us(self.seconds),
            "us_fastest": _us(self.fastest),
            "us_slowest": _us(self.slowest),
            "gbps": _rounded(self.gigabytes_per_second, 1),
            "copy_us": _us(self.copy),
            "of_copy": _rounded(self.copy / self.seconds, 4),
            "floor_us": _us(self.floor),
        }
        for peer in peers:
            seconds = self.peers.get(peer)
            row[f"{peer}_us"] = _us(seconds) if isinstance(seconds, float) else seconds
            row[f"{peer}_speedup"] = _rounded(self.speedup(peer), 4)
        return row


def _us(seconds: float | None) -> float | None:
    return _rounded(None if seconds is None else seconds * 1e6, 3)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, digits)


def geometric_mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.geometric_mean(known) if known else None


# ------------------------------------------------------------------------------------------------ on the terminal


def console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def progress(console: Console) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def print_head(clock: Clock, rivals: Iterable[str], absent: dict[str, str], console: Console) -> None:
    console.print(f"{clock.name}: {clock.method}", style="bold", markup=False, soft_wrap=True)
    versions = _versions()
    console.print(", ".join(f"{name} {version}" for name, version in versions.items()), style="dim", soft_wrap=True)
    for name, why in absent.items():
        console.print(f"not compared with {name}: {why}", style="yellow", markup=False, soft_wrap=True)


def print_records(records: Sequence[Record], clock: Clock, rivals: Sequence[str], console: Console) -> None:
    """The table of one operation and dtype."""
    case = records[0].case
    flow = f"{', '.join(case.operation.inputs)} → {', '.join(case.operation.results)}"
    table = _table(f"[bold]{case.op} {case.dtype}[/]: {flow}")
    table.add_column("rows × cols", justify="right", no_wrap=True)
    heads = ["µs", "GB/s", "of copy"] + (["of floor"] if clock.bandwidth else [])
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for name in rivals:
        table.add_column(f"{name} µs", justify="right", no_wrap=True)
        table.add_column("×", justify="right", no_wrap=True)
    for record in records:
        shape = f"{record.case.rows} × {record.case.cols}"
        if record.wrong:
            table.add_row(shape, f"[bold red]{'failed' if record.wrong.startswith('failed') else 'wrong'}[/]")
            continue
        cells = [shape, _micro(record.seconds), f"{record.gigabytes_per_second:.0f}"]
        cells.append(f"{record.copy / record.seconds:.3f}")
        if clock.bandwidth:
            cells.append(f"{(record.floor or math.nan) / record.seconds:.3f}")
        for name in rivals:
            seconds, speedup = record.peers.get(name), record.speedup(name)
            if speedup is None or not isinstance(seconds, float):
                cells += ["failed", ""]
            else:
                style = "green" if speedup >= 1 else "yellow"
                cells += [_micro(seconds), f"[{style}]{speedup:.2f}[/]"]
        table.add_row(*cells)
    _print_table(table, console)
    failures: dict[str, list[str]] = {}
    for record in records:
        for name, seconds in record.peers.items():
            if isinstance(seconds, str):
                failures.setdefault(f"{name} {seconds}", []).append(f"{record.case.rows}x{record.case.cols}")
    for text, shapes in failures.items():
        console.print(f"{', '.join(shapes)}: {text[:200]}", style="yellow", markup=False, soft_wrap=True)
    console.print()


def print_means(records: Sequence[Record], rivals: Sequence[str], console: Console) -> None:
    """Geometric means over the shapes of each operation and dtype."""
    if not rivals or not any(record.speedup_of_fastest() for record in records):
        return
    table = _table("[bold]speed-up[/], geometric mean over the shapes")
    table.add_column("op")
    table.add_column("dtype")
    for name in ("fastest peer", "least", *rivals):
        table.add_column(name, justify="right", no_wrap=True)
    for (op, dtype), same in _by_operation(records).items():
        fastest = [record.speedup_of_fastest() for record in same]
        least = min((value for value in fastest if value is not None), default=None)
        means = [geometric_mean(fastest), least]
        means += [geometric_mean(record.speedup(name) for record in same) for name in rivals]
        table.add_row(op, dtype, *("" if mean is None else f"{mean:.3f}" for mean in means))
    _print_table(table, console)
    console.print()


def print_wrong(wrong: Sequence[Record], count: int, console: Console) -> None:
    for record in wrong:
        console.print(f"{record.case}: {record.wrong}", style="red", markup=False, soft_wrap=True)
    if wrong:
        console.print(f"{len(wrong)} of {count} cases are wrong.", style="bold red")
    else:
        console.print(f"All {count} cases agree with float64.", style="bold green")


def print_overhead(entries: Sequence[Entry], absent: dict[str, str], console: Console) -> None:
    table = _table("[bold]host time per call[/], 4 × 1024 bfloat16, median of a tight loop")
    table.add_column("call", no_wrap=True)
    table.add_column("µs", justify="right", no_wrap=True)
    table.add_column("×", justify="right", no_wrap=True)
    table.add_column("at most", justify="right", no_wrap=True)
    table.add_column("of", no_wrap=True)
    for entry in entries:
        ratio = "" if entry.ratio is None else f"{entry.ratio:.2f}"
        style = "bold" if entry.against else ""
        table.add_row(entry.name, _micro(entry.seconds), ratio, _target(entry), " + ".join(entry.against), style=style)
    _print_table(table, console)
    for name, why in absent.items():
        console.print(f"left out: {name}: {why}", style="yellow", markup=False, soft_wrap=True)


def _target(entry: Entry) -> str:
    if entry.target is None:
        return ""
    return f"{entry.target:.1f} ×" if entry.ratio is not None else f"{_micro(entry.target)} µs"


def _by_operation(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.case.op, record.case.dtype), []).append(record)
    return groups


def _micro(seconds: float) -> str:
    return _three_digits(seconds * 1e6)


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(
        title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False
    )


def _print_table(table: Table, console: Console) -> None:
    """A pipe has no width to keep to: there, nothing is cut."""
    if not console.is_terminal:
        console.width = max(console.width, console.measure(table).maximum, 200)
    console.print(table)


# ------------------------------------------------------------------------------------------------ into files


def write_files(records: Sequence[Record], clock: Clock, absent: dict[str, str], folder: Path | None) -> None:
    """bench.csv, a line for each case, and bench.json, the same with what it was measured on."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    peers = list(dict.fromkeys(peer for record in records for peer in record.peers))
    rows = [record.row(peers) for record in records]
    with (folder / "bench.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    means = {
        f"{op} {dtype}": geometric_mean(record.speedup_of_fastest() for record in same)
        for (op, dtype), same in _by_operation(records).items()
    }
    about = _about() | {"device": clock.name, "method": clock.method, "not_compared": absent}
    _write_json(folder / "bench.json", {**about, "speedup_over_fastest_peer": means, "cases": rows})


def write_overhead(entries: Sequence[Entry], absent: dict[str, str], folder: Path | None) -> None:
    """overhead.csv and overhead.json."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "call": e.name, "us": _us(e.seconds), "ratio": _rounded(e.ratio, 4), "at_most": _target(e),
            "of": " + ".join(e.against),
        }
        for e in entries
    ]  # fmt: skip
    with (folder / "overhead.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["call", "us", "ratio", "at_most", "of"])
        writer.writeheader()
        writer.writerows(rows)
    _write_json(folder / "overhead.json", _about() | {"left_out": absent, "calls": rows})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _versions() -> dict[str, str]:
    from .. import __version__

    found = {"rmsnorm_raw": __version__, "Python": platform.python_version()}
    names = (*VERSIONS, *environment.cupy_distributions(environment.installed_distributions()))
    return found | {name: version for name in names if (version := environment.version_of(name))}


def _about() -> dict[str, Any]:
    return {"date": datetime.date.today().isoformat(), "versions": _versions()}


# ------------------------------------------------------------------------------------------------ the plot


def plot(records: Sequence[Record], clock: Clock, rivals: Sequence[str], folder: Path, console: Console) -> None:
    """bench.png: GB/s over the columns, one panel for each operation and dtype; where several numbers of rows were
    timed at one number of columns, the one that moves most."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        console.print("no bench.png: matplotlib is not installed (pip install matplotlib)", style="dim")
        return
    groups = _by_operation(record for record in records if not record.wrong)
    if not groups:
        return
    ops = list(dict.fromkeys(op for op, _ in groups))
    dtypes = list(dict.fromkeys(dtype for _, dtype in groups))
    size = (4.2 * len(ops) + 0.8, 3.4 * len(dtypes) + 0.8)
    figure, panels = pyplot.subplots(len(dtypes), len(ops), figsize=size, squeeze=False, sharex=True, sharey=True)
    for i, dtype in enumerate(dtypes):
        for j, op in enumerate(ops):
            panel = panels[i][j]
            panel.set_title(f"{op}, {dtype}", fontsize=10)
            panel.set_xscale("log", base=2)
            panel.grid(alpha=0.3)
            if j == 0:
                panel.set_ylabel("GB/s")
            if i == len(dtypes) - 1:
                panel.set_xlabel("columns")
            widest: dict[int, Record] = {}
            for record in groups.get((op, dtype), []):
                other = widest.get(record.case.cols)
                if other is None or record.case.rows > other.case.rows:
                    widest[record.case.cols] = record
            series = [widest[cols] for cols in sorted(widest)]
            _line(panel, series, "copy", [r.copy for r in series], color="0.5", linestyle="--", zorder=1)
            for k, name in enumerate(rivals):
                peer = [r.peers.get(name) for r in series]
                _line(panel, series, name, peer, color=f"C{k}", marker=".", linewidth=1.0)
            own = [r.seconds for r in series]
            _line(panel, series, "rmsnorm_raw", own, color="black", marker="o", markersize=4, linewidth=2)
    panels[0][0].set_ylim(bottom=0)
    panels[0][0].legend(fontsize=8)
    figure.suptitle(f"{clock.name}: {clock.method}", fontsize=10)
    figure.tight_layout()
    figure.savefig(folder / "bench.png", dpi=130)
    pyplot.close(figure)


def _line(
    panel: Any, series: Sequence[Record], label: str, seconds: Sequence[float | str | None], **style: Any
) -> None:
    points = [
        (record.case.cols, record.case.bytes / taken / 1e9)
        for record, taken in zip(series, seconds, strict=True)
        if isinstance(taken, float)
    ]
    if points:
        panel.plot([x for x, _ in points], [y for _, y in points], label=label, **style)
