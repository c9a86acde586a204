"""Parts of the demo voice's recipe that can be checked without training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from shoal.model.firefly import Firefly

graft = pytest.importorskip("demo_voice.graft", exc_type=ImportError)
from demo_voice.polish import (  # noqa: E402
    BEGINNING,
    CONTEXT,
    CROSSOVER,
    TARGET,
    ComplexLoss,
    crossed,
    run_head,
    segments,
)
from demo_voice.train_codec import CODEC, HOP  # noqa: E402

FRAMES = 96


def tone(hertz: float, frames: int = FRAMES) -> torch.Tensor:
    """(samples,), swells and fades."""
    t = torch.arange(frames * HOP) / CODEC.sample_rate
    return 0.1 * torch.sin(2 * torch.pi * hertz * t) * torch.sin(torch.pi * t / t[-1]) ** 2


def apart(made: torch.Tensor, real: torch.Tensor) -> float:
    return ((made - real).norm() / real.norm()).item()


def test_the_grafted_path_says_the_low_waveform_through_the_heads_own_layers(monkeypatch):
    torch.manual_seed(0)
    codec, audio = Firefly(CODEC).eval(), sum(tone(180.0 * k) / k for k in range(1, 6))
    # Features that hold the waveform outright, and the convolution that reads it.
    features = torch.zeros(CODEC.dims[-1], FRAMES)
    features[: graft.LOW_SAMPLES] = graft.path_target(audio, FRAMES)
    weight = torch.zeros(graft.LOW_SAMPLES, CODEC.dims[-1], CODEC.pre_conv_kernel_size)
    weight[:, : graft.LOW_SAMPLES, -1] = torch.eye(graft.LOW_SAMPLES)
    monkeypatch.setattr(graft, "solve_first", lambda *_: (weight, torch.zeros(graft.LOW_SAMPLES)))
    for parameter in codec.head.conv_post.parameters():
        torch.nn.init.zeros_(parameter)  # all that sounds is the path
    graft.graft(codec, [features], [audio])
    with torch.no_grad():
        made = run_head(codec, features[None], 0)[0]
    assert apart(made, audio) < 0.2
    assert apart(made.roll(8), audio) > 0.4  # half a millisecond late is no longer it


def test_the_crossover_takes_each_band_from_its_own():
    low, high = tone(CROSSOVER / 3), tone(3 * CROSSOVER)
    assert apart(crossed(low + tone(4 * CROSSOVER), high + tone(CROSSOVER / 4)), low + high) < 0.02
    assert apart(crossed(low[:100], high), high) < 0.1  # a recording that ends earlier


def test_the_loss_hears_phases_and_weighs_all_bands_alike():
    low, high = 10 * tone(200.0)[None], tone(5000.0)[None]
    loss = ComplexLoss([(low + high)[0]])
    assert loss(-low - high, low + high) > 20 * loss(low + high, low + high)
    without_low, without_high = loss(high, low + high).item(), loss(low, low + high).item()
    assert 0.2 < without_low / without_high < 5


def test_pieces_keep_sound_and_features_together():
    # Each feature frame, and each sample that belongs to it, holds the frame's own number.
    numbers = [torch.arange(1.0, n + 1) for n in (60, 100, 300)]
    features = [n.expand(CODEC.dims[-1], -1) for n in numbers]
    audio = [n.repeat_interleave(HOP) for n in numbers]
    seen = set()
    for seed in range(20):
        x, y, context = segments(features, audio, np.random.default_rng(seed))
        assert x.shape[2] == context + (TARGET if context else BEGINNING)
        assert torch.equal(x[:, 0, context:].repeat_interleave(HOP, dim=1), y)
        seen.add(context)
    assert seen == {0, CONTEXT}
