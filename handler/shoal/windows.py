"""Codes -> sound for streams of any length, through the codec in windows of a few sizes. Knows nothing of requests.

On a CPU the kernels are prepared anew for each shape of input, which takes as long as the work itself, and what is
prepared stays in memory: some 0.3 MB per frame of each shape, hundreds of megabytes where every utterance has a length
of its own. So windows are padded to a few lengths (the decoder is causal: what follows changes nothing before it) and
go through one by one, since a CPU gains nothing by more. On a GPU all streams go through together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shoal.model.firefly import Firefly

_LENGTHS = (16, 24, 32, 40, 48, 64, 96, 128)  # frames
_LEAST_ROW = 48  # frames that Firefly gives a row at least, with the past that it needs


def decode_windows(
    codec: Firefly, codes: Sequence[Tensor], starts: Sequence[int], max_frames: int | None = None
) -> list[Tensor]:
    """The newest sound of several streams that are at different places; as `Firefly.decode_chunks`.

    Args:
        codes: per stream (num_codebooks, frames), from its first frame on or from `context_frames` before its start.
        starts: per stream the index in it of the first frame to decode.
        max_frames: bound on what goes through the codec at a time, for little memory; never less than 16.

    Returns:
        per stream the samples from its start on, ((frames - start) * samples_per_frame,) float32.
    """
    lengths = _LENGTHS
    if max_frames is not None:  # two of them only, as each one's kernels stay in memory
        fitting = [n for n in _LENGTHS if n <= max_frames] or [_LENGTHS[0]]
        lengths = (fitting[0], fitting[-1])
    if not codes or codes[0].device.type != "cpu" or codec.context_frames >= lengths[-1]:
        return _decode_together(codec, codes, starts, max_frames)
    return [_decode_alone(codec, row, start, lengths) for row, start in zip(codes, starts, strict=True)]


def _decode_together(
    codec: Firefly, codes: Sequence[Tensor], starts: Sequence[int], max_frames: int | None
) -> list[Tensor]:
    if max_frames is None:
        return codec.decode_chunks(codes, starts)
    rows = max(1, max_frames // _LEAST_ROW)
    sound: list[Tensor] = []
    for i in range(0, len(codes), rows):
        sound += codec.decode_chunks(codes[i : i + rows], starts[i : i + rows], max_frames)
    return sound


def _decode_alone(codec: Firefly, codes: Tensor, start: int, lengths: Sequence[int]) -> Tensor:
    """One stream's sound from frame `start` on, window after window."""
    frames, reach, longest = codes.shape[1], codec.context_frames, lengths[-1]
    pieces = []
    while start < frames:
        # a window near the stream's beginning is decoded from there, any other with the past that it needs
        young = start < reach
        first = 0 if young else start - reach
        end = min(frames, longest if young else start + longest)
        needed = end if young else end - start
        width = next(n for n in lengths if n >= needed) + (0 if young else reach)
        window = nn.functional.pad(codes[:, first:end], (0, width - (end - first)))
        (sound,) = codec.decode_chunks([window], [start - first])
        pieces.append(sound[: (end - start) * codec.config.samples_per_frame])
        start = end
    return torch.cat(pieces) if pieces else torch.zeros(0)
