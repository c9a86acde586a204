"""Builds the model archive (.mar) that TorchServe loads: the handler, its configuration and this library.

Weights stay where they are and are named by path, unless asked for. Knows nothing of what the checkpoint holds.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import CheckpointError, DependencyError, ShoalError
from shoal.project import MODEL_NAME, PACKAGE_DIR, handler_dir

# The checkpoint directory in an archive that carries its weights; relative, so seen from where TorchServe unpacks it.
WEIGHTS_DIR = "checkpoint"


def build_archive(
    output_dir: str | Path,
    *,
    name: str = MODEL_NAME,
    version: str = "1.0",
    checkpoint: str | Path,
    include_weights: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Write `output_dir`/`name`.mar and return its path.

    Args:
        output_dir: Made where missing; an older archive of that name is replaced once the new one is complete.
        name: The model's name in the server's URLs.
        version: The model's version in the server's URLs.
        checkpoint: Directory of a Fish Speech 1.5 checkpoint.
        include_weights: Copy the checkpoint into the archive. Slow to build and to start (35 s and 25 s per GB), but
            the archive then serves on a machine that has nothing else.
        overrides: Values for model-config.yaml, nested as there: {"batchSize": 4, "handler": {"cache_bytes": 0}}.

    Raises:
        CheckpointError: the checkpoint is no directory with a config.json.
        DependencyError: the archiver or PyYAML is not installed.
        ShoalError: the handler's files were not found, or the archiver failed.
    """
    checkpoint = Path(checkpoint).expanduser().resolve()
    if not (checkpoint / "config.json").is_file():
        raise CheckpointError(
            f"{checkpoint} has no config.json, so it is no checkpoint: name the directory that holds it and model.pth"
        )
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_\-.]*", name):
        raise ShoalError(f"{name!r} is no model name: use letters, digits, '_', '-' and '.', a letter or digit first")
    for module, package in (("model_archiver", "torch-model-archiver"), ("yaml", "PyYAML")):
        if importlib.util.find_spec(module) is None:
            raise DependencyError(
                f'building an archive needs {package}: pip install "shoal[serve]" or pip install {package}'
            )
    source = handler_dir()
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)

    # The archiver deletes $TMPDIR/NAME first, and commas and wildcards in paths are syntax to it: its own place then.
    with tempfile.TemporaryDirectory(prefix="shoal-archive-") as scratch:
        stage = Path(scratch, "stage")
        skip = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
        # --extra-files flattens the directory that it is given, so it gets the parent of the package.
        shutil.copytree(PACKAGE_DIR, stage / "extra" / "shoal", ignore=skip)
        if include_weights:
            shutil.copytree(checkpoint, stage / "extra" / WEIGHTS_DIR, ignore=skip)
        shutil.copy2(source / "fish_speech_handler.py", stage)
        named = WEIGHTS_DIR if include_weights else str(checkpoint)
        config = _model_config(source / "model-config.yaml", named, overrides or {})
        (stage / "model-config.yaml").write_text(config, encoding="utf-8")
        built = _run_archiver(stage, Path(scratch), name, version, stored=include_weights)
        return _move_into_place(built, output_dir / f"{name}.mar")


def _model_config(template: Path, checkpoint: str, overrides: Mapping[str, Any]) -> str:
    """The template's values with the checkpoint's path and the overrides in their place, as YAML."""
    import yaml

    config = yaml.safe_load(template.read_text(encoding="utf-8")) or {}
    config = _merged(config, {"handler": {"checkpoint": checkpoint}})
    return yaml.safe_dump(_merged(config, overrides), sort_keys=False, allow_unicode=True)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, sections merged key by key."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        merged[key] = _merged(old, value) if both else value
    return merged


def _run_archiver(stage: Path, scratch: Path, name: str, version: str, *, stored: bool) -> Path:
    """Run torch-model-archiver over the staged files; the finished archive's path."""
    out, tmp = scratch / "out", scratch / "tmp"
    out.mkdir()
    tmp.mkdir()
    command = [sys.executable, "-m", "model_archiver.model_packaging", "--model-name", name, "--version", version]
    command += ["--handler", "fish_speech_handler.py", "--config-file", "model-config.yaml", "--extra-files", "extra"]
    command += ["--export-path", str(out), "--archive-format", "zip-store" if stored else "default"]
    done = subprocess.run(command, cwd=stage, env={**os.environ, "TMPDIR": str(tmp)}, capture_output=True, text=True)
    built = out / f"{name}.mar"
    if done.returncode or not built.is_file():
        raise ShoalError(f"torch-model-archiver failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    return built


def _move_into_place(built: Path, target: Path) -> Path:
    """Replace the target at once: a server that starts meanwhile sees the old archive or the new one, never half."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        shutil.copyfile(built, partial)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return target.resolve()
