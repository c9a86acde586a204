"""Upstream's own Firefly modules, loaded file by file: importing the package would import torchaudio.

torchaudio is stood in for by the one function that the spectrogram uses, computed by transformers in float64.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import sys
import types
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from shoal.config import CodecConfig

_PACKAGE = "shoal_upstream_codec"


def _installed(file: str) -> Path:
    try:
        files = importlib.metadata.files("fish-speech-lib") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fish-speech-lib is not installed (pip install --no-deps fish-speech-lib==0.1.1.1)")
    for entry in files:
        if entry.as_posix().endswith(file):
            return Path(entry.locate())
    pytest.skip(f"the installed fish-speech-lib has no {file}")


def _load(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{_PACKAGE}.{name}", _installed(file))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _melscale_fbanks(n_freqs, f_min, f_max, n_mels, sample_rate, norm, mel_scale):
    from transformers.audio_utils import mel_filter_bank

    return torch.from_numpy(mel_filter_bank(n_freqs, n_mels, f_min, f_max, sample_rate, norm, mel_scale)).float()


@cache
def modules() -> tuple[ModuleType, ModuleType, ModuleType]:
    """Upstream's firefly, fsq and spectrogram modules; skips the test where they are not installed."""
    pytest.importorskip("vector_quantize_pytorch", reason="the oracle of the quantiser is not installed")
    parent = types.ModuleType(_PACKAGE)
    parent.__path__ = []  # relative imports need a package
    sys.modules[_PACKAGE] = parent
    firefly = _load("firefly", "models/vqgan/modules/firefly.py")
    fsq = _load("fsq", "models/vqgan/modules/fsq.py")
    stand_ins = {
        name: types.ModuleType(name) for name in ("torchaudio", "torchaudio.functional", "torchaudio.transforms")
    }
    stand_ins["torchaudio"].functional = stand_ins["torchaudio.functional"]
    stand_ins["torchaudio.functional"].melscale_fbanks = _melscale_fbanks
    stand_ins["torchaudio.transforms"].MelScale = None
    with pytest.MonkeyPatch.context() as patch:
        for name, module in stand_ins.items():
            patch.setitem(sys.modules, name, module)
        spectrogram = _load("spectrogram", "utils/spectrogram.py")
    spectrogram.F = stand_ins["torchaudio.functional"]
    return firefly, fsq, spectrogram


def build(config: CodecConfig, seed: int = 0) -> torch.nn.Module:
    """Upstream's FireflyArchitecture of this geometry with random weights, weight norm not folded.

    Upstream's own initial weights make the codec constant (layer scale 1e-6, standard deviations of 0.01 and 0.02);
    these carry a signal of about unit size through every layer, so that codes and samples vary.
    """
    firefly, fsq, spectrogram = modules()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.init, "trunc_normal_", lambda tensor, **_: tensor)  # slow, and overwritten below
        model = firefly.FireflyArchitecture(
            backbone=firefly.ConvNeXtEncoder(
                input_channels=config.n_mels,
                depths=list(config.depths),
                dims=list(config.dims),
                drop_path_rate=0.2,
                kernel_size=config.encoder_kernel_size,
            ),
            head=firefly.HiFiGANGenerator(
                hop_length=config.hop_length,
                upsample_rates=config.upsample_rates,
                upsample_kernel_sizes=config.upsample_kernel_sizes,
                resblock_kernel_sizes=config.resblock_kernel_sizes,
                resblock_dilation_sizes=[config.resblock_dilations] * len(config.resblock_kernel_sizes),
                num_mels=config.dims[-1],
                upsample_initial_channel=config.upsample_initial_channel,
                pre_conv_kernel_size=config.pre_conv_kernel_size,
                post_conv_kernel_size=config.post_conv_kernel_size,
            ),
            quantizer=fsq.DownsampleFiniteScalarQuantize(
                input_dim=config.dims[-1],
                n_groups=config.n_groups,
                n_codebooks=config.n_codebooks,
                levels=list(config.levels),
                downsample_factor=config.downsample_factor,
            ),
            spec_transform=spectrogram.LogMelSpectrogram(
                sample_rate=config.sample_rate,
                n_fft=config.n_fft,
                win_length=config.win_length,
                hop_length=config.hop_length,
                n_mels=config.n_mels,
            ),
        ).eval()
    _randomise(model, torch.Generator().manual_seed(seed))
    return model.requires_grad_(False)


@torch.no_grad()
def _randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("gamma"):
            parameter.uniform_(0.1, 0.5, generator=generator)
        elif name.endswith("original0"):
            continue  # set with its direction
        elif parameter.ndim == 1:
            parameter.normal_(0.0, 0.1, generator=generator)
            if name.endswith("weight"):  # of a LayerNorm
                parameter.add_(1.0)
        else:
            # a transposed kernel is (in, out, taps), and about two of its taps meet in each output
            fan_in = 2 * parameter.shape[0] if ".ups." in name else parameter[0].numel()
            gain = 3.0 if "project_in" in name else 0.3 if "conv_post" in name else 1.2
            parameter.normal_(0.0, gain / math.sqrt(fan_in), generator=generator)
            if name.endswith("original1"):
                lengths = parameter.flatten(1).norm(dim=1).view(-1, *[1] * (parameter.ndim - 1))
                gains = model.get_parameter(name.removesuffix("1") + "0")
                gains.uniform_(0.8, 1.2, generator=generator).mul_(lengths)
