"""The command rmsnorm-raw: what demo accepts and refuses, what info says of machines that are not this one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import EPSILONS, TOLERANCES

import rmsnorm_raw
from rmsnorm_raw import cli, environment, ops, reference

PACKAGE = Path(rmsnorm_raw.__file__).resolve().parent


def run(*arguments):
    """The command as a process, with the very package that the tests imported."""
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path, "PYTHONIOENCODING": "utf-8", "COLUMNS": "80"}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, encoding="utf-8", timeout=240)


@pytest.fixture
def small(monkeypatch):
    """--quick in a second: what is asked of the demo does not depend on the shapes."""
    monkeypatch.setattr(cli, "QUICK_SHAPES", ((1, 64), (5, 96)))


# ------------------------------------------------------------------------------------------------ demo


def test_module_runs_the_quick_demo():
    done = run("-m", "rmsnorm_raw", "demo", "--quick", "--device", "host")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert not [line for line in lines if len(line) > 80 and not line.startswith("host: ")]
    assert "All 60 cases agree with float64 on host" in done.stdout
    for name in cli.OPERATIONS:
        start = next(i for i, line in enumerate(lines) if line.startswith(f"{name} on host: "))
        head, rows = lines[start + 1 : start + 4], lines[start + 4 : start + 9]
        assert re.findall(r"fp32|fp16|bf16", head[0]) == ["fp32", "fp16", "bf16"]
        assert head[1].split() == ["hidden", *["error", "time", "GB/s"] * 3]
        for row, (tokens, hidden) in zip(rows, cli.QUICK_SHAPES, strict=True):
            assert row.strip().startswith(f"{tokens} × {hidden} ")
            assert len(re.findall(r"\d+ %\s+[\d.]+ (?:µs|ms|s)\s+[\d.]+", row)) == 3, row


@pytest.mark.gpu
def test_quick_demo_on_a_gpu(capsys):
    assert cli.main(["demo", "--quick", "--device", "gpu"]) == 0
    assert "All 60 cases agree with float64 on GPU 0" in capsys.readouterr().out


def test_shapes_are_those_of_the_models():
    assert len(set(cli.SHAPES)) == 15
    assert {hidden for _, hidden in cli.SHAPES} == {896, 2880, 4096, 5120, 8192}
    assert {tokens for tokens, _ in cli.SHAPES} == {1, 128, 2048}
    assert set(cli.QUICK_SHAPES) < set(cli.SHAPES)
    assert len(cli.QUICK_SHAPES) * 3 == len(cli.SHAPES)


def test_tolerances_are_those_of_the_tests():
    for label, dtype in cli.DTYPES.items():
        assert cli.ROW_TOLERANCE[label] == TOLERANCES[dtype]
        assert cli.EPSILON[label] == EPSILONS[dtype]


@pytest.mark.parametrize(
    ("name", "operation", "result"),
    [
        ("rmsnorm_fwd", "forward", "y"),
        ("fused_add_rmsnorm_fwd", "fused-add forward", "residual_out"),
        ("rmsnorm_bwd", "backward", "dweight"),
        ("fused_add_rmsnorm_bwd", "fused-add backward", "dx"),
    ],
)
@pytest.mark.parametrize("fault", ["shifted", "unwritten"])
def test_a_wrong_value_is_named(small, monkeypatch, capsys, name, operation, result, fault):
    """The last value of one result at one shape in fp16, off by an eighth or never written."""
    right = getattr(ops, name)
    place = {"y": 0, "residual_out": 1, "dweight": 1, "dx": 0}[result]

    def wrong(*operands, **options):
        results = right(*operands, **options)
        array = results[place]
        if array.dtype == np.float16 and operands[0].shape == (5, 96):
            array.reshape(-1)[-1] += np.float16(0.125 if fault == "shifted" else np.nan)
        return results

    monkeypatch.setattr(ops, name, wrong)
    assert cli.main(["demo", "--quick", "--device", "host"]) == 1
    printed = capsys.readouterr().out
    assert f"{operation}, 5 × 96, fp16: {result} is off by up to {'nan' if fault == 'unwritten' else '0.12'}" in printed
    assert "1 of 24 cases are off on host" in printed


def test_a_wrong_reference_is_off(small, monkeypatch, capsys):
    right = reference.forward

    def wrong(x, weight, eps, **options):
        return right(x, weight, 1e-3, **options)

    monkeypatch.setattr(reference, "forward", wrong)
    assert cli.main(["demo", "--quick", "--device", "host"]) == 1
    printed = capsys.readouterr().out
    assert "forward, 1 × 64, fp32: y is off" in printed
    assert "fused-add forward, 5 × 96, fp32: y is off" in printed
    assert "backward, " not in printed  # compared with reference.backward


def test_an_operation_that_writes_nothing_is_off(small, monkeypatch, capsys):
    monkeypatch.setattr(ops, "fused_add_rmsnorm_bwd", lambda *operands, **options: None)
    assert cli.main(["demo", "--quick", "--device", "host"]) == 1
    assert "6 of 24 cases are off" in capsys.readouterr().out


def test_error_is_a_share_of_what_is_allowed():
    """At the edge: |Δ| = u·|ref| + c·max|ref row| is right, anything more is not."""
    u, c = cli.ROW_TOLERANCE["bf16"]
    expected = np.array([[1.0, -4.0], [0.0, 0.0]])
    allowed = np.array([[u + 4 * c, 4 * u + 4 * c], [0.0, 0.0]])
    at_the_edge = cli._row_error("y", expected + allowed, expected, "bf16")
    assert at_the_edge.share == pytest.approx(1.0)
    assert at_the_edge.difference == pytest.approx(4 * u + 4 * c)
    assert not cli.Error("y", 1.0, 1.0).is_off
    assert cli._row_error("y", expected + 1.01 * allowed, expected, "bf16").is_off
    assert cli._row_error("y", expected + [[0, 0], [0, 1e-30]], expected, "bf16").is_off  # a row of zeros stays one
    assert cli._row_error("y", expected * np.nan, expected, "bf16").is_off


def test_a_device_that_does_not_work(monkeypatch, capsys):
    monkeypatch.setattr(environment, "find_gpus", lambda: ([], "the driver lists no GPU"))
    assert cli.main(["demo", "--device", "gpu"]) == 2
    assert "no GPU: the driver lists no GPU" in capsys.readouterr().out
    monkeypatch.setattr(environment, "try_device", lambda kind: "no C++ compiler")
    assert cli.main(["demo"]) == 2
    printed = capsys.readouterr().out
    assert "no GPU: the driver lists no GPU" in printed
    assert "no host: no C++ compiler" in printed


def test_auto_falls_back_to_the_host(small, monkeypatch, capsys):
    monkeypatch.setattr(environment, "find_gpus", lambda: ([], "the driver lists no GPU"))
    assert cli.main(["demo", "--quick"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("no GPU: the driver lists no GPU; running on the host")
    assert "All 24 cases agree with float64 on host" in printed


# ------------------------------------------------------------------------------------------------ the command


def test_help_and_version(capsys):
    assert cli.main([]) == 2
    assert re.search(r"demo .*\n?.*\binfo\b", capsys.readouterr().out, re.DOTALL)
    for arguments in (["--help"], ["demo", "--help"], ["info", "--help"], ["--version"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main(arguments)
        assert stopped.value.code == 0
    assert rmsnorm_raw.__version__ in capsys.readouterr().out


def test_help_loads_nothing_heavy():
    code = "import sys, rmsnorm_raw.cli as c; c.main([]); print({'rich', 'cupy', 'torch'} & set(sys.modules))"
    done = run("-c", code)
    assert done.stdout.endswith("set()\n"), done.stdout + done.stderr


# ------------------------------------------------------------------------------------------------ info


def test_info_prints_what_was_found(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("RMSNORM_RAW_CACHE_DIR", str(tmp_path))
    (tmp_path / "rmsnorm_fwd-0.so").write_bytes(bytes(1_500_000))
    assert cli.main(["info", "--check"]) == 0
    printed = capsys.readouterr().out
    lines = dict(re.findall(r"^(\S[^\n]*?)  +(\S.*)$", printed, re.MULTILINE))
    assert lines["rmsnorm_raw"].startswith(rmsnorm_raw.__version__)
    assert lines["numpy"].strip() == np.__version__
    for label in ("Python", "ml_dtypes", "torch", "cupy", "hip-python", "C++ compiler", "host", "host's cache"):
        assert label in lines, printed
    assert "host" in lines["works"]
    state = environment.cache_state(tmp_path)
    assert state.writable
    assert state.entries >= 1
    assert state.bytes >= 1_500_000
    assert f"{tmp_path.name}" in printed.replace("\n", "").replace(" ", "")


def test_info_does_not_import_torch():
    done = run("-c", "import sys, rmsnorm_raw.cli as c; c.main(['info']); print('torch' in sys.modules)")
    assert done.stdout.endswith("False\n"), done.stdout + done.stderr


@pytest.mark.parametrize(("working", "status"), [([], 1), (["host"], 0)])
def test_info_check_fails_without_a_device(monkeypatch, capsys, working, status):
    monkeypatch.setattr(environment, "survey", lambda: environment.Survey(working=working))
    assert cli.main(["info", "--check"]) == status
    assert cli.main(["info"]) == 0
    assert "Everything is fine." in capsys.readouterr().out


def test_info_prints_remedies_on_one_line(monkeypatch, capsys):
    command = "pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install 'rmsnorm-raw[cuda13]' # " + "long " * 20
    survey = environment.Survey(findings=[environment.Finding("[two] CuPys", command)])
    monkeypatch.setattr(environment, "survey", lambda: survey)
    cli.main(["info"])
    printed = capsys.readouterr().out
    assert f"[two] CuPys\n    {command}" in printed
    assert "Everything is fine" not in printed


MAPS = """\
55d0c0000000-55d0c0001000 r--p 00000000 08:01 42      /usr/bin/python3.11
7f0000000000-7f0000100000 r--p 00000000 08:01 1234    /opt/rocm-7.0.0/lib/libamdhip64.so.7.0.70000
7f0000100000-7f0000200000 r-xp 00100000 08:01 1234    /opt/rocm-7.0.0/lib/libamdhip64.so.7.0.70000
7f0000200000-7f0000300000 rw-p 00000000 00:00 0
7f0000300000-7f0000400000 r-xp 00000000 08:01 99      /home/a b/site-packages/torch/lib/libamdhip64.so (deleted)
7f0000400000-7f0000500000 r-xp 00000000 08:01 77      /opt/rocm-7.0.0/lib/libamdhip64_notes.txt
"""


def test_two_hip_runtimes():
    paths = environment.hip_runtimes(MAPS)
    assert paths == [
        "/home/a b/site-packages/torch/lib/libamdhip64.so",
        "/opt/rocm-7.0.0/lib/libamdhip64.so.7.0.70000",
    ]
    (found,) = environment.check_hip_runtimes(paths)
    assert "2 HIP runtimes" in found.text
    assert all(path in found.text for path in paths)
    assert "import torch before cupy" in found.remedy
    assert environment.check_hip_runtimes(paths[:1]) == []
    assert environment.hip_runtimes("") == []


@pytest.mark.parametrize(
    ("distributions", "version", "extra", "text", "remedy"),
    [
        ([], None, "cuda13", "CuPy is not installed", "pip install 'rmsnorm-raw[cuda13]'"),
        ([], None, "rocm", "CuPy is not installed", "pip install 'rmsnorm-raw[rocm]'"),
        ([], None, None, "CuPy is not installed", "cuda13, cuda12 or rocm"),
        (
            ["cupy-cuda12x", "cupy-cuda13x"], "14.2.0", "cuda13", "keep cupy-cuda13x alone",
            "pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install 'rmsnorm-raw[cuda13]'",
        ),
        (["cupy-cuda12x", "cupy-rocm-7-0"], "14.2.0", "rocm", "keep cupy-rocm-7-0", "pip uninstall -y cupy-cuda12x"),
        (["cupy", "cupy-cuda12x"], "14.2.0", None, "overwrite each other", "pip uninstall -y cupy cupy-cuda12x && "),
        (["cupy-cuda13x"], "14.2.0", "rocm", "an AMD card", "pip install 'rmsnorm-raw[rocm]'"),
        (["cupy-rocm-7-0"], "14.2.0", "cuda12", "an NVIDIA card", "pip install 'rmsnorm-raw[cuda12]'"),
        (["cupy-cuda13x"], "14.2.0", "cuda12", "older than CUDA 13", "pip install 'rmsnorm-raw[cuda12]'"),
        (["cupy-cuda12x"], "13.3.0", "cuda12", "14 or newer", "pip install --upgrade cupy-cuda12x"),
    ],
)  # fmt: skip
def test_cupy_findings(distributions, version, extra, text, remedy):
    (found,) = environment.check_cupy(distributions, version, extra)
    assert text in found.text
    assert remedy in found.remedy


@pytest.mark.parametrize("extra", ["cuda13", None])
def test_a_fitting_cupy_is_fine(extra):
    for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):  # CUDA 12's runs on a newer driver too
        assert environment.check_cupy([name], "14.2.0", extra) == []


def test_extras_by_card():
    assert environment.fitting_extra(13000, False) == "cuda13"
    assert environment.fitting_extra(12080, False) == "cuda12"
    assert environment.fitting_extra(None, True) == "rocm"
    assert environment.fitting_extra(None, False) is None
    assert environment.fitting_extra(13000, True) is None  # both: the user knows which


def test_distributions_that_bring_cupy():
    installed = ["numpy", "CuPy_CUDA12x", "cupy-xarray", "cupy-rocm-7-0", "cupy", "amd-cupy", "cuda-core", "cupy"]
    assert environment.cupy_distributions(installed) == ["amd-cupy", "cupy", "cupy-cuda12x", "cupy-rocm-7-0"]


def test_rocm_libraries():
    asked = []

    def load(name):
        asked.append(name)
        if name in ("libroctracer64.so.4", "librccl.so.1"):
            raise OSError(f"{name}: cannot open shared object file")

    first, second = environment.check_rocm_libraries(["cupy-rocm-7-0"], load)
    assert len(asked) == 11
    assert first.text.endswith("without libroctracer64.so.4")
    assert "librccl.so.1" in second.text
    assert environment.check_rocm_libraries(["cupy-rocm-7-0"], asked.append) == []
    assert environment.check_rocm_libraries(["cupy-cuda13x"], load) == []


def test_hipcc_is_asked_for_on_rocm_alone():
    (found,) = environment.check_hipcc(["cupy-rocm-7-0"], None)
    assert "export PATH=/opt/rocm/bin:$PATH" in found.remedy
    assert environment.check_hipcc(["cupy-rocm-7-0"], "/opt/rocm/bin/hipcc") == []
    assert environment.check_hipcc(["cupy-cuda13x"], None) == []


def test_numpy_for_bfloat16():
    assert environment.check_numpy("1.26.4", []) == []
    assert environment.check_numpy("2.1.2", ["cupy"]) == []
    assert "2.1.1" in environment.check_numpy("2.1.1", ["cupy"])[0].text


def test_cache_states(tmp_path):
    fresh = environment.cache_state(tmp_path / "not" / "yet")
    assert (fresh.writable, fresh.entries, fresh.bytes) == (True, 0, 0)
    file = tmp_path / "file"
    file.write_bytes(b"x")
    blocked = environment.cache_state(file / "below")
    assert not blocked.writable
    assert environment.check_cache(fresh) == []
    assert "RMSNORM_RAW_CACHE_DIR" in environment.check_cache(blocked)[0].remedy


def test_versions_are_readable():
    assert environment.hip_or_cuda_version(13020, False) == "13.2"
    assert environment.hip_or_cuda_version(70051831, True) == "7.0.51831"
    assert environment.numbers("14.2.0rc1") == (14, 2, 0)


def test_gpus_describe_themselves():
    text = str(environment.Gpu(0, "AMD Instinct MI300X", "gfx942:sramecc+:xnack-", 64, 304))
    assert text == "AMD Instinct MI300X, gfx942:sramecc+:xnack-, waves of 64, 304 CUs"
    assert str(environment.Gpu(0, "RX 7900 XTX", "gfx1100", 32, 48)).endswith("48 WGPs")
    assert str(environment.Gpu(0, "NVIDIA H200", "sm_90", 32, 132)).endswith("warps of 32, 132 multiprocessors")


def test_essence_of_a_failed_import():
    page = (
        "\n=====\nFailed to import CuPy.\n\nIf you installed…\n\nOriginal error:\n"
        "  ImportError: libamdhip64.so.7: cannot open shared object file\n=====\n"
    )
    error = ImportError(page)
    assert environment.essence(error) == "ImportError: libamdhip64.so.7: cannot open shared object file"
    assert environment.essence(ValueError("plain")) == "plain"
    assert environment.essence(ValueError()) == "ValueError"
