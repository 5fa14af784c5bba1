"""The host's compilers, object cache and threads; what must not happen is counted by a compiler that keeps a log."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from conftest import assert_rows_close, assert_sums_close, random

import rmsnorm_raw
from rmsnorm_raw import cache, calls, plan, program, reference
from rmsnorm_raw.devices import Compiled, host

PACKAGE = Path(rmsnorm_raw.__file__).resolve().parent
M, N = 3, 13

# One forward; the values are checked in the process itself, and its bytes are printed.
FORWARD = """
import numpy, rmsnorm_raw
x = numpy.arange(1, 40, dtype=numpy.float32).reshape(3, 13)
y = rmsnorm_raw.rmsnorm(x, eps=1e-6)
right = x / numpy.sqrt((x.astype(numpy.float64) ** 2).mean(1, keepdims=True) + 1e-6)
assert numpy.allclose(y, right, rtol=1e-6), y
print(y.tobytes().hex())
"""
BACKWARD = """
_, rstd = rmsnorm_raw.rmsnorm_fwd(x, store_rstd=True)
dx, dweight = rmsnorm_raw.rmsnorm_bwd(x, numpy.ones(13, numpy.float32), x, rstd)
assert numpy.allclose(dweight, (x * right).sum(0), rtol=1e-5), dweight
print(dx.tobytes().hex(), dweight.tobytes().hex())
"""


def start(code, **environment):
    """A Python process that finds the package that the tests imported; None unsets a variable."""
    env = os.environ | {"PYTHONPATH": str(PACKAGE.parent)} | environment
    env = {name: str(value) for name, value in env.items() if value is not None}
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


def finish(process):
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return output


def run(code, **environment):
    return finish(start(code, **environment))


@pytest.fixture
def real_compiler():
    for words in filter(None, [os.environ.get("CXX"), "c++", "g++", "clang++"]):
        if shutil.which(words.split()[0]):
            return words
    pytest.skip("this machine has no C++ compiler")


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


class Logged:
    """A compiler that notes each call, also those that ask for its version."""

    def __init__(self, folder, real):
        self.log = folder / "compiler.log"
        self.path = script(folder / "logged-c++", f'echo "$@" >> {self.log}\nexec {real} "$@"')

    @property
    def calls(self):
        return self.log.read_text().splitlines() if self.log.exists() else []

    @property
    def compiled(self):
        return [call for call in self.calls if "--version" not in call]


@pytest.fixture
def logged(tmp_path, real_compiler):
    return Logged(tmp_path, real_compiler)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """This process as if nothing had been compiled, with a cache folder of its own."""
    monkeypatch.setattr(host, "_compiled", Compiled())
    calls.forget()
    monkeypatch.setenv("RMSNORM_RAW_CACHE_DIR", str(tmp_path / "cache"))
    host._compiler.cache_clear()
    yield tmp_path / "cache"
    host._compiler.cache_clear()


def a_program(cols=N):
    forward = plan.plan_forward(M, cols, plan.HOST, x="float32", y="float32")
    return program.program(forward.kernel, forward.constants)


def objects(folder):
    return sorted(folder.iterdir()) if folder.exists() else []


def assert_forward_is_right():
    x = random((M, N), "float32", 1)
    assert_rows_close(rmsnorm_raw.rmsnorm(x), reference.forward(x).y, "float32")


# ------------------------------------------------------------------------------------------------ importing


def test_importing_does_nothing(tmp_path, logged):
    code = """
