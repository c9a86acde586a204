"""Draws one token per row: temperature, top-p, repetition penalty and noise of each row's own. Pure functions.

The order of operations is upstream 1.5's (penalty, then top-p, then temperature), and so is the draw:
argmax(p / q) with q ~ Exp(1), here in its logarithmic form. The noise is counter-based: it depends on the row's seed,
the frame, the codebook and the candidate alone, so a row draws the same whoever its batch mates are, on any device.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.errors import RequestError

WINDOW = 16  # frames that the repetition penalty looks back over
MAX_SEED = 2**63 - 1

# (seeds (B,), frames (B,), codebook index, candidates (B, k)) -> exponential noise (B, k) of these candidates
NoiseSource = Callable[[Tensor, Tensor, int, Tensor], Tensor]

# Candidates looked at before all of them: top_p rarely keeps more, and sorting 1,025 costs several times as much.
_FEW = 64


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled; the defaults are upstream 1.5's.

    Raises:
        RequestError: a value lies outside its range.
    """

    temperature: float = 0.7  # 0 takes the most likely token (greedy)
    top_p: float = 0.7
    repetition_penalty: float = 1.2
    seed: int | None = None  # None: drawn when the request is submitted
    max_new_tokens: int = 1024  # frames per sentence, about 47 s at 21.5 frames a second

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.0, 2.0)
        _check_range("top_p", self.top_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.5, 2.0)
        _check_range("max_new_tokens", self.max_new_tokens, 1, 1_000_000)
        if self.seed is not None:
            _check_range("seed", self.seed, 0, MAX_SEED)

    def resolve_seed(self) -> int:
        """The seed, or a fresh random one."""
        return secrets.randbits(63) if self.seed is None else self.seed


@dataclass(frozen=True)
class RowSampling:
    """Sampling parameters of B rows as tensors of shape (B, 1) on the model's device."""

    temperature: Tensor
    top_p: Tensor
    repetition_penalty: Tensor


def sample(logits: Tensor, rows: RowSampling, window: Tensor, noise_of: Callable[[Tensor], Tensor] | None) -> Tensor:
    """One token per row.

    Args:
        logits: (B, n) float; not modified.
        window: (B, WINDOW) int64, candidates of the last frames; an index of n marks an empty place.
        noise_of: gives the exponential noise of candidates, (B, k) -> (B, k); None when every row is greedy.

    Returns:
        (B,) int64 indices into the n candidates.
    """
    logits = penalise(logits.float(), window, rows.repetition_penalty)
    if noise_of is None:
        return logits.argmax(-1)
    ordered, order, cumulative = _most_likely(logits, rows)
    dropped = cumulative > rows.top_p
    dropped[:, 0] = False  # upstream keeps the best candidate whatever top_p says
    scores = ordered / rows.temperature.clamp_min(1e-5) - noise_of(order).log()
    choice = scores.masked_fill_(dropped, -math.inf).argmax(-1, keepdim=True)
    choice = choice.masked_fill(rows.temperature == 0, 0)
    return order.gather(-1, choice).squeeze(-1)


def _most_likely(logits: Tensor, rows: RowSampling) -> tuple[Tensor, Tensor, Tensor]:
    """The candidates that top_p can keep, in falling order: their logits, indices and cumulative probability."""
    if logits.device.type == "cpu" and logits.shape[-1] > _FEW:
        ordered, order = logits.topk(_FEW, dim=-1)
        cumulative = (ordered - logits.logsumexp(-1, keepdim=True)).exp().cumsum(-1)
        if bool((cumulative[:, -1:] > rows.top_p).all()):
            return ordered, order, cumulative
    ordered, order = logits.sort(dim=-1, descending=True)  # a GPU always goes here: asking would make it wait
    return ordered, order, ordered.softmax(-1).cumsum(-1)


def penalise(logits: Tensor, window: Tensor, penalty: Tensor) -> Tensor:
    """Repetition penalty (Keskar et al. 2019): a new (B, n) tensor, candidates in the window made less likely."""
    padded = torch.nn.functional.pad(logits, (0, 1))  # the extra column takes the empty places' writes
    score = padded.gather(-1, window)
    padded.scatter_(-1, window, torch.where(score < 0, score * penalty, score / penalty))
    return padded[:, :-1]


def exponential_noise(seeds: Tensor, frames: Tensor, codebook: int, candidates: Tensor) -> Tensor:
    """Exp(1) noise from a counter: splitmix64's finaliser (Steele et al. 2014) over seed, frame, codebook, candidate.

    Args:
        seeds: (B,) int64; frames: (B,) int64; candidates: (B, k) int64.

    Returns:
        (B, k) float32, each value in (2**-25, 17.4).
    """
    key = _mix(seeds + _mix(frames * _GAMMA + codebook))
    bits = _mix(key[:, None] + candidates * _GAMMA) >> 40  # the upper 24 bits, signed
    return (bits + (2**23 + 0.5)).float().mul_(2.0**-24).log_().neg_()


# The constants of splitmix64, as signed 64-bit integers; products wrap, which is what they are made for.
_GAMMA, _M1, _M2 = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix(x: Tensor) -> Tensor:
    # PyTorch shifts int64 arithmetically: the mask makes the shift logical, or the sign would cancel itself
    x = (x ^ (x >> 30 & 2**34 - 1)) * _M1
    x = (x ^ (x >> 27 & 2**37 - 1)) * _M2
    return x ^ (x >> 31 & 2**33 - 1)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} must be a number from {low} to {high}, not {value!r}")
    if not math.isfinite(value) or not low <= value <= high:
        raise RequestError(f"{name} must be from {low} to {high}, not {value!r}")
