"""A TorchServe that outlives the command that started it: a file says where it is, another command stops it.

So do servers whose program was killed: each is noted while it runs, and the next program ends those without an owner.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.serving.processes import deferred_signals, end_group, group_members
from shoal.serving.server import Ports, ServerError, TorchServe, frontend_pid


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
    left = note(server, state_file)
    server.release()
    return left


def note(server: TorchServe, state_file: Path) -> Background:
    """Write down how to find a server that runs."""
    import psutil

    if server.pid is None:
        raise ServerError("this TorchServe is not running")
    left = Background(
        pid=server.pid,
        created=psutil.Process(server.pid).create_time(),
        name=server.name,
        run_dir=str(server.run_dir),
        log_dir=str(server.log_dir),
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


def own_folder(folder: Path) -> Path:
    """A directory in `folder` that tells, by its name, that this process made it; for a server's note and archive."""
    import psutil

    me = psutil.Process()
    mine = folder / f"{me.pid}-{int(me.create_time())}"
    mine.mkdir(parents=True, exist_ok=True)
    return mine


def stop_orphans(folder: Path) -> int:
    """Stop the servers noted in `own_folder`s of processes that are gone, and remove those; returns how many ran."""
    import psutil

    stopped = 0
    for place in folder.glob("*-*"):
        pid, _, created = place.name.partition("-")
        if not (pid.isdigit() and created.isdigit()):
            continue
        try:
            alive = int(psutil.Process(int(pid)).create_time()) == int(created)
        except psutil.NoSuchProcess:
            alive = False
        if not alive:
            stopped += sum(stop(file) for file in place.rglob("server.json"))
            shutil.rmtree(place, ignore_errors=True)
    return stopped


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
