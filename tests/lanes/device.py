"""The public functions on the machine of lanes: the door, the plans and the order of launches are the package's own.

Knows: the call by which devices/host.py prepares a launch, which it stands in for, and where results are allocated.
Must not: know kernels' arguments, or the norm.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np

from rmsnorm_raw import calls, ops
from rmsnorm_raw.devices import Launch, host
from rmsnorm_raw.libraries import NumpyLibrary
from rmsnorm_raw.plan import Constants, Traits
from rmsnorm_raw.program import Program, program

from . import build, launch, parameters, poisoned


@dataclass
class Device:
    """Runs calls as one of DEVICES would. What they allocate is poisoned.

    few_blocks: two blocks a head, or what one unit holds, so that the loops over rows turn.
    small: at most 256 threads a block (128 for one row), for ThreadSanitizer, which is slow at making fibres.
    """

    traits: Traits
    sanitizer: str | None = None
    few_blocks: bool = False
    small: bool = False
    launched: list[tuple[Program, int]] = field(default_factory=list)  # and its blocks

    def __call__(self, function: Callable, *arguments: Any, **options: Any) -> Any:
        given = [*arguments, *options.values()]
        given += [array for several in given if isinstance(several, tuple) for array in several]
        areas = {_bounds(array) for array in given if isinstance(array, np.ndarray)}  # all that a launch may point to

        def maker(library: NumpyLibrary, shape: tuple[int, ...], dtype: str, device: Any) -> partial[np.ndarray]:
            def make() -> np.ndarray:
                array = poisoned(shape, real_maker(library, (0,), dtype, device)().dtype)
                areas.add(_bounds(array))
                return array

            return partial(make)

        def prepare(text: Program, blocks: int, elements: int, index: int = 0) -> Launch:
            return Launch(lambda arguments, stream: self._launch(text, blocks, arguments, areas))

        traits = replace(self.traits, units=1) if self.few_blocks else self.traits
        real_maker = NumpyLibrary.maker
        with ExitStack() as stack:
            stack.enter_context(patch.object(NumpyLibrary, "maker", maker))
            stack.enter_context(patch.object(ops, "_traits", lambda door: traits))
            stack.enter_context(patch.object(host, "prepare", prepare))
            calls.forget()  # recorded ones go straight to the host's kernels
            stack.callback(calls.forget)
            return function(*arguments, **options)

    def _launch(self, planned: Program, blocks: int, arguments: tuple, areas: set[tuple[int, int]]) -> None:
        text = program(planned.kernel, _small(planned.constants)) if self.small else planned
        if self.few_blocks and (text.kernel == "rmsnorm_fwd" or text.constants.mean_only):  # any grid will do
            blocks = min(blocks, 2 * text.constants.heads)
        self.launched.append((text, blocks))
        # Of long rows dweight_reduce has too many blocks for ThreadSanitizer, and all of them do the same.
        sanitizer = None if self.small and blocks > 4 and text.kernel == "dweight_reduce" else self.sanitizer
        declared = parameters(text.kernel)
        names = [name for name, _, _ in declared]
        arguments = tuple(blocks if name == "blocks" else v for name, v in zip(names, arguments, strict=True))
        executable = build(text.kernel, text.text, self.traits, sanitizer)
        launch(executable, declared, text.arguments_format, arguments, areas, blocks)


def _bounds(array: np.ndarray) -> tuple[int, int]:
    """First address and end."""
    last = sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True))
    return array.ctypes.data, array.ctypes.data + last + array.itemsize


def _small(c: Constants) -> Constants:
    """The same work of a block with fewer threads."""
    if c.rows_per_block > 1:
        return replace(c, rows_per_block=min(c.rows_per_block, max(1, 256 // c.threads_per_row)))
    threads = min(c.threads_per_row, 128)
    packs = _ceil(_ceil(c.cols, c.tiles), threads * c.pack)
    kept = packs if c.kept >= c.packs else min(c.kept, packs - 1)
    batch = packs if c.batch == c.packs else c.batch
    return replace(c, threads_per_row=threads, packs=packs, section=packs, batch=batch, kept=kept)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
