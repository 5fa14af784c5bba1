"""What can be proven of the AMD side without a card: the exact programs, compiled by two clangs for six architectures,
hold what their plans count on; planted faults show that each rule is looked at; plans fit the cards."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from dataclasses import replace

import pytest
from amd.budgets import complaints
from amd.build import COMPILERS, build, build_all, build_text
from amd.faults import FAULTS
from amd.variants import ARCHS, CARDS, traits_of, variants

from rmsnorm_raw import cli, codeobject, compile_command
from rmsnorm_raw.plan import SIZES, Plan, plan_backward, plan_forward, plan_reduce
from rmsnorm_raw.program import SIGNATURES, program

pytestmark = pytest.mark.amd


# ------------------------------------------------------------------------------------------------ code objects


@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_every_variant_is_within_its_budget(compiler, arch):
    every = variants(traits_of(arch))
    assert len(every) > 90
    broken = {}
    for variant, (facts, listing) in zip(every, build_all(compiler, arch, every), strict=True):
        found = complaints(variant.plan, arch, facts, listing)
        if found:
            broken[variant.name] = found
    assert not broken, "\n".join(f"{name}: {'; '.join(found)}" for name, found in broken.items())


@pytest.mark.parametrize("operation", ["forward", "fused forward", "backward", "fused backward"])
def test_the_next_architecture_compiles_too(operation):
    """gfx1250, which clang 20 does not know."""
    plan = variant_of("gfx1250", f"{operation} bfloat16 4096")
    facts, listing = build("own", "gfx1250", plan)
    assert not complaints(plan, "gfx1250", facts, listing)
    assert sum(one.name.startswith("v_cvt_pk_bf16_f32") for one in listing) >= plan.constants.packs * 4


def variant_of(arch, name) -> Plan:
    return next(variant.plan for variant in variants(traits_of(arch)) if variant.name == name)


@pytest.mark.parametrize(
    ("fault", "arch"), [pytest.param(fault, arch, id=f"{fault}-{arch}") for fault in FAULTS for arch in fault.archs]
)
def test_a_planted_fault_is_found(fault, arch):
    plan = variant_of(arch, fault.variant)
    text = program(plan.kernel, plan.constants).text
    facts, listing = build_text("own", arch, plan.kernel, fault.planted_in(text))
    found = complaints(plan, arch, facts, listing)
    assert any(one.startswith(fault.complaint) for one in found), found
    assert not complaints(plan, arch, *build("own", arch, plan))


def test_too_much_lds_is_refused_by_the_compiler_where_the_card_has_no_more():
    fault = next(fault for fault in FAULTS if fault.name == "LDS overflow")
    plan = variant_of("gfx942", fault.variant)
    with pytest.raises(RuntimeError, match=r"local memory \(\d+\) exceeds limit \(65536\)"):
        build_text("own", "gfx942", plan.kernel, fault.planted_in(program(plan.kernel, plan.constants).text))


def test_the_other_wave_is_found():
    plan = variant_of("gfx942", "forward bfloat16 40")
    other = replace(plan, constants=replace(plan.constants, wave=32))
    assert any(one.startswith("wave") for one in complaints(other, "gfx942", *build("own", "gfx942", other)))


@pytest.mark.parametrize("arch", ARCHS)
def test_backward_has_the_next_row_in_flight_during_the_sum(arch):
    for name, at_least in (("backward bfloat16 4096", 4), ("fused backward bfloat16 4096", 6)):
        _, listing = build("own", arch, variant_of(arch, name))
        assert min(listing.loads_in_flight()) >= at_least


@pytest.mark.parametrize("arch", ARCHS)
def test_forward_has_row_and_weight_in_flight_together(arch):
    for name, at_least in (("forward bfloat16 4096", 8), ("fused forward bfloat16 4096", 12)):
        _, listing = build("own", arch, variant_of(arch, name))
        assert listing.loads_before_waiting() >= at_least


# Vector instructions an element at 4096 columns of bf16: the better of FlyDSL's kernels (compiler 0.4.2) and Liger's
# (0.8.5, Triton 3.9), read in their code objects the same way.
PEERS = {
    "forward": {"gfx942": 9.5, "gfx950": 9.3},
    "fused forward": {"gfx942": 15.3, "gfx950": 14.1},
    "backward": {"gfx942": 12.3, "gfx950": 9.3},
    "fused backward": {"gfx942": 13.9, "gfx950": 10.6},
}


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("operation", PEERS)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_leaner_than_the_peers(compiler, operation, arch):
    plan = variant_of(arch, f"{operation} bfloat16 4096")
    _, listing = build(compiler, arch, plan)
    # The backward's blocks stay for many rows; a forward's serves one turn, with all that comes before it.
    persistent = plan.kernel == "rmsnorm_bwd"
    code = listing.main_loop if persistent else list(listing)
    an_element = sum(one.is_vector for one in code) * plan.constants.threads_per_row / plan.constants.cols
    nan_kept = operation == "forward" and arch == "gfx942"  # the peer's does not keep it there
    assert an_element <= (1.0 if nan_kept else 0.85) * PEERS[operation][arch]
    assert sum(one.is_barrier for one in code) == 1
    assert sum(one.is_lane_move for one in code) >= 4
    assert not any(re.match(r"ds_(b?permute|swizzle)", one.name) for one in code)


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kernel", SIGNATURES)
def test_packed_arguments_lie_where_the_code_object_reads_them(kernel, dtype, arch):
    traits = traits_of(arch)
    plan = {
        "rmsnorm_fwd": plan_forward(64, 1024, traits, x=dtype, y=dtype, weight=dtype, vector=2),
        "rmsnorm_bwd": plan_backward(64, 1024, traits, x=dtype, dout=dtype, dx=dtype, weight=dtype, vector=2).main,
        "dweight_reduce": plan_reduce(1024, traits, weight=dtype, compute=dtype),
    }[kernel]
    text = program(kernel, plan.constants)
    facts, _ = build("own", arch, plan)
    codes = text.arguments_format.lstrip("@")
    expected = [(struct.calcsize("@" + codes[:i] + "0" + c), struct.calcsize(c)) for i, c in enumerate(codes)]
    assert [(argument.offset, argument.size) for argument in facts.arguments] == expected
    kinds = ["global_buffer" if code == "P" else "by_value" for code in codes]
    assert [argument.kind for argument in facts.arguments] == kinds, "the runtime is asked for hidden arguments"
    assert facts.kernarg_bytes == struct.calcsize(text.arguments_format)


# ------------------------------------------------------------------------------------------------ plans

ROWS = (1, 2, 7, 64, 512, 1000, 4096, 32768, 1 << 20)
COLS = (8, 64, 256, 768, 1024, 2048, 4096, 5120, 8192, 16384, 32768, 65536, 131072)


@pytest.mark.parametrize("card", CARDS)
def test_partials_are_at_most_half_of_the_rows(card):
    """They are written and read again; the rows are x, dout and dx. 512 × 2048 on 304 units would be 79 % by one block
    a unit."""
    traits = CARDS[card]
    for dtype in ("bfloat16", "float32"):
        for rows in ROWS:
            for cols in COLS:
                for dbias in (False, True):
                    operands = {"x": dtype, "dout": dtype, "dx": dtype, "weight": dtype, "vector": 8}
                    plan = plan_backward(rows, cols, traits, **operands, need_dbias=dbias)
                    moved = 2 * (1 + dbias) * plan.partials_rows * plan.partials_pitch * 4
                    assert moved <= 3 * rows * cols * SIZES[dtype] / 2, (rows, cols, dtype, dbias)


@pytest.mark.parametrize("card", CARDS)
def test_persistent_grids_are_resident(card):
    traits = CARDS[card]
    unit = codeobject.unit_of(traits.arch)
    for cols in COLS:
        for dtype in ("bfloat16", "float32"):
            for fused in (None, dtype):
                many = {"x": dtype, "weight": dtype, "vector": 8}
                forward = plan_forward(64, cols, traits, **many, y=dtype, residual=fused, residual_out=fused)
                backward = plan_backward(1 << 20, cols, traits, **many, dout=dtype, dx=dtype, dresidual_out=fused)
                for plan in (forward, backward.main):
                    waves = -(-plan.threads // traits.wave) * plan.constants.blocks_per_unit
                    assert plan.threads % traits.wave == 0
                    assert plan.threads <= 1024
                    assert waves <= unit.waves * unit.simds
                    assert plan.constants.blocks_per_unit <= unit.blocks
                assert backward.main.blocks <= traits.units * backward.main.constants.blocks_per_unit
                assert backward.main.blocks >= 0.8 * traits.units, "units are idle"


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
@pytest.mark.parametrize("heads", [1, 40])
def test_grids_stay_below_hips_limit(arch, heads):
    traits = traits_of(arch)
    for power in range(41):
        for rows in (heads << power, heads * ((1 << power) + 1)):
            for cols in (1, 64, 128, 4096, 131072):
                operands = {"x": "float16", "weight": "float16", "heads": heads, "vector": 8}
                backward = plan_backward(rows, cols, traits, **operands, dout="float16", dx="float16")
                forward = plan_forward(rows, cols, traits, **operands, y="float16")
                reduce = plan_reduce(cols, traits, weight="float16", compute="float32", heads=heads)
                for plan in (forward, *backward.launches, reduce):
                    assert 0 < plan.blocks * plan.threads < 2**32
                    assert plan.blocks % plan.constants.heads == 0


# ------------------------------------------------------------------------------------------------ the reader


def test_a_disassembly_reads_like_the_assembly():
    disassembly = """
