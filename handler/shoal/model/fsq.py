"""Grouped residual finite scalar quantisation: features <-> codes. Knows nothing of sound.

The arithmetic is that of vector_quantize_pytorch's GroupedResidualFSQ, with all groups computed at once. A digit of a
code is a feature squashed into its range and rounded; a code is its digits read as a number, first digit lowest.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor, nn

from ..config import CodecConfig


@lru_cache(maxsize=16)
def _constants(levels: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    # Place values of a code's digits, as in vector_quantize_pytorch: the first level is the lowest digit.
    with torch.inference_mode(False):
        places = [math.prod(levels[:i]) for i in range(len(levels))]
        return torch.tensor(levels, device=device), torch.tensor(places, device=device)


class GroupQuantizer(nn.Module):
    """The projections of one channel group; absent (no weights) where the group is as wide as the code has digits."""

    def __init__(self, channels: int, digits: int) -> None:
        super().__init__()
        if channels != digits:
            self.project_in = nn.Linear(channels, digits)
            self.project_out = nn.Linear(digits, channels)


class ResidualFSQ(nn.Module):
    """Grouped residual finite scalar quantisation. Codebooks: group by group, then the residuals of a group."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.levels, self.quantizers = config.levels, config.n_codebooks
        width = config.dims[-1] // config.n_groups
        self.projected = width != len(config.levels)
        self.rvqs = nn.ModuleList(GroupQuantizer(width, len(config.levels)) for _ in range(config.n_groups))

    def _project(self, x: Tensor, which: str) -> Tensor:
        """All groups at once: (B, G, T, in) -> (B, G, T, out)."""
        if not self.projected:
            return x
        layers = [getattr(group, which) for group in self.rvqs]
        weight = torch.stack([layer.weight for layer in layers])
        bias = torch.stack([layer.bias for layer in layers])
        return x @ weight.mT + bias[:, None]

    def _bound(self, z: Tensor) -> Tensor:
        """Squash each digit into its range, so that rounding gives one of its levels."""
        levels, _ = _constants(self.levels, z.device)
        half = (levels - 1) * (1 + 1e-3) / 2
        offset = torch.where(levels % 2 == 0, 0.5, 0.0)
        return (z + (offset / half).atanh()).tanh() * half - offset

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """z: (B, C, T) -> quantised z (B, C, T), differentiable straight through, and codes (B, codebooks, T) int16."""
        batch, channels, frames = z.shape
        groups = len(self.rvqs)
        levels, places = _constants(self.levels, z.device)
        half_width = levels // 2
        grouped = z.reshape(batch, groups, channels // groups, frames).mT
        # float32 from here: half precision would round to the wrong level
        residual = self._bound(self._project(grouped, "project_in").float())
        total = torch.zeros_like(residual)
        codes = []
        for i in range(self.quantizers):
            scale = (levels - 1.0) ** -i
            bounded = self._bound(residual / scale)
            digits = bounded.round()
            codes.append(((digits.detach().long() + half_width) * places).sum(-1))
            quantized = (bounded + (digits - bounded).detach()) / half_width * scale
            residual = residual - quantized.detach()
            total = total + quantized
        out = self._project(total.to(z.dtype), "project_out").mT.reshape(batch, channels, frames)
        return out, torch.stack(codes, dim=2).reshape(batch, -1, frames).to(torch.int16)

    def lookup(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """codes: (B, codebooks, T) -> quantised z (B, C, T).

        A code beyond the codebook wraps around. 1.5's language model has 1024 outputs for a codebook of 1000: the 24
        others stand for no sound, and upstream fails on them.
        """
        batch, _, frames = codes.shape
        levels, places = _constants(self.levels, codes.device)
        codes = codes.long().reshape(batch, len(self.rvqs), self.quantizers, frames, 1)
        half_width = levels // 2
        digits = (codes // places % levels - half_width) / half_width  # (B, G, R, T, digits) float32
        scales = (levels - 1.0) ** -torch.arange(self.quantizers, device=codes.device)[:, None, None]
        z = self._project((digits * scales).sum(2).to(dtype), "project_out")
        return z.transpose(1, 2).reshape(batch, frames, -1).mT
