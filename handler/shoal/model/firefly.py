"""The Firefly codec: sound -> VQ codes and back, batched and streamed. Knows nothing of text or requests.

Encoder: log-mel -> ConvNeXt -> downsampling -> grouped residual FSQ. Decoder: FSQ -> upsampling -> HiFiGAN head.
Every convolution sees the past only, so right padding never reaches a row's own samples, and a decoder that is given
`context_frames` frames of the past makes the same samples as one that was given all of it.

State-dict names are those of the published firefly-gan-vq-fsq checkpoints with weight norm folded in
(`fold_weight_norm`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import CodecConfig
from .mel import log_mel, mel_lengths

_NORM_EPS = 1e-6
_LAYER_SCALE_INIT = 1e-6
_STEM_KERNEL = 7  # fixed upstream; encoder_kernel_size concerns the backbone's blocks only
_RESAMPLE_KERNEL = 7

# Code frames (rows x frames) that `decode` runs through the head at once. The published geometry takes about 0.7 MB of
# activations a frame.
DECODE_MAX_FRAMES = 2048


def fold_weight_norm(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A published codec's state dict as `Firefly` names it: weight norm folded, wrapping and derived buffers removed.

    Takes the file's content as loaded: wrapped in "state_dict" or not, names with or without "generator." (a training
    checkpoint, whose other networks are dropped), weight norm as parametrizations or as weight_g / weight_v.
    Raises KeyError if one half of a weight-norm pair is missing.
    """
    state = state.get("state_dict", state)
    if any("generator." in name for name in state):
        state = {name.replace("generator.", ""): value for name, value in state.items() if "generator." in name}
    folded: dict[str, Tensor] = {}
    for name, value in state.items():
        if name.endswith(".parametrizations.weight.original1"):
            stem = name.removesuffix(".parametrizations.weight.original1")
            folded[f"{stem}.weight"] = _merge(value, state[f"{stem}.parametrizations.weight.original0"])
        elif name.endswith(".weight_v"):
            stem = name.removesuffix(".weight_v")
            folded[f"{stem}.weight"] = _merge(value, state[f"{stem}.weight_g"])
        elif name.endswith((".parametrizations.weight.original0", ".weight_g")):
            continue
        elif name.startswith("spec_transform.") or name.endswith(
            (".implicit_codebook", "._levels", "._basis", ".scales")
        ):
            continue  # computed from the config
        else:
            folded[name] = value
    return folded


def _merge(direction: Tensor, gain: Tensor) -> Tensor:
    """weight_norm(dim=0) in float32: each slice along the first axis is scaled to the length `gain`."""
    return torch._weight_norm(direction.float(), gain.float(), 0).to(direction.dtype)


# Activations are (B, C, T) by shape and (B, T, C) in memory: convolutions run as 2-d ones of height 1 in channels-last
# layout, the faster kernels on the CPU, and LayerNorm and Linear need no copies.


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


