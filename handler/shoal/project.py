"""Where things lie on disk: the project, its handler files, the default checkpoint, a running server's state.

Knows paths only; loads no model. Works in a checkout, and from an installed package where the working directory is one.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from shoal.errors import CheckpointError, ShoalError

PACKAGE_DIR = Path(__file__).resolve().parent
HANDLER_FILES = ("fish_speech_handler.py", "model-config.yaml")
MODEL_NAME = "fish_speech"


def project_root() -> Path:
    """The checkout that this package runs from, else the working directory."""
    checkout = PACKAGE_DIR.parent.parent
    return checkout if (checkout / "pyproject.toml").is_file() and PACKAGE_DIR.parent.name == "handler" else Path.cwd()


def handler_dir() -> Path:
    """The directory with the handler and its configuration.

    Raises:
        ShoalError: neither beside the package, nor in SHOAL_HANDLER_DIR, nor in ./handler.
    """
    tried = [PACKAGE_DIR.parent, Path.cwd() / "handler"]
    named = os.environ.get("SHOAL_HANDLER_DIR")
    if named:
        tried.insert(0, Path(named))
    for directory in tried:
        if all((directory / name).is_file() for name in HANDLER_FILES):
            return directory.resolve()
    raise ShoalError(
        f"{' and '.join(HANDLER_FILES)} were not found in {', '.join(map(str, tried))}: run this in a checkout of the "
        "project, or set SHOAL_HANDLER_DIR to its handler directory"
    )


def model_store() -> Path:
    """Where archives are built and the demo checkpoint lies; $SHOAL_MODEL_STORE names another place."""
    return Path(os.environ.get("SHOAL_MODEL_STORE") or project_root() / "model_store")


def state_dir() -> Path:
    """Where a running server leaves its process id and logs; $SHOAL_STATE_DIR names another place."""
    return Path(os.environ.get("SHOAL_STATE_DIR") or project_root() / ".shoal")


def find_checkpoint(given: str | Path | None = None) -> Path | None:
    """The checkpoint directory to use: the given one, else $CHECKPOINT, else model_store/demo; None where none is.

    Raises:
        CheckpointError: one was named, but is no directory.
    """
    named = given or os.environ.get("CHECKPOINT")
    if named:
        path = Path(named).expanduser().resolve()
        if not path.is_dir():
            raise CheckpointError(
                f"{path}: no such directory. Name a Fish Speech 1.5 checkpoint directory (config.json, model.pth, "
                "tokenizer.tiktoken, special_tokens.json and the codec's .pth)"
            )
        return path
    demo = model_store() / "demo"
    return demo if (demo / "config.json").is_file() else None


def ensure_checkpoint(given: str | Path | None = None) -> Path:
    """`find_checkpoint`, and where there is none, a small one with random weights, made once in model_store/smoke."""
    path = find_checkpoint(given)
    if path is not None:
        return path
    smoke = model_store() / "smoke"
    if not (smoke / "config.json").is_file():
        from shoal.random_checkpoint import write_random_checkpoint

        # Written aside and renamed: another process may do the same just now.
        with tempfile.TemporaryDirectory(prefix="smoke-", dir=_made(model_store())) as scratch:
            write_random_checkpoint(Path(scratch, "smoke"), size="smoke", seed=0)
            try:
                Path(scratch, "smoke").rename(smoke)
            except OSError:
                if not (smoke / "config.json").is_file():
                    raise
    return smoke


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory
