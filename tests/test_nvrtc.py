"""Every kind of program through NVRTC for several architectures, on a machine that needs no GPU."""

from __future__ import annotations

import pytest

from rmsnorm_raw import compile_command
from rmsnorm_raw.plan import Traits, plan_backward, plan_forward, plan_reduce
from rmsnorm_raw.program import program

pytest.importorskip("cuda.core", reason="cuda-core, which compiles without a GPU, is not installed")
pytest.importorskip("cuda.bindings.nvrtc", reason="the NVRTC bindings are not installed")


def backward(*arguments, **operands):
    return plan_backward(*arguments, **operands).launches


def plans(arch):
    traits = compile_command.traits_of(arch)
    for cols in (5, 769, 1024, 4096, 16384, 131072):
        for dtype in ("float16", "bfloat16", "float32", "float64"):
            vector = 1 if cols in (5, 769) else 8
            yield plan_forward(64, cols, traits, x=dtype, y=dtype, weight=dtype, vector=vector)
            yield plan_forward(
                64, cols, traits, x=dtype, residual=dtype, residual_out=dtype, y=dtype, weight=dtype, vector=vector
            )
            yield from backward(64, cols, traits, x=dtype, dout=dtype, dx=dtype, weight=dtype, vector=vector)
            yield from backward(
                64, cols, traits, x=dtype, dout=dtype, dx=dtype, dresidual_out=dtype, weight=dtype, vector=vector
            )
    yield plan_forward(
        64, 1024, traits, x="bfloat16", y="float16", weight="float32", bias="float32", llama=True, offset_weight=True
    )
    yield from backward(
        64,
        128,
        traits,
        x="float32",
        dout="bfloat16",
        dx="bfloat16",
        dresidual="float32",
        weight="float32",
        heads=4,
        need_dbias=True,
    )
    yield from backward(64, 1024, traits, x="bfloat16", dout="bfloat16", dx=None, weight="bfloat16")
    for dtype in ("float16", "bfloat16", "float32"):
        yield plan_reduce(4096, traits, weight=dtype, compute="float32")
    yield plan_reduce(4096, traits, weight="float64", compute="float64")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_every_program_compiles(arch):
    texts = {program(plan.kernel, plan.constants).text for plan in plans(arch)}
    assert len(texts) > 80
    assert all(len(compile_command.make(text, arch).code) > 1000 for text in sorted(texts))


def test_a_fault_in_a_kernel_is_reported_at_its_line():
    plan = plan_forward(64, 1024, Traits("nvidia", "sm_90", 32, 132), x="float32", y="float32")
    text = program(plan.kernel, plan.constants).text.replace(
        "Place at = place(rows, blocks);", "Place at = plaice(rows, blocks);", 1
    )
    line = next(i for i, text in enumerate(open_source("rmsnorm_fwd.hip"), 1) if "place(rows, blocks)" in text)
    with pytest.raises(Exception, match=rf"rmsnorm_fwd\.hip\({line}\)"):
        compile_command.make(text, "sm_90")


def open_source(name):
    from rmsnorm_raw.program import read_source

    return read_source(name).splitlines()
