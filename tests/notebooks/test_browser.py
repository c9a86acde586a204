"""A real browser opens the notebooks in JupyterLab, runs them, moves sliders, presses buttons, listens and looks.

SHOAL_SCREENSHOTS=DIR keeps the screenshots there. CHECKPOINT=DIR runs on that checkpoint instead of random weights.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from shoal.random_checkpoint import write_random_checkpoint

from tests.notebooks.driver import NOTEBOOKS
from tests.notebooks.lab import LOOKED_FOR, LabPage, browser, copy_notebook, find_chromium, jupyter_lab

CHROMIUM = find_chromium()
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
PARAMETERS = {
    "04_dynamic_batching": {"REQUESTS": 8, "RATE": 20.0},
    "05_caching": {"REQUESTS": 12},
    "08_torchserve": {"SECONDS": 3.0},
}
WAITING = (
    """
import time
from shoal.ui.jobs import JobButton

def work(report, cancelled):
    for i in range(2400):
        report(f"step {i}")
        time.sleep(0.05)
        if cancelled():
            return

job = JobButton("Go", work)
job.view
""",
    'job.start()\nawait job.wait()\nprint("ended:", job.status.value)',
)
pytestmark = [
    pytest.mark.notebook,
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason=f"no browser: none of {', '.join(LOOKED_FOR)} is installed (apt install chromium)"
    ),
]
sync_api = pytest.importorskip("playwright.sync_api", reason='no Playwright: pip install "shoal[test]"')
expect = sync_api.expect
expect.set_options(timeout=60_000)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder, state = tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("lab")
    checkpoint = os.environ.get("CHECKPOINT") or str(write_random_checkpoint(tmp_path_factory.mktemp("smoke")))
    for name, parameters in PARAMETERS.items():
        if (NOTEBOOKS / f"{name}.ipynb").exists():
            shorter = {} if os.environ.get("CHECKPOINT") else {"MAX_NEW_TOKENS": 16}
            copy_notebook(name, folder, {"CHECKPOINT": checkpoint, **shorter, **parameters})
    waiting = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in WAITING])
    waiting.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(waiting, folder / "waiting.ipynb")
    own = {"SHOAL_STATE_DIR": str(state / "server"), "OMP_NUM_THREADS": "1"}
    with jupyter_lab(folder, state, **own) as address:
        yield address
    if (state / "server").exists():  # a notebook that failed half-way leaves its server behind
        subprocess.run([sys.executable, "-m", "shoal", "stop"], env=os.environ | own, check=False)


@pytest.fixture(scope="module")
def chromium():
    with browser(CHROMIUM) as chromium:
        yield chromium


@pytest.fixture
def opened(lab, chromium):
    """Opens a notebook by name and runs it from top to bottom."""
    pages = []

    def open_and_run(name: str) -> LabPage:
        page = chromium.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(60_000)
        pages.append(page)
        notebook = LabPage(page, lab, name)
        notebook.run_all()
        assert notebook.errors() == []
        expect(notebook.notebook.get_by_text("all right").first).to_be_visible()
        return notebook

    yield open_and_run
    for page in pages:
        page.evaluate("async () => { await window.jupyterapp.shell.currentWidget.sessionContext.shutdown(); }")
        page.close()


@pytest.fixture
def pictures(tmp_path):
    folder = Path(os.environ.get("SHOAL_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def move_slider(notebook: LabPage, name: str, key: str) -> tuple[str, str]:
    """Press a key on the slider beside the number box of that name; the box's values before and after."""
    box = notebook.notebook.get_by_label(name, exact=True).first
    before = box.input_value()
    row = box.locator("xpath=ancestor::*[contains(@class, 'widget-hbox')][1]")
    row.get_by_role("slider").first.press(key)
    expect(box).not_to_have_value(before)
    return before, box.input_value()


def listen(notebook: LabPage) -> None:
    """Play, switch to the second take while it plays: it goes on at the same place, and loudness is never touched."""
    player = notebook.notebook.locator(".shoal-ab").last
    player.scroll_into_view_if_needed()
    sounds = player.locator("audio")
    sounds.evaluate_all("all => all.forEach(a => { a.playbackRate = 0.1; })")  # else they end before we look
    player.get_by_role("button", name="play").click()
    expect(player.get_by_role("button", name="pause")).to_be_visible()
    player.get_by_role("button", name="pause").press("2")
    expect(player.get_by_role("radio").nth(1)).to_be_checked()
    first, second, *_ = sounds.evaluate_all(
        """all => all.map((a) => ({
            volume: a.volume, muted: a.muted, seconds: a.duration, paused: a.paused, at: a.currentTime,
        }))"""
    )
    assert all(sound["volume"] == 1 and not sound["muted"] and sound["seconds"] > 0.05 for sound in (first, second))
    assert first["paused"], "one take is heard at a time"
    assert second["at"] >= min(first["at"], second["seconds"] - 0.02) - 0.02
    expect(player.get_by_label("position")).to_have_attribute("aria-valuetext", re.compile(r"\d s of \d"))


