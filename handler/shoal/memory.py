"""Memory-constrained mode: batch, codec and caches sized so that a model at work stays under a given limit.

Knows what a row, a codec frame and a cached byte cost; knows nothing of requests.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shoal.errors import ShoalError
from shoal.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from shoal.speech import FishSpeech

# What the codec takes per frame that it decodes at once: 0.4 to 0.7 MB were measured, at the published geometry and at
# far smaller ones alike, since the kernels pad few channels to many. A third more is the past that each row needs.
_CODEC_BYTES_PER_FRAME = 1_000_000
_LEAST_CODEC_FRAMES = 48  # one row's smallest window with its context
_MOST_CODEC_FRAMES = 1024
_SOUND_COPIES = 3  # of a row's sound: its pieces, the whole, the result in the caller's hands
_POSITION_BUCKET = 128
_MMAP_THRESHOLD = -3  # mallopt's name for it
_LARGE_BLOCK = 256 * 1024


@dataclass(frozen=True)
class MemoryPlan:
    """What `limit_memory` decided; sizes in bytes."""

    limit: int
    in_use: int  # before any work: weights and the program itself
    batch_limit: int  # rows that decode at a time
    codec_frames: int  # frames that the codec decodes at a time
    caches: int  # all of them together


def limit_memory(model: FishSpeech, limit: int | str, *, frames: int = 1024) -> MemoryPlan:
    """Have a model stay under `limit` while it works.

    The limit is on the whole process on the CPU, and on what PyTorch takes of the card on a GPU. Of the room that is
    left beside the weights a quarter goes to the caches, half to the batch and the codec, and a quarter stays free for
    what an allocator wastes. Call it before the first request. What callers keep of their results, and the encoding of
    reference audio, is not counted.

    Args:
        frames: positions of the longest row, prompt included.

    Raises:
        ShoalError: not even one row fits; the message says what would do.
    """
    limit = parse_bytes(limit)
    if model.device.type == "cpu":
        _return_large_blocks_at_once()
    in_use = memory_in_use(model.device)
    room = max(0, limit - in_use)
    codec, rows_room = int(room * 0.3), int(room * 0.2)
    codec_frames = min(codec // _CODEC_BYTES_PER_FRAME, _MOST_CODEC_FRAMES)
    rows = 0
    while rows < model.max_batch_size and _bytes_of_rows(model, rows + 1, frames) <= rows_room:
        rows += 1
    if rows < 1 or codec_frames < _LEAST_CODEC_FRAMES:
        least = max(_LEAST_CODEC_FRAMES * _CODEC_BYTES_PER_FRAME / 0.3, _bytes_of_rows(model, 1, frames) / 0.2)
        raise ShoalError(
            f"a limit of {format_bytes(limit)} leaves {format_bytes(room)} beside the {format_bytes(in_use)} in use "
            f"already: give at least {format_bytes(in_use + int(least * 1.01))}, or shorten what a request may ask for"
        )
    plan = MemoryPlan(limit, in_use, rows, codec_frames, room // 4)
    model.scheduler.batch_limit = rows
    model.scheduler.sound.max_frames = codec_frames
    model.scheduler.sound.workers = min(1, model.scheduler.sound.workers)
    model.set_internal_cache_capacity(plan.caches)
    return plan


def memory_in_use(device: torch.device) -> int:
    """Bytes that this process takes now: resident on the CPU, reserved by PyTorch on a GPU."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    statm = Path("/proc/self/statm")
    if statm.exists():
        import resource

        return int(statm.read_text().split()[1]) * resource.getpagesize()
    import psutil  # where there is no /proc; needed for this alone

    return psutil.Process().memory_info().rss


def give_memory_back(device: torch.device) -> None:
    """Return what is free but held, by Python, PyTorch's allocator or the C library, to whom it came from."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def _bytes_of_rows(model: FishSpeech, rows: int, frames: int) -> int:
    """KV cache, at the moment when it grows and old and new exist together, and sound."""
    config, codec = model.model.config, model.codec.config
    held = 1 << (rows - 1).bit_length()  # as model/kv_cache.py grows
    positions = min(-(-frames // _POSITION_BUCKET) * _POSITION_BUCKET, config.max_seq_len)
    kv = held * positions * config.kv_bytes_per_token(model.model.dtype.itemsize) * 5 // 2
    sound = 0 if model.device.type == "cuda" else rows * frames * codec.samples_per_frame * 4 * _SOUND_COPIES
    return kv + sound


def _return_large_blocks_at_once() -> None:
    """Keep glibc from holding on to freed blocks, as it does with ever larger ones the more it has seen."""
    if sys.platform.startswith("linux"):
        try:
            ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE_BLOCK)
        except (OSError, AttributeError):  # another C library, which has its own ways
            pass