import sys, rmsnorm_raw
print([name for name in ("torch", "cupy", "ml_dtypes") if name in sys.modules])
"""
    environment = {
        "CXX": logged.path,
        "RMSNORM_RAW_CACHE_DIR": tmp_path / "cache",
        "RMSNORM_RAW_DUMP": tmp_path / "dump",
    }
    assert run(code, **environment).strip() == "[]"
    assert logged.calls == []
    assert not (tmp_path / "cache").exists()
    assert not (tmp_path / "dump").exists()


def test_a_call_on_numpy_loads_no_framework(tmp_path):
    code = FORWARD + "import sys; print([name for name in ('torch', 'cupy') if name in sys.modules])"
    assert run(code, RMSNORM_RAW_CACHE_DIR=tmp_path).splitlines()[-1] == "[]"


# ------------------------------------------------------------------------------------------------ cache


def test_a_second_process_compiles_nothing(tmp_path, logged):
    environment = {"CXX": logged.path, "RMSNORM_RAW_CACHE_DIR": tmp_path / "cache"}
    first = run(FORWARD, **environment)
    assert len(logged.compiled) == 1
    assert run(FORWARD, **environment) == first
    assert len(logged.compiled) == 1
    both = run(FORWARD + BACKWARD, **environment)
    assert both.startswith(first)
    assert len(logged.compiled) == 3, "the backward and the sum of its partials"
    assert run(FORWARD + BACKWARD, **environment) == both
    assert len(logged.compiled) == 3
    assert len(objects(tmp_path / "cache")) == 3


def test_other_columns_are_another_program(tmp_path, logged):
    environment = {"CXX": logged.path, "RMSNORM_RAW_CACHE_DIR": tmp_path / "cache"}
    run(FORWARD, **environment)
    run(FORWARD.replace("3, 13", "13, 3"), **environment)
    assert len(logged.compiled) == 2


def test_another_command_is_another_object(tmp_path, logged):
    environment = {"RMSNORM_RAW_CACHE_DIR": tmp_path / "cache"}
    first = run(FORWARD, CXX=logged.path, **environment)
    assert run(FORWARD, CXX=f"{logged.path} -g0", **environment) == first
    assert len(logged.compiled) == 2
    assert logged.compiled[0].startswith("-O3 ")
    assert logged.compiled[1].startswith("-g0 -O3 "), "$CXX may bring options of its own"


def test_another_cpu_is_another_object(fresh, monkeypatch):
    """-march=native: a home folder is often shared by unlike machines."""
    host._load(a_program())
    host._load(a_program())
    assert len(objects(fresh)) == 1
    monkeypatch.setattr(host, "cpu", lambda: "a CPU without vectors")
    host._load(a_program())
    assert len(objects(fresh)) == 2


DAMAGE = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "without-its-end": lambda content: content[:-1],
    "one-bit": lambda content: content[:1000] + bytes([content[1000] ^ 4]) + content[1001:],
    "garbage": lambda content: b"\x7fELF" + bytes(len(content)),
    "another-digest": lambda content: content[:-32] + bytes(32),
    "longer": lambda content: content + b"\0",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A process's output, and the name and bytes of the one object that it left in its cache folder."""
    folder = tmp_path_factory.mktemp("cache")
    output = run(FORWARD, RMSNORM_RAW_CACHE_DIR=folder)
    (path,) = objects(folder)
    return output, path.name, path.read_bytes()


@pytest.mark.parametrize("damage", [None, *DAMAGE])
def test_a_damaged_object_is_built_anew(monkeypatch, tmp_path, whole, damage):
    output, name, content = whole
    (tmp_path / name).write_bytes(DAMAGE[damage](content) if damage else content)
    before = (tmp_path / name).stat()
    assert run(FORWARD, RMSNORM_RAW_CACHE_DIR=tmp_path) == output
    assert [path.name for path in objects(tmp_path)] == [name]
    after = (tmp_path / name).stat()
    assert (before.st_ino == after.st_ino) == (damage is None), "a whole object stays, a damaged one is replaced"
    monkeypatch.setenv("RMSNORM_RAW_CACHE_DIR", str(tmp_path))
    assert cache.find(name) == tmp_path / name, "the new object is whole"


def test_compiling_leaves_nothing_in_the_temporary_folder(tmp_path):
    (tmp_path / "temporary").mkdir()
    run(FORWARD, RMSNORM_RAW_CACHE_DIR=tmp_path / "cache", TMPDIR=tmp_path / "temporary")
    assert len(objects(tmp_path / "cache")) == 1
    assert objects(tmp_path / "temporary") == []


def test_an_object_of_another_name_is_not_taken(fresh):
    """A folder in an object's place is no object either."""
    host._load(a_program())
    (path,) = objects(fresh)
    path.unlink()
    path.mkdir()
    assert cache.find(path.name) is None


@pytest.mark.parametrize("below", ["a-file", "a-file/below/it"])
def test_a_cache_folder_that_cannot_be_written(tmp_path, logged, below):
    """Objects go to a temporary folder; each process then compiles for itself."""
    (tmp_path / "a-file").write_text("no folder")
    (tmp_path / "temporary").mkdir()
    environment = {"CXX": logged.path, "RMSNORM_RAW_CACHE_DIR": tmp_path / below, "TMPDIR": tmp_path / "temporary"}
    first = run(FORWARD, **environment)
    assert run(FORWARD, **environment) == first
    assert len(logged.compiled) == 2
    assert (tmp_path / "a-file").read_text() == "no folder"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_cache_folder(tmp_path, logged):
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o555)
    environment = {"CXX": logged.path, "RMSNORM_RAW_CACHE_DIR": folder}
    assert run(FORWARD, **environment) == run(FORWARD, **environment)
    assert objects(folder) == []


