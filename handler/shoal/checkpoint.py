"""Reads a Fish Speech 1.5 directory exactly as published, checks it and loads it safely.

    config.json  model.pth|model.safetensors  tokenizer.tiktoken  special_tokens.json
    firefly-gan-vq-fsq-8x1024-21hz-generator.pth|.safetensors  [codec.json]

Knows files, names and shapes; knows nothing of what the networks compute. Nothing is unpickled beyond tensors
(`weights_only=True`, or safetensors), and files are memory-mapped, so a load costs little more than the weights.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from shoal.config import CodecConfig, DualARConfig
from shoal.errors import CheckpointError

DOWNLOAD_HINT = (
    "download the real weights with `pip install huggingface_hub` and "
    "`hf download fishaudio/fish-speech-1.5 --local-dir DIR`, or write a small random checkpoint with "
    "`shoal make-checkpoint DIR --size smoke`"
)
MODEL_FILES = ("model.safetensors", "model.pth")
CODEC_FILES = (
    "firefly-gan-vq-fsq-8x1024-21hz-generator.safetensors",
    "firefly-gan-vq-fsq-8x1024-21hz-generator.pth",
)
SCALES = ".scales"  # the scales of an int8 matrix X.weight are X.scales
TOKENIZER_FILE = "tokenizer.tiktoken"

_SAMPLE_BYTES = 1 << 16
_SAMPLES = 32
_MADV_PAGEOUT = 21  # linux/mman.h, since Linux 5.4; elsewhere the call just fails


@dataclass(frozen=True)
class Checkpoint:
    """A checked directory: its files and the sizes of its networks; no weights are loaded yet."""

    path: Path
    config: DualARConfig
    codec: CodecConfig
    model_file: Path
    codec_file: Path
    tokenizer_file: Path

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change when any file's content does (weights are sampled); the same on every machine."""
        digest = hashlib.sha256()
        for file in (self.model_file, self.codec_file):
            digest.update(_sampled_digest(file))
        for file in (self.path / "config.json", self.path / "codec.json", self.tokenizer_file):
            digest.update(file.read_bytes() if file.exists() else b"-")
        return digest.hexdigest()[:16]

    @property
    def quantised(self) -> bool:
        """Whether the layers are stored as int8 (`shoal.quantise`)."""
        if self.model_file.suffix != ".safetensors":
            return False
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.model_file, framework="pt") as file:
                return (file.metadata() or {}).get("quantisation") == "int8"
        except (SafetensorError, OSError):
            return False  # reading the tensors says what is wrong with it

    def read_dual_ar(self) -> dict[str, Tensor]:
        """The transformer's tensors under upstream 1.5's names, unwrapped; memory-mapped, in the file's dtype."""
        state = _unwrap(read_tensors(self.model_file), "model.")
        state = {k: v for k, v in state.items() if not _is_buffer(k)}
        for name in [k for k in state if k.endswith("attention.wq.weight")]:  # older exports keep them apart
            stem = name.removesuffix("wq.weight")
            if f"{stem}wk.weight" in state and f"{stem}wv.weight" in state:
                parts = [state.pop(f"{stem}{part}.weight") for part in ("wq", "wk", "wv")]
                state[f"{stem}wqkv.weight"] = torch.cat(parts)
        return state

    def read_codec(self) -> dict[str, Tensor]:
        """The codec's tensors as stored, unwrapped (weight norm not yet folded)."""
        state = _unwrap(read_tensors(self.codec_file), "generator.")
        return state


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Check a checkpoint directory and read its configuration.

    Raises:
        CheckpointError: the directory or a file is missing, or a configuration cannot be used.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise CheckpointError(f"checkpoint directory {path} does not exist: {DOWNLOAD_HINT}")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file, a checkpoint is a directory (holding config.json, model.pth, ...)")
    config = _read_config(path / "config.json", DualARConfig, required=True)
    codec = _read_config(path / "codec.json", CodecConfig, required=False)
    if config.num_codebooks > codec.num_codebooks:
        raise CheckpointError(
            f"{path}: config.json has {config.num_codebooks} codebooks, the codec only {codec.num_codebooks}; "
            "the two files do not belong together (a codec.json names another codec geometry)"
        )
    return Checkpoint(
        path=path,
        config=config,
        codec=codec,
        model_file=_first_existing(path, MODEL_FILES, "transformer weights"),
        codec_file=_first_existing(path, CODEC_FILES, "codec weights"),
        tokenizer_file=_first_existing(path, (TOKENIZER_FILE,), "tokenizer"),
    )


