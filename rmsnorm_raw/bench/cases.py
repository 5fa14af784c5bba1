"""What is measured: the operations, the bytes that each must move, its operands, and whether its results are right.

Knows: the public operations, the float64 reference, NumPy's interface, which CuPy shares.
Must not: time, or know peers. Operands are dictionaries of arrays by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import ops, reference
from ..cli import DTYPES as CLI_DTYPES
from ..cli import EPSILON as CLI_EPSILON
from ..cli import Error, _error, _row_error

if TYPE_CHECKING:
    from .timing import Clock

EPS = 1e-6
LABELS = {name: label for label, name in CLI_DTYPES.items()}  # "float32" → "fp32"
EPSILON = {name: CLI_EPSILON[label] for name, label in LABELS.items()}


@dataclass(frozen=True)
class Operation:
    """`inputs` and `outputs` are rows × columns; `results` are the outputs and, where it is computed, dweight."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    call: Callable[[dict[str, Any]], Any]
    expect: Callable[[dict[str, np.ndarray]], tuple[np.ndarray, ...]]
    sums: bool = False

    @property
    def arrays(self) -> int:
        return len(self.inputs) + len(self.outputs)

    @property
    def results(self) -> tuple[str, ...]:
        return (*self.outputs, "dweight") if self.sums else self.outputs


def _fwd(o: dict[str, Any]) -> Any:
    return ops.rmsnorm_fwd(o["x"], o["weight"], EPS, out=o["y"])


def _fused_fwd(o: dict[str, Any]) -> Any:
    return ops.fused_add_rmsnorm_fwd(
        o["x"], o["residual"], o["weight"], EPS, out=o["y"], residual_out=o["residual_out"]
    )


def _bwd(o: dict[str, Any]) -> Any:
    out = (o["dx"], o["dweight"])
    return ops.rmsnorm_bwd(o["x"], o["weight"], o["dout"], o["rstd"], out=out, workspace=o["workspace"])


def _fused_bwd(o: dict[str, Any]) -> Any:
    # residual_out can be any array, so x stands for it.
    out = (o["dx"], None, o["dweight"])
    return ops.fused_add_rmsnorm_bwd(
        o["x"], o["weight"], o["dout"], o["rstd"], o["dresidual_out"], out=out, workspace=o["workspace"]
    )


def _bwd_frozen(o: dict[str, Any]) -> Any:
    return ops.rmsnorm_bwd(
        o["x"], o["weight"], o["dout"], o["rstd"],
        need_dweight=False, out=(o["dx"], None), workspace=o["workspace"],
    )  # fmt: skip


