"""Runs a notebook in a real kernel, then presses buttons and moves sliders by the messages that a browser sends."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


class Kernel:
    """A kernel that several notebooks use in turn, since most of a short notebook's time goes into imports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manager = AsyncKernelManager(kernel_name="python3")

    def run(self, name: str, **parameters: Any) -> Driver:
        """Execute a copy of a notebook with other parameters than its `parameters` cell's, in an empty namespace."""
        return Driver(name, self, parameters)

    def restart(self) -> None:
        """As JupyterLab's button does: nothing that was there is left."""
        run_sync(self.manager.restart_kernel)(now=True)

    def stop(self) -> None:
        run_sync(self.manager.shutdown_kernel)(now=True)


class Driver:
    """A notebook that has run from top to bottom. Use it as a context manager."""

    def __init__(self, name: str, kernel: Kernel, parameters: dict[str, Any]) -> None:
        self.notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
        (cell,) = [c for c in self.notebook.cells if "parameters" in c.metadata.get("tags", [])]
        cell.source += "\n" + "\n".join(f"{key} = {value!r}" for key, value in parameters.items())
        self.client = NotebookClient(
            self.notebook, km=kernel.manager, timeout=240, resources={"metadata": {"path": str(kernel.folder)}}
        )
        self._stack = ExitStack()

    def __enter__(self) -> Driver:
        self._stack.enter_context(self.client.setup_kernel(cleanup_kc=False))  # True would end the kernel too
        self._stack.callback(self.client.kc.stop_channels)
        try:
            for index, cell in enumerate(self.notebook.cells):
                self.client.execute_cell(cell, index)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.cell("%reset -f")
        self._stack.close()

    def cell(self, source: str) -> str:
        """Run more code in the notebook's namespace; what it printed."""
        self.notebook.cells.append(nbformat.v4.new_code_cell(source))
        done = self.client.execute_cell(self.notebook.cells[-1], len(self.notebook.cells) - 1)
        return "".join(output.get("text", "") for output in done.outputs)

    def text(self) -> str:
        """All that the cells show, as text and HTML."""
        parts = []
        for cell in self.notebook.cells:
            for output in cell.get("outputs", []):
                assert output.output_type != "error"
                data = output.get("data", {})
                parts += [output.get("text", ""), data.get("text/plain", ""), data.get("text/html", "")]
        return "\n".join(parts)

    def widgets(self, **traits: Any) -> list[tuple[str, dict[str, Any]]]:
        """(model id, state) of all widgets that have these values."""
        found = [(key, state) for key, state in self.client.widget_state.items() if "_model_name" in state]
        return [(key, state) for key, state in found if all(state.get(t) == v for t, v in traits.items())]

    def pictures(self) -> list[str]:
        """All plots in widgets."""
        return [state["value"] for _, state in self.widgets() if "<svg" in str(state.get("value"))]

    def click(self, description: str) -> None:
        """Press the button that says this."""
        ((model, _),) = self.widgets(description=description, _model_name="ButtonModel")
        self._send(model, {"method": "custom", "content": {"event": "click"}})

    def move(self, description: str, value: float) -> None:
        """Give the number box of this name another value."""
        found = [key for key, state in self.widgets(description=description) if "TextModel" in state["_model_name"]]
        (model,) = found
        self._send(model, {"method": "update", "state": {"value": value}, "buffer_paths": []})

    def _send(self, comm: str, data: dict[str, Any]) -> None:
        client = self.client.kc
        client.shell_channel.send(client.session.msg("comm_msg", {"comm_id": comm, "data": data}))
