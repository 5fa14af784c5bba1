"""One file for each way to run a program. host and cupy have the same calls:

traits(index) -> plan.Traits;  prepare(program, blocks, elements, index) -> launch(arguments, stream), compiled;
place() -> what tells the current device's index and switches to another for a while, None where there is one device.

hip and clang only compile: to AMD code objects, with hipRTC and with the clang of the ziglang package.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import Any


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
