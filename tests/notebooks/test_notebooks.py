"""The notebooks run from top to bottom with no hand on them, show what they promise, and are committed stripped."""

from __future__ import annotations

import re
import subprocess
import sys

import nbformat
import pytest
from shoal.random_checkpoint import write_random_checkpoint
from shoal.results import load_result, new_result, save_result

from tests.notebooks.driver import NOTEBOOKS, Kernel

NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
pytestmark = pytest.mark.notebook


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    return str(write_random_checkpoint(tmp_path_factory.mktemp("smoke")))


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    kernel = Kernel(tmp_path_factory.mktemp("notebooks"))
    yield kernel
    kernel.stop()


def test_there_are_notebooks():
    first = {"01_gpu_check", "02_baseline", "03_batching", "04_dynamic_batching", "05_caching", "06_pipeline"}
    assert first <= set(NAMES)


def test_committed_without_output():
    command = [sys.executable, "-m", "nbstripout", "--verify", *(NOTEBOOKS / f"{name}.ipynb" for name in NAMES)]
    verified = subprocess.run(command, capture_output=True, text=True)
    assert verified.returncode == 0, verified.stdout + verified.stderr


@pytest.mark.parametrize("name", NAMES)
def test_headings_in_both_languages_and_cells_that_each_say_something(name):
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    assert 10 <= len(notebook.cells) <= 25 and all(cell.source.strip() for cell in notebook.cells)
    assert notebook.metadata.kernelspec.name == "python3"
    headings = re.findall(r"^#+ (.*)$", "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown"), re.M)
    assert len(headings) >= 5 and all(re.search("[가-힣]", heading) for heading in headings)


def test_the_machine_is_shown(smoke, kernel):
    with kernel.run("01_gpu_check", CHECKPOINT=smoke) as notebook:
        assert "64 rows take" in notebook.text() and "all right" in notebook.text()
        shown = " ".join(str(state.get("value")) for _, state in notebook.widgets())
        assert "processor" in shown and "8 to 12" in shown
        assert any("A batch of 8 takes" in picture for picture in notebook.pictures())
        notebook.move("batch", 32)
        assert "A batch of 32 takes" in notebook.cell("print(panel.picture.value)")


def test_upstream_and_shoal_are_compared(smoke, kernel, tmp_path):
    file = tmp_path / "results" / "baseline.json"
    with kernel.run("02_baseline", CHECKPOINT=smoke, MAX_NEW_TOKENS=20, SAVE_TO=str(file)) as notebook:
        shown = notebook.text()
        ways = ["Shoal, one at a time", "Shoal, together"]
        if "only Shoal is measured" not in shown:
            ways.insert(0, "upstream as shipped")
        assert [row["way"] for row in load_result(file).rows if row["seconds"] > 0] == ways
        table = notebook.cell("print(panel.table.value)")
        for way in ways:
            found = re.search(rf"<td[^>]*>{way}</td><td[^>]*>([\d.e+-]+)</td><td[^>]*>([\d.e+-]+)</td>", table)
            assert found and float(found[1]) > 0 and float(found[2]) > 0, way
        assert "안녕하세요" in shown and "done" in shown and "all right" in shown
        assert any("a second of sound costs" in picture for picture in notebook.pictures())
        notebook.move("texts to speak", 1)
        notebook.click("Measure")
        again = (
            "await panel.state.wait(); print(panel.state.status, [len(r.measurements) for r in panel.state.reports])"
        )
        assert notebook.cell(again).strip() == f"done {[1] * len(ways)}"


def test_batches_are_measured_and_the_best_is_found(smoke, kernel, tmp_path):
    file = tmp_path / "batches.json"
    with kernel.run(
        "03_batching", CHECKPOINT=smoke, MAX_NEW_TOKENS=20, CANDIDATES=[1, 2, 4], SAVE_TO=str(file)
    ) as notebook:
        assert "codes equal: True" in notebook.text() and "all right" in notebook.text()
        kept = load_result(file)
        assert [row["batch size"] for row in kept.rows] == [1, 2, 4] and "is best" in kept.title
        assert any("is the smallest batch within" in picture for picture in notebook.pictures())
        notebook.move("batch size", 3)
        notebook.click("Measure this size")
        assert "3" in notebook.cell("await panel.state.wait(); print(sorted(panel.state.speeds))")


def test_arriving_requests_are_gathered_and_can_be_cancelled(smoke, kernel, tmp_path):
    file = tmp_path / "arrivals.json"
    small = {"MAX_NEW_TOKENS": 20, "REQUESTS": 8, "RATE": 20.0, "SAVE_TO": str(file)}
    with kernel.run("04_dynamic_batching", CHECKPOINT=smoke, **small) as notebook:
        assert all(row["p95 (s)"] >= row["p50 (s)"] > 0 for row in load_result(file).rows)
        assert "RequestError" in notebook.text() and "all right" in notebook.text()
        assert "95% are answered within" in notebook.text()
        assert any("Half of 8 requests" in picture for picture in notebook.pictures())
        notebook.move("requests", 200)
        notebook.move("requests a second", 2.0)
        notebook.click("Send requests")
        notebook.cell("import asyncio\nwhile not panel.state.running: await asyncio.sleep(0.01)")
        notebook.click("Cancel")
        assert notebook.cell("await panel.state.wait(); print(panel.state.status)").strip() == "cancelled"


