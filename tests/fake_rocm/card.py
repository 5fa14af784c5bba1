"""The stand-in's card, for processes that run over it: launches lane by lane at wave 64, and the record of all calls.

Knows: runtime.cpp's structures, the machine of lanes, a program's text (it is all that a launch brings).
Must not: know CuPy or hip-python; only pointers come in.
"""

from __future__ import annotations

import ctypes
import re
import struct
from dataclasses import dataclass

import lanes

TRAITS = lanes.DEVICES["gfx942"]


class _Launch(ctypes.Structure):
    _fields_ = (
        ("text", ctypes.c_char_p),
        ("kernel", ctypes.c_char_p),
        ("grid", ctypes.c_uint),
        ("block", ctypes.c_uint),
        ("device", ctypes.c_int),
        ("stream", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
    )


@dataclass(frozen=True)
class Launch:
    kernel: str
    text: str
    grid: int
    block: int
    device: int
    stream: int
    arguments: dict[str, float]  # by the names in the kernel's text


class Card:
    """Launches as they came, in order. What a launch raises is raised again by `check`."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.faults: list[Exception] = []
        self.runtime = ctypes.CDLL("libamdhip64.so.7")
        self.runtime.stand_in_record.restype = ctypes.c_char_p
        self._callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Launch))(self._launch)
        self.runtime.stand_in_set_launcher(self._callback)

    def record(self) -> list[list[str]]:
        """The calls since the last time this was asked, each as its words."""
        lines = self.runtime.stand_in_record().decode().splitlines()
        self.runtime.stand_in_forget()
        return [line.split("\t") for line in lines]

    def check(self) -> None:
        if self.faults:
            raise self.faults.pop()

    def areas(self) -> list[tuple[int, int]]:
        """First address and end of each allocation."""
        room = 4096
        pairs = (ctypes.c_int64 * (2 * room))()
        count = self.runtime.stand_in_areas(pairs, room)
        return [(pairs[2 * i], pairs[2 * i] + pairs[2 * i + 1]) for i in range(count)]

    def _launch(self, pointer) -> int:
        try:
            self._run(pointer.contents)
        except Exception as error:  # nothing passes through the C++ above
            self.faults.append(error)
            return 1
        return 0

    def _run(self, given: _Launch) -> None:
        text, kernel = given.text.decode(), given.kernel.decode()
        declared = lanes.parameters(kernel)
        real = "d" if "constexpr Dtype COMPUTE = F64;" in text else "f"
        codes = [code.replace("r", real) for _, code, _ in declared]
        # Each pointer leads to a value of its parameter's size; what a caller packs too narrow is read wrong here.
        values = tuple(
            struct.unpack("@" + code, ctypes.string_at(given.arguments[i], struct.calcsize(code)))[0]
            for i, code in enumerate(codes)
        )
        named = {name: value for (name, _, _), value in zip(declared, values, strict=True)}
        self.launches.append(Launch(kernel, text, given.grid, given.block, given.device, given.stream or 0, named))
        threads = _constant(text, "THREADS_PER_ROW") * _constant(text, "ROWS_PER_BLOCK")
        assert given.block == threads, f"a block of {given.block} threads for a program of {threads}"
        assert _constant(text, "WAVE") == TRAITS.wave
        assert named["blocks"] == given.grid, f"the kernel is told {named['blocks']} blocks, the grid has {given.grid}"
        executable = lanes.build(kernel, text, TRAITS)
        lanes.launch(executable, declared, "@" + "".join(codes), values, self.areas(), given.grid)


def _constant(text: str, name: str) -> int:
    found = re.search(rf"constexpr int {name} = (\d+);", text)
    assert found, f"no {name} in the program"
    return int(found[1])
