"""The kernels' cases for the machine of lanes: operands, calls of the public functions, comparison with float64.

Knows: every kernel variant, and row lengths that take each way through the plans. Shared by plain and sanitized runs.
Must not: know how a launch is run, or how a plan divides the work.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from conftest import DTYPES, assert_rows_close, assert_sums_close, random

import rmsnorm_raw as rr
from rmsnorm_raw import reference

from . import DEVICES, is_poison, poisoned
from .device import Device

# 3001 columns take a number of waves that is no power of two; long rows do not fit in registers, longer ones by
# far not. Rows start at multiples of 16 bytes ("half": of 8), with a gap between them; "tight" rows follow each other,
# and all arrays lie one element off, so that only single elements may be accessed.
SHAPES = {
    "40": 40, "256": 256, "256-half": 256, "3001": 3001, "769-tight": 769, "long": 17000, "longer": 40008,
    "stashed": 31000, "stashed-tight": 23001,
}  # fmt: skip
VARIANTS = ("forward", "fused_forward", "backward", "fused_backward")
# All operands, of unlike dtypes and for two heads; outputs that are inputs; results left out.
OPTIONS = (
    "forward_options", "forward_in_place", "forward_unrounded",
    "backward_options", "backward_in_place", "backward_dx", "backward_sums",
)  # fmt: skip
EPS = 1e-6


@dataclass(frozen=True)
class Case:
    device: str
    variant: str
    dtype: str
    shape: str

    def __str__(self) -> str:
        return "-".join((self.device, self.variant, self.dtype, self.shape))


def every_case(devices: tuple[str, ...], dtypes: tuple[str, ...]) -> list[Case]:
    shapes, others = ("40", "256", "3001", "769-tight", "long", "longer"), ("256-half", "769-tight", "long")
    cases = [Case(d, v, t, s) for d in devices for v in VARIANTS for t in dtypes for s in shapes]
    cases += [Case(d, v, "float64", s) for d in devices for v in VARIANTS for s in ("40", "769-tight")]
    return cases + [Case(d, v, "bfloat16", s) for d in devices for v in OPTIONS for s in others]


def stashed_cases(dtypes: tuple[str, ...]) -> list[Case]:
    """Backwards whose rows lie in registers and shared memory, beside dweight's sums and without."""
    variants, shapes = ("backward", "fused_backward", "backward_dx"), ("stashed", "stashed-tight")
    return [Case("sm_90_whole", v, t, s) for v in variants for t in dtypes for s in shapes]


