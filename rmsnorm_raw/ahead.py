"""Compiling ahead: what calls of given shapes and dtypes will need, before there are arrays.

Knows: which of the functions' steps a model goes through. They plan for themselves, with outlines for arrays.
Must not: plan, or know how a device compiles.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from . import ops
from .arrays import dtype_name
from .libraries import HOST, Device, Outline, Outlines


def warmup(
    shapes: Iterable[tuple[int, ...]],
    dtypes: Any = "bfloat16",
    *,
    weight: bool = True,
    weight_dtype: Any = None,
    bias: bool = False,
    heads: int | None = None,
    weight_offset: float = 0.0,
    casting: str = "fp32",
    residual_rounding: str = "stored",
    out_dtype: Any = None,
    residual_dtype: Any = None,
    plain: bool = True,
    fused: bool = True,
    backward: bool = True,
    need_dweight: bool = True,
    device: str | None = None,
    progress: bool = True,
) -> int:
    """Compiles ahead, in parallel, every program that calls of these shapes will need; then those compile nothing.

    Args:
        shapes: of x, (…, N) each. The rows count too: few of them are dealt to blocks in another way.
        dtypes: of x, one or several: strings, NumPy or torch dtypes. The residual and dout have x's.
        weight, bias: whether there is one; (N,), or (heads, N) for shapes (…, heads, N).
        weight_dtype: x's by default.
        weight_offset, casting, residual_rounding, out_dtype, residual_dtype: as the calls will have them.
        plain, fused: for `rmsnorm`, for `fused_add_rmsnorm`.
        backward: for their backward too, with all gradients; need_dweight=False is that of a frozen weight.
        device: "gpu" (CuPy's current one), "host", or None for the GPU where there is one that CuPy can use.
        progress: a progress bar on stderr, if that is a terminal.

    Returns:
        How many programs were asked for. They are kept on disk as well, so later processes only load them.

    Arrays that begin at a multiple of 16 bytes and whose rows lie one after the other are planned for, as the libraries
    allocate them; others need programs of their own, compiled at their first call.

    Raises:
        ValueError, TypeError: as the calls would. RuntimeError: as the calls, or where a program does not compile.
    """
    where, library, shapes = _device(device), Outlines(), [tuple(shape) for shape in shapes]
    for dtype in [dtypes] if isinstance(dtypes, str) or not isinstance(dtypes, Iterable) else dtypes:
        kind = dtype_name(dtype, "dtypes")
        y_kind = kind if out_dtype is None else dtype_name(out_dtype, "out_dtype")
        w_kind = kind if weight_dtype is None else dtype_name(weight_dtype, "weight_dtype")
        for shape in shapes:
            per_column = (heads, *shape[-1:]) if heads else shape[-1:]
            x, dout = Outline(shape, kind, where, library), Outline(shape, y_kind, where, library)
            w = Outline(per_column, w_kind, where, library) if weight else None
            b = Outline(per_column, w_kind, where, library) if bias else None
            rstd = Outline(shape[:-1], "float64" if kind == "float64" else "float32", where, library)
            scale = (b, weight_offset, casting)
            if plain:
                ops._forward(x, None, w, None, True, *scale, "stored", out_dtype, None, None, None)
                if backward:
                    ops._backward(x, w, dout, rstd, None, *scale, True, need_dweight, None, None, None, False, None)
            if not fused:
                continue
            ops._forward(x, x, w, None, True, *scale, residual_rounding, out_dtype, residual_dtype, None, None)
            total = x if residual_dtype is None else Outline(shape, dtype_name(residual_dtype, ""), where, library)
            for added in (None, total) if backward else ():  # whether the sum is used further on
                ops._backward(total, w, dout, rstd, added, *scale, True, need_dweight, kind, kind, None, True, None)
    _compile(library, progress)
    return len({program for _, program, *_ in library.programs})


def _device(name: str | None) -> Device:
    if name not in (None, "gpu", "host"):
        raise ValueError(f"device is {name!r}; it must be 'gpu', 'host' or None")
    if name == "host":
        return HOST
    from .devices import cupy as gpu

    try:
        cupy = gpu.require_cupy()
        index = cupy.cuda.runtime.getDevice()
        gpu.traits(index)
        return Device("gpu", index)
    except Exception as error:
        if name is None:
            return HOST
        raise RuntimeError(f"there is no GPU that CuPy can use ({error}); rmsnorm-raw info says more") from error


def _compile(library: Outlines, progress: bool) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with (
        Progress(console=console, transient=True, disable=not (progress and console.is_terminal)) as bar,
        ThreadPoolExecutor(min(32, os.cpu_count() or 1), thread_name_prefix="rmsnorm_raw-warmup") as pool,
    ):
        # A program that is asked for with another grid is compiled once: the others wait for it.
        for _ in bar.track(pool.map(lambda entry: entry[0](*entry[1:]), library.programs), len(library.programs)):
            pass
