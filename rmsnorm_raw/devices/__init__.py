"""One file for each way to run a program. host and cupy have the same calls:

traits(index) -> plan.Traits;  prepare(program, blocks, elements, index) -> Launch, compiled;
place() -> what tells the current device's index and switches to another for a while, None where there is one device.

hip and clang only compile: to AMD code objects, with hipRTC and with the clang of the ziglang package.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any


class Launch:
    """A kernel that is compiled and loaded, with its grid: `run(arguments, stream)` starts it. `lines` may say more
    shortly what `run` does, for a function that is written out for one call."""

    def __init__(self, run: Callable[[tuple, int], None]):
        self.run = run

    def lines(self, arguments: Sequence[str | int | float], space: dict[str, Any], number: int) -> list[str]:
        """The launch in a function whose globals are `space`: with the arguments that are texts in its variables, the
        stream in `here` and the device current. `number` tells several in one function apart."""
        texts = []
        for i, argument in enumerate(arguments):
            texts.append(argument if isinstance(argument, str) else f"argument{number}_{i}")
            if not isinstance(argument, str):
                space[texts[-1]] = argument
        space[f"launch{number}"] = self.run
        return [f"    launch{number}(({', '.join(texts)},), here)"]


class Compiled:
    """Kernels by key, each made once, however many threads ask at once; different keys are made side by side."""

    def __init__(self) -> None:
        self.kernels: dict[Hashable, Any] = {}
        self._renew()
        os.register_at_fork(after_in_child=self._renew)  # a child may have copied a held lock

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self._making: dict[Hashable, threading.Lock] = {}

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        kernel = self.kernels.get(key)
        if kernel is not None:
            return kernel
        with self._lock:
            lock = self._making.setdefault(key, threading.Lock())
        with lock:
            if key not in self.kernels:
                self.kernels[key] = make()
            return self.kernels[key]
