"""The command `bench`: what it accepts, checks, counts and writes. Times themselves are nothing to test."""

import csv
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from conftest import EPSILONS

import rmsnorm_raw
from rmsnorm_raw import bench, cli, ops
from rmsnorm_raw.bench import cases, overhead, peers, show, timing

TINY = ["bench", "--device", "host", "--shapes", "5x96,64x128"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Few and short samples: what the tests look at does not depend on them."""
    monkeypatch.setattr(bench, "REPEATS", 2)
    monkeypatch.setattr(timing, "HOST_SAMPLE_SECONDS", 1e-4)
    monkeypatch.setattr(overhead, "BATCHES", 2)
    monkeypatch.setattr(overhead, "BATCH_SECONDS", 1e-4)


def lines_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# ------------------------------------------------------------------------------------------------ a whole run


def test_every_operation_on_the_host(tmp_path, capsys):
    arguments = ["--op", ",".join(bench.OPERATIONS), "--against", "none", "--out", str(tmp_path)]
    assert cli.main([*TINY, "--dtype", "bfloat16,float32", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "All 20 cases agree with float64" in printed
    assert "fused_bwd float32: x, dout, dresidual_out → dx, dweight" in " ".join(printed.split())
    assert "threads" in printed.splitlines()[0] or "thread:" in printed.splitlines()[0]
    rows = lines_of(tmp_path / "bench.csv")
    assert [row["op"] for row in rows[::2]] == [*bench.OPERATIONS] * 2
    for row in rows:
        assert 0 < float(row["us"]) < 1e6
        assert float(row["copy_us"]) > 0
        assert 0 <= float(row["error"]) <= 1
        assert row["wrong"] == row["floor_us"] == ""
        assert float(row["gbps"]) == pytest.approx(int(row["bytes"]) / float(row["us"]) / 1e3, rel=0.05, abs=0.06)
    about = json.loads((tmp_path / "bench.json").read_text())
    assert len(about["cases"]) == 20
    assert about["versions"]["numpy"] == np.__version__


def test_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert cli.main([*TINY, "--op", "fwd,bwd", "--against", "none", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main([*TINY, "--op", "fwd", "--against", "none", "--out", str(tmp_path)]) == 0
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert (tmp_path / "bench.csv").exists()
    assert not (tmp_path / "bench.png").exists()


def test_against_torch_on_the_host(tmp_path, capsys):
    pytest.importorskip("torch", reason="torch is not installed")
    operations = ",".join(bench.OPERATIONS)
    assert (
        cli.main([*TINY, "--dtype", "float16", "--op", operations, "--against", "torch", "--out", str(tmp_path)]) == 0
    )
    printed = capsys.readouterr().out
    assert "geometric mean over the shapes" in printed
    for row in lines_of(tmp_path / "bench.csv"):
        assert float(row["torch_speedup"]) == pytest.approx(float(row["torch_us"]) / float(row["us"]), rel=0.01)


def test_a_pipe_cuts_nothing():
    path = os.pathsep.join(filter(None, [str(Path(rmsnorm_raw.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "rmsnorm_raw", *TINY, "--op", "fwd", "--dtype", "float32", "--against", "torch"]
    env = os.environ | {"PYTHONPATH": path, "PYTHONIOENCODING": "utf-8", "COLUMNS": "20"}
    done = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fwd float32: x → y" in done.stdout
    assert "64 × 128" in done.stdout


# ------------------------------------------------------------------------------------------------ right and wrong


@pytest.mark.parametrize(
    ("name", "op", "result"),
    [
        ("rmsnorm_fwd", "fwd", "y"),
        ("fused_add_rmsnorm_fwd", "fused_fwd", "residual_out"),
        ("rmsnorm_bwd", "bwd", "dweight"),
        ("rmsnorm_bwd", "bwd_frozen", "dx"),
        ("fused_add_rmsnorm_bwd", "fused_bwd", "dweight"),
    ],
)
@pytest.mark.parametrize("fault", ["shifted", "unwritten"])
def test_a_wrong_result_exits_1(monkeypatch, capsys, tmp_path, name, op, result, fault):
    """The last value of one result at one of two shapes."""
    right = getattr(ops, name)
    place = {"y": 0, "residual_out": 1, "dx": 0, "dweight": -1}[result]

    def wrong(*operands, **options):
        results = right(*operands, **options)
        if operands[0].shape == (64, 128):
            array = results[:2][place] if name == "fused_add_rmsnorm_fwd" else results[place]
            array.reshape(-1)[-1] += np.float16(0.25 if fault == "shifted" else np.nan)
        return results

    monkeypatch.setattr(ops, name, wrong)
    assert cli.main([*TINY, "--op", op, "--dtype", "float16", "--against", "none", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert f"{op} 64x128 float16: {result} is off by up to" in printed
    assert "1 of 2 cases are wrong" in printed
    good, bad = lines_of(tmp_path / "bench.csv")
    assert good["us"]
    assert bad["wrong"].startswith(f"{result} is off")
    assert not bad["us"]


def test_an_operation_that_writes_nothing_or_raises(monkeypatch, capsys):
    monkeypatch.setattr(ops, "rmsnorm_fwd", lambda *operands, **options: None)
    assert cli.main([*TINY, "--op", "fwd", "--dtype", "float32", "--against", "none"]) == 1

    def refuse(*operands, **options):
        raise ValueError("this shape is too long\nand the message, too")

    monkeypatch.setattr(ops, "rmsnorm_fwd", refuse)
    assert cli.main([*TINY, "--op", "fwd", "--dtype", "float32", "--against", "none"]) == 1
    assert "fwd 5x96 float32: failed: ValueError: this shape is too long\n" in capsys.readouterr().out


def test_only_the_timed_calls_are_wrong(monkeypatch, capsys):
    """What is right once and wrong when repeated is found after the timing."""
    right, seen = ops.rmsnorm_fwd, []

    def wears_out(x, *operands, **options):
        results = right(x, *operands, **options)
        if x.shape == (64, 128):
            seen.append(x)
            if len(seen) > 2:
                results[0][0, 0] += 1
        return results

    monkeypatch.setattr(ops, "rmsnorm_fwd", wears_out)
    assert cli.main([*TINY, "--op", "fwd", "--dtype", "float32", "--against", "none"]) == 1
    assert "fwd 64x128 float32: y is off" in capsys.readouterr().out


def test_tolerances_are_those_of_the_tests():
    assert {name: EPSILONS[name] for name in bench.DTYPES} == cases.EPSILON
    assert set(cases.LABELS) == set(bench.DTYPES)


# ------------------------------------------------------------------------------------------------ counting


@pytest.mark.parametrize(
    ("op", "arrays"), [("fwd", 2), ("bwd", 3), ("fused_fwd", 4), ("fused_bwd", 4), ("bwd_frozen", 3)]
)
@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float16", 2), ("float32", 4)])
def test_bytes(op, arrays, dtype, size):
    assert cases.Case(op, 32768, 4096, dtype).bytes == arrays * 32768 * 4096 * size


def test_table_has_the_shapes_of_the_comparison():
    assert len(set(bench.TABLE)) == 16
    assert bench._shapes("table") == bench.TABLE
    assert bench._shapes("32768x4096,3x5,32768x4096") == ((32768, 4096), (3, 5))
    assert set(bench.OPERATIONS) == set(cases.OPERATIONS)
    assert set(bench.PEERS) == set(peers._MAKERS)


def test_speedups():
    record = show.Record(cases.Case("fwd", 4, 8, "float32"), seconds=2e-6)
    record.peers = {"torch": 6e-6, "quack": 3e-6, "liger": "failed: RuntimeError: too wide"}
    assert record.speedup("torch") == pytest.approx(3.0)
    assert record.speedup("liger") is None
    assert record.speedup_of_fastest() == pytest.approx(1.5)
    assert show.geometric_mean([1.0, None, 4.0]) == pytest.approx(2.0)
    assert show.geometric_mean([None]) is None


# ------------------------------------------------------------------------------------------------ peers


def test_absent_peers_are_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setitem(sys.modules, "quack", None)
    assert (
        cli.main([*TINY, "--op", "fwd", "--dtype", "float32", "--against", "liger,quack", "--out", str(tmp_path)]) == 0
    )
    printed = capsys.readouterr().out
    assert "not compared with liger: not installed" in printed
    assert "not compared with quack: not installed" in printed
    assert set(json.loads((tmp_path / "bench.json").read_text())["not_compared"]) == {"liger", "quack"}


@pytest.mark.parametrize("fault", ["raises", "is wrong"])
def test_a_failing_peer_is_told_and_passed_over(capsys, monkeypatch, tmp_path, fault):
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def peer(op, operands):
        if fault == "raises" and operands["x"].shape == (5, 96):
            raise RuntimeError("no kernel for 5 rows\nmore")
        scale = 1.5 if fault == "is wrong" and operands["x"].shape == (5, 96) else 1.0
        shape = operands["weight"].shape
        return lambda: (torch.nn.functional.rms_norm(operands["x"], shape, operands["weight"], 1e-6) * scale,)

    monkeypatch.setitem(peers._MAKERS, "quack", lambda on_gpu: peer)
    assert cli.main([*TINY, "--op", "fwd", "--dtype", "float32", "--against", "quack", "--out", str(tmp_path)]) == 0
    why = "RuntimeError: no kernel for 5 rows" if fault == "raises" else "ValueError: its result is off by 50.0%"
    assert f"5x96: quack failed: {why}" in capsys.readouterr().out
    failed, compared = lines_of(tmp_path / "bench.csv")
    assert failed["quack_us"] == f"failed: {why}"
    assert failed["us"]
    assert float(compared["quack_speedup"]) > 0


# ------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    "arguments",
    [
        ["--op", "sideways"],
        ["--op", ""],
        ["--shapes", "4x"],
        ["--shapes", "0x4"],
        ["--shapes", "square"],
        ["--dtype", "int8"],
        ["--against", "everyone"],
    ],
)
def test_refused_options(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", *arguments])
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_no_device(monkeypatch, capsys):
    monkeypatch.setattr(cli, "choose_device", lambda wanted, console: None)
    assert cli.main(["bench", "--against", "none"]) == 2


# ------------------------------------------------------------------------------------------------ host time per call


def test_overhead_on_this_machine(capsys, tmp_path):
    assert cli.main(["bench", "--host", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "rmsnorm(NumPy)" in printed
    calls = {row["call"]: row for row in lines_of(tmp_path / "overhead.csv")}
    assert all(float(row["us"]) > 0 for row in calls.values())
    torch_call = calls.get("rmsnorm(torch, CPU)")
    if torch_call is not None:
        ratio = float(torch_call["us"]) / float(calls["F.rms_norm, CPU"]["us"])
        assert float(torch_call["ratio"]) == pytest.approx(ratio, rel=0.01)
    assert "left_out" in json.loads((tmp_path / "overhead.json").read_text())


def test_overhead_leaves_out_what_fails():
    absent = {}

    def fail():
        raise RuntimeError("no such kernel")

    calls = {
        "good": overhead.Call(lambda: None),
        "bad": overhead.Call(fail),
        "both": overhead.Call(int, ("good", "bad")),
    }
    entries = {entry.name: entry for entry in overhead._time(calls, lambda: None, absent)}
    assert set(entries) == {"good", "both"}
    assert entries["both"].ratio is None
    assert absent == {"bad": "RuntimeError: no such kernel"}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs a system where a process chooses its cores")
def test_one_core_is_of_all_threads_and_for_a_while():
    def cores():
        return {int(thread): os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")}

    absent, release, threads = {}, threading.Event(), []

    def another():
        threads.append(threading.Thread(target=release.wait))
        threads[-1].start()

    another()
    try:
        before = cores()
        with overhead._one_core(absent) as pinned:
            assert pinned
            another()
            inside = cores()
            assert len(set.union(*inside.values())) == 1
            assert len(inside) == len(before) + 1
        after = cores()
    finally:
        release.set()
        for thread in threads:
            thread.join()
    assert absent == {}
    assert {thread: after[thread] for thread in before} == before
    assert set(map(frozenset, after.values())) == set(map(frozenset, before.values()))


def test_without_a_choice_of_cores_the_rest_is_measured(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    absent = {}
    with overhead._one_core(absent) as pinned:
        assert not pinned
    assert "does not let" in absent["one core"]


def test_calls_on_one_core_are_compared_with_each_other():
    calls = overhead._renamed({"a": overhead.Call(int, ("b",), 0.8), "b": overhead.Call(int)}, ", one core")
    entries = {entry.name: entry for entry in overhead._time(calls, lambda: None, {})}
    assert set(entries) == {"a, one core", "b, one core"}
    assert entries["a, one core"].against == ("b, one core",)
    assert entries["a, one core"].ratio is not None
    assert entries["a, one core"].target == 0.8


@pytest.mark.parametrize("on_gpu", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_a_fresh_process_is_soon_ready(on_gpu):
    """Three times what is wanted, since tests share the machine: an import of torch alone would take longer."""
    absent = {}
    entries = overhead._start(on_gpu, absent)
    assert absent == {}
    assert len(entries) == 3
    for entry in entries:
        assert entry.seconds <= 3 * entry.target, entry


# ------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, capsys):
    operations = ",".join(bench.OPERATIONS)
    arguments = ["--device", "gpu", "--op", operations, "--shapes", "4x256,512x2048", "--out", str(tmp_path)]
    assert cli.main(["bench", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "All 10 cases agree with float64" in printed
    for row in lines_of(tmp_path / "bench.csv"):
        assert int(row["sets"]) > 1
        assert 0.5 < float(row["us"]) < 1000
        assert 0.5 < float(row["copy_us"]) < 1000


@pytest.mark.gpu
def test_overhead_on_a_gpu(capsys):
    assert cli.main(["bench", "--host"]) == 0
    printed = capsys.readouterr().out
    assert "RawKernel launch + cupy.empty" in printed
    if "F.rms_norm, f+b" in printed:
        assert "fused_add_rmsnorm(torch), f+b, one core" in printed