def check(case: Case, sanitizer: str | None = None, small: bool = False) -> None:
    """Every output against float64: on few blocks that take turns, the last of them not full; for a single row; and,
    without a sanitizer, where some blocks have no row, and on the planned grid."""
    run = _forward if "forward" in case.variant else _backward
    few = Device(DEVICES[case.device], sanitizer, few_blocks=True, small=small)
    rows = max(11, 20000 // SHAPES[case.shape]) | 1
    run(case, few, rows)
    first, blocks = few.launched[0]
    groups = blocks // (first.constants.heads * first.constants.tiles)
    assert groups * first.constants.rows_per_block < rows, f"{groups} blocks do not take turns for {rows} rows"
    if not small:
        run(case, few, 1)
    if sanitizer is None:
        run(case, few, 7)
        run(case, Device(DEVICES[case.device]), 11 if SHAPES[case.shape] > 16384 else 37)


# ------------------------------------------------------------------------------------------------ the kernels


def _forward(case: Case, device: Device, rows: int) -> None:
    dtype, options, in_place = case.dtype, case.variant == "forward_options", case.variant == "forward_in_place"
    memory = Memory(case, rows, heads=2 if options else 1)
    other = "float32" if options else dtype
    x, weight = memory.rows(dtype, 1), memory.weight(other, 2)
    residual = memory.rows(dtype, 3) if case.variant != "forward" else None
    bias, offset = (memory.weight(dtype, 4), 1.0) if options else (None, 0.0)
    expected = reference.forward(
        x, weight, EPS, residual=residual, bias=bias, weight_offset=offset,
        residual_dtype=None if case.variant == "forward_unrounded" else DTYPES[other],
    )  # fmt: skip

    y = x if in_place else memory.output(dtype)
    keywords = {"bias": bias, "weight_offset": offset, "out": y}
    if residual is None:
        _, rstd = device(rr.rmsnorm_fwd, x, weight, EPS, True, **keywords)
    else:
        total = residual if in_place else memory.output(other)
        keywords |= {"residual_out": total, "residual_dtype": other}
        if case.variant == "forward_unrounded":
            keywords["residual_rounding"] = "fp32"
        _, _, rstd = device(rr.fused_add_rmsnorm_fwd, x, residual, weight, EPS, True, **keywords)
        assert_rows_close(total, expected.normed, other, "residual_out")
    assert_rows_close(y, expected.y, dtype, "y")
    assert_rows_close(rstd[..., None], expected.rstd[..., None], _real(dtype), "rstd")
    memory.check_gaps()


def _backward(case: Case, device: Device, rows: int) -> None:
    dtype, variant, options = case.dtype, case.variant, case.variant == "backward_options"
    memory = Memory(case, rows, heads=2 if options else 1)
    other = "float32" if options else dtype
    x, dout, weight = memory.rows(dtype, 1), memory.rows(dtype, 2), memory.weight(other, 3)
    added = memory.rows(other, 4) if options or variant == "fused_backward" else None
    bias, offset = (memory.weight(dtype, 5), 1.0) if options else (None, 0.0)
    rstd = reference.forward(x, None, EPS).rstd.astype(DTYPES[_real(dtype)])
    expected = reference.backward(x, weight, dout, EPS, dresidual_out=added, weight_offset=offset)

    dx = x if variant == "backward_in_place" else memory.output(dtype) if variant != "backward_sums" else None
    dresidual, dbias = memory.output(other) if options else None, None
    if added is None:
        needs = {"need_dx": variant != "backward_sums", "need_dweight": variant != "backward_dx"}
        _, dweight = device(rr.rmsnorm_bwd, x, weight, dout, rstd, out=(dx, None), **needs)
    else:
        keywords = {"bias": bias, "weight_offset": offset, "dx_dtype": dtype, "dresidual_dtype": other}
        out = (dx, dresidual, None, None) if options else (dx, None, None)
        _, _, dweight, *rest = device(rr.fused_add_rmsnorm_bwd, x, weight, dout, rstd, added, out=out, **keywords)
        dbias = rest[0] if rest else None
    for result, name, result_dtype in ((dx, "dx", dtype), (dresidual, "dresidual", other)):
        if result is not None:
            assert_rows_close(result, expected.dx, result_dtype, name)
    dout_max = float(np.abs(dout.astype(np.float64)).max())
    if variant != "backward_dx":
        assert_sums_close(dweight, expected.dweight, other, rows, dout_max)
    if dbias is not None:
        assert_sums_close(dbias, expected.dbias, other, rows, dout_max, what="dbias")
    memory.check_gaps()


# ------------------------------------------------------------------------------------------------ operands


def _real(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


class Memory:
    """A case's arrays, laid out as its shape says."""

    def __init__(self, case: Case, rows: int, heads: int):
        self.cols, self.layout = SHAPES[case.shape], case.shape.partition("-")[2]
        self.shape = (rows, self.cols) if heads == 1 else (rows, heads, self.cols)
        self.pitch = self.cols if self.layout == "tight" else -(-self.cols // 16) * 16 + 16
        self.outputs: list[np.ndarray] = []

    def output(self, dtype: str) -> np.ndarray:
        """Poisoned, with poisoned gaps."""
        whole = self._new((*self.shape[:-1], self.pitch), dtype)
        self.outputs.append(whole)
        return whole[..., : self.cols]

    def rows(self, dtype: str, seed: int) -> np.ndarray:
        array = self._new((*self.shape[:-1], self.pitch), dtype)[..., : self.cols]
        array[...] = random(self.shape, dtype, seed)
        return array

    def weight(self, dtype: str, seed: int) -> np.ndarray:
        array = self._new(self.shape[1:], dtype)
        array[...] = random(array.shape, dtype, seed)
        return array

    def check_gaps(self) -> None:
        for whole in self.outputs:
            assert is_poison(whole[..., self.cols :]), "something was written between the rows of an output"

    def _new(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        offset = {"tight": DTYPES[dtype].itemsize, "half": 8}.get(self.layout, 0)
        return poisoned(shape, DTYPES[dtype], offset)
