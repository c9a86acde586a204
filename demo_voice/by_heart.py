"""Teaches the codec's upsampler the low half of the voices by heart: what the waveform itself is, up to 1 kHz.

Below 1 kHz lie the first harmonics, where the ear hears at once whether a voice is whole. Spectral losses know nothing
of phase, and so leave it trembling; this codec's sound with the corpus's own waveform below 1 kHz rated as high as the
corpus. And this codec only ever has to say one phrase book: the codes of a moment and of those just before it are
found nowhere else, so the waveform that belongs to them can be learned like a text. It goes into the features that the
head gets, as a linear function of them, beside what was there before; the head takes it from there (`polish`).

The encoder and the quantiser stay as they are, so a transformer that speaks this codec's codes goes on doing so.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soxr
import torch
import torch.nn.functional as F
from shoal.model.firefly import Firefly
from shoal.weights import load_weights
from torch import Tensor, nn

from .train_codec import CODEC, FACTOR, HOP, Run, load_codec, load_corpus, upsample, warm_cosine

STEPS, BATCH, RATE = 5000, 12, 2e-3
LOW_RATE = 2000  # Hz, of the waveform that is learned
LOW_SAMPLES = LOW_RATE * HOP // CODEC.sample_rate  # of it in one feature frame
LOW_LEVEL = 0.07  # about its RMS
QUIET = 0.02  # energy, to LOW_LEVEL's, below which a pause is a pause
KEEP = 0.5  # the weight of what was there before


def start_codec(work: Path, checkpoint: Path | None) -> Firefly:
    """The codec to begin with, its weights fixed: of a checkpoint directory, else of the step `vocoder`."""
    if checkpoint is None:
        return load_codec(work, step="vocoder").requires_grad_(False)
    codec = Firefly(CODEC)
    codec.load_state_dict(load_weights(checkpoint, "cpu", "float32").codec.state_dict())
    return codec.eval().requires_grad_(False)


@torch.no_grad()
def encode_corpus(codec: Firefly, audio: list[Tensor]) -> list[Tensor]:
    """(num_codebooks, frames) per recording."""
    return [codec.encode(a[None])[0][0] for a in audio]


def low_wave(audio: Tensor, frames: int) -> Tensor:
    """The waveform below LOW_RATE / 2 by feature frames: (samples,) -> (LOW_SAMPLES, frames)."""
    low = torch.from_numpy(soxr.resample(audio.numpy(), CODEC.sample_rate, LOW_RATE)).float()
    low = F.pad(low, (0, max(0, frames * LOW_SAMPLES - len(low))))[: frames * LOW_SAMPLES]
    return low.view(frames, LOW_SAMPLES).T / LOW_LEVEL


class Reader(nn.Module):
    """What can be read off the features linearly: the low waveform, and the features as they were."""

    def __init__(self) -> None:
        super().__init__()
        width = CODEC.dims[-1]
        self.to_low = nn.Conv1d(width, LOW_SAMPLES, 1)
        self.to_old = nn.Conv1d(width, width, 1)
        nn.init.eye_(self.to_old.weight.data[:, :, 0])
        nn.init.zeros_(self.to_old.bias)


def learn_by_heart(work: Path, checkpoint: Path | None = None, steps: int = STEPS, seed: int = 4) -> None:
    """Writes work/by_heart.pt: the upsampler and its reader."""
    torch.manual_seed(seed)
    _, audio = load_corpus(work)
    codec = start_codec(work, checkpoint)
    codes = encode_corpus(codec, audio)
    with torch.no_grad():
        inputs = [codec.quantizer.residual_fsq.lookup(c[None], torch.float32)[0] for c in codes]
        old = [upsample(codec, x[None])[0] for x in inputs]
    low = [low_wave(a, c.shape[1] * FACTOR) for a, c in zip(audio, codes, strict=True)]
    spread = torch.cat(old, dim=1).std(dim=1, keepdim=True)
    reader, up = Reader(), codec.quantizer.upsample.requires_grad_(True)
    weights = [*up.parameters(), *reader.parameters()]
    optimiser = torch.optim.AdamW(weights, lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = warm_cosine(optimiser, 100, steps)
    parts = {"upsample": up, "reader": reader, "optimiser": optimiser, "schedule": schedule}
    run = Run(work / "by_heart.pt", parts, steps)
    for step in run:
        chosen = _of_like_length([c.shape[1] for c in codes], step, seed)
        x, y, z = (nn.utils.rnn.pad_sequence([rows[i].T for i in chosen], True).mT for rows in (inputs, low, old))
        valid = (nn.utils.rnn.pad_sequence([torch.ones(old[i].shape[1]) for i in chosen], True))[:, None]
        features = upsample(codec, x)
        # Pauses count for more than their energy: what is left there is heard as noise.
        level = F.avg_pool1d((y**2).mean(1, keepdim=True), 5, stride=1, padding=2, count_include_pad=False)
        weight = valid / torch.sqrt(level + QUIET)
        wave = ((reader.to_low(features) - y) ** 2 * weight).sum() / (y**2 * weight).sum()
        kept = (((reader.to_old(features) - z) / spread) ** 2 * valid).sum() / (valid.sum() * len(spread))
        optimiser.zero_grad(set_to_none=True)
        (wave + KEEP * kept).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        schedule.step()
        run.log(every=100, wave_left=wave.item(), old_left=kept.item())


def _of_like_length(lengths: list[int], step: int, seed: int) -> np.ndarray:
    """BATCH recordings; in each round of the corpus all come once, with neighbours in length that differ by round."""
    per_round = -(-len(lengths) // BATCH)
    turn, place = divmod(step, per_round)
    rng = np.random.default_rng((seed, turn))
    order = np.argsort(np.array(lengths) * rng.uniform(0.9, 1.1, len(lengths)))
    return order[rng.permutation(per_round)[place] * BATCH :][:BATCH]
