"""Lays a path for the low waveform through the codec's head, from the features that know it (`by_heart`) to the sound.

Trained from where it is, the head takes long to find out that the features hold the waveform itself; but what it has to
do with it is linear, and a HiFi-GAN can be linear: a pair of channels a and -a passes SiLU whole, since
silu(a) - silu(-a) = a. So the least useful channels of each stage are given to the low waveform, which comes in 32
samples a feature frame, is unfolded to 2 kHz by the first two upsamplings and interpolated by the others. Training goes
on from there, with nothing held fixed.
"""

from __future__ import annotations

import torch
from shoal.model.firefly import Firefly
from torch import Tensor

from .by_heart import LOW_LEVEL, LOW_RATE, LOW_SAMPLES, low_wave
from .train_codec import CODEC

OFFSET, SCALE = 10.0, 0.5  # the first stage has no room for pairs: SiLU is linear around OFFSET
RIDGE = 1e-3
_TINY = 1e-3  # for filters that do nothing as yet: weight norm cannot start from zero


def interpolator(rate: int, kernel: int) -> Tensor:
    """Linear interpolation as the taps of a transposed convolution; it is late by rate - 1 steps."""
    taps = 1 - (torch.arange(kernel) - (rate - 1)).abs() / rate
    return taps.clamp(min=0)


def smoother(kernel: int) -> Tensor:
    """A low pass for the last convolution; it is late by half its length."""
    at = torch.arange(kernel) - kernel // 2
    taps = torch.sinc(at * 2 * 0.8 * LOW_RATE / CODEC.sample_rate) * torch.hann_window(kernel + 2, periodic=False)[1:-1]
    return taps / taps.sum()


def path_target(audio: Tensor, frames: int) -> Tensor:
    """The low waveform as the path has to be given it, so that it comes out right: early, and with its losses made up.

    audio: (samples,). Returns (LOW_SAMPLES, frames).
    """
    rate3, rate4 = CODEC.upsample_rates[2:]
    late = (rate3 - 1) * rate4 + rate4 - 1 + CODEC.post_conv_kernel_size // 2
    padded = torch.nn.functional.pad(audio, (1024, 1024))
    spectrum = torch.fft.rfft(padded)
    hertz = torch.fft.rfftfreq(len(padded), 1 / CODEC.sample_rate)
    taps = smoother(CODEC.post_conv_kernel_size)
    at = torch.arange(len(taps)) - len(taps) // 2
    kept = torch.sinc(hertz / LOW_RATE) ** 2  # what interpolation leaves of it
    kept = kept * (taps * torch.cos(2 * torch.pi * hertz[:, None] / CODEC.sample_rate * at)).sum(1)
    spectrum = spectrum * torch.exp(2j * torch.pi * hertz * late / CODEC.sample_rate)
    spectrum = torch.where(hertz < 0.47 * LOW_RATE, spectrum / kept.clamp(min=0.3), 0)
    return low_wave(torch.fft.irfft(spectrum, len(padded))[1024:-1024].contiguous(), frames)


def solve_first(features: list[Tensor], audio: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The causal convolution from features to `path_target` by least squares: (LOW_SAMPLES, width, kernel), bias."""
    kernel = CODEC.pre_conv_kernel_size
    size = CODEC.dims[-1] * kernel + 1
    square, side = torch.zeros(size, size), torch.zeros(size, LOW_SAMPLES)
    for x, sound in zip(features, audio, strict=True):
        past = torch.nn.functional.pad(x, (kernel - 1, 0)).unfold(1, kernel, 1)  # (width, frames, kernel)
        rows = torch.cat([past.permute(1, 0, 2).flatten(1), torch.ones(x.shape[1], 1)], dim=1)
        square += rows.T @ rows
        side += rows.T @ path_target(sound, x.shape[1]).T
    square += RIDGE * square.diagonal().mean() * torch.eye(size)
    solution = torch.linalg.solve(square.double(), side.double()).float().T
    return solution[:, :-1].reshape(LOW_SAMPLES, CODEC.dims[-1], kernel), solution[:, -1]


@torch.no_grad()
def graft(codec: Firefly, features: list[Tensor], audio: list[Tensor]) -> None:
    """Change the head of `codec` (weight norm folded) so that it adds the low waveform to its sound.

    features: (width, frames) per recording, of the upsampler that `by_heart` made.
    """
    head = codec.head
    first, *others = [up.conv for up in head.ups]
    pre, post = head.conv_pre.conv, head.conv_post.conv
    given = (pre.weight.norm(dim=(1, 2)) * first.weight.norm(dim=(1, 2))).argsort()[:LOW_SAMPLES]
    weight, bias = solve_first(features, audio)
    pre.weight[given], pre.bias[given] = SCALE * weight, OFFSET + SCALE * bias
    first.weight[given] = 0
    nexts, before = [*others, None], given[None]
    for stage, (up, after, block) in enumerate(zip((first, *others), nexts, head.resblocks, strict=True)):
        rate, kernel = CODEC.upsample_rates[stage], CODEC.upsample_kernel_sizes[stage]
        signals = max(1, LOW_SAMPLES // CODEC.upsample_rates[0]) if stage == 0 else 1
        use = post.weight[0].norm(dim=1) if after is None else after.weight.norm(dim=(1, 2))
        pairs = use.argsort()[: 2 * signals].view(2, signals)  # the positive ones, the negative ones
        flat = pairs.flatten()
        up.weight[:, flat], up.bias[flat] = 0, 0
        for sign, row in zip((1.0, -1.0), pairs, strict=True):
            if stage == 0:  # LOW_SAMPLES channels a frame -> `signals` channels at `rate` times the frames
                for sample, channel in enumerate(given):
                    up.weight[channel, row[sample % signals], sample // signals] = sign / SCALE
                up.bias[row] = -sign * OFFSET / SCALE
            else:
                taps = interpolator(rate, kernel) if stage > 1 else None
                for side, source in zip((1.0, -1.0), before, strict=True):
                    for i, channel in enumerate(source):
                        if taps is None:  # `signals` channels -> one, at the low waveform's own rate
                            up.weight[channel, row[0], i] = sign * side
                        else:
                            up.weight[channel, row[0]] = sign * side * taps
        for branch in block.blocks:
            for conv in branch.convs1:
                conv.conv.weight[:, flat] = 0
            for conv in branch.convs2:
                conv.conv.weight[flat] = _TINY * torch.randn_like(conv.conv.weight[flat])
                conv.conv.bias[flat] = 0
        if after is not None:
            after.weight[flat] = 0
        before = pairs
    post.weight[:, before.flatten()] = 0
    for sign, channel in zip((1.0, -1.0), before.flatten(), strict=True):
        post.weight[0, channel] = sign * LOW_LEVEL * smoother(CODEC.post_conv_kernel_size)