def test_repeats_come_from_the_cache_also_after_a_kernel_restart(smoke, kernel, tmp_path):
    kernel.restart()
    small = {"MAX_NEW_TOKENS": 20, "REQUESTS": 16, "SAVE_TO": str(tmp_path / "caching.json")}
    with kernel.run("05_caching", CHECKPOINT=smoke, **small) as notebook:
        rows = {row["what"]: row for row in load_result(tmp_path / "caching.json").rows}
        assert rows["decoded anew"]["seconds"] > 0 and rows["3 entries"]["evictions"] > 0
        assert "first call from the cache: True" in notebook.text() and "all right" in notebook.text()
        assert any("16 requests come from the cache" in picture for picture in notebook.pictures())
        notebook.move("entries at most", 0)
        notebook.click("Send requests")
        assert notebook.cell("await panel.state.wait(); print(panel.state.stats.entries)").strip() == "0"


def test_the_guides_strategies_and_scenarios_are_measured_and_compared(smoke, kernel, tmp_path):
    before, now = tmp_path / "before.json", tmp_path / "now.json"
    earlier = [{"strategy": "everything", "rtf": 0.25, "texts_per_s": 1.0}]
    save_result(new_result("guide_strategies", "Before", earlier, "strategy", {"COUNT": 4}), before)
    report = tmp_path / "report.html"
    small = {"MAX_NEW_TOKENS": 12, "COUNT": 4, "SCENARIO_TEXTS": 2}
    small |= {"SAVE_TO": str(now), "COMPARE_WITH": [str(before)], "REPORT_TO": str(report)}
    with kernel.run("06_pipeline", CHECKPOINT=smoke, **small) as notebook:
        assert str(before) in notebook.text() and str(report) in notebook.text()
        assert {row["strategy"]: row for row in load_result(now).rows}["everything"]["audio_seconds"] > 0
        assert "rtf: everything went to" in report.read_text(encoding="utf-8")
        assert "all right" in notebook.text() and "times as fast as" in notebook.text()
        table = notebook.cell("print(table_job.result.value)")
        ways = int(notebook.cell("print(len(strategies))"))
        assert ways in (3, 4) and table.count("<tr>") == 1 + ways
        assert notebook.cell("print(scenario_job.result.value.count('audiobook'))").strip() == "2"
        notebook.click("Measure the strategies")
        notebook.cell("import asyncio\nwhile not table_job.job.running: await asyncio.sleep(0.01)")
        notebook.cell("table_job.cancel_button.click(); await table_job.wait()")
        assert notebook.cell("print(table_job.status.value)").strip() == "cancelled"


def test_requests_are_summed_up_and_settings_found(smoke, kernel, tmp_path):
    file = tmp_path / "samples.csv"
    small = {"MAX_NEW_TOKENS": 12, "REQUESTS": 10, "TRIAL_REQUESTS": 3, "SAVE_SAMPLES_TO": str(file)}
    before, report = tmp_path / "before.json", tmp_path / "report.html"
    save_result(new_result("monitoring", "Before", [{"what": "requests", "p95_s": 9.0}], "what"), before)
    small |= {"SAVE_TO": str(tmp_path / "now.json"), "COMPARE_WITH": [str(before)], "REPORT_TO": str(report)}
    with kernel.run("07_monitoring", CHECKPOINT=smoke, **small) as notebook:
        text = notebook.text()
        assert "all right" in text and "10 requests noted" in text and "p95 (s)" in text
        assert "기준" in text  # both the advice and the line that all is well name it
        assert len(file.read_text().splitlines()) >= 11
        assert load_result(tmp_path / "now.json").rows[0]["requests"] == 10
        assert "p95_s: requests went to" in report.read_text(encoding="utf-8")
        assert any("texts a second" in picture for picture in notebook.pictures())
        notebook.move("requests per trial", 200)
        notebook.move("requests a second", 1.0)
        notebook.click("Search")
        notebook.cell("import asyncio\nwhile not panel.state.running: await asyncio.sleep(0.01)")
        notebook.click("Cancel")
        assert notebook.cell("await panel.state.wait(); print(panel.state.status)").strip() == "cancelled"


@pytest.mark.server
def test_a_server_is_started_loaded_tuned_and_stopped(smoke, kernel, tmp_path):
    file = tmp_path / "server.json"
    with kernel.run("08_torchserve", CHECKPOINT=smoke, CLIENTS=4, SECONDS=4.0, SAVE_TO=str(file)) as notebook:
        assert [row["texts per second"] > 0 for row in load_result(file).rows] == [True] * 3
        text = notebook.text()
        assert "all right" in text and "did you mean 'temperature'?" in text and "shoal_requests_total" in text
        pictures = notebook.pictures()
        assert any("texts a second with at most" in picture for picture in pictures)
        assert re.search(r"4 clients: the limit goes from 1 to (2|4|8|16)\b", text)
        assert any("of the last requests were answered" in picture for picture in pictures)
        notebook.click("Send load")
        notebook.cell("await panel.state.wait()")
        assert "no server runs" in notebook.cell("print(panel.state.error)")
        notebook.click("Start the server")
        notebook.cell("await panel.state.wait()")
        notebook.move("batch limit (live)", 3)
        told = "import time; time.sleep(1); print(panel.state.ask()['batch_limit'], panel.state.status)"
        assert notebook.cell(told).split()[0] == "3"
        notebook.click("Stop the server")
        assert notebook.cell("await panel.state.wait(); print(panel.state.up)").strip() == "False"
