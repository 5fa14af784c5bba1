"""A reduced run of every kernel on a GPU, for tools that make it slow (compute_sanitizer.sh). Checked in float64."""

from __future__ import annotations

import sys

import cupy
import numpy as np
from conftest import DTYPES, assert_rows_close, assert_sums_close, random

import rmsnorm_raw as rr
from rmsnorm_raw import reference

SHAPES = [(7, 40), (5, 769), (300, 256), (64, 1024), (33, 4096), (3, 8192), (2, 16384), (135, 24576), (3, 32768)]


def run(m: int, n: int, dtype: str) -> None:
    x, residual, dout, added = (random((m, n), dtype, seed) for seed in (1, 2, 3, 4))
    weight = random((n,), dtype, 5)
    there = cupy.asarray
    y, rstd = rr.rmsnorm_fwd(there(x), there(weight), 1e-5, True)
    assert_rows_close(y.get(), reference.forward(x, weight, 1e-5).y, dtype, "y")
    dx, dweight = rr.rmsnorm_bwd(there(x), there(weight), there(dout), rstd)
    expected = reference.backward(x, weight, dout, 1e-5)
    assert_rows_close(dx.get(), expected.dx, dtype, "dx")
    assert_sums_close(dweight.get(), expected.dweight, dtype, m, np.abs(dout.astype(np.float64)).max())
    dx, _ = rr.rmsnorm_bwd(there(x), there(weight), there(dout), rstd, need_dweight=False)
    assert_rows_close(dx.get(), expected.dx, dtype, "dx alone")
    y, total, rstd = rr.fused_add_rmsnorm_fwd(there(x), there(residual), there(weight), 1e-5, True)
    fused = reference.forward(x, weight, 1e-5, residual=residual, residual_dtype=DTYPES[dtype])
    assert_rows_close(y.get(), fused.y, dtype, "fused y")
    dx, _, dweight = rr.fused_add_rmsnorm_bwd(total, there(weight), there(dout), rstd, there(added))
    expected = reference.backward(total.get(), weight, dout, 1e-5, dresidual_out=added)
    assert_rows_close(dx.get(), expected.dx, dtype, "fused dx")


def main() -> None:
    cupy.cuda.set_allocator(None)  # every array an allocation of its own, so that a tool sees its bounds
    for dtype in sys.argv[1:] or ("bfloat16", "float32"):
        for m, n in SHAPES:
            run(m, n, dtype)
    print(f"{len(SHAPES)} shapes: right")


if __name__ == "__main__":
    main()
