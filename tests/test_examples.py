"""Runs what is in examples/ the way a reader would: char_lm.py as a command, the notebook in a kernel."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rmsnorm_raw

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
CHAR_LM = EXAMPLES / "char_lm.py"
NOTEBOOK = EXAMPLES / "quickstart.ipynb"
PACKAGE = Path(rmsnorm_raw.__file__).resolve().parent

# A child process gets the very package that the tests imported, installed or not.
PYTHONPATH = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))


def train_both(tmp_path, *options, text=CHAR_LM):
    """Runs `char_lm.py --norm both`; returns the finished process and one (torch, rmsnorm_raw) pair of losses per step.

    The text is the example's own source: always there, and editing the README moves no loss.
    """
    pytest.importorskip("torch", reason="examples/char_lm.py trains with torch")
    curves = tmp_path / "losses.csv"
    command = [sys.executable, str(CHAR_LM), "--norm", "both", "--text", str(text), "--csv", str(curves), *options]
    # One thread: slower by a quarter where the cores are idle, but faster by far where other tests keep them busy.
    env = os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, encoding="utf-8", timeout=240)
    assert curves.exists(), run.stderr  # written before the comparison, so also where that one fails
    with curves.open(newline="") as file:
        return run, [(float(row["torch"]), float(row["rmsnorm_raw"])) for row in csv.DictReader(file)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_char_lm_trains_like_torch(tmp_path, device):
    torch = pytest.importorskip("torch", reason="examples/char_lm.py trains with torch")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    run, losses = train_both(tmp_path, "--steps", "50", "--device", device)
    assert run.returncode == 0, run.stdout + run.stderr
    assert len(losses) == 50
    differences = [abs(a - b) for a, b in losses]
    print(f"largest |Δloss| {max(differences):.2e}")
    assert all(difference <= 2e-3 for difference in differences), losses
    for curve in zip(*losses, strict=True):
        # From log(alphabet size), about 4.4, to about 3.2: the batches' own spread is 0.1.
        assert sum(curve[-5:]) / 5 < curve[0] - 0.8


def test_char_lm_reports_a_difference(tmp_path):
    """The comparison above can fail: with a wrong eps in one of the two norms it does."""
    run, losses = train_both(tmp_path, "--steps", "3", "--device", "cpu", "--torch-eps", "1e-2")
    assert run.returncode == 1, run.stdout + run.stderr
    assert "beyond 0.002" in run.stdout
    assert max(abs(a - b) for a, b in losses) > 2e-3


def test_char_lm_is_deterministic(tmp_path):
    """The same seed gives the same losses to the last bit, another seed gives others."""
    first, again, other = (train_both(tmp_path, "--steps", "3", "--device", "cpu", "--seed", s)[1] for s in "001")
    assert first == again
    assert first != other


def test_notebook_is_committed_clean():
    """No outputs, no run counts, nothing of anyone's machine."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"] == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in notebook["cells"]:
        assert cell["metadata"] == {}
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


def test_notebook_runs(tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="examples/quickstart.ipynb shows the torch interop")
    pytest.importorskip("matplotlib", reason="examples/quickstart.ipynb draws a plot")
    pytest.importorskip("ipykernel", reason="a notebook needs a kernel to run in")
    nbformat = pytest.importorskip("nbformat", reason="reads the notebook")
    nbclient = pytest.importorskip("nbclient", reason="runs the notebook")

    # A kernel of this interpreter, found before any other that is called python3 too.
    kernel = tmp_path / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))  # nothing is read from or left in the home
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    notebook.cells.append(
        nbformat.v4.new_code_cell("import sys; print(sys.executable, rmsnorm_raw.__file__, sep='\\n')")
    )
    work = tmp_path / "work"
    work.mkdir()
    # Raises CellExecutionError, with the cell and its traceback, where a cell fails.
    nbclient.NotebookClient(
        notebook, kernel_name="python3", timeout=200, resources={"metadata": {"path": str(work)}}
    ).execute()

    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    interpreter, package = notebook.cells[-1].outputs[0].text.split("\n")[:2]
    assert interpreter == sys.executable
    assert Path(package).resolve().parent == PACKAGE
    print("".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout"))
