"""A checkpoint's networks in memory, and one copy of them for all that runs in a process. Knows nothing of requests."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.checkpoint import Checkpoint, check_state, convert, open_checkpoint
from shoal.errors import RequestError
from shoal.model.dual_ar import DualAR, load_dual_ar
from shoal.model.firefly import Firefly, fold_weight_norm
from shoal.model.linear import PACKED_FOR_MANY
from shoal.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Weights:
    """What a checkpoint holds, ready to run; nothing in it changes while it is used, so it can be shared."""

    model: DualAR
    codec: Firefly
    tokenizer: Tokenizer
    fingerprint: str  # of the checkpoint
    precision: str  # "float32", "bfloat16", "float16" or "int8"
    packed: int  # for how many rows, as asked for: where there is no such layout, or for 0, the layers are plain

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, as far as PyTorch shows them."""
        tensors = [t for m in (self.model, self.codec) for t in (*m.parameters(), *m.buffers())]
        return sum({t.data_ptr(): t.nbytes for t in tensors}.values())


Key = tuple[str, str, str, int, torch.dtype]  # fingerprint, device, precision, packed, of the codec's decoder

_shared: dict[Key, Weights] = {}
_loading = threading.Lock()


def load_weights(
    path: str | Path,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    *,
    share: bool = False,
    pack: int = PACKED_FOR_MANY,
    codec_dtype: str | torch.dtype = "float32",
) -> Weights:
    """The networks of a checkpoint directory: those that the process shares where there are such, else loaded.

    Args:
        share: keep them for the next call.
        pack: put the layers into the layout that a CPU multiplies with so many rows fastest (model/linear.py); 0: leave
            them plain.
        codec_dtype: arithmetic in which sound is made; codes are found in float32 whatever it is.

    Raises:
        CheckpointError: the directory cannot be used; the message says why and what to do.
        RequestError: device or dtype is not one that this machine has.
    """
    where, checkpoint = pick_device(device), open_checkpoint(path)
    int8 = dtype in ("int8", torch.int8) or (dtype == "auto" and checkpoint.quantised)
    precision = "int8" if int8 else str(_pick_dtype(dtype, device)).removeprefix("torch.")
    sounds = _pick_dtype(codec_dtype, "cpu")
    key = (checkpoint.fingerprint, str(where), precision, pack, sounds)
    if not share:
        return _shared.get(key) or _load(checkpoint, where, precision, pack, sounds)
    with _loading:
        if key not in _shared:
            _shared[key] = _load(checkpoint, where, precision, pack, sounds)
        return _shared[key]


def share_weights(weights: Weights) -> None:
    """Have later loads of the same checkpoint, device and precision use these."""
    _shared.setdefault(_key(weights), weights)


def release_weights(weights: Weights | None = None) -> None:
    """Share these no longer, or none at all; their memory is free once nobody uses them."""
    if weights is None:
        _shared.clear()
    else:
        _shared.pop(_key(weights), None)


def shared_weights() -> list[Weights]:
    """What the process shares now."""
    return list(_shared.values())


def load_codec(checkpoint: Checkpoint, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Firefly:
    """The codec with a checkpoint's weights, weight norm folded.

    Raises:
        CheckpointError: a tensor is missing, surplus or of the wrong shape.
    """
    try:
        state = fold_weight_norm(checkpoint.read_codec())
    except KeyError as error:
        check_state(checkpoint.codec_file, {str(error.args[0]): ()}, {})
        raise
    with torch.device("meta"):
        expected = {name: tuple(t.shape) for name, t in Firefly(checkpoint.codec).state_dict().items()}
    check_state(checkpoint.codec_file, expected, state)
    state = {name: convert(tensor, dtype, device) for name, tensor in state.items()}
    return Firefly.from_state(checkpoint.codec, state).requires_grad_(False)


def pick_device(device: str) -> torch.device:
    """The device that a name means, with its index; "auto" takes the GPU if there is one. Raises RequestError."""
    try:
        picked = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    except RuntimeError:
        raise RequestError(f"unknown device {device!r}: use auto, cpu or cuda") from None
    if picked.type == "cuda":
        if not torch.cuda.is_available():
            raise RequestError(f"device {device!r} asked for, but PyTorch sees no CUDA GPU here: use cpu or auto")
        picked = torch.device("cuda", torch.cuda.current_device() if picked.index is None else picked.index)
    return picked


def _key(weights: Weights) -> Key:
    sounds = weights.codec.head.conv_pre.conv.weight.dtype
    return weights.fingerprint, str(weights.model.device), weights.precision, weights.packed, sounds


def _load(checkpoint: Checkpoint, where: torch.device, precision: str, pack: int, sounds: torch.dtype) -> Weights:
    tokenizer = Tokenizer.from_file(checkpoint.tokenizer_file)
    last = min(tokenizer.semantic_end_id, tokenizer.semantic_begin_id + checkpoint.config.codebook_size - 1)
    head_ids = [tokenizer.im_end_id, *range(tokenizer.semantic_begin_id, last + 1)]
    int8 = precision == "int8"
    dtype = _pick_dtype("auto", where.type) if int8 else getattr(torch, precision)
    model = load_dual_ar(checkpoint, head_ids, where, dtype, pack=pack, int8=int8)
    codec = load_codec(checkpoint, where).decoder_to(sounds)
    return Weights(model, codec, tokenizer, checkpoint.fingerprint, precision, pack)


def _pick_dtype(dtype: str | torch.dtype, device: str) -> torch.dtype:
    if dtype == "auto":
        return torch.float32 if pick_device(device).type == "cpu" else torch.bfloat16
    picked = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if picked not in (torch.float32, torch.bfloat16, torch.float16):
        raise RequestError(f"unknown dtype {dtype!r}: use auto, float32, bfloat16, float16 or int8")
    return picked