@pytest.mark.usefixtures("real_compiler")
def test_a_cache_folder_mounted_noexec(fresh, monkeypatch, tmp_path):
    """Nothing can be loaded from it: the object is copied to a temporary folder and loaded there."""
    load, refused = ctypes.CDLL, []

    def refuse(name, *rest, **options):
        if str(fresh) in str(name):
            refused.append(name)
            raise OSError(f"{name}: failed to map segment from shared object")
        return load(name, *rest, **options)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    monkeypatch.setattr(cache, "temporary_folder", lambda: tmp_path / "elsewhere")
    assert_forward_is_right()
    assert len(refused) == 1
    assert [path.name for path in objects(tmp_path / "elsewhere")] == [path.name for path in objects(fresh)]


@pytest.mark.usefixtures("real_compiler")
def test_nothing_can_be_loaded_anywhere(fresh, monkeypatch, tmp_path):
    def refuse(name, *rest, **options):
        raise OSError(f"{name}: failed to map segment from shared object")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    monkeypatch.setattr(cache, "temporary_folder", lambda: tmp_path / "elsewhere")
    with pytest.raises(
        RuntimeError, match=r"(?s)failed to map segment.*RMSNORM_RAW_CACHE_DIR|RMSNORM_RAW_CACHE_DIR.*failed"
    ):
        rmsnorm_raw.rmsnorm(random((M, N), "float32", 1))


def test_no_folder_can_be_written(monkeypatch, tmp_path):
    (tmp_path / "a-file").write_text("no folder")
    monkeypatch.setenv("RMSNORM_RAW_CACHE_DIR", str(tmp_path / "a-file" / "cache"))
    monkeypatch.setattr(cache, "temporary_folder", lambda: tmp_path / "a-file" / "temporary")
    with pytest.raises(RuntimeError, match=rf"{re.escape(str(tmp_path / 'a-file' / 'cache'))}.*RMSNORM_RAW_CACHE_DIR"):
        cache.keep("object.so", b"content")


