"""Waveform -> log-mel spectrogram, as the Firefly encoder was trained on it. Knows nothing of codes.

The filters are those of `torchaudio.functional.melscale_fbanks(norm="slaney", mel_scale="slaney")`, computed in float32
in the same order: the last bits of a log-mel can move a code to its neighbour.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from ..config import CodecConfig

# Slaney's scale: linear up to 1 kHz (15 mel), logarithmic above.
_HZ_PER_MEL = 200.0 / 3
_BREAK_HZ = 1000.0
_BREAK_MEL = _BREAK_HZ / _HZ_PER_MEL
_LOG_STEP = math.log(6.4) / 27.0


def _hz_to_mel(hz: float) -> float:
    return hz / _HZ_PER_MEL if hz < _BREAK_HZ else _BREAK_MEL + math.log(hz / _BREAK_HZ) / _LOG_STEP


def _mel_to_hz(mel: Tensor) -> Tensor:
    return torch.where(mel < _BREAK_MEL, mel * _HZ_PER_MEL, _BREAK_HZ * torch.exp(_LOG_STEP * (mel - _BREAK_MEL)))


def mel_filterbank(sample_rate: int, n_fft: int, n_mels: int, device: torch.device | str = "cpu") -> Tensor:
    """Triangular filters of equal area from 0 Hz to the Nyquist frequency: (n_fft // 2 + 1, n_mels) float32."""
    nyquist = sample_rate // 2
    bins = torch.linspace(0, nyquist, n_fft // 2 + 1, device="cpu")
    edges = _mel_to_hz(torch.linspace(0.0, _hz_to_mel(float(nyquist)), n_mels + 2, device="cpu"))
    width = edges[1:] - edges[:-1]
    distance = edges[None, :] - bins[:, None]
    rising = -distance[:, :-2] / width[:-1]
    falling = distance[:, 2:] / width[1:]
    filters = torch.minimum(rising, falling).clamp_min(0.0)
    return (filters * (2.0 / (edges[2:] - edges[:-2]))).to(device)


@lru_cache(maxsize=16)
def _constants(
    sample_rate: int, n_fft: int, win_length: int, n_mels: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    # Not module buffers: those would be left on "meta" by loading, and turned to bfloat16 by Module.to().
    with torch.inference_mode(False):  # training may differentiate through them later
        window = torch.hann_window(win_length, device="cpu").to(device)
        return window, mel_filterbank(sample_rate, n_fft, n_mels, device)


def mel_lengths(config: CodecConfig, lengths: Tensor) -> Tensor:
    """Mel frames of waveforms of `lengths` samples; 0 where a waveform is too short for one."""
    spare = lengths + config.win_length - config.hop_length - config.n_fft
    return torch.where(lengths > 0, spare // config.hop_length + 1, 0).clamp_min(0)


def reflect_pad(audio: Tensor, lengths: Tensor, left: int, right: int) -> Tensor:
    """Mirror each row at its own two ends: (B, samples) -> (B, left + samples + right).

    Row b holds `left + lengths[b] + right` samples; what follows is undefined. Rows shorter than the padding bounce
    between their ends as often as needed.
    """
    batch, samples = audio.shape
    ends = (lengths - 1).clamp_min(0)[:, None]
    period = (2 * ends).clamp_min(1)

    def mirrored(position: Tensor) -> Tensor:
        position = position % period  # (B, n)
        return audio.gather(1, torch.minimum(position, period - position).minimum(ends))

    padded = audio.new_zeros(batch, left + samples + right)
    padded[:, left : left + samples] = audio
    padded[:, :left] = mirrored(torch.arange(-left, 0, device=audio.device)[None])
    tail = lengths[:, None] + torch.arange(right, device=audio.device)
    return padded.scatter(1, left + tail, mirrored(tail))


def log_mel(config: CodecConfig, audio: Tensor, lengths: Tensor) -> Tensor:
    """Log-mel spectrogram of a ragged batch; each row is computed as if it were alone.

    audio: (B, samples) float32 in -1..1 at config.sample_rate, right padded; lengths: (B,) int64 on the same device.
    Returns (B, n_mels, mel frames) float32; columns past mel_lengths(config, lengths) are undefined.
    """
    window, filters = _constants(config.sample_rate, config.n_fft, config.win_length, config.n_mels, audio.device)
    overlap = config.win_length - config.hop_length
    padded = reflect_pad(audio.float(), lengths, overlap // 2, (overlap + 1) // 2)
    spectrum = torch.stft(
        padded, config.n_fft, config.hop_length, config.win_length, window, center=False, return_complex=True
    )
    magnitude = torch.sqrt(torch.view_as_real(spectrum).pow(2).sum(-1) + 1e-6)
    return torch.log((magnitude.mT @ filters).clamp_min(1e-5)).mT
