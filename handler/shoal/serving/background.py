"""A TorchServe that outlives the command that started it: a file says where it is, another command stops it."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.serving.processes import deferred_signals, end_group, group_members
from shoal.serving.server import Ports, TorchServe, frontend_pid


@dataclass(frozen=True)
class Background:
    """What is known of a server that was left running."""

    pid: int  # the launcher's, which is the process group's id too
    created: float  # when that process was made, in seconds since the epoch: process ids are used again
    name: str
    run_dir: str
    log_dir: str
    ports: Ports

    @property
    def predict_url(self) -> str:
        """Where requests go."""
        return f"http://127.0.0.1:{self.ports.inference}/predictions/{self.name}"


def detach(server: TorchServe, state_file: Path) -> Background:
    """Leave a started server running when this process ends, and write down how to find it."""
    import psutil

    run_dir, log_dir = server.run_dir, server.log_dir
    group = server.release()
    left = Background(
        pid=group,
        created=psutil.Process(group).create_time(),
        name=server.name,
        run_dir=str(run_dir),
        log_dir=str(log_dir),
        ports=server.ports,
    )
    state_file.parent.mkdir(parents=True, exist_ok=True)
    state_file.write_text(json.dumps(asdict(left), indent=1), encoding="utf-8")
    return left


def running(state_file: Path) -> Background | None:
    """The server that `detach` left, if it still runs; a stale file is removed."""
    import psutil

    try:
        values = json.loads(state_file.read_text(encoding="utf-8"))
        left = Background(**(values | {"ports": Ports(**values["ports"])}))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        state_file.unlink(missing_ok=True)
        return None
    try:
        same = abs(psutil.Process(left.pid).create_time() - left.created) < 2
    except psutil.NoSuchProcess:
        same = True  # the launcher died alone; no new process takes a number that still names a group
    if same and group_members(left.pid):
        return left
    shutil.rmtree(left.run_dir, ignore_errors=True)
    state_file.unlink(missing_ok=True)
    return None


def stop(state_file: Path, grace_s: float = 10.0) -> bool:
    """Stop the server that `detach` left running. False where none runs."""
    left = running(state_file)
    if left is None:
        return False
    with deferred_signals():
        end_group(left.pid, frontend_pid(Path(left.run_dir)), grace_s)
        shutil.rmtree(left.run_dir, ignore_errors=True)
        state_file.unlink(missing_ok=True)
    return True