def read_tensors(file: Path) -> dict[str, Tensor]:
    """All tensors of a .safetensors or .pth file, memory-mapped, never running pickled code.

    Raises:
        CheckpointError: the file is not what its name says (empty, truncated, an HTML page, a Git LFS pointer, ...).
    """
    _reject_impostors(file)
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(file)
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file}: contains more than tensors ({_first_line(error)}) and is not loaded, since a pickle can run "
            "code; convert it to safetensors on a machine where you trust it"
        ) from None
    except Exception as error:  # the readers raise RuntimeError, SafetensorError, EOFError, OSError, ValueError, ...
        raise CheckpointError(
            f"{file}: cannot be read, it is probably truncated or damaged ({_first_line(error)}); "
            f"delete it and fetch it again: {DOWNLOAD_HINT}"
        ) from None
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not state:
        raise CheckpointError(f"{file}: holds {type(state).__name__} instead of named tensors; {DOWNLOAD_HINT}")
    wrong = [k for k, v in state.items() if not isinstance(v, Tensor)]
    if wrong:
        raise CheckpointError(f"{file}: entry {wrong[0]!r} is not a tensor; this is not a Fish Speech 1.5 weight file")
    return state


def check_state(file: Path, expected: Mapping[str, Sequence[int]], state: Mapping[str, Tensor]) -> None:
    """Compare names and shapes with what the configuration asks for.

    Raises:
        CheckpointError: names the first tensors that are missing, surplus or of the wrong shape.
    """
    problems = []
    missing = [k for k in expected if k not in state]
    surplus = [k for k in state if k not in expected]
    shapes = [k for k in expected if k in state and tuple(state[k].shape) != tuple(expected[k])]
    if missing:
        problems.append(f"{len(missing)} tensors are missing ({_some(missing)})")
    if surplus:
        problems.append(f"{len(surplus)} tensors are unknown ({_some(surplus)})")
    if shapes:
        k = shapes[0]
        problems.append(
            f"{len(shapes)} tensors have the wrong shape ({k} is {tuple(state[k].shape)}, "
            f"the configuration says {tuple(expected[k])})"
        )
    if problems:
        raise CheckpointError(
            f"{file}: {'; '.join(problems)}. The weights and the configuration beside them do not belong together; "
            f"{DOWNLOAD_HINT}"
        )


def convert(tensor: Tensor, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """A private copy in `dtype` on `device`; gives the pages of the memory-mapped source back to the system.

    Without that, loading a bfloat16 file as float32 would hold file and copy in memory together.
    """
    result = torch.empty(tensor.shape, dtype=dtype, device=device)
    result.copy_(tensor)
    _drop_pages(tensor)
    return result


def _read_config(file: Path, model: type[BaseModel], required: bool) -> Any:
    if not file.exists():
        if required:
            raise CheckpointError(f"{file} is missing, so this is not a Fish Speech 1.5 checkpoint: {DOWNLOAD_HINT}")
        return model()
    _reject_impostors(file)
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{file}: is not valid JSON ({_first_line(error)}); fetch it again") from None
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(
            f"{file}: {where + ': ' if where else ''}{first['msg'].removeprefix('Value error, ')}"
        ) from None


def _first_existing(path: Path, names: Sequence[str], what: str) -> Path:
    for name in names:
        if (path / name).exists():
            return path / name
    raise CheckpointError(f"{path}: the {what} are missing (looked for {' or '.join(names)}): {DOWNLOAD_HINT}")


def _reject_impostors(file: Path) -> None:
    """Files that downloads leave in place of the real ones deserve a better message than a parser's."""
    try:
        with file.open("rb") as handle:
            head = handle.read(512)
    except OSError as error:
        raise CheckpointError(
            f"{file}: cannot be opened ({error.strerror}); check the path and its permissions"
        ) from None
    if not head:
        raise CheckpointError(f"{file}: is empty; the download failed or the disk is full: {DOWNLOAD_HINT}")
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{file}: is a Git LFS pointer, not the file itself; run `git lfs pull` there, or {DOWNLOAD_HINT}"
        )
    if head.lstrip()[:15].lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise CheckpointError(
            f"{file}: is a web page (an error page saved under this name?), not the file: {DOWNLOAD_HINT}"
        )


def _unwrap(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Training wrappers save the network under a prefix, sometimes beside others (a discriminator)."""
    if any(k.startswith(prefix) for k in state):
        return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    return state


def _is_buffer(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in ("freqs_cis", "fast_freqs_cis", "causal_mask", "k_cache", "v_cache")


def _sampled_digest(file: Path) -> bytes:
    """Hash of the size and of evenly spaced samples: cheap on gigabytes, sure to see a new training."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as handle:
        for i in range(_SAMPLES):
            handle.seek(max(0, (size - _SAMPLE_BYTES)) * i // (_SAMPLES - 1))
            digest.update(handle.read(_SAMPLE_BYTES))
    return digest.digest()


def _drop_pages(tensor: Tensor) -> None:
    """Tell the kernel that a memory-mapped tensor's pages are not needed again (no effect where it can't be told)."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return
    page = mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page
    length = (tensor.data_ptr() + tensor.nbytes) // page * page - start
    if length <= 0:
        return
    try:  # MADV_PAGEOUT never loses data: pages of a file are read again when touched, others stay or are swapped
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_PAGEOUT)
    except (OSError, AttributeError):
        pass


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