class Backbone(nn.Module):
    """ConvNeXt encoder without striding: (B, n_mels, T) -> (B, dims[-1], T)."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        dims = config.dims
        stem = nn.Sequential(CausalConv1d(config.n_mels, dims[0], _STEM_KERNEL), ChannelNorm(dims[0]))
        self.downsample_layers = nn.ModuleList([stem])
        for narrow, wide in itertools.pairwise(dims):
            self.downsample_layers.append(nn.Sequential(ChannelNorm(narrow), nn.Conv1d(narrow, wide, 1)))
        self.stages = nn.ModuleList(
            nn.Sequential(*(ConvNeXtBlock(dim, config.encoder_kernel_size) for _ in range(depth)))
            for dim, depth in zip(dims, config.depths, strict=True)
        )
        self.norm = ChannelNorm(dims[-1])

    def forward(self, mel: Tensor) -> Tensor:
        x = mel
        for widen, stage in zip(self.downsample_layers, self.stages, strict=True):
            x = stage(widen(x))
        return self.norm(x)


@lru_cache(maxsize=16)
def _fsq_constants(levels: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
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
        levels, _ = _fsq_constants(self.levels, z.device)
        half = (levels - 1) * (1 + 1e-3) / 2
        offset = torch.where(levels % 2 == 0, 0.5, 0.0)
        return (z + (offset / half).atanh()).tanh() * half - offset

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """z: (B, C, T) -> quantised z (B, C, T), differentiable straight through, and codes (B, codebooks, T) int16."""
        batch, channels, frames = z.shape
        groups = len(self.rvqs)
        levels, places = _fsq_constants(self.levels, z.device)
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
        """codes: (B, codebooks, T) -> quantised z (B, C, T)."""
        batch, _, frames = codes.shape
        levels, places = _fsq_constants(self.levels, codes.device)
        codes = codes.long().reshape(batch, len(self.rvqs), self.quantizers, frames, 1)
        half_width = levels // 2
        digits = (codes // places % levels - half_width) / half_width  # (B, G, R, T, digits) float32
        scales = (levels - 1.0) ** -torch.arange(self.quantizers, device=codes.device)[:, None, None]
        z = self._project((digits * scales).sum(2).to(dtype), "project_out")
        return z.transpose(1, 2).reshape(batch, frames, -1).mT


class Quantizer(nn.Module):
    """Mel-rate features <-> frame-rate codes."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        dim, factors = config.dims[-1], config.downsample_factor
        self.residual_fsq = ResidualFSQ(config)
        self.downsample = nn.Sequential(
            *(nn.Sequential(DownConv1d(dim, dim, f), ConvNeXtBlock(dim, _RESAMPLE_KERNEL)) for f in factors)
        )
        self.upsample = nn.Sequential(
            *(nn.Sequential(UpConv1d(dim, dim, f, f), ConvNeXtBlock(dim, _RESAMPLE_KERNEL)) for f in reversed(factors))
        )


class ResBlock(nn.Module):
    """Pairs of dilated causal convolutions with residuals: (B, C, T) -> (B, C, T)."""

    def __init__(self, channels: int, kernel: int, dilations: Sequence[int]) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(CausalConv1d(channels, channels, kernel, d) for d in dilations)
        self.convs2 = nn.ModuleList(CausalConv1d(channels, channels, kernel, d) for d in dilations)

    def forward(self, x: Tensor) -> Tensor:
        for first, second in zip(self.convs1, self.convs2, strict=True):
            x = second(F.silu(first(F.silu(x)))) + x
        return x


