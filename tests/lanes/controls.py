"""Small kernels: with a fault each (lanes/broken), to be reported with its lines; and sound ones, for the machine.

Knows: the faults' lines, which the kernels mark with FAULT. All run on blocks of 128 threads.
Must not: know what finds which fault: the tests say so.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import random

from rmsnorm_raw.plan import plan_forward

from . import DEVICES, HERE, Fault, build, launch, parameters, poisoned, text_of

THREADS = 128


def _path(name: str) -> Path:
    return HERE / "broken" / f"{name}.hip"


def _run(path: Path, device: str, sanitizer: str | None, blocks: int, *outputs: np.ndarray) -> np.ndarray:
    """Gives the kernel x, one value for each thread, and the outputs."""
    traits, source = DEVICES[device], path.read_text()
    planned = plan_forward(7, 4 * THREADS, traits, x="float32", y="float32").constants
    constants = replace(planned, threads_per_row=THREADS, rows_per_block=1)
    x = poisoned((THREADS,), np.float32)
    x[:] = random(x.shape, "float32", 1)
    arrays = (x, *outputs)
    launch(
        build(path.stem, text_of(path.stem, constants, source), traits, sanitizer),
        parameters(path.stem, source),
        "@" + "P" * len(arrays) + "i",
        (*(array.ctypes.data for array in arrays), blocks),
        [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in arrays],
        blocks,
    )
    return x


def run(name: str, device: str, sanitizer: str | None = None, blocks: int = 1) -> None:
    """Runs a broken kernel; raises Fault where that is found."""
    _run(_path(name), device, sanitizer, blocks, poisoned((THREADS,), np.float32))


def must_report(words: str, name: str, device: str, sanitizer: str | None = None, blocks: int = 1) -> None:
    """The fault is found, in these words, with every line that is marked."""
    with pytest.raises(Fault) as raised:
        run(name, device, sanitizer, blocks)
    report = str(raised.value)
    assert words in report, report
    for number, line in enumerate(_path(name).read_text().splitlines(), 1):
        if "// FAULT" in line:
            assert re.search(rf"\b{name}\.hip:{number}\b", report), f"line {number} is not in\n{report}"


def sound_must_pass(device: str, sanitizer: str | None = None) -> None:
    """wave_sum of every width, in every lane, and a reduction through shared memory."""
    blocks = 3
    sums, y = poisoned((blocks, THREADS, 7), np.float32), poisoned((blocks,), np.float32)
    x = _run(HERE / "sound.hip", device, sanitizer, blocks, sums, y).astype(np.float64)
    for i, width in enumerate((1, 2, 4, 8, 16, 32, DEVICES[device].wave)):
        expected = np.repeat(x.reshape(-1, width).sum(axis=1), width)
        np.testing.assert_allclose(sums[..., i], np.broadcast_to(expected, (blocks, THREADS)), atol=1e-5)
    np.testing.assert_allclose(y, np.full(blocks, x.sum()), atol=1e-5)


def moves_must_match(device: str) -> None:
    """The AMD moves, by the ISA manuals' words for each lane."""
    wave = DEVICES[device].wave
    y = poisoned((10, wave), np.float32)
    _run(HERE / "moves.hip", device, None, 1, y)
    for lane in range(wave):
        row, at = lane // 16 * 16, lane % 16
        assert y[:, lane].tolist() == [
            lane // 4 * 4 + 3 - lane % 4,
            lane - 1 if at else lane + 100,
            lane - 1 if at else 0,
            lane + 2 if row == 16 and at < 14 else lane + 100,
            row + (at + 12) % 16 if at // 4 in (0, 2) else lane + 100,
            row + 15 - at,
            lane // 8 * 8 + 7 - lane % 8,
            17,
            lane + 16 if lane % 32 < 16 else lane - 16,
            lane // 8 * 8,
        ], f"lane {lane}"