def test_where_the_cache_lies(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("RMSNORM_RAW_CACHE_DIR", raising=False)
    assert cache.folder() == tmp_path / "home" / ".cache" / "rmsnorm_raw"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.folder() == tmp_path / "xdg" / "rmsnorm_raw"
    monkeypatch.setenv("RMSNORM_RAW_CACHE_DIR", str(tmp_path / "own"))
    assert cache.folder() == tmp_path / "own"


def test_eight_processes_on_an_empty_cache(monkeypatch, tmp_path, real_compiler):
    """All compile at once, none sees another's half-written object, and nothing is left behind."""
    environment = {"CXX": real_compiler, "RMSNORM_RAW_CACHE_DIR": tmp_path / "cache"}
    processes = [start(FORWARD + BACKWARD, **environment) for _ in range(8)]
    outputs = {finish(process) for process in processes}
    assert len(outputs) == 1
    names = [path.name for path in objects(tmp_path / "cache")]
    assert [name.partition("-")[0] for name in names] == ["dweight_reduce", "rmsnorm_bwd", "rmsnorm_fwd"]
    monkeypatch.setenv("RMSNORM_RAW_CACHE_DIR", str(tmp_path / "cache"))
    assert all(cache.find(name) for name in names), "a damaged object"


@pytest.mark.usefixtures("real_compiler", "fresh")
def test_many_threads_compile_a_program_once(monkeypatch):
    loaded, load, together = [], host._load, threading.Barrier(8, timeout=60)

    def count(program):
        loaded.append(program)
        return load(program)

    monkeypatch.setattr(host, "_load", count)
    x = random((M, N), "float32", 1)

    def call():
        together.wait()
        return rmsnorm_raw.rmsnorm(x)

    with ThreadPoolExecutor(8) as pool:
        results = [future.result() for future in [pool.submit(call) for _ in range(8)]]
    assert len(loaded) == 1
    assert len({result.tobytes() for result in results}) == 1
    assert_rows_close(results[0], reference.forward(x).y, "float32")


# ------------------------------------------------------------------------------------------------ compilers


def test_cxx_is_honoured(fresh, monkeypatch, logged):
    monkeypatch.setenv("CXX", str(logged.path))
    assert host.compiler().command == (str(logged.path),)
    assert_forward_is_right()
    assert len(logged.compiled) == 1
    for flag in ("-O3", "-std=c++17", "-ffp-contract=off", "-march=native", "-shared", "-fPIC"):
        assert flag in logged.compiled[0].split(), flag
    assert "fast-math" not in logged.compiled[0]


@pytest.mark.usefixtures("fresh")
def test_compilers_in_their_order(monkeypatch, tmp_path):
    """$CXX, c++, g++, clang++: the first that is there and answers."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    for name in ("clang++", "g++", "c++"):  # each that appears comes before those that were there
        script(tmp_path / name, f"echo '{name} of the test'\necho more")
        host._compiler.cache_clear()
        assert host.compiler() == host.Compiler((name,), f"{name} of the test")
    script(tmp_path / "c++", "exit 1")
    host._compiler.cache_clear()
    assert host.compiler().command == ("g++",), "c++ is there but does not run"
    script(tmp_path / "mine", "echo mine")
    monkeypatch.setenv("CXX", "mine -m64")
    assert host.compiler().command == ("mine", "-m64")
    monkeypatch.setenv("CXX", "not-there")
    assert host.compiler().command == ("g++",)


def test_a_compile_error_carries_the_compilers_words(fresh, monkeypatch, tmp_path, real_compiler):
    own = script(
        tmp_path / "no-c++", '[ "$1" = --version ] && exec echo 1.0\necho "a very particular complaint" >&2; exit 1'
    )
    monkeypatch.setenv("CXX", str(own))
    with pytest.raises(RuntimeError, match=rf"(?s){re.escape(str(own))}.*rmsnorm_fwd.*a very particular complaint"):
        assert_forward_is_right()
    assert objects(fresh) == []
    monkeypatch.setenv("CXX", f"{real_compiler} -include no-such-file.h")
    with pytest.raises(RuntimeError, match=r"(?s)could not compile.*no-such-file\.h"):
        assert_forward_is_right()
    assert objects(fresh) == []
    monkeypatch.setenv("CXX", real_compiler)
    assert_forward_is_right()  # a failure is not remembered
    assert len(objects(fresh)) == 1


def test_a_compile_error_has_the_line_of_the_kernels_own_file(fresh, monkeypatch, real_compiler):
    text = program.read_source("rmsnorm_fwd.hip")
    line = next(i for i, words in enumerate(text.splitlines(), 1) if "    Place at" in words)
    broken = text.replace("    Place at", "    Plaice at", 1)
    read = program.read_source
    monkeypatch.setattr(program, "read_source", lambda name: broken if name == "rmsnorm_fwd.hip" else read(name))
    monkeypatch.setenv("CXX", real_compiler)
    with pytest.raises(RuntimeError, match=rf"rmsnorm_fwd\.hip:{line}:.*"):
        host._load(program.Program("rmsnorm_fwd", a_program(7).constants))
    assert objects(fresh) == []


def assert_all_steps_are_right(dtype):
    """Forward, fused-add and both backwards; odd columns, so that tails are among them."""
    x, residual, dout, dresidual_out = (random((M, N), dtype, seed) for seed in (1, 2, 3, 4))
    weight = random((N,), dtype, 5)
    y, total, rstd = rmsnorm_raw.fused_add_rmsnorm_fwd(x, residual, weight, 1e-5, True)
    expected = reference.forward(x, weight, 1e-5, residual=residual, residual_dtype=residual.dtype)
    assert_rows_close(y, expected.y, dtype, "y")
    assert_rows_close(total, expected.normed, dtype, "residual_out")
    assert_rows_close(rmsnorm_raw.rmsnorm(total, weight, 1e-5), expected.y, dtype, "plain y")
    dx, _, dweight = rmsnorm_raw.fused_add_rmsnorm_bwd(total, weight, dout, rstd, dresidual_out)
    expected = reference.backward(total, weight, dout, 1e-5, dresidual_out=dresidual_out)
    assert_rows_close(dx, expected.dx, dtype, "dx")
    assert_sums_close(dweight, expected.dweight, dtype, M, np.abs(dout.astype(np.float64)).max())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_ziglang_compiles_and_is_right(fresh, monkeypatch, dtype):
    pytest.importorskip("ziglang", reason="ziglang is not installed")
    zig = host.Compiler((sys.executable, "-m", "ziglang"), "of the test")
    assert zig.is_zig
    monkeypatch.setattr(host, "compiler", lambda: zig)
    assert_all_steps_are_right(dtype)
    assert len(objects(fresh)) == 4


def test_ziglang_is_the_last_resort(tmp_path):
    pytest.importorskip("ziglang", reason="ziglang is not installed")
    (tmp_path / "empty").mkdir()
    environment = {"PATH": tmp_path / "empty", "CXX": None, "RMSNORM_RAW_CACHE_DIR": tmp_path / "cache"}
    code = FORWARD + "from rmsnorm_raw.devices import host; print(host.compiler().version)"
    assert re.match(r"ziglang \d", run(code, **environment).splitlines()[-1])


def test_a_ziglang_error_carries_its_words(tmp_path):
    pytest.importorskip("ziglang", reason="ziglang is not installed")
    source = tmp_path / "kernel.cpp"
    source.write_text("int f() { return no_such_name; }\n")
    with pytest.raises(RuntimeError, match=r"(?s)ziglang.*kernel\.cpp.*no_such_name"):
        host.Compiler((sys.executable, "-m", "ziglang"), "of the test").build(source, tmp_path / "kernel.so")


# ------------------------------------------------------------------------------------------------ threads

COUNT = "import rmsnorm_raw; print(rmsnorm_raw.get_num_threads())"


@pytest.fixture
def threads(monkeypatch):
    """Any number of threads in a test, the former one after it."""
    monkeypatch.setattr(host, "_threads", None)
    return monkeypatch


def test_threads_of_the_environment():
    assert run(COUNT, RMSNORM_RAW_THREADS="3") == "3\n"
    affinity = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]);"
    assert run(affinity + COUNT, RMSNORM_RAW_THREADS=None) == "1\n", "the CPUs of the process, not of the machine"


@pytest.mark.parametrize("given", ["0", "-1", "two", "1.5", "", " ", "²"])
def test_threads_of_the_environment_are_checked(threads, given):
    threads.setenv("RMSNORM_RAW_THREADS", given)
    with pytest.raises(ValueError, match=rf"^RMSNORM_RAW_THREADS is '{re.escape(given)}'.*positive whole number"):
        rmsnorm_raw.get_num_threads()


def test_set_num_threads(threads):
    threads.setenv("RMSNORM_RAW_THREADS", "5")
    assert rmsnorm_raw.get_num_threads() == 5
    rmsnorm_raw.set_num_threads(2)
    assert rmsnorm_raw.get_num_threads() == 2
    for wrong in (0, -1, 1.5, "2"):
        with pytest.raises(ValueError, match=rf"^count is {wrong!r}.*positive whole number"):
            rmsnorm_raw.set_num_threads(wrong)
        assert rmsnorm_raw.get_num_threads() == 2
    rmsnorm_raw.set_num_threads(None)
    assert rmsnorm_raw.get_num_threads() == 5


@pytest.mark.parametrize(("count", "blocks"), [(1, 10), (2, 10), (3, 10), (7, 10), (16, 10), (4, 1), (3, 2)])
def test_blocks_are_dealt_to_threads(threads, count, blocks):
    """Every block once, in no more pieces than there are threads, all at the same time where there is enough work."""
    rmsnorm_raw.set_num_threads(count)
    pieces, workers = [], set()
    together = threading.Barrier(min(count, blocks), timeout=20)

    def kernel(packed, first, last):
        assert packed == b"arguments"
        together.wait()
        workers.add(threading.get_ident())
        pieces.append(range(first, last))

    host.run(kernel, blocks, b"arguments", host.INLINE_ELEMENTS)
    assert sorted(block for piece in pieces for block in piece) == list(range(blocks))
    assert len(pieces) == len(workers) == min(count, blocks)
    assert threading.get_ident() in workers


def test_little_work_stays_in_this_thread(threads):
    rmsnorm_raw.set_num_threads(4)
    calls = []
    host.run(lambda *call: calls.append((threading.get_ident(), *call)), 10, b"", host.INLINE_ELEMENTS - 1)
    assert calls == [(threading.get_ident(), b"", 0, 10)]


@pytest.mark.usefixtures("real_compiler")
def test_calls_from_many_threads_at_once(threads):
    """The pool is shared, and the place of a block is each thread's own."""
    rmsnorm_raw.set_num_threads(3)
    rows = [random((1100, 64), "float32", seed) for seed in range(6)]
    expected = [reference.forward(x).y for x in rows]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(5):
            for y, right in zip(pool.map(rmsnorm_raw.rmsnorm, rows), expected, strict=True):
                assert_rows_close(y, right, "float32")


FORK = """
import os, signal, threading, warnings, numpy, rmsnorm_raw
from rmsnorm_raw.devices import Compiled, host
warnings.simplefilter("ignore")
rmsnorm_raw.set_num_threads(3)
x = numpy.random.default_rng(0).standard_normal((1100, 64), dtype=numpy.float32)
y = rmsnorm_raw.rmsnorm(x)
assert host._pool is not None, "the call was not threaded"
{before}
if (child := os.fork()) == 0:
    signal.alarm(60)
    try:
        again = rmsnorm_raw.rmsnorm(x)
        new = rmsnorm_raw.rmsnorm(x[:, :13].copy())
        right = x[:, :13] / numpy.sqrt((x[:, :13].astype(numpy.float64) ** 2).mean(1, keepdims=True) + 1e-6)
        same = numpy.array_equal(again, y) and rmsnorm_raw.get_num_threads() == 3
        os._exit(0 if same and numpy.allclose(new, right, rtol=1e-5, atol=1e-6) else 3)
    except BaseException:
        os._exit(4)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), numpy.array_equal(rmsnorm_raw.rmsnorm(x), y))
"""


def test_a_forked_child_has_threads_of_its_own(tmp_path):
    assert run(FORK.format(before=""), RMSNORM_RAW_CACHE_DIR=tmp_path) == "0 True\n"


COMPILING = """
load, entered, leave = host._load, threading.Event(), threading.Event()
def slow(program):
    entered.set()
    leave.wait(60)
    return load(program)
host._load = slow
other = threading.Thread(target=lambda: rmsnorm_raw.rmsnorm(x[:, :13].copy()))
other.start()
assert entered.wait(60)
host._load = load
"""


def test_a_fork_while_another_thread_compiles(tmp_path):
    """The child compiles the same program; the thread that holds its lock does not exist there."""
    code = FORK.format(before=COMPILING) + "leave.set(); other.join()"
    assert run(code, RMSNORM_RAW_CACHE_DIR=tmp_path) == "0 True\n"


# ------------------------------------------------------------------------------------------------ texts


def test_dump_writes_the_text_of_each_program(tmp_path):
    environment = {"RMSNORM_RAW_CACHE_DIR": tmp_path / "cache", "RMSNORM_RAW_DUMP": tmp_path / "made" / "dump"}
    run(FORWARD + BACKWARD, **environment)
    texts = {path.name.partition("-")[0]: path.read_text() for path in objects(tmp_path / "made" / "dump")}
    assert sorted(texts) == ["dweight_reduce", "rmsnorm_bwd", "rmsnorm_fwd"]
    for kernel, text in texts.items():
        assert f'#line 1 "{kernel}.hip"\n{program.read_source(f"{kernel}.hip")}' in text
        assert f'#line 1 "prelude.h"\n{program.read_source("prelude.h")}' in text
        assert f"ENTRY({kernel})" in text
    assert texts["rmsnorm_fwd"] == a_program().text
    assert "constexpr int COLS = 13;" in texts["rmsnorm_bwd"]
    run(FORWARD, **environment)  # from the cache, into the same folder
    assert len(objects(tmp_path / "made" / "dump")) == 3


SOURCES = next(folder for folder in (PACKAGE / "kernels_src", PACKAGE.parent / "kernels_src") if folder.is_dir())


@pytest.mark.parametrize("name", sorted(path.name for path in SOURCES.iterdir()))
def test_kernel_texts_have_no_preprocessor(name):
    """prelude.h alone has #if, and nothing is included: what is compiled is what is hashed, on every compiler."""
    lines = (SOURCES / name).read_text().splitlines()
    allowed = r"(if|elif|else|endif|define|undef|pragma)\b" if name == "prelude.h" else r"(define|undef|pragma)\b"
    directives = [line for line in lines if re.match(r"\s*#", line)]
    assert [line for line in directives if not re.match(rf"\s*#\s*{allowed}", line)] == []
    assert lines[0].startswith("//"), "a text opens by saying what it is"


def test_the_kernel_texts_are_found():
    assert {"prelude.h", "rmsnorm_fwd.hip", "rmsnorm_bwd.hip", "dweight_reduce.hip"} <= {
        p.name for p in SOURCES.iterdir()
    }
    with pytest.raises(RuntimeError, match=r"no-such-kernel\.hip is missing"):
        program.read_source("no-such-kernel.hip")
