"""Every kernel at wave 32 and 64 with real barriers and shuffles, on a GPU made of fibres (tests/lanes); and the faults
that this machine finds without a sanitizer's help."""

from __future__ import annotations

import lanes
import numpy as np
import pytest
from conftest import random
from lanes import DEVICES, WAVES, controls
from lanes.cases import SHAPES, check, every_case, stashed_cases
from lanes.device import Device

import rmsnorm_raw as rr
from rmsnorm_raw.program import SIGNATURES

pytestmark = [pytest.mark.lanes, pytest.mark.skipif(bool(lanes.missing()), reason=lanes.missing())]


# gfx950 has gfx942's programs, on other grids.
CASES = every_case(WAVES, ("float16", "bfloat16", "float32")) + every_case(("gfx950",), ("bfloat16",))
CASES += stashed_cases(("float16", "bfloat16", "float32"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case):
    check(case)


@pytest.mark.parametrize("shape", ["long", "stashed", "stashed-tight"])
def test_a_gradient_does_not_depend_on_what_else_is_wanted(shape):
    """However the row is held: beside dweight, without it, or in two launches where dbias is wanted too."""
    cols = SHAPES[shape]
    x, dout, weight = (random(s, "bfloat16", i) for i, s in enumerate(((3, cols), (3, cols), (cols,))))
    rstd = np.ones(3, np.float32)
    gradients = []
    for options in ({}, {"need_dweight": False}, {"bias": weight}):
        device = Device(DEVICES["sm_90_whole"])
        gradients.append(device(rr.rmsnorm_bwd, x, weight, dout, rstd, **options)[0])
    np.testing.assert_array_equal(gradients[0], gradients[1])
    np.testing.assert_array_equal(gradients[0], gradients[2])


@pytest.mark.parametrize("kernel", SIGNATURES)
def test_signatures_are_the_texts(kernel):
    assert "".join(code for _, code, _ in lanes.parameters(kernel)) == SIGNATURES[kernel]


@pytest.mark.parametrize("device", WAVES)
def test_sound_kernel(device):
    controls.sound_must_pass(device)


@pytest.mark.parametrize("device", ["gfx942", "gfx1100"])
def test_amd_moves(device):
    controls.moves_must_match(device)


@pytest.mark.parametrize("device", WAVES)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("divergent_barrier", "threads of a block wait at different barriers"),
        ("early_return", "threads have ended before a barrier"),
        ("missing_lanes", "lanes are missing from a shuffle"),
        ("different_shuffles", "lanes of a wave are in different shuffles"),
        ("unwritten_shared", "arithmetic on poison"),
        ("global_write_beyond", "bad access"),
        ("input_written", "bad access"),
    ],
)
def test_faults_are_found(name, words, device):
    controls.must_report(words, name, device)


def test_hard_coded_32_is_found():
    controls.must_report("arithmetic on poison", "hard_coded_32", "gfx942")
    for device in ("gfx1100", "sm_90"):
        controls.run("hard_coded_32", device)


def test_missing_instruction_is_found():
    controls.must_report("a DPP control that this device does not have", "row_broadcast", "gfx1100")
    controls.run("row_broadcast", "gfx942")
