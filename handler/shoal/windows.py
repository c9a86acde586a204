"""Codes -> sound for several streams at once, through the codec in windows of a few sizes. Knows nothing of requests.

On a CPU the kernels are prepared anew for each shape of input, which takes as long as the work itself, and what is
prepared stays in memory: some 0.3 MB per frame of each shape, hundreds of megabytes where every utterance has a length
of its own. So windows are padded to a few lengths (the decoder is causal: what follows changes nothing before it), and
few of them go together, since a CPU gains little by more. On a GPU all streams go through together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.model.firefly import Firefly

_LENGTHS = (16, 24, 32, 48, 64, 96, 128)  # frames
_GROUP_FRAMES = 128  # rows x frames that go together
_LEAST_ROW = 48  # frames that Firefly gives a row at least, with the past that it needs


@dataclass(frozen=True)
class _Window:
    stream: int
    begin: int  # frames of the stream that it makes sound of: begin to end
    end: int
    past: int  # frames before `begin` that it needs


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
    groups: dict[tuple[int, int], list[_Window]] = defaultdict(list)
    for stream, (row, start) in enumerate(zip(codes, starts, strict=True)):
        for window in _cut(stream, row.shape[1], start, codec.context_frames, lengths[-1]):
            young = window.past < codec.context_frames
            size = next(n for n in lengths if n >= (window.end if young else window.end - window.begin))
            groups[(-1 if young else codec.context_frames, size)].append(window)
    pieces: dict[tuple[int, int], Tensor] = {}
    for (_, size), windows in groups.items():
        together = 1 if max_frames is not None else max(1, _GROUP_FRAMES // size)
        while windows:
            count = together if len(windows) >= together else 1
            batch, windows = windows[:count], windows[count:]
            for window, sound in zip(batch, _decode(codec, codes, batch, size), strict=True):
                pieces[window.stream, window.begin] = sound
    out: list[list[Tensor]] = [[] for _ in codes]
    for (stream, _), sound in sorted(pieces.items(), key=lambda item: item[0]):
        out[stream].append(sound)
    return [torch.cat(parts) if parts else torch.zeros(0) for parts in out]


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


def _cut(stream: int, frames: int, start: int, reach: int, longest: int) -> list[_Window]:
    windows = []
    begin = start
    while begin < frames:
        # a window near the stream's beginning is decoded from there, any other with the past that it needs
        end = min(frames, longest if begin < reach else begin + longest)
        windows.append(_Window(stream, begin, end, min(begin, reach)))
        begin = end
    return windows


def _decode(codec: Firefly, codes: Sequence[Tensor], batch: Sequence[_Window], size: int) -> list[Tensor]:
    """The sound of windows of one kind, padded to `size` frames (and their past)."""
    young = batch[0].past < codec.context_frames
    width = size if young else size + codec.context_frames
    rows = [codes[w.stream][:, w.begin - w.past : w.end] for w in batch]
    padded = [nn.functional.pad(row, (0, width - row.shape[1])) for row in rows]
    sound = codec.decode_chunks(padded, [w.past for w in batch])
    return [row[: (w.end - w.begin) * codec.config.samples_per_frame] for row, w in zip(sound, batch, strict=True)]