def look(notebook: LabPage, name: str, folder: Path) -> None:
    """A picture in both themes; all text of plots, tables and panels stands out from what is behind it."""
    cells = notebook.notebook.locator(".jp-Cell")
    tops = [box["y"] for box in (cells.first.bounding_box(), cells.last.bounding_box())]
    notebook.page.set_viewport_size({"width": 1280, "height": min(6000, round(tops[1] - tops[0]) + 400)})
    cells.first.scroll_into_view_if_needed()
    for theme, title in THEMES.items():
        notebook.use_theme(title)
        taken = notebook.page.screenshot(path=folder / f"{name}-{theme}.png", animations="disabled")
        assert len(taken) > 20_000
        for selector in (".jp-Notebook svg[role=img] text", ".jp-Notebook td", ".shoal-ab label", ".shoal-status"):
            ratios = notebook.contrasts(selector)
            assert all(ratio >= 3 for ratio in ratios), (theme, selector, min(ratios))
        assert notebook.contrasts(".jp-Notebook svg[role=img] text"), "there is a plot with words"


def test_requests_are_sent_and_cancelled(opened, pictures):
    notebook = opened("04_dynamic_batching")
    before, after = move_slider(notebook, "batch capacity", "ArrowLeft")
    assert int(after) < int(before)
    notebook.button("Send requests").click()
    expect(notebook.button("Send requests")).to_be_disabled()
    expect(notebook.button("Send requests")).to_be_enabled()
    status = notebook.notebook.get_by_role("status")
    expect(status).to_have_text("done")
    notebook.notebook.get_by_label("requests", exact=True).fill("200")
    notebook.notebook.get_by_label("requests a second", exact=True).fill("2")
    notebook.notebook.get_by_label("requests a second", exact=True).press("Enter")
    notebook.button("Send requests").press("Enter")  # by keyboard
    expect(status).to_have_text(re.compile("answered"))
    notebook.button("Cancel").click()
    expect(status).to_have_text("cancelled")
    expect(notebook.notebook.locator("svg[aria-label*='requests are answered']")).to_be_visible()
    listen(notebook)
    look(notebook, "04_dynamic_batching", pictures)


def clear(notebook: LabPage) -> None:
    """Clear the cache, and wait until it is: a button pressed while another's work runs does nothing."""
    notebook.button("Clear the cache").click()
    expect(notebook.notebook.get_by_role("row", name=re.compile(r"^0 0 0%"))).to_be_visible()
    expect(notebook.button("Send requests")).to_be_enabled()


def test_the_cache_is_filled_bounded_and_cleared(opened, pictures):
    notebook = opened("05_caching")
    before, after = move_slider(notebook, "entries at most", "ArrowRight")
    assert int(after) == int(before) + 1
    status = notebook.notebook.get_by_role("status")
    clear(notebook)
    notebook.button("Send requests").click()
    expect(notebook.notebook.locator("svg[aria-label*='of 12 requests come from the cache']")).to_be_visible()
    expect(status).to_have_text("done")
    listen(notebook)
    look(notebook, "05_caching", pictures)
    requests = notebook.notebook.get_by_label("requests", exact=True)
    requests.fill("500")
    requests.press("Enter")
    clear(notebook)
    notebook.button("Send requests").click()
    expect(status).to_have_text(re.compile("of 500 requests"))
    notebook.button("Cancel").click()
    expect(status).to_have_text("cancelled")
    notebook.restart_and_run_all()
    assert notebook.errors() == []
    expect(status).to_have_text("done")


def test_cancel_works_while_a_cell_waits_for_the_job(lab, chromium):
    page = chromium.new_page()
    page.set_default_timeout(60_000)
    notebook = LabPage(page, lab, "waiting")
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }")  # not to its end
    expect(notebook.notebook.get_by_role("status")).to_have_text(re.compile("step [1-9]"))
    notebook.button("Cancel").click()
    expect(notebook.notebook.get_by_text("ended: cancelled")).to_be_visible()
    page.close()


@pytest.mark.skipif(not (NOTEBOOKS / "08_torchserve.ipynb").exists(), reason="there is no notebook 08 yet")
def test_a_server_is_started_tuned_and_stopped(opened, pictures):
    notebook = opened("08_torchserve")
    status = notebook.notebook.get_by_role("status")
    notebook.button("Start the server").click()
    expect(notebook.button("Start the server")).to_be_disabled()
    expect(status).to_have_text("done")
    notebook.button("Send load").click()
    expect(notebook.button("Cancel")).to_be_enabled()
    slider = notebook.notebook.get_by_role("slider").first
    value, most = slider.get_attribute("aria-valuenow"), slider.get_attribute("aria-valuemax")
    slider.press("ArrowLeft" if value == most else "ArrowRight")
    expect(slider).not_to_have_attribute("aria-valuenow", value)
    notebook.button("Cancel").click()
    expect(status).to_have_text("cancelled")
    notebook.button("Stop the server").click()
    expect(status).to_have_text("done")
    expect(notebook.notebook.locator("audio").first).to_be_attached()
    expect(notebook.notebook.locator("svg[role=img]").first).to_be_visible()
    look(notebook, "08_torchserve", pictures)
