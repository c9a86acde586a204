"""A JupyterLab of its own on copies of the notebooks, and a real browser that looks at it (Debian's chromium)."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import nbformat

from tests.notebooks.driver import NOTEBOOKS

LOOKED_FOR = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},  # else cells out of sight are not in the page
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "docmanager-extension/plugin": {"autosave": False},
}
_ARGUMENTS = (
    "--no-sandbox",  # chromium's sandbox does not start as root or in most containers
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--autoplay-policy=no-user-gesture-required",
)


def find_chromium() -> str | None:
    """Path of the browser: $SHOAL_CHROMIUM, else one on the PATH."""
    named = os.environ.get("SHOAL_CHROMIUM")
    return named or next((path for name in LOOKED_FOR if (path := shutil.which(name))), None)


def copy_notebook(name: str, folder: Path, parameters: dict[str, Any]) -> None:
    """A copy whose `parameters` cell ends with other values."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    (cell,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    cell.source += "\n" + "\n".join(f"{key} = {value!r}" for key, value in parameters.items())
    nbformat.write(notebook, folder / f"{name}.ipynb")


@contextmanager
def jupyter_lab(folder: Path, state: Path, **environment: str) -> Iterator[str]:
    """Serves `folder`; yields the address that opens `/lab/tree/NAME`, with a place for the name."""
    for plugin, settings in _SETTINGS.items():
        file = state / "settings" / "@jupyterlab" / f"{plugin}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings))
    own = {f"JUPYTER_{name}_DIR": str(state / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    own |= {"JUPYTERLAB_SETTINGS_DIR": str(state / "settings"), "JUPYTERLAB_WORKSPACES_DIR": str(state / "workspaces")}
    token, port = secrets.token_hex(16), _free_port()
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser"]
    command += [f"--port={port}", "--ServerApp.port_retries=0", f"--notebook-dir={folder}"]
    command += [f"--IdentityProvider.token={token}", "--LabApp.extension_manager=readonly"]
    with (state / "lab.log").open("w") as log:
        server = subprocess.Popen(
            command, env=os.environ | own | environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            _wait(f"http://127.0.0.1:{port}/api?token={token}", server, state / "lab.log")
            yield f"http://127.0.0.1:{port}/lab/tree/{{}}?reset&token={token}"
        finally:
            server.terminate()
            with suppress(subprocess.TimeoutExpired):
                server.wait(20)
            server.kill()


class LabPage:
    """One notebook open in the browser.

    Args:
        page: Playwright's.
    """

    def __init__(self, page: Any, address: str, name: str) -> None:
        self.page = page
        page.goto(address.format(f"{name}.ipynb"))
        page.wait_for_function("() => window.jupyterapp && window.jupyterapp.shell.currentWidget?.sessionContext")
        # without this Run All races the kernel
        page.evaluate(
            """async () => {
                const app = window.jupyterapp;
                await app.restored;
                const panel = app.shell.currentWidget;
                await panel.context.ready;
                await panel.sessionContext.ready;
                await panel.sessionContext.session.kernel.info;
                app.shell.collapseLeft();
            }"""
        )
        self.notebook = page.locator(".jp-Notebook")

    def command(self, name: str, **arguments: Any) -> None:
        """One of JupyterLab's commands, to its end."""
        call = "async ([name, arguments]) => { await window.jupyterapp.commands.execute(name, arguments); }"
        self.page.evaluate(call, [name, arguments])

    def run_all(self) -> None:
        self.command("notebook:run-all-cells")

    def restart_and_run_all(self) -> None:
        self.page.evaluate(
            """async () => {
                const context = window.jupyterapp.shell.currentWidget.sessionContext;
                await context.restartKernel();
                await context.session.kernel.info;
            }"""
        )
        self.run_all()

    def use_theme(self, name: str) -> None:
        """ "JupyterLab Light" or "JupyterLab Dark"."""
        self.command("apputils:change-theme", theme=name)
        self.page.wait_for_function(
            "light => document.body.dataset.jpThemeLight === light", arg=str("Light" in name).lower()
        )

    def errors(self) -> list[str]:
        """What cells failed with."""
        types = ("vnd.jupyter.stderr", "vnd.jupyter.error")
        selector = ", ".join(f'.jp-OutputArea-output[data-mime-type="application/{kind}"]' for kind in types)
        return self.page.locator(selector).all_inner_texts()

    def button(self, name: str) -> Any:
        return self.notebook.get_by_role("button", name=name, exact=True)

    def contrasts(self, selector: str) -> list[float]:
        """Of each visible text: how far its colour stands out from the page behind it (WCAG's ratio, 1 to 21)."""
        return self.page.locator(selector).evaluate_all(_CONTRAST)


_CONTRAST = """(texts) => {
    const parse = (colour) => (colour.match(/[\\d.]+/g) || []).map(Number);
    const light = ([r, g, b]) => {
        const linear = (c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        const [x, y, z] = [r, g, b].map((c) => linear(c / 255));
        return 0.2126 * x + 0.7152 * y + 0.0722 * z;
    };
    const behind = (element) => {
        for (let at = element; at; at = at.parentElement) {
            const colour = parse(getComputedStyle(at).backgroundColor);
            if (colour.length === 3 || colour[3] > 0.99) return colour;
        }
        return [255, 255, 255];
    };
    return texts.filter((text) => text.textContent.trim()).map((text) => {
        const style = getComputedStyle(text);
        const ink = parse(text instanceof SVGElement ? style.fill : style.color);
        const [a, b] = [light(ink), light(behind(text))].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05);
    });
}"""


@contextmanager
def browser(executable: str) -> Iterator[Any]:
    """Playwright's browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=list(_ARGUMENTS))
        try:
            yield chromium
        finally:
            chromium.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait(address: str, server: subprocess.Popen, log: Path) -> None:
    for _ in range(600):
        with suppress(OSError), urllib.request.urlopen(address, timeout=5):
            return
        if server.poll() is not None:
            break
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")
