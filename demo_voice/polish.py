"""Teaches the head of a finished codec to say the low band as it was, and all else as it did (`by_heart`, `graft`).

Spectral losses know nothing of phase, and so leave the first harmonics trembling: one hears a buzz. But this codec only
has to say one phrase book, so that what it should say is a waveform that is known: the recording below `CROSSOVER`, and
the sound that the codec made so far above it. Both follow from the codes, phases and all, and so can be learned with
losses on the waveform's spectrum, complex as it is, which lead much faster to where they want than magnitudes do.

Encoder and quantiser stay as they are, so a transformer that speaks this codec's codes goes on doing so.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from shoal.model.firefly import Firefly
from torch import Tensor, nn

from .by_heart import encode_corpus, start_codec
from .graft import graft
from .losses import SpectralLoss
from .train_codec import CODEC, HOP, Run, load_corpus, normed, upsample, warm_cosine

STEPS, RATE, WARM = 2400, 6e-4, 100
CONTEXT, TARGET = 32, 48  # feature frames of left context and of trained audio in a segment
BEGINNING = CONTEXT + TARGET  # and in one from where a recording begins
CROSSOVER, WIDTH = 800.0, 60.0  # Hz
COMPLEX, MEL, STFT = 2.0, 3.0, 1.0  # weights of the losses


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


def crossed(low: Tensor, high: Tensor) -> Tensor:
    """`low` (samples,) below the crossover and `high` above, as long as `high`."""
    low = F.pad(low, (0, max(0, len(high) - len(low))))[: len(high)]
    hertz = torch.fft.rfftfreq(len(high), 1 / CODEC.sample_rate)
    share = torch.sigmoid((CROSSOVER - hertz) / WIDTH)
    return torch.fft.irfft(torch.fft.rfft(low) * share + torch.fft.rfft(high) * (1 - share), len(high))


class ComplexLoss(nn.Module):
    """Distance of complex spectra, in parts of what each frequency has on the average over the recordings."""

    def __init__(self, audio: list[Tensor], sizes: tuple[int, ...] = (256, 512, 1024)) -> None:
        super().__init__()
        self.sizes = sizes
        for n_fft in sizes:
            self.register_buffer(f"window_{n_fft}", torch.hann_window(n_fft))
            level = torch.stack([self._spectrum(a[None], n_fft).abs().mean(dim=(0, 2)) for a in audio]).mean(0)
            self.register_buffer(f"level_{n_fft}", level[:, None] + 0.02 * level.max())

    def _spectrum(self, audio: Tensor, n_fft: int) -> Tensor:
        window = getattr(self, f"window_{n_fft}")
        return torch.stft(audio, n_fft, n_fft // 4, window=window, return_complex=True)

    def forward(self, made: Tensor, real: Tensor) -> Tensor:
        """made, real: (batch, samples); a scalar."""
        total = made.new_zeros(())
        for n_fft in self.sizes:
            apart = torch.view_as_real(self._spectrum(made, n_fft) - self._spectrum(real, n_fft))
            total = total + (torch.sqrt(apart.square().sum(-1) + 1e-6) / getattr(self, f"level_{n_fft}")).mean()
        return total / len(self.sizes)


def polish(work: Path, checkpoint: Path | None = None, steps: int = STEPS, seed: int = 5) -> None:
    """Writes work/polish.pt, whose "average" (a running mean of the weights) is what will be shipped.

    checkpoint: what `by_heart` began with. A work/polish.pt that is there goes on.
    """
    torch.manual_seed(seed)
    _, audio = load_corpus(work)
    codec = start_codec(work, checkpoint)
    codes = encode_corpus(codec, audio)
    with torch.no_grad():
        wanted = [crossed(a, codec.decode(c[None].long())[0]) for a, c in zip(audio, codes, strict=True)]
        with_low_wave(codec, work)
        features = [upsample(codec, codec.quantizer.residual_fsq.lookup(c[None], torch.float32))[0] for c in codes]
    graft(codec, features, audio)
    normed(codec.head).requires_grad_(True)
    weights = list(codec.head.parameters())
    optimiser = torch.optim.AdamW(weights, lr=RATE, betas=(0.8, 0.98), weight_decay=0.0)
    schedule = warm_cosine(optimiser, WARM, steps)
    spectral, complex_loss = SpectralLoss(CODEC.sample_rate), ComplexLoss(wanted[::8])
    average = torch.optim.swa_utils.AveragedModel(codec, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    parts = {"codec": codec, "optimiser": optimiser, "schedule": schedule, "average": average.module}
    run = Run(work / "polish.pt", parts, steps)
    for step in run:
        x, real, context = segments(features, wanted, np.random.default_rng((seed, step)))
        made = run_head(codec, x, context)
        apart = complex_loss(made, real)
        mel, stft = spectral(made, real)
        optimiser.zero_grad(set_to_none=True)
        (COMPLEX * apart + MEL * mel + STFT * stft).backward()
        nn.utils.clip_grad_norm_(weights, 10.0)
        optimiser.step()
        schedule.step()
        average.update_parameters(codec)
        run.log(complex=apart.item(), mel=mel.item(), stft=stft.item())


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

    One time in five the beginnings of recordings, without context, so that the silence of the padding is learned too;
    else pieces from anywhere behind them.
    """
    context, target, rows = (0, BEGINNING, 4) if rng.random() < 0.2 else (CONTEXT, TARGET, 6)
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
