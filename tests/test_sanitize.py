"""The kernels of test_lanes under AddressSanitizer with UndefinedBehaviorSanitizer, and under ThreadSanitizer; and the
faults that these are to find."""

from __future__ import annotations

import lanes
import pytest
from lanes import WAVES, controls
from lanes.cases import VARIANTS, Case, check, every_case, stashed_cases

pytestmark = [pytest.mark.sanitize, pytest.mark.skipif(bool(lanes.missing()), reason=lanes.missing())]

# Sanitizers see what a kernel accesses and where its barriers are. That follows from how threads and rows are divided:
# one device of each wave width will do (RDNA has the one's wave_sum and the other's width), and one 16-bit dtype. To
# ThreadSanitizer alignment, too, is all the same.
DEVICES = ("gfx942", "sm_90")
RACES = [Case(d, v, "bfloat16", s) for d in DEVICES for v in VARIANTS for s in ("40", "256", "3001", "long")]
RACES += [Case(d, v, "bfloat16", "256") for d in DEVICES for v in ("forward_in_place", "backward_options")]


@pytest.mark.parametrize("case", every_case(DEVICES, ("bfloat16", "float32")) + stashed_cases(("bfloat16",)), ids=str)
def test_addresses(case):
    check(case, "address")


@pytest.mark.parametrize("case", RACES, ids=str)
def test_races(case):
    check(case, "thread", small=True)


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
@pytest.mark.parametrize("device", WAVES)
def test_sound_kernel(device, sanitizer):
    controls.sound_must_pass(device, sanitizer)


@pytest.mark.parametrize("device", WAVES)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("global_write_beyond", "AddressSanitizer: heap-buffer-overflow"),
        ("global_read_before", "AddressSanitizer: heap-buffer-overflow"),
        ("shared_out_of_bounds", "AddressSanitizer: global-buffer-overflow"),
        ("misaligned_pack", "misaligned address"),
        ("unwritten_shared", "arithmetic on poison"),
    ],
)
def test_bad_addresses_are_found(name, words, device):
    controls.must_report(words, name, device, "address")


@pytest.mark.parametrize("device", WAVES)
@pytest.mark.parametrize(("name", "blocks"), [("missing_barrier", 1), ("barrier_too_late", 1), ("blocks_collide", 2)])
def test_races_are_found(name, blocks, device):
    controls.must_report("ThreadSanitizer: data race", name, device, "thread", blocks)
