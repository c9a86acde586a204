"""Starts one TorchServe, waits until its workers are ready, and stops it so that no process stays behind.

Each server has its own ports, temporary directory, logs and process group, so several can run side by side. Knows an
archive's path; knows nothing of speech.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from shoal.errors import DependencyError, ShoalError
from shoal.serving.control import set_limits
from shoal.serving.java import find_java
from shoal.serving.probe import handler_says, last_words, read_tokens, worker_died, worker_error, worker_states
from shoal.serving.processes import deferred_signals, end_group
from shoal.serving.properties import escaped, read_properties

# A unix socket's path may take about 100 bytes, and TorchServe puts its sockets into TMPDIR.
_LONGEST_TMPDIR = 60


class ServerError(ShoalError):
    """TorchServe did not start, a worker died while loading, or it was not ready in time."""


@dataclass(frozen=True)
class Ports:
    """The five ports that one TorchServe listens on, all on 127.0.0.1."""

    inference: int = 8080
    management: int = 8081
    metrics: int = 8082
    grpc_inference: int = 7070
    grpc_management: int = 7071

    @classmethod
    def free(cls) -> Ports:
        """Ports that nothing listens on now."""
        sockets = [socket.socket() for _ in range(5)]
        try:
            for s in sockets:
                s.bind(("127.0.0.1", 0))
            return cls(*(s.getsockname()[1] for s in sockets))
        finally:
            for s in sockets:
                s.close()

    def taken(self) -> list[int]:
        """Those of these ports that something listens on already."""
        return [port for port in asdict(self).values() if not _can_bind(port)]


def _can_bind(port: int) -> bool:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


class TorchServe:
    """One TorchServe process with one model archive.

        with TorchServe(archive) as server:
            server.wait_ready()
            ...  # POST to server.predict_url

    Args:
        archive: The .mar to serve; the model is named as the file.
        config: A config.properties to start from; None starts from TorchServe's defaults.
        overrides: Values over the config's; addresses, ports and the model are set here in any case.
        ports: None picks free ones.
        log_dir: Where logs are kept; None keeps them until the server stops.
        python: The interpreter that runs TorchServe and its workers.
        env: Environment variables beside the inherited ones.
    """

    def __init__(
        self,
        archive: str | Path,
        *,
        config: str | Path | None = None,
        overrides: Mapping[str, str] | None = None,
        ports: Ports | None = None,
        log_dir: str | Path | None = None,
        python: str = sys.executable,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.archive = Path(archive).resolve()
        self.name = self.archive.stem
        self.ports = ports or Ports.free()
        self._config = Path(config) if config else None
        self._overrides = dict(overrides or {})
        self._log_dir = Path(log_dir).resolve() if log_dir else None
        self._python = python
        self._env = dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None
        self.run_dir: Path | None = None

    @property
    def url(self) -> str:
        """Base URL of the inference API."""
        return f"http://127.0.0.1:{self.ports.inference}"

    @property
    def predict_url(self) -> str:
        """Where requests go."""
        return f"{self.url}/predictions/{self.name}"

    @property
    def management_url(self) -> str:
        """Base URL of the management API."""
        return f"http://127.0.0.1:{self.ports.management}"

    @property
    def metrics_url(self) -> str:
        """Where Prometheus reads."""
        return f"http://127.0.0.1:{self.ports.metrics}/metrics"

    @property
    def log_dir(self) -> Path:
        """The directory with console.log, ts_log.log, model_log.log and access_log.log."""
        if self._log_dir is None:
            raise ServerError("the server keeps its logs in a temporary directory, and it has not been started")
        return self._log_dir

    @property
    def control_file(self) -> Path:
        """The file through which limits are changed while it runs (`shoal.serving.control.set_limits`)."""
        if self.run_dir is None:
            raise ServerError("the server has not been started")
        return Path(self._env.get("SHOAL_CONTROL") or self.run_dir / "control.json")

    @property
    def pid(self) -> int | None:
        """Process id of the launcher, which leads the process group; None when not running."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def __enter__(self) -> TorchServe:
        return self.start()

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def start(self) -> TorchServe:
        """Start the processes and return at once; `wait_ready` waits for the workers.

        Raises:
            DependencyError: TorchServe or a Java runtime is missing.
            ServerError: the archive is missing, a port is taken, or the server runs already.
        """
        if self._process is not None:
            raise ServerError("this TorchServe was started already")
        if not self.archive.is_file():
            raise ServerError(f"{self.archive}: no such archive. Build it with: shoal archive")
        if self._python == sys.executable and importlib.util.find_spec("ts") is None:
            raise DependencyError('TorchServe is not installed: pip install "shoal[serve]"')
        taken = self.ports.taken()
        if taken:
            raise ServerError(f"port {', '.join(map(str, taken))} on 127.0.0.1 is taken: stop what listens there")
        java = find_java()
        with deferred_signals():
            self.run_dir = _short_temporary_directory()
            self._log_dir = self._log_dir or self.run_dir / "logs"
            shutil.rmtree(self._log_dir, ignore_errors=True)  # so that an old log is not taken for this start's
            self._log_dir.mkdir(parents=True, exist_ok=True)
            properties = self._write_config(self.run_dir)
            command = [self._python, "-m", "ts.model_server", "--start", "--foreground", "--ncs"]
            command += ["--ts-config", str(properties), "--model-store", str(self.archive.parent)]
            with open(self._log_dir / "console.log", "wb") as console:
                self._process = subprocess.Popen(
                    command,
                    cwd=self.run_dir,
                    env=self._environment(self.run_dir, java.home),
                    stdin=subprocess.DEVNULL,
                    stdout=console,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a terminal's Ctrl-C reaches us only, and we end the whole group
                )
            atexit.register(self.stop)
        return self

    def wait_ready(self, timeout_s: float = 300.0, progress: Callable[[float, str], None] | None = None) -> None:
        """Wait until every worker is READY. (/ping says Healthy before the workers have loaded.)

        Args:
            timeout_s: Seconds to wait.
            progress: Called about four times a second with the seconds waited and a word on the state.

        Raises:
            ServerError: a worker or the server died (with its last words), or time is up.
        """
        begin = time.monotonic()
        while True:
            waited = time.monotonic() - begin
            if self._process is None or self._process.poll() is not None:
                self._fail("TorchServe ended while starting", last_words(self.log_dir / "console.log"))
            if worker_died(self.log_dir):
                time.sleep(0.5)  # the traceback follows the line that says so
                self._fail("the model's worker did not start", worker_error(self.log_dir))
            states = self.worker_states()
            if states and all(state == "READY" for state in states):
                return
            if progress:
                progress(waited, "workers load the model" if states else "TorchServe starts")
            if waited > timeout_s:
                self._fail(f"no worker was ready after {timeout_s:.0f} s", worker_error(self.log_dir))
            time.sleep(0.25)

    def _fail(self, what: str, why: str) -> NoReturn:
        kept = self.run_dir is None or not self.log_dir.is_relative_to(self.run_dir)
        raise ServerError(f"{what}: {why}" + (f" (logs: {self.log_dir})" if kept else ""))

    def worker_states(self) -> list[str]:
        """The states of the model's workers as TorchServe reports them; empty while it does not answer."""
        return worker_states(self.management_url, self.name, self.tokens.get("management"))

    @property
    def tokens(self) -> dict[str, str]:
        """Where the configuration turns tokens on: the keys, by "inference" and "management"; else {}."""
        return read_tokens(self.run_dir) if self.run_dir else {}

    def wait(self) -> int:
        """Wait until the server ends by itself; its exit status."""
        if self._process is None:
            raise ServerError("this TorchServe is not running")
        return self._process.wait()

    def stop_taking(self, timeout_s: float = 30.0) -> bool:
        """Turn new requests away with a 503, once this has returned True; False if the handler did not say so in time.

        The handler looks at its control file a few times a second, so writing it alone closes nothing yet.
        """
        set_limits(self.control_file, draining=True)
        return handler_says(self.predict_url, self.tokens.get("inference"), lambda told: told["draining"], timeout_s)

    def drain(self, timeout_s: float = 30.0) -> bool:
        """Take no new requests (they get a 503) and wait until those that are there are done; False if time was up."""
        set_limits(self.control_file, draining=True)
        return handler_says(
            self.predict_url,
            self.tokens.get("inference"),
            lambda told: told["draining"] and told["requests"] == 0,
            timeout_s,
        )

    def stop(self, grace_s: float = 10.0) -> None:
        """End the server and its workers; what is left after the grace time is killed. Idempotent."""
        process, run_dir = self._process, self.run_dir
        if process is None or run_dir is None:
            return
        with deferred_signals():
            end_group(process.pid, frontend_pid(run_dir), grace_s)
            process.wait()
            atexit.unregister(self.stop)
            shutil.rmtree(run_dir, ignore_errors=True)
            self._process = None

    def release(self) -> int:
        """Let the server outlive this process and return its process group; `background` stops it later."""
        if self._process is None:
            raise ServerError("this TorchServe is not running")
        group = self._process.pid
        atexit.unregister(self.stop)
        self._process.returncode = 0  # Popen warns about a child that it has not seen end
        self._process = None
        return group

    def _write_config(self, run_dir: Path) -> Path:
        """This start's configuration: the given file's lines, the overrides, then what must be this server's own."""
        p = self.ports
        own = dict(
            self._overrides,
            inference_address=self.url,
            management_address=self.management_url,
            metrics_address=f"http://127.0.0.1:{p.metrics}",
            grpc_inference_address="127.0.0.1",
            grpc_management_address="127.0.0.1",
            grpc_inference_port=str(p.grpc_inference),
            grpc_management_port=str(p.grpc_management),
            model_store=str(self.archive.parent),
            load_models=f"{self.name}={self.archive.name}",
        )
        values = read_properties(self._config) if self._config else {"disable_token_authorization": "true"}
        if self._config and "metrics_config" in values:  # relative to the file that names it, wherever we run
            own["metrics_config"] = str(self._config.resolve().parent / values["metrics_config"])
        values.update({key: escaped(value) for key, value in own.items()})
        path = run_dir / "config.properties"
        path.write_text("".join(f"{k}={v}\n" for k, v in values.items()), encoding="utf-8")
        return path

    def _environment(self, run_dir: Path, java_home: str | None) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if k not in ("TS_CONFIG_FILE", "JAVA_HOME")}
        env.update(dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(run_dir)))
        env.update(dict.fromkeys(("LOG_LOCATION", "METRICS_LOCATION"), str(self.log_dir)))
        # Threads that spin while they wait were 15 times slower beside other busy processes.
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        env["SHOAL_CONTROL"] = str(run_dir / "control.json")
        if java_home:
            env["JAVA_HOME"] = java_home
        return env | self._env


def frontend_pid(run_dir: Path) -> int | None:
    """The frontend's process id, from the file that TorchServe's launcher writes into TMPDIR."""
    try:
        return int((run_dir / ".model_server.pid").read_text())
    except (OSError, ValueError):
        return None


def _short_temporary_directory() -> Path:
    parent = tempfile.gettempdir()
    if len(parent) > _LONGEST_TMPDIR and os.access("/tmp", os.W_OK):
        parent = "/tmp"
    return Path(tempfile.mkdtemp(prefix="shoal-", dir=parent))
