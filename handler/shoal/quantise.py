"""Writes a checkpoint whose layers are kept in one byte a weight: a third of float32's size on disk.

The directory is like any other of 1.5's format, but for the layers' matrices: X.weight is int8, (out, in), and X.scales
bfloat16, (out,), as in upstream's own int8 checkpoints. Everything else of the transformer is bfloat16.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from shoal.checkpoint import SCALES, open_checkpoint
from shoal.errors import CheckpointError
from shoal.model.dual_ar import expected_shapes
from shoal.model.linear import quantise_rows


def quantise_checkpoint(source: str | Path, target: str | Path) -> Path:
    """Write an int8 copy of a checkpoint, voices included; it loads like any other, as int8 unless told otherwise.

    Each weight is off by at most half of its row's largest weight / 127.

    Raises:
        CheckpointError: the source cannot be used, is quantised already, or the target exists and is not empty.
    """
    checkpoint, target = open_checkpoint(source), Path(target)
    if checkpoint.quantised:
        raise CheckpointError(f"{checkpoint.path} is quantised already")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not empty: name a new directory")
    target.mkdir(parents=True, exist_ok=True)
    state, wanted = checkpoint.read_dual_ar(), expected_shapes(checkpoint.config)
    out: dict[str, torch.Tensor] = {}
    for name in [name for name in wanted if name in state]:
        tensor = state.pop(name)
        if "layers." in name and tensor.ndim == 2:
            out[name], out[name.removesuffix(".weight") + SCALES] = quantise_rows(tensor)
        else:
            out[name] = tensor.to(torch.bfloat16).contiguous()
    save_file(out, target / "model.safetensors", metadata={"quantisation": "int8"})
    for file in (checkpoint.codec_file, checkpoint.tokenizer_file, checkpoint.path / "codec.json"):
        if file.exists():
            shutil.copyfile(file, target / file.name)
    (target / "config.json").write_text(json.dumps(checkpoint.config.model_dump(), indent=1), encoding="utf-8")
    if (checkpoint.path / "voices").is_dir():
        shutil.copytree(checkpoint.path / "voices", target / "voices")
    return target
