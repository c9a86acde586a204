"""Voila shows notebook 07 as an app: it runs, and the page holds its results and not its code."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import nbformat
import pytest
import requests
from shoal.random_checkpoint import write_random_checkpoint

from tests.notebooks.driver import NOTEBOOKS

pytestmark = pytest.mark.notebook
pytest.importorskip("voila", reason="voila is not installed (pip install voila)")


@pytest.fixture
def app(tmp_path):
    smoke = write_random_checkpoint(tmp_path / "smoke")
    notebook = nbformat.read(NOTEBOOKS / "07_monitoring.ipynb", as_version=4)
    (cell,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    cell.source += f"\nCHECKPOINT, MAX_NEW_TOKENS, REQUESTS, TRIAL_REQUESTS = {str(smoke)!r}, 12, 6, 2"
    nbformat.write(notebook, tmp_path / "07.ipynb")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "voila", str(tmp_path / "07.ipynb"), "--no-browser", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        yield f"http://127.0.0.1:{port}/"
        process.terminate()
        process.wait(20)


def test_the_page_shows_results_and_no_code(app):
    deadline = time.monotonic() + 60
    while True:
        try:
            page = requests.get(app, timeout=200).text
            break
        except requests.ConnectionError:
            assert time.monotonic() < deadline, "Voila does not answer"
            time.sleep(0.5)
    assert "all right: go on with 08_torchserve" in page and "<svg" in page
    assert "poisson_arrivals(TEXTS" not in page
