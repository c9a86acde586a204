"""Sound made in windows of a few sizes is the sound of the whole, and few sizes it is."""

from __future__ import annotations

import pytest
import torch
from shoal.model.firefly import Firefly
from shoal.random_checkpoint import write_random_checkpoint
from shoal.speech import FishSpeech
from shoal.windows import decode_windows


@pytest.fixture(scope="module")
def codec(tmp_path_factory) -> Firefly:
    return FishSpeech.load(write_random_checkpoint(tmp_path_factory.mktemp("smoke")), device="cpu").codec


def some_codes(codec, frames, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1000, (codec.config.num_codebooks, frames), generator=generator, dtype=torch.int16)


@pytest.mark.parametrize("max_frames", [None, 1, 48, 1000])
@pytest.mark.parametrize(
    ("frames", "starts"),
    [
        ((1, 5, 16, 17, 31, 32, 33, 40), (0,) * 8),
        ((130, 128, 127, 300), (0,) * 4),
        ((20, 20, 60, 200, 150, 16), (7, 19, 14, 15, 140, 15)),
        ((30, 30, 30, 30, 30), (0,) * 5),
        ((9,), (9,)),
    ],
)
@torch.inference_mode()
def test_windows_make_the_sound_of_the_whole(codec, frames, starts, max_frames):
    codes = [some_codes(codec, n, i) for i, n in enumerate(frames)]
    whole = [codec.decode(row[None].long())[0] for row in codes]
    out = decode_windows(codec, codes, starts, max_frames)
    for sound, expected, start in zip(out, whole, starts, strict=True):
        expected = expected[start * codec.config.samples_per_frame :]
        assert sound.shape == expected.shape
        torch.testing.assert_close(sound, expected, atol=1e-5, rtol=0)
    assert decode_windows(codec, [], []) == []


@pytest.mark.parametrize(("max_frames", "most"), [(None, 28), (48, 4)])
@torch.inference_mode()
def test_sizes_are_few_whatever_the_lengths(codec, monkeypatch, max_frames, most):
    shapes = set()
    real = codec.synthesize

    def noted(features, context=0):
        shapes.add((features.shape, context))
        return real(features, context)

    monkeypatch.setattr(codec, "synthesize", noted)
    for i in range(40):
        codes = [some_codes(codec, 1 + (37 * i + 11 * k) % 170) for k in range(1 + i % 7)]
        starts = [0 if (i + k) % 3 else (codes[k].shape[1] - 1) for k in range(len(codes))]
        decode_windows(codec, codes, starts, max_frames)
    assert len(shapes) <= most
    if max_frames:
        assert all(shape[0] == 1 and shape[-1] <= max_frames + codec.context_frames for shape, _ in shapes)


@torch.inference_mode()
def test_elsewhere_all_streams_go_together_within_the_bound(codec, monkeypatch):
    codes = [some_codes(codec, 20 + i, i) for i in range(5)]
    whole = [codec.decode(row[None].long())[0] for row in codes]
    real, rows = codec.decode_chunks, []
    monkeypatch.setattr(codec, "decode_chunks", lambda c, *rest: rows.append(len(c)) or real(c, *rest))
    monkeypatch.setattr(type(codec), "context_frames", 500)  # a GPU takes the same way
    for max_frames in (None, 100):
        for sound, expected in zip(decode_windows(codec, codes, [0] * 5, max_frames), whole, strict=True):
            torch.testing.assert_close(sound, expected, atol=1e-5, rtol=0)
    assert rows == [5, 2, 2, 1]
