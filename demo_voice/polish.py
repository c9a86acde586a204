"""Trains the head of a finished codec on features that know the low waveform by heart (`by_heart`, `graft`).

Spectral losses as before, with longer windows, and the waveform itself below 1 kHz. Encoder, quantiser and upsampler
stay as they are.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from shoal.model.firefly import Firefly
from torch import Tensor, nn

from .balance import Balancer
from .by_heart import encode_corpus, start_codec
from .graft import graft
from .losses import SpectralLoss, low_wave_loss
from .train_codec import CODEC, HOP, Run, load_corpus, normed, upsample

STEPS, PEAK_RATE, WARM = 1600, 8e-4, 50
COOL_DOWN = 0.2  # the last part of the steps, in which the rate falls to nothing: fewer steps end a run early
CONTEXT, TARGET = 32, 48  # feature frames of left context and of trained audio in a segment
BEGINNING = CONTEXT + TARGET  # and in one from where a recording begins
WEIGHTS = {"wave": 2.0, "mel": 1.0, "stft": 1.0}


def with_low_wave(codec: Firefly, work: Path) -> Firefly:
    """The codec with the upsampler that `by_heart` made, and a head that still finds in its features what was there."""
    learned = torch.load(work / "by_heart.pt", weights_only=False)
    codec.quantizer.upsample.load_state_dict(learned["upsample"])
    weight, bias = (learned["reader"][f"to_old.{name}"] for name in ("weight", "bias"))
    first = codec.head.conv_pre.conv
    with torch.no_grad():
        first.bias += torch.einsum("omk,m->o", first.weight, bias)
        first.weight.copy_(torch.einsum("omk,mc->ock", first.weight, weight[:, :, 0]))
    return codec


def rate_at(step: int, steps: int) -> float:
    """The share of the peak rate: up within WARM steps, then constant, then down over the last COOL_DOWN."""
    left = (steps - step) / max(1, round(steps * COOL_DOWN))
    return max(0.01, min(1.0, (step + 1) / WARM, left))


def polish(work: Path, checkpoint: Path | None = None, steps: int = STEPS, seed: int = 5) -> None:
    """Writes work/polish.pt, whose "average" (a running mean of the weights) is what will be shipped.

    checkpoint: what `by_heart` began with. A work/polish.pt that is there goes on.
    """
    torch.manual_seed(seed)
    _, audio = load_corpus(work)
    codec = start_codec(work, checkpoint)
    codes = encode_corpus(codec, audio)
    with_low_wave(codec, work)
    with torch.no_grad():
        features = [upsample(codec, codec.quantizer.residual_fsq.lookup(c[None], torch.float32))[0] for c in codes]
    graft(codec, features, audio)
    normed(codec.head).requires_grad_(True)
    weights = list(codec.head.parameters())
    optimiser = torch.optim.AdamW(weights, lr=PEAK_RATE, betas=(0.8, 0.98), weight_decay=0.0)
    spectral = SpectralLoss(CODEC.sample_rate, stfts=(256, 512, 1024, 2048))
    average = torch.optim.swa_utils.AveragedModel(codec, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    parts = {"codec": codec, "optimiser": optimiser, "balancer": Balancer(WEIGHTS), "average": average.module}
    run = Run(work / "polish.pt", parts, steps)
    for step in run:
        optimiser.param_groups[0]["lr"] = PEAK_RATE * rate_at(step, steps)
        rng = np.random.default_rng((seed, step))
        x, real, context = segments(features, audio, rng)
        made = run_head(codec, x, context)
        view = made.detach().requires_grad_(True)
        losses = {"wave": low_wave_loss(view, real)}
        losses |= zip(("mel", "stft"), spectral(view, real), strict=True)
        optimiser.zero_grad(set_to_none=True)
        made.backward(parts["balancer"].gradient(losses, view))
        nn.utils.clip_grad_norm_(weights, 10.0)
        optimiser.step()
        average.update_parameters(codec)
        run.log(**{name: loss.item() for name, loss in losses.items()})


def run_head(codec: Firefly, features: Tensor, context: int) -> Tensor:
    """Features (batch, width, context + frames) -> audio of the last `frames` of them, as `Firefly.synthesize` does it.

    Each layer drops the past that the samples cannot feel.
    """
    head, needs = codec.head, iter(codec._plan[2 * len(codec.quantizer.upsample) :])

    def trim(x: Tensor) -> Tensor:
        nonlocal context
        surplus = max(0, context - next(needs))
        context -= surplus
        return x[..., surplus:]

    x = head.conv_pre(trim(features))
    for up, block in zip(head.ups, head.resblocks, strict=True):
        x = up(F.silu(trim(x)))
        context *= up.stride
        x = block(trim(x))
    x = head.conv_post(F.silu(trim(x)))
    return torch.tanh(x[:, 0, context:])


def segments(features: list[Tensor], audio: list[Tensor], rng: np.random.Generator) -> tuple[Tensor, Tensor, int]:
    """A batch of features (rows, width, context + frames), the audio of the last `frames` of them, and `context`.

    Three times in ten the beginnings of recordings, without context, so that the silence of the padding is learned too;
    else pieces from anywhere behind them.
    """
    context, target, rows = (0, BEGINNING, 4) if rng.random() < 0.3 else (CONTEXT, TARGET, 6)
    # A recording has as many chances as it has frames of the kind.
    chances = [min(f.shape[1], target) if not context else max(0, f.shape[1] - context - target + 1) for f in features]
    xs, ys = [], []
    for i in rng.choice(len(features), rows, p=np.array(chances, float) / sum(chances)):
        start = int(rng.integers(chances[i])) if context else 0
        x = features[i][:, start : start + context + target]
        y = audio[i][(start + context) * HOP : (start + context + target) * HOP]
        xs.append(F.pad(x, (0, context + target - x.shape[1])))
        ys.append(F.pad(y, (0, target * HOP - len(y))))
    return torch.stack(xs), torch.stack(ys), context
