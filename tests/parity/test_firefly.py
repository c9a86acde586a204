"""The codec equals upstream's own code: same codes, same samples, from the same state dict."""

from __future__ import annotations

import pytest
import torch
import upstream_codec
from shoal.config import CodecConfig
from shoal.model.firefly import Firefly, fold_weight_norm
from shoal.model.mel import log_mel, mel_filterbank

GEOMETRIES = {
    "three groups": CodecConfig(
        sample_rate=8000,
        n_fft=64,
        win_length=64,
        hop_length=16,
        n_mels=12,
        depths=(1, 2),
        dims=(16, 24),
        n_groups=3,
        upsample_rates=(4, 2, 2),
        upsample_kernel_sizes=(8, 4, 4),
        upsample_initial_channel=32,
    ),
    "residual quantisers, odd rates": CodecConfig(
        sample_rate=16000,
        n_fft=100,
        win_length=80,
        hop_length=20,
        n_mels=10,
        depths=(2, 1, 1),
        dims=(8, 12, 20),
        encoder_kernel_size=5,
        n_groups=2,
        n_codebooks=3,
        levels=(4, 7, 5),
        downsample_factor=(3, 2),
        upsample_rates=(5, 2, 2),
        upsample_kernel_sizes=(11, 4, 3),
        upsample_initial_channel=24,
        resblock_kernel_sizes=(3, 5),
        pre_conv_kernel_size=7,
        post_conv_kernel_size=5,
    ),
    "groups as wide as their digits": CodecConfig(
        sample_rate=8000,
        n_fft=32,
        win_length=32,
        hop_length=8,
        n_mels=6,
        depths=(1,),
        dims=(8,),
        n_groups=2,
        levels=(8, 5, 5, 5),
        downsample_factor=(4,),
        upsample_rates=(8,),
        upsample_kernel_sizes=(16,),
        upsample_initial_channel=16,
        resblock_kernel_sizes=(3,),
        pre_conv_kernel_size=3,
        post_conv_kernel_size=3,
    ),
}


@pytest.fixture(scope="module", params=GEOMETRIES, ids=lambda name: name.replace(" ", "-"))
def pair(request: pytest.FixtureRequest) -> tuple[torch.nn.Module, Firefly]:
    return _pair(GEOMETRIES[request.param])


def _pair(config: CodecConfig) -> tuple[torch.nn.Module, Firefly]:
    theirs = upstream_codec.build(config)
    return theirs, Firefly.from_state(config, fold_weight_norm(theirs.state_dict()))


def _assert_equal_both_ways(theirs: torch.nn.Module, ours: Firefly, samples: int, tolerance: float = 1e-4) -> None:
    generator = torch.Generator().manual_seed(1)
    audio = torch.randn(2, samples, generator=generator) * torch.rand(2, samples, generator=generator).square()
    with torch.inference_mode():
        expected, _ = theirs.encode(audio[:, None], torch.tensor([samples, samples]))
        codes, lengths = ours.encode(audio)
        assert torch.equal(codes.long(), expected.long())
        assert lengths.tolist() == [expected.shape[2]] * 2
        used = [row.unique().numel() for row in codes.transpose(0, 1)]
        assert min(used) > 2, f"the comparison means little: distinct codes per codebook {used}"

        expected, _ = theirs.decode(codes.long(), lengths)
        decoded = ours.decode(codes)
    assert decoded.std() > 0.02, "the comparison means little: the audio is silent"
    assert (decoded - expected[:, 0]).abs().max() < tolerance


def test_codes_and_samples_equal_upstreams(pair):
    theirs, ours = pair
    step = ours.config.samples_per_frame
    _assert_equal_both_ways(theirs, ours, 40 * step)


def test_audio_that_fills_no_whole_frame_is_encoded_as_upstream_does(pair):
    theirs, ours = pair
    step, hop = ours.config.samples_per_frame, ours.config.hop_length
    for samples in (12 * step + 1, 12 * step + hop, 12 * step - 1, 11 * step + hop + 3):
        _assert_equal_both_ways(theirs, ours, samples)


def test_the_log_mel_equals_upstreams(pair):
    theirs, ours = pair
    audio = torch.randn(1, 1003) * 0.3
    expected = theirs.spec_transform(audio)
    assert (log_mel(ours.config, audio, torch.tensor([1003])) - expected).abs().max() < 1e-4


def test_folding_gives_the_weights_that_upstream_computes(pair):
    theirs, ours = pair
    expected = {name: p for name, p in theirs.named_modules() if isinstance(p, torch.nn.Conv1d)}
    assert expected
    for name, conv in expected.items():
        folded = ours.get_parameter(f"{name}.weight")
        torch.testing.assert_close(folded, conv.weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("sample_rate", "n_fft", "n_mels"), [(44100, 2048, 160), (16000, 400, 80), (8000, 64, 12)])
def test_mel_filters_are_slaneys(sample_rate, n_fft, n_mels):
    audio_utils = pytest.importorskip("transformers.audio_utils")
    expected = torch.from_numpy(
        audio_utils.mel_filter_bank(
            n_fft // 2 + 1, n_mels, 0.0, float(sample_rate // 2), sample_rate, norm="slaney", mel_scale="slaney"
        )
    ).float()
    filters = mel_filterbank(sample_rate, n_fft, n_mels)
    assert (filters - expected).abs().max() < 1e-5 * expected.max()


def test_the_published_geometry_equals_upstream():
    theirs, ours = _pair(CodecConfig())
    _assert_equal_both_ways(theirs, ours, 5 * 2048 + 700)