k.hsaco:	file format elf64-amdgpu

Disassembly of section .text:

0000000000001600 <rmsnorm_fwd>:
	s_load_dwordx2 s[4:5], s[0:1], 0x0                         // 000000001600: C0060100 00000000
	global_load_dwordx4 v[0:3], v4, s[4:5]                     // 000000001608: DC5C8000 00040004
	s_waitcnt vmcnt(0)                                         // 000000001610: BF8C0F70
	s_cbranch_vccnz 65533                                      // 000000001614: BF87FFFD <rmsnorm_fwd+0x8>
	s_endpgm                                                   // 000000001618: BF810000
"""
    listing = codeobject.Listing(codeobject.as_listing(disassembly, "rmsnorm_fwd"), "rmsnorm_fwd")
    assert [one.name for one in listing.main_loop] == ["global_load_dwordx4", "s_waitcnt", "s_cbranch_vccnz"]
    assert listing.widths()[0] == {16: 1}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("global_load_dwordx4", 16), ("global_load_b128", 16), ("global_store_dwordx2", 8), ("global_store_b64", 8),
        ("global_load_dword", 4), ("global_store_b32", 4), ("global_load_ushort", 2), ("global_load_short_d16_hi", 2),
        ("global_load_d16_hi_b16", 2), ("global_store_short", 2), ("global_store_b16", 2), ("global_load_u16", 2),
        ("global_load_ubyte", 1),
    ],
)  # fmt: skip
def test_widths_of_accesses(name, size):
    assert codeobject.Instruction(name, "").bytes == size


def test_what_is_no_code_object_is_refused():
    with pytest.raises(ValueError, match="not a 64-bit ELF file"):
        codeobject.read(b"__CLANG_OFFLOAD_BUNDLE__")


# ------------------------------------------------------------------------------------------------ the commands


def test_compile_writes_code_objects_and_a_report(tmp_path, capsys):
    arguments = ["compile", "--arch", "gfx942,gfx1100", "--with", "clang", "--out", str(tmp_path)]
    assert cli.main([*arguments, "--shape", "512x4096", "--dtype", "bf16"]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert {line["kernel"] for line in report} == set(SIGNATURES)
    assert {line["arch"] for line in report} == {"gfx942", "gfx1100"}
    for line in report:
        (facts,) = codeobject.read((tmp_path / line["file"]).read_bytes())
        assert (facts.name, facts.vgprs, facts.block) == (line["kernel"], line["vgprs"], line["block"])
        assert line["vgpr_spills"] == line["scratch_bytes"] == 0
        assert set(line["loads_by_bytes"]) <= {"16", "4"}
    printed = capsys.readouterr().out
    assert "rmsnorm_bwd" in printed
    assert f"{len({line['file'] for line in report})} code objects and report.json are in" in printed


def test_compile_needs_neither_cupy_nor_torch(tmp_path):
    code = (
        "import sys\n"
        "for name in ('cupy', 'torch', 'hip', 'cuda'): sys.modules[name] = None\n"
        "from rmsnorm_raw.cli import main\n"
        f"arguments = ['--shape', '8x64', '--dtype', 'fp16', '--out', {str(tmp_path)!r}]\n"
        "sys.exit(main(['compile', '--arch', 'gfx1201', *arguments]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "report.json").read_text())[0]["compiler"].startswith("clang")


def test_compile_says_what_is_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    compile_command.make.cache_clear()
    assert cli.main(["compile", "--arch", "sm_90", "--shape", "8x64", "--out", str(tmp_path)]) == 2
    assert "pip install cuda-core nvidia-cuda-nvrtc" in capsys.readouterr().err
    assert cli.main(["compile", "--arch", "mi300x", "--shape", "8x64", "--out", str(tmp_path)]) == 2
    assert "'mi300x' is no architecture" in capsys.readouterr().err


def test_compile_for_nvidia(tmp_path):
    pytest.importorskip("cuda.core", reason="cuda-core, which compiles without a GPU, is not installed")
    pytest.importorskip("cuda.bindings.nvrtc", reason="the NVRTC bindings are not installed")
    arguments = ["--shape", "512x4096", "--dtype", "bf16", "--out", str(tmp_path)]
    assert cli.main(["compile", "--arch", "sm_90", *arguments]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert all(16 <= line["registers"] <= 255 and (tmp_path / line["file"]).is_file() for line in report)


def test_show(capsys):
    assert cli.main(["show", "fused-forward", "--arch", "gfx1100", "--shape", "8x1024"]) == 0
    (job,) = compile_command.jobs("fused-forward", "bfloat16", 8, 1024, compile_command.traits_of("gfx1100"))
    assert capsys.readouterr().out == job.text + "\n"
    assert cli.main(["show", "backward", "--isa", "--arch", "gfx942", "--shape", "512x1024"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^rmsnorm_bwd:", printed, re.M)
    assert re.search(r"^dweight_reduce:", printed, re.M)
    assert "global_load_dwordx4" in printed