class ParallelBlock(nn.Module):
    """The mean of residual blocks with different kernels."""

    def __init__(self, channels: int, kernels: Sequence[int], dilations: Sequence[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResBlock(channels, kernel, dilations) for kernel in kernels)
        self.past = max(2 * (kernel - 1) * sum(dilations) for kernel in kernels)

    def forward(self, x: Tensor) -> Tensor:
        total = self.blocks[0](x)
        for block in self.blocks[1:]:
            total = total + block(x)
        return total / len(self.blocks)


class Head(nn.Module):
    """HiFiGAN generator: (B, dims[-1], T) -> (B, 1, T * hop_length)."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        width = config.upsample_initial_channel
        self.conv_pre = CausalConv1d(config.dims[-1], width, config.pre_conv_kernel_size)
        self.ups, self.resblocks = nn.ModuleList(), nn.ModuleList()
        for rate, kernel in zip(config.upsample_rates, config.upsample_kernel_sizes, strict=True):
            self.ups.append(UpConv1d(width, width // 2, kernel, rate))
            width //= 2
            self.resblocks.append(ParallelBlock(width, config.resblock_kernel_sizes, config.resblock_dilations))
        self.conv_post = CausalConv1d(width, 1, config.post_conv_kernel_size)


class Firefly(nn.Module):
    """Encoder and decoder with the weights of one geometry; a plain trainable module."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config)
        self.quantizer = Quantizer(config)
        self.head = Head(config)
        self._plan = _context_plan(self)

    @classmethod
    def from_state(cls, config: CodecConfig, state: dict[str, Tensor]) -> Firefly:
        """A model that holds the tensors of `state` (names as fold_weight_norm gives them), without copying them.

        Raises RuntimeError naming each missing, unexpected or misshapen weight.
        """
        with torch.device("meta"):
            model = cls(config)
        model.load_state_dict(state, strict=True, assign=True)
        return model.eval()

    @property
    def context_frames(self) -> int:
        """Frames before a chunk that its samples depend on; 15 at the published geometry.

        Counted back from the chunk's first sample through every layer: a convolution reaches (kernel - 1) * dilation
        steps back, a transposed one turns r steps into (r + kernel - 1) // stride. With fewer frames the samples are
        close, with these or more they are the same but for rounding.
        """
        return self._plan[0]

    @property
    def _dtype(self) -> torch.dtype:
        return self.head.conv_pre.conv.weight.dtype

    def frame_lengths(self, lengths: Tensor) -> Tensor:
        """Code frames of waveforms of `lengths` samples: whole mel frames, in groups of which the last may be partial.

        Upstream's encode returns the number of complete groups beside codes that hold the partial one too, and its
        server uses all of them; so does this.
        """
        frames = mel_lengths(self.config, lengths)
        for factor in self.config.downsample_factor:
            frames = -(-frames // factor)
        return frames

    def encode(self, audio: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Codes of a ragged batch of waveforms; a row's codes depend on its own samples only.

        audio: (B, samples) float32 in -1..1, right padded; lengths: (B,) samples, all of them by default.
        Returns codes (B, num_codebooks, frames) int16, zero past each row's end, and frame lengths (B,) int64. Rows
        shorter than one hop have 0 frames. Raises ValueError if a length exceeds the samples given.
        """
        if lengths is None:
            lengths = torch.full((audio.shape[0],), audio.shape[1])
        lengths = lengths.to(audio.device, torch.int64)
        longest = int(lengths.max())
        if longest > audio.shape[1]:
            raise ValueError(f"a length of {longest} samples is beyond the {audio.shape[1]} given")
        steps = mel_lengths(self.config, lengths)
        if not steps.any():
            return audio.new_zeros(audio.shape[0], self.config.num_codebooks, 0, dtype=torch.int16), steps
        _, codes = self.quantize(log_mel(self.config, audio[:, :longest], lengths), steps)
        frames = self.frame_lengths(lengths)
        return codes * _mask(frames, codes.shape[-1])[:, None], frames

    def quantize(self, mel: Tensor, steps: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Log-mel -> quantised features at the frame rate and their codes. Differentiable straight through.

        mel: (B, n_mels, T); steps: (B,) valid mel frames, all of them by default.
        Returns (B, dims[-1], frames) and codes (B, num_codebooks, frames) int16.
        """
        x = self.backbone(mel.to(self._dtype))
        for stage in self.quantizer.downsample:
            # A group that spans a row's end must see zeros there, as it would at the end of the batch.
            if steps is not None:
                x = x * _mask(steps, x.shape[-1])[:, None]
                steps = -(-steps // stage[0].factor)
            x = stage(x)
        return self.quantizer.residual_fsq(x)

    def synthesize(self, features: Tensor, context: int = 0) -> Tensor:
        """Quantised features (B, dims[-1], context + T) -> audio of the last T frames, (B, T * samples_per_frame).

        `context` counts the leading frames that are there for their influence only: all frames of the past, or the
        last `context_frames` of them or more. Differentiable.
        """
        needs = iter(self._plan)
        x = features

        def trim(x: Tensor) -> Tensor:
            # Drop what the samples cannot feel from here on: little past is needed where a step of it costs most.
            nonlocal context
            surplus = max(0, context - next(needs))
            context -= surplus
            return x[..., surplus:]

        for up, block in self.quantizer.upsample:
            x = up(trim(x))
            context *= up.stride
            x = block(trim(x))
        x = self.head.conv_pre(trim(x))
        for up, block in zip(self.head.ups, self.head.resblocks, strict=True):
            x = up(F.silu(trim(x)))
            context *= up.stride
            x = block(trim(x))
        x = self.head.conv_post(F.silu(trim(x)))
        return torch.tanh(x[:, 0, context:].float())

    def decode(self, codes: Tensor, lengths: Tensor | None = None, max_frames: int = DECODE_MAX_FRAMES) -> Tensor:
        """Audio of a ragged batch of codes.

        codes: (B, num_codebooks, frames), any integer type, right padded; lengths: (B,) frames, all of them by default.
        Returns (B, frames * samples_per_frame) float32, zero past each row's end. At most `max_frames` frames, counted
        over all rows, pass through the network at a time (at least one window of 16 a row): longer batches are decoded
        in windows along time, with the same result.
        """
        batch, _, frames = codes.shape
        ends = [frames] * batch if lengths is None else lengths.tolist()
        audio = torch.zeros(batch, frames * self.config.samples_per_frame, device=codes.device)
        start = 0
        while start < max(ends, default=0):
            rows = [i for i, end in enumerate(ends) if end > start]
            stop = min(start + max(16, max_frames // len(rows)), max(ends))
            picked = codes if len(rows) == batch else codes[rows]
            samples = slice(start * self.config.samples_per_frame, stop * self.config.samples_per_frame)
            audio[rows, samples] = self._decode_span(picked, start, stop)
            start = stop
        if lengths is not None:
            ends_in_samples = lengths.to(audio.device) * self.config.samples_per_frame
            audio *= _mask(ends_in_samples, audio.shape[1])
        return audio

    def decode_chunk(self, codes: Tensor, start: int, end: int) -> Tensor:
        """Audio of the frames [start, end) of codes that begin at frame 0: (B, (end - start) * samples_per_frame).

        codes: (B, num_codebooks, >= end); only `context_frames` frames before `start` are read. Chunks joined are
        the one-shot decode, but for rounding.
        """
        if not 0 <= start <= end <= codes.shape[-1]:
            raise ValueError(f"frames {start} to {end} are not within the {codes.shape[-1]} frames given")
        if start == end:
            return torch.zeros(codes.shape[0], 0, device=codes.device)
        return self._decode_span(codes, start, end)

    def decode_chunks(self, codes: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
        """The newest audio of several streams, which may be at different places, in at most two passes.

        codes: per stream (num_codebooks, frames) from frame 0 on; starts: how many of its frames have been decoded.
        Returns per stream the audio of the frames from its start on, ((frames - start) * samples_per_frame,), as
        `decode_chunk` gives it. Everything new passes at once: meant for chunks, not for whole utterances.
        """
        hop, reach = self.config.samples_per_frame, self.context_frames
        chunks = [torch.zeros(0, device=row.device) for row in codes]
        # Streams that have their full context share it; the young ones are decoded from their beginning.
        young = [i for i, start in enumerate(starts) if start < min(reach, codes[i].shape[-1])]
        grown = [i for i, start in enumerate(starts) if reach <= start < codes[i].shape[-1]]
        for rows, context in ((young, 0), (grown, reach)):
            if not rows:
                continue
            windows = [codes[i][:, starts[i] - context if context else 0 :].mT for i in rows]
            batch = nn.utils.rnn.pad_sequence(windows, batch_first=True).mT
            audio = self.synthesize(self.quantizer.residual_fsq.lookup(batch, self._dtype), context)
            for i, row, window in zip(rows, audio, windows, strict=True):
                skip = 0 if context else starts[i]
                chunks[i] = row[skip * hop : (len(window) - context) * hop]
        return chunks

    def _decode_span(self, codes: Tensor, start: int, stop: int) -> Tensor:
        context = min(start, self.context_frames)
        features = self.quantizer.residual_fsq.lookup(codes[..., start - context : stop], self._dtype)
        return self.synthesize(features, context)


def _mask(lengths: Tensor, size: int) -> Tensor:
    """(B,) -> (B, size) bool, true within each length."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def _context_plan(model: Firefly) -> list[int]:
    """Steps of the past that matter at each point where `synthesize` trims, in its order."""
    needs = [model.head.conv_post.past]
    layers = [(up, block.past) for up, block in zip(model.head.ups, model.head.resblocks, strict=True)]
    for up, past in reversed(layers):
        needs.append(needs[-1] + past)
        needs.append((needs[-1] + up.kernel - 1) // up.stride)
    needs.append(needs[-1] + model.head.conv_pre.past)
    for up, block in reversed(model.quantizer.upsample):
        needs.append(needs[-1] + block.dwconv.past)
        needs.append((needs[-1] + up.kernel - 1) // up.stride)
    return needs[::-1]
