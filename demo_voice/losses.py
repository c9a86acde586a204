"""Spectral losses and small discriminators for the codec's training. Knows nothing of the codec.

The discriminators follow the multi-period idea of HiFi-GAN and the multi-resolution spectrogram idea of UnivNet, with
few channels: they only have to take the buzz out of a handful of synthetic voices.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from shoal.model.mel import mel_filterbank
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm


class SpectralLoss(nn.Module):
    """L1 distance of log-mel and log-magnitude spectra at several resolutions."""

    def __init__(
        self,
        sample_rate: int,
        mels: tuple[tuple[int, int], ...] = ((512, 40), (1024, 80), (2048, 120)),
        stfts: tuple[int, ...] = (256, 512, 1024),
    ) -> None:
        super().__init__()
        self.mels, self.stfts = mels, stfts
        for n_fft, n_mels in mels:
            self.register_buffer(f"bank_{n_fft}", mel_filterbank(sample_rate, n_fft, n_mels), persistent=False)
        for n_fft in {n for n, _ in mels} | set(stfts):
            self.register_buffer(f"window_{n_fft}", torch.hann_window(n_fft), persistent=False)

    def _magnitude(self, audio: Tensor, n_fft: int) -> Tensor:
        window = getattr(self, f"window_{n_fft}")
        spec = torch.stft(audio, n_fft, n_fft // 4, window=window, center=True, return_complex=True)
        return torch.sqrt(spec.real**2 + spec.imag**2 + 1e-7).transpose(1, 2)

    def forward(self, made: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """made, real: (batch, samples). Returns (mel loss, stft loss), scalars."""
        sizes = {n for n, _ in self.mels} | set(self.stfts)
        made_spec = {n: self._magnitude(made, n) for n in sizes}
        with torch.no_grad():
            real_spec = {n: self._magnitude(real, n) for n in sizes}
        mel = made.new_zeros(())
        for n, _ in self.mels:
            bank = getattr(self, f"bank_{n}")
            mel = mel + F.l1_loss(
                (made_spec[n] @ bank).clamp(min=1e-5).log(), (real_spec[n] @ bank).clamp(min=1e-5).log()
            )
        stft = made.new_zeros(())
        for n in self.stfts:
            log_part = F.l1_loss(made_spec[n].clamp(min=1e-3).log(), real_spec[n].clamp(min=1e-3).log())
            shape = (made_spec[n] - real_spec[n]).norm() / real_spec[n].norm().clamp(min=1e-3)
            stft = stft + log_part + shape
        return mel / len(self.mels), stft / len(self.stfts)


class _Stack(nn.Module):
    """Convolutions with leaky ReLU; keeps the inner activations for feature matching."""

    def __init__(self, convs: list[nn.Module]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(weight_norm(c) for c in convs)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Activations of each layer; the last is the score map."""
        kept = []
        for i, conv in enumerate(self.convs):
            x = conv(x)
            if i < len(self.convs) - 1:
                x = F.leaky_relu(x, 0.1)
            kept.append(x)
        return kept


class Discriminators(nn.Module):
    """Three periods of the waveform and two resolutions of its spectrogram, a few thousand parameters each."""

    def __init__(self, periods: tuple[int, ...] = (2, 3, 7), ffts: tuple[int, ...] = (512, 1024)) -> None:
        super().__init__()
        self.periods, self.ffts = periods, ffts
        self.by_period = nn.ModuleList(
            _Stack(
                [
                    nn.Conv2d(1, 8, (5, 1), (3, 1), (2, 0)),
                    nn.Conv2d(8, 24, (5, 1), (3, 1), (2, 0)),
                    nn.Conv2d(24, 64, (5, 1), (3, 1), (2, 0)),
                    nn.Conv2d(64, 96, (5, 1), (2, 1), (2, 0)),
                    nn.Conv2d(96, 1, (3, 1), (1, 1), (1, 0)),
                ]
            )
            for _ in periods
        )
        self.by_spectrum = nn.ModuleList(
            _Stack(
                [
                    nn.Conv2d(1, 8, (3, 7), (1, 2), (1, 3)),
                    nn.Conv2d(8, 16, (3, 7), (1, 2), (1, 3)),
                    nn.Conv2d(16, 24, (3, 7), (1, 2), (1, 3)),
                    nn.Conv2d(24, 24, (3, 3), (1, 1), (1, 1)),
                    nn.Conv2d(24, 1, (3, 3), (1, 1), (1, 1)),
                ]
            )
            for _ in ffts
        )
        for n_fft in ffts:
            self.register_buffer(f"window_{n_fft}", torch.hann_window(n_fft), persistent=False)

    def forward(self, audio: Tensor) -> list[list[Tensor]]:
        """audio: (batch, samples). One list of activations per discriminator."""
        outputs = []
        for period, stack in zip(self.periods, self.by_period, strict=True):
            x = F.pad(audio, (0, -audio.shape[-1] % period))
            outputs.append(stack(x.view(len(x), 1, -1, period)))
        for n_fft, stack in zip(self.ffts, self.by_spectrum, strict=True):
            window = getattr(self, f"window_{n_fft}")
            spec = torch.stft(audio, n_fft, n_fft // 4, window=window, return_complex=True)
            magnitude = torch.sqrt(spec.real**2 + spec.imag**2 + 1e-7)
            outputs.append(stack(torch.log(magnitude + 1e-3).transpose(1, 2).unsqueeze(1)))
        return outputs


def discriminator_loss(real: list[list[Tensor]], made: list[list[Tensor]]) -> Tensor:
    """Least-squares GAN loss of the discriminators."""
    return sum(((1 - r[-1]) ** 2).mean() + (m[-1] ** 2).mean() for r, m in zip(real, made, strict=True))


def generator_losses(real: list[list[Tensor]], made: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """(adversarial, feature matching) losses of the generator."""
    adversarial = sum(((1 - m[-1]) ** 2).mean() for m in made)
    matching = sum(
        F.l1_loss(m, r.detach()) / r.detach().abs().mean().clamp(min=1e-3)
        for rs, ms in zip(real, made, strict=True)
        for r, m in zip(rs[:-1], ms[:-1], strict=True)
    )
    return adversarial, matching
