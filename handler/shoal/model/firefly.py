"""The Firefly codec: sound -> VQ codes and back, batched and streamed. Knows nothing of text or requests.

Encoder: log-mel -> ConvNeXt -> downsampling -> grouped residual FSQ. Decoder: FSQ -> upsampling -> HiFiGAN head.
Every convolution sees the past only, so right padding never reaches a row's own samples, and a decoder that is given
`context_frames` frames of the past makes the same samples as one that was given all of it.

State-dict names are those of the published firefly-gan-vq-fsq checkpoints with weight norm folded in
(`fold_weight_norm`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import CodecConfig
from .causal import CausalConv1d, ChannelNorm, ConvNeXtBlock, DownConv1d, UpConv1d
from .fsq import ResidualFSQ
from .mel import log_mel, mel_lengths

_STEM_KERNEL = 7  # fixed upstream; encoder_kernel_size concerns the backbone's blocks only
_RESAMPLE_KERNEL = 7

# Code frames (rows x frames) that `decode` runs through the head at once. The published geometry takes about 0.7 MB of
# activations a frame.
DECODE_MAX_FRAMES = 1024
_MIN_WINDOW = 32  # frames; a window's context costs as much as about 3 frames


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

    @property
    def _encoder_dtype(self) -> torch.dtype:
        return self.backbone.norm.weight.dtype

    def decoder_to(self, dtype: torch.dtype) -> Firefly:
        """Have sound made in another arithmetic; codes are still found, and looked up, in the one they were."""
        self.quantizer.upsample.to(dtype)
        self.head.to(dtype)
        return self

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
        x = self.backbone(mel.to(self._encoder_dtype))
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
        """Audio of a ragged batch of codes that begin at frame 0.

        codes: (B, num_codebooks, frames), any integer type, right padded; lengths: (B,) frames, all of them by default.
        Returns (B, frames * samples_per_frame) float32, zero past each row's end. At most `max_frames` frames, counted
        over all rows, pass through the network at a time (but 32 of a row): longer batches are decoded in windows along
        time, with the same result but for rounding.
        """
        ends = [codes.shape[-1]] * len(codes) if lengths is None else lengths.tolist()
        return self._decode_ragged(codes, ends, 0, max_frames)

    def decode_chunk(self, codes: Tensor, start: int, end: int) -> Tensor:
        """Audio of the frames [start, end) of codes that begin at frame 0: (B, (end - start) * samples_per_frame).

        codes: (B, num_codebooks, >= end); only `context_frames` frames before `start` are read. Chunks joined are
        the one-shot decode, but for rounding.
        """
        if not 0 <= start <= end <= codes.shape[-1]:
            raise ValueError(f"frames {start} to {end} are not within the {codes.shape[-1]} frames given")
        context = min(start, self.context_frames)
        window = codes[..., start - context : end]
        return self._decode_ragged(window, [end - start] * len(codes), context, DECODE_MAX_FRAMES)

    def decode_chunks(
        self, codes: Sequence[Tensor], starts: Sequence[int], max_frames: int = DECODE_MAX_FRAMES
    ) -> list[Tensor]:
        """The newest audio of several streams that are at different places, in two batches.

        codes: per stream (num_codebooks, frames), from its first frame on or, just as good, from `context_frames`
        before its start; starts: the index in it of the first frame to decode.
        Returns per stream the samples from there on, ((frames - start) * samples_per_frame,) float32.
        """
        audio = [torch.zeros(0, device=row.device) for row in codes]
        reach = self.context_frames
        # Streams with a full context need only that; the young ones are decoded from their beginning.
        for context, grown in ((0, False), (reach, True)):
            rows = [i for i, start in enumerate(starts) if (start >= reach) == grown]
            windows = [codes[i][:, max(0, starts[i] - reach) if grown else 0 :].mT for i in rows]
            if not rows:
                continue
            batch = nn.utils.rnn.pad_sequence(windows, batch_first=True).mT
            decoded = self._decode_ragged(batch, [len(window) - context for window in windows], context, max_frames)
            for i, row, window in zip(rows, decoded, windows, strict=True):
                first = 0 if grown else starts[i]
                samples = self.config.samples_per_frame
                audio[i] = row[first * samples : (len(window) - context) * samples]
        return audio

    def _decode_ragged(self, codes: Tensor, ends: list[int], context: int, max_frames: int) -> Tensor:
        """Windows along time, each with the rows that reach it; `ends` count from frame `context` of `codes`."""
        scale = self.config.samples_per_frame
        audio = torch.zeros(len(codes), (codes.shape[-1] - context) * scale, device=codes.device)
        start, last = 0, max(ends, default=0)
        while start < last:
            rows = [i for i, end in enumerate(ends) if end > start]
            # Stop where a row ends, to stop computing its padding, unless the window would be mostly context.
            stop = min((ends[i] for i in rows if ends[i] >= start + _MIN_WINDOW), default=last)
            stop = min(stop, start + max(_MIN_WINDOW, max_frames // len(rows)))
            known = min(context + start, self.context_frames)
            window = codes[:, :, context + start - known : context + stop]
            features = self.quantizer.residual_fsq.lookup(
                window if len(rows) == len(codes) else window[rows], self._encoder_dtype
            ).to(self._dtype)
            for i, row in zip(rows, self.synthesize(features, known), strict=True):
                samples = (min(stop, ends[i]) - start) * scale
                audio[i, start * scale : start * scale + samples] = row[:samples]
            start = stop
        return audio


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
