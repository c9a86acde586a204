"""Layers that see the past only, shared by the Firefly encoder and decoder. Knows nothing of codes or geometry.

Activations are (B, C, T) by shape and (B, T, C) in memory: convolutions run as 2-d ones of height 1 in channels-last
layout, the faster kernels on the CPU, and LayerNorm and Linear need no copies.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_NORM_EPS = 1e-6
_LAYER_SCALE_INIT = 1e-6


class CausalConv1d(nn.Module):
    """Stride-1 convolution over the past: (B, in, T) -> (B, out, T)."""

    def __init__(self, channels_in: int, channels_out: int, kernel: int, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.past = (kernel - 1) * dilation
        self.conv = nn.Conv1d(channels_in, channels_out, kernel, dilation=dilation, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        conv = self.conv
        # Padding both ends inside the convolution and dropping the right one spares a padded copy of the input.
        y = F.conv2d(
            x[:, :, None],
            conv.weight[:, :, None],
            conv.bias,
            padding=(0, self.past),
            dilation=(1, conv.dilation[0]),
            groups=conv.groups,
        )
        return y[:, :, 0, : x.shape[-1]]


class DownConv1d(nn.Module):
    """Convolution with kernel = stride; a last partial step is completed with zeros: T -> ceil(T / stride)."""

    def __init__(self, channels_in: int, channels_out: int, factor: int) -> None:
        super().__init__()
        self.factor = factor
        self.conv = nn.Conv1d(channels_in, channels_out, factor, stride=factor)

    def forward(self, x: Tensor) -> Tensor:
        missing = -x.shape[-1] % self.factor
        x = F.pad(x, (0, missing)) if missing else x
        return F.conv2d(x[:, :, None], self.conv.weight[:, :, None], self.conv.bias, stride=(1, self.factor))[:, :, 0]


class UpConv1d(nn.Module):
    """Transposed convolution whose right overhang is cut off: T -> T * stride, from the past only."""

    def __init__(self, channels_in: int, channels_out: int, kernel: int, stride: int) -> None:
        super().__init__()
        if kernel < stride:
            raise ValueError(f"upsampling kernel {kernel} is shorter than its stride {stride}: it would leave gaps")
        self.kernel, self.stride = kernel, stride
        self.conv = nn.ConvTranspose1d(channels_in, channels_out, kernel, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        conv = self.conv
        y = F.conv_transpose2d(x[:, :, None], conv.weight[:, :, None], conv.bias, stride=(1, self.stride))
        return y[:, :, 0, : x.shape[-1] * self.stride]


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of (B, C, T)."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=_NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT).mT


class ConvNeXtBlock(nn.Module):
    """Depthwise causal convolution and a pointwise MLP with a residual: (B, C, T) -> (B, C, T)."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.dwconv = CausalConv1d(channels, channels, kernel, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=_NORM_EPS)
        self.pwconv1 = nn.Linear(channels, 4 * channels)
        self.pwconv2 = nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(torch.full((channels,), _LAYER_SCALE_INIT))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.dwconv(x).mT)
        y = self.pwconv2(F.gelu(self.pwconv1(y)))
        return x + (self.gamma * y).mT
