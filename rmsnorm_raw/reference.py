"""The formulas in float64 NumPy: what every backend is compared with.

Knows: the contract's arithmetic, one rounding at the end left out: results stay in float64.
Must not: share a line with the kernels or the door.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Forward(NamedTuple):
    y: np.ndarray
    rstd: np.ndarray
    normed: np.ndarray  # what the norm was taken of: x, or the residual sum


class Backward(NamedTuple):
    dx: np.ndarray
    dweight: np.ndarray | None
    dbias: np.ndarray


def forward(x, weight=None, eps=1e-6, *, residual=None, bias=None, weight_offset=0.0, residual_dtype=None) -> Forward:
    """y, rstd and what was normed. With `residual_dtype` the sum is rounded to it first, as "stored" does."""
    h = np.asarray(x).astype(np.float64)
    if residual is not None:
        h = h + np.asarray(residual).astype(np.float64)
        if residual_dtype is not None:
            if np.dtype(residual_dtype).itemsize < 8:
                h = h.astype(np.float32)  # where the kernels add
            h = h.astype(residual_dtype).astype(np.float64)
    with np.errstate(all="ignore"):
        rstd = 1.0 / np.sqrt(np.mean(h * h, axis=-1) + eps)
        y = h * rstd[..., None]
        if weight is not None:
            y = y * (np.asarray(weight).astype(np.float64) + weight_offset)
        if bias is not None:
            y = y + np.asarray(bias).astype(np.float64)
    return Forward(y, rstd, h)


def backward(x, weight, dout, eps=1e-6, *, dresidual_out=None, weight_offset=0.0) -> Backward:
    """dx, dweight and dbias of `forward` at what was normed, x; dresidual_out is added after the norm's derivative."""
    x, dout = np.asarray(x).astype(np.float64), np.asarray(dout).astype(np.float64)
    rstd = 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    normed = x * rstd
    g = dout if weight is None else dout * (np.asarray(weight).astype(np.float64) + weight_offset)
    dx = rstd * (g - normed * np.mean(g * normed, axis=-1, keepdims=True))
    if dresidual_out is not None:
        dx = dx + np.asarray(dresidual_out).astype(np.float64)
    shape = (x.shape[-1],) if weight is None else np.asarray(weight).shape
    leading = tuple(range(x.ndim - len(shape)))
    dweight = None if weight is None else (dout * normed).sum(axis=leading)
    return Backward(dx, dweight, dout.sum(axis=leading))
