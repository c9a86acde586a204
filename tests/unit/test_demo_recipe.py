"""Parts of the demo voice's recipe that can be checked without training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from shoal.model.firefly import Firefly

graft = pytest.importorskip("demo_voice.graft", exc_type=ImportError)
from demo_voice.balance import Balancer  # noqa: E402
from demo_voice.losses import low_wave_loss  # noqa: E402
from demo_voice.polish import BEGINNING, CONTEXT, TARGET, rate_at, run_head, segments  # noqa: E402
from demo_voice.train_codec import CODEC, HOP  # noqa: E402

FRAMES = 96


def voice(frames: int = FRAMES) -> torch.Tensor:
    """A tone of 180 Hz with overtones up to 900 Hz that swells and fades: (samples,)."""
    t = torch.arange(frames * HOP) / CODEC.sample_rate
    tone = sum(torch.sin(2 * torch.pi * 180 * k * t + k) / k for k in range(1, 6))
    return 0.1 * tone * torch.sin(torch.pi * t / t[-1]) ** 2


def test_the_grafted_path_says_the_low_waveform_through_the_heads_own_layers(monkeypatch):
    torch.manual_seed(0)
    codec, audio = Firefly(CODEC).eval(), voice()
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
        made = run_head(codec, features[None], 0)
    assert low_wave_loss(made, audio[None]).item() < 0.15
    assert low_wave_loss(made.roll(8, dims=1), audio[None]).item() > 0.4  # half a millisecond late is no longer it


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


def test_balanced_losses_pull_by_their_weights_whatever_their_scale():
    output = torch.zeros(2, requires_grad=True)
    balancer = Balancer({"loud": 1.0, "soft": 3.0})
    losses = {"loud": 1000 * output[0], "soft": 0.001 * output[1]}
    assert balancer.gradient(losses, output).tolist() == pytest.approx([1.0, 3.0])


def test_the_rate_warms_up_stays_and_cools_down():
    rates = [rate_at(step, 1000) for step in range(1000)]
    assert rates[0] < 0.1
    assert rates[100] == rates[700] == 1.0
    assert rates[-1] <= 0.01
