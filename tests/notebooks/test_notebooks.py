"""The notebooks run from top to bottom with no hand on them, show what they promise, and are committed stripped."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from shoal.random_checkpoint import write_random_checkpoint

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
pytestmark = pytest.mark.notebook


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("smoke"))


def run(name: str, tmp_path: Path, **parameters) -> nbformat.NotebookNode:
    """Execute a copy with other parameters than its `parameters` cell's."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    (cell,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    cell.source += "\n" + "\n".join(f"{key} = {value!r}" for key, value in parameters.items())
    client = NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    return client.execute()


def text_of(notebook: nbformat.NotebookNode) -> str:
    """All that the cells show, as text and HTML."""
    parts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            assert output.output_type != "error"
            data = output.get("data", {})
            parts += [output.get("text", ""), data.get("text/plain", ""), data.get("text/html", "")]
    return "\n".join(parts)


def widgets_of(notebook: nbformat.NotebookNode) -> list[dict]:
    state = notebook.metadata["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    return [model["state"] for model in state.values()]


def test_there_are_notebooks():
    assert {"01_gpu_check", "02_baseline"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_committed_without_output_and_with_headings_in_both_languages(name):
    path = NOTEBOOKS / f"{name}.ipynb"
    verified = subprocess.run([sys.executable, "-m", "nbstripout", "--verify", path], capture_output=True, text=True)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    notebook = nbformat.read(path, as_version=4)
    assert 10 <= len(notebook.cells) <= 25 and all(cell.source.strip() for cell in notebook.cells)
    assert notebook.metadata.kernelspec.name == "python3"
    headings = re.findall(r"^#+ (.*)$", "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown"), re.M)
    assert len(headings) >= 5 and all(re.search("[가-힣]", heading) for heading in headings)


def test_the_machine_is_shown(smoke, tmp_path):
    notebook = run("01_gpu_check", tmp_path, CHECKPOINT=str(smoke))
    shown = text_of(notebook)
    assert "processor" in shown and "GPU" in shown and "8 to 12" in shown and "all right" in shown
    pictures = [w["value"] for w in widgets_of(notebook) if "<svg" in str(w.get("value"))]
    assert any("A batch of 8 takes" in picture for picture in pictures)


def test_upstream_and_shoal_are_compared(smoke, tmp_path):
    notebook = run("02_baseline", tmp_path, CHECKPOINT=str(smoke), MAX_NEW_TOKENS=20)
    shown = text_of(notebook)
    ways = ["Shoal, one at a time", "Shoal, together"]
    if "only Shoal is measured" not in shown:
        ways.insert(0, "upstream as shipped")
    for way in ways:
        found = re.search(rf"<td[^>]*>{way}</td><td[^>]*>([\d.e+-]+)</td><td[^>]*>([\d.e+-]+)</td>", shown)
        assert found and float(found[1]) > 0 and float(found[2]) > 0, way
    assert shown.count("<audio") == 2 * len(ways) and "안녕하세요" in shown
    assert "done" in shown and "all right" in shown
    states = widgets_of(notebook)
    assert any(state.get("description") == "batch size" and state.get("value") == 4 for state in states)
    assert any("Texts per second" in str(state.get("value")) for state in states)