def _expect_fwd(o: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    return (reference.forward(o["x"], o["weight"], EPS).y,)


def _expect_fused_fwd(o: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    residual = o["residual"]
    right = reference.forward(o["x"], o["weight"], EPS, residual=residual, residual_dtype=residual.dtype)
    return right.y, right.normed


def _expect_bwd(o: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    added = o.get("dresidual_out")
    return (reference.backward(o["x"], o["weight"], o["dout"], EPS, dresidual_out=added).dx,)


OPERATIONS = {
    "fwd": Operation(("x",), ("y",), _fwd, _expect_fwd),
    "bwd": Operation(("x", "dout"), ("dx",), _bwd, _expect_bwd, sums=True),
    "fused_fwd": Operation(("x", "residual"), ("y", "residual_out"), _fused_fwd, _expect_fused_fwd),
    "fused_bwd": Operation(("x", "dout", "dresidual_out"), ("dx",), _fused_bwd, _expect_bwd, sums=True),
    "bwd_frozen": Operation(("x", "dout"), ("dx",), _bwd_frozen, _expect_bwd),
}


def numpy_dtype(name: str) -> np.dtype:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


@dataclass(frozen=True)
class Case:
    op: str
    rows: int
    cols: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.op} {self.rows}x{self.cols} {self.dtype}"

    @property
    def operation(self) -> Operation:
        return OPERATIONS[self.op]

    @property
    def bytes(self) -> int:
        """Each rows × columns array read or written once; weight, rstd and dweight are small and not counted."""
        return self.operation.arrays * self.rows * self.cols * numpy_dtype(self.dtype).itemsize

    def unfilled(self, clock: Clock, rows: int) -> dict[str, Any]:
        """Operands of whatever values."""
        xp, dtype = clock.xp, numpy_dtype(self.dtype)
        names = (*self.operation.inputs, *self.operation.outputs)
        operands = {name: xp.empty((rows, self.cols), dtype) for name in names}
        operands["weight"], operands["dweight"] = xp.empty(self.cols, dtype), xp.empty(self.cols, dtype)
        operands["rstd"] = xp.empty(rows, np.float32)
        if "dx" in self.operation.outputs:
            needed = ops.workspace_bytes(operands["x"], operands["weight"])
            operands["workspace"] = xp.empty(max(16, needed), np.uint8)
        return operands

    def filled(self, clock: Clock, count: int) -> list[dict[str, Any]]:
        """`count` sets of operands with the same normal values, each in memory of its own; weight and scratch are
        one, as in a model and in an allocator that gives the same block again."""
        first = self.unfilled(clock, self.rows)
        for seed, name in enumerate(self.operation.inputs):
            first[name][...] = clock.normal((self.rows, self.cols), seed).astype(first[name].dtype)
        first["weight"][...] = (1.0 + 0.25 * clock.normal((self.cols,), 99)).astype(first["weight"].dtype)
        for start, x, _ in _stretches(first["x"]):
            first["rstd"][start : start + len(x)] = _rstd(clock.xp, x)[:, 0]
        own = (*self.operation.inputs, *self.operation.outputs, "rstd", "dweight")
        return [first] + [{**first, **{name: first[name].copy() for name in own}} for _ in range(count - 1)]


# ------------------------------------------------------------------------------------------------ right or wrong


class Checker:
    """What the results of one case must be: some rows of the outputs, and all of dweight, in float64."""

    def __init__(self, clock: Clock, case: Case, operands: dict[str, Any]):
        self._clock, self._case = clock, case
        some = np.random.default_rng(0).integers(0, case.rows, 14)
        self._rows = np.unique(np.concatenate([[0, case.rows - 1], some]))
        here = {name: clock.get(operands[name][self._rows]) for name in case.operation.inputs}
        here["weight"] = clock.get(operands["weight"])
        self._expected = dict(zip(case.operation.outputs, case.operation.expect(here), strict=True))
        if case.operation.sums:
            # On the device: all rows take part.
            xp, total = clock.xp, clock.xp.zeros(case.cols, np.float64)
            largest = 0.0
            for _, x, dout in _stretches(operands["x"], operands["dout"]):
                total += (dout * x * _rstd(xp, x)).sum(axis=0)
                largest = max(largest, float(xp.abs(dout).max()))
            self._expected["dweight"] = clock.get(total)
            self._largest = largest

    def poison(self, operands: dict[str, Any]) -> None:
        """NaN everywhere in the results: in every float format all bits set is one."""
        for name in self._case.operation.results:
            operands[name].view(np.uint8).fill(0xFF)

    def error(self, operands: dict[str, Any]) -> Error:
        """The largest error as a share of what the tests allow."""
        errors = []
        for name, right in self._expected.items():
            if name == "dweight":
                got = self._clock.get(operands[name]).astype(np.float64)
                rounding = 2 * EPSILON[self._case.dtype] * float(np.abs(right).max())
                allowed = max(5e-6 * self._case.rows**0.5 * self._largest, rounding)
                errors.append(_error(name, np.abs(got - right), np.float64(allowed)))
            else:
                got = self._clock.get(operands[name][self._rows])
                errors.append(_row_error(name, got, right, LABELS[self._case.dtype]))
        return max(errors, key=lambda error: error.share)

    def distance(self, results: tuple[Any, ...]) -> float:
        """The largest ‖result − right‖ / ‖right‖ of a peer's results, in this operation's order."""
        worst = 0.0
        for (name, right), result in zip(self._expected.items(), results, strict=True):
            got = self._clock.get(result if name == "dweight" else result[self._rows]).astype(np.float64)
            distance = float(np.linalg.norm(got - right) / np.linalg.norm(right))
            worst = max(worst, distance) if distance == distance else float("inf")
        return worst


def _stretches(*arrays: Any) -> Any:
    """Some rows at a time in float64: the first one's number, then a part of each array (None where there is one)."""
    rows, cols = arrays[0].shape
    step = max(1, (1 << 24) // cols)
    for start in range(0, rows, step):
        parts = [array[start : start + step].astype(np.float32).astype(np.float64) for array in arrays]
        yield start, parts[0], parts[1] if len(parts) > 1 else None


def _rstd(xp: Any, x: Any) -> Any:
    return 1.0 / xp.sqrt((x * x).mean(axis=1, keepdims=True) + EPS)
