"""What callers rely on in the codec: rows are independent, streams join, checkpoints load, it can be trained."""

from __future__ import annotations

import math

import pytest
import torch
from shoal.config import CodecConfig
from shoal.model.firefly import Firefly, fold_weight_norm
from shoal.model.mel import mel_lengths, reflect_pad

CONFIG = CodecConfig(
    sample_rate=8000,
    n_fft=64,
    win_length=64,
    hop_length=16,
    n_mels=12,
    depths=(1, 1),
    dims=(16, 32),
    n_groups=4,
    n_codebooks=2,
    levels=(4, 5, 3),
    downsample_factor=(2, 2),
    upsample_rates=(4, 2, 2),
    upsample_kernel_sizes=(8, 4, 4),
    upsample_initial_channel=32,
    resblock_kernel_sizes=(3, 5),
    pre_conv_kernel_size=7,
    post_conv_kernel_size=7,
)
HOP = CONFIG.samples_per_frame


def _state(config: CodecConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights that keep a signal at about unit size, so that codes and samples vary."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Firefly(config).state_dict().items()}
    state = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("gamma"):
            state[name] = 0.3 + 0.1 * noise
        elif len(shape) == 1:
            state[name] = 0.1 * noise + float(name.endswith("weight"))
        else:
            fan_in = 2 * shape[0] if ".ups." in name else math.prod(shape[1:])
            state[name] = noise * (2.0 if "project_in" in name else 1.2) / math.sqrt(fan_in)
    return state


@pytest.fixture(scope="module")
def codec() -> Firefly:
    return Firefly.from_state(CONFIG, _state(CONFIG)).requires_grad_(False)


@pytest.fixture
def codes() -> torch.Tensor:
    shape = (3, CONFIG.num_codebooks, 100)
    return torch.randint(CONFIG.codebook_size, shape, generator=torch.Generator().manual_seed(2), dtype=torch.int16)


# --- encoding


def test_a_rows_codes_do_not_depend_on_its_batch_mates_or_its_padding(codec):
    lengths = [20 * HOP, 7 * HOP + 37, 13 * HOP + 17, 5 * HOP - 1, HOP]
    audio = torch.randn(len(lengths), max(lengths) + 50)  # what follows a row's end is noise, not silence
    codes, frames = codec.encode(audio, torch.tensor(lengths))
    assert codes.dtype == torch.int16
    for row, (length, count) in enumerate(zip(lengths, frames.tolist(), strict=True)):
        alone, alone_count = codec.encode(audio[row : row + 1, :length])
        assert count == alone_count.item() == alone.shape[2]
        assert torch.equal(codes[row, :, :count], alone[0])
        assert not codes[row, :, count:].any()
    assert codes.unique().numel() > 10


def test_codes_are_within_the_codebook_and_reach_all_of_it(codec):
    _, codes = codec.quantizer.residual_fsq(torch.randn(8, CONFIG.dims[-1], 500) * 5)
    assert codes.min() == 0
    assert codes.max() == CONFIG.codebook_size - 1


def test_a_frame_is_begun_by_every_whole_hop(codec):
    hop = CONFIG.hop_length
    lengths = torch.tensor([0, hop - 1, hop, 4 * hop, 5 * hop - 1, 5 * hop])
    assert mel_lengths(CONFIG, lengths).tolist() == [0, 0, 1, 4, 4, 5]
    assert codec.frame_lengths(lengths).tolist() == [0, 0, 1, 1, 1, 2]


def test_audio_shorter_than_a_hop_has_no_frames(codec):
    codes, frames = codec.encode(torch.zeros(2, CONFIG.hop_length - 1))
    assert codes.shape == (2, CONFIG.num_codebooks, 0)
    assert frames.tolist() == [0, 0]
    mixed, frames = codec.encode(torch.randn(2, 4 * HOP), torch.tensor([0, 4 * HOP]))
    assert frames.tolist() == [0, 4]
    assert not mixed[0].any()


def test_lengths_beyond_the_audio_are_refused(codec):
    with pytest.raises(ValueError, match="100"):
        codec.encode(torch.zeros(1, 99), torch.tensor([100]))


def test_each_row_is_mirrored_at_its_own_end():
    audio = torch.arange(1.0, 9.0).repeat(2, 1)
    padded = reflect_pad(audio, torch.tensor([8, 5]), 3, 2)
    assert padded[0].tolist() == [4, 3, 2, 1, 2, 3, 4, 5, 6, 7, 8, 7, 6]
    assert padded[1, :10].tolist() == [4, 3, 2, 1, 2, 3, 4, 5, 4, 3]


def test_a_row_shorter_than_the_padding_bounces_between_its_ends():
    padded = reflect_pad(torch.tensor([[1.0, 2.0, 3.0], [7.0, 0.0, 0.0]]), torch.tensor([3, 1]), 4, 4)
    assert padded[0].tolist() == [1, 2, 3, 2, 1, 2, 3, 2, 1, 2, 3]
    assert padded[1, :9].tolist() == [7] * 9


# --- decoding


def test_a_rows_samples_do_not_depend_on_its_batch_mates_and_end_in_zeros(codec, codes):
    lengths = torch.tensor([100, 3, 41])
    audio = codec.decode(codes, lengths)
    assert audio.dtype == torch.float32
    assert audio.shape == (3, 100 * HOP)
    for row, length in enumerate(lengths.tolist()):
        alone = codec.decode(codes[row : row + 1, :, :length])
        assert (audio[row, : length * HOP] - alone[0]).abs().max() < 1e-5
        assert not audio[row, length * HOP :].any()
    assert audio.std() > 0.05


@pytest.mark.parametrize("lengths", [None, [100, 3, 41], [0, 17, 40]])
def test_windows_along_time_change_nothing(codec, codes, lengths):
    lengths = None if lengths is None else torch.tensor(lengths)
    whole = codec.decode(codes, lengths)
    assert (codec.decode(codes, lengths, max_frames=3) - whole).abs().max() < 1e-5


def test_no_frames_decode_to_no_samples(codec, codes):
    assert codec.decode(codes[:, :, :0]).shape == (3, 0)
    assert not codec.decode(codes, torch.tensor([0, 0, 0])).any()


@pytest.mark.parametrize("step", [3, 25, 70])
def test_joined_chunks_are_the_one_shot_decode(codec, codes, step):
    whole = codec.decode(codes)
    spans = [(start, min(start + step, 100)) for start in range(0, 100, step)]
    joined = torch.cat([codec.decode_chunk(codes[:, :, :end], start, end) for start, end in spans], 1)
    assert (joined - whole).abs().max() < 1e-5


def test_streams_at_different_places_are_decoded_together(codec, codes):
    whole = codec.decode(codes)
    reach = codec.context_frames
    for starts, ends in [((0, reach, 40), (2, reach + 9, 100)), ((5, 0, 7), (6, 90, 7)), ((30, 31, 32), (60, 60, 60))]:
        rows = [codes[row, :, :end] for row, end in enumerate(ends)]
        for row, chunk in enumerate(codec.decode_chunks(rows, starts)):
            expected = whole[row, starts[row] * HOP : ends[row] * HOP]
            assert chunk.shape == expected.shape
            assert torch.allclose(chunk, expected, atol=1e-5)
    assert codec.decode_chunks([], []) == []


def test_a_stream_needs_to_keep_only_its_context(codec, codes):
    reach = codec.context_frames
    (kept,) = codec.decode_chunks([codes[0, :, 50 - reach : 60]], [reach])
    assert torch.equal(kept, codec.decode_chunk(codes[:1], 50, 60)[0])


def test_a_chunk_outside_the_codes_is_refused(codec, codes):
    with pytest.raises(ValueError, match="101"):
        codec.decode_chunk(codes, 10, 101)


def test_context_frames_is_exactly_how_far_back_a_sample_reaches(codec):
    reach = codec.context_frames
    features = torch.randn(1, CONFIG.dims[-1], reach + 10, requires_grad=True)
    first_sample = codec.synthesize(features)[0, (reach + 5) * HOP]
    (gradient,) = torch.autograd.grad(first_sample, features)
    felt = gradient.abs().sum((0, 1)).nonzero().flatten()
    assert felt[0] == 5
    assert felt[-1] == reach + 5, "a frame of the future was felt"


def test_the_published_geometry():
    with torch.device("meta"):
        codec = Firefly(CodecConfig())
    assert codec.context_frames == 15
    assert sum(p.numel() for p in codec.parameters()) == 47_054_785
    state = codec.state_dict()
    assert state["head.resblocks.4.blocks.2.convs2.2.conv.weight"].shape == (16, 16, 11)
    assert state["quantizer.residual_fsq.rvqs.7.project_in.weight"].shape == (4, 64)
    assert state["backbone.stages.2.8.dwconv.conv.weight"].shape == (384, 1, 7)


def test_every_code_decodes_to_features_that_encode_to_it(codec):
    """Round trip through the quantiser alone: a code's digits are its own nearest neighbours."""
    fsq = Firefly.from_state(plain := _plain_config(), _state(plain)).quantizer.residual_fsq
    codes = torch.arange(plain.codebook_size, dtype=torch.int16).expand(1, plain.num_codebooks, -1)
    features = fsq.lookup(codes, torch.float32)
    half = torch.tensor([level // 2 for level in plain.levels])
    digits = (features.reshape(1, plain.n_groups, 3, -1).mT * half + half).round().long()
    assert torch.equal(digits[0, 0, :, 0], torch.arange(plain.codebook_size) % plain.levels[0])
    assert len(digits[0, 0].unique(dim=0)) == plain.codebook_size


def test_a_code_beyond_the_codebook_wraps_around(codec, codes):
    shifted = codes.clone()
    shifted[:, :, 5] += CONFIG.codebook_size
    assert torch.equal(codec.decode(shifted), codec.decode(codes))


def _plain_config() -> CodecConfig:
    """Groups as wide as their digits, so that features are the quantised digits themselves."""
    return CONFIG.model_copy(update={"dims": (16, 12), "n_codebooks": 1})


# --- weights


def _with_weight_norm(state: dict[str, torch.Tensor], gain: str, direction: str) -> dict[str, torch.Tensor]:
    """Every convolution of the head split into a gain and a direction of another length."""
    split = {}
    for name, weight in state.items():
        if name.startswith("head.") and name.endswith(".conv.weight"):
            stem = name.removesuffix("weight")
            lengths = weight.flatten(1).norm(dim=1).view(-1, *[1] * (weight.ndim - 1))
            split[stem + gain] = lengths
            split[stem + direction] = weight * 2.5
        else:
            split[name] = weight
    return split


PARAMETRIZED = ("parametrizations.weight.original0", "parametrizations.weight.original1")


@pytest.mark.parametrize("names", [PARAMETRIZED, ("weight_g", "weight_v")])
def test_weight_norm_is_folded(names):
    state = _state(CONFIG)
    folded = fold_weight_norm(_with_weight_norm(state, *names))
    assert folded.keys() == state.keys()
    for name, weight in state.items():
        torch.testing.assert_close(folded[name], weight, rtol=1e-5, atol=1e-6)


def test_a_training_checkpoint_is_unwrapped_and_its_other_networks_dropped():
    state = _state(CONFIG)
    wrapped = {f"generator.{name}": value for name, value in state.items()}
    wrapped["discriminator.weight"] = torch.zeros(1)
    folded = fold_weight_norm({"state_dict": wrapped, "epoch": 3})
    assert folded.keys() == state.keys()


def test_derived_buffers_of_older_files_are_dropped():
    state = _state(CONFIG)
    extra = {
        "spec_transform.fb": torch.zeros(1),
        "spec_transform.spectrogram.window": torch.zeros(1),
        "quantizer.residual_fsq.rvqs.0.scales": torch.zeros(1),
        "quantizer.residual_fsq.rvqs.0.layers.0.implicit_codebook": torch.zeros(1),
        "quantizer.residual_fsq.rvqs.0.layers.0._levels": torch.zeros(1),
        "quantizer.residual_fsq.rvqs.0.layers.0._basis": torch.zeros(1),
    }
    assert fold_weight_norm({**state, **extra}).keys() == state.keys()


def test_half_a_weight_norm_pair_is_an_error():
    state = _with_weight_norm(_state(CONFIG), *PARAMETRIZED)
    del state["head.conv_pre.conv.parametrizations.weight.original0"]
    with pytest.raises(KeyError, match="conv_pre"):
        fold_weight_norm(state)


def test_loading_shares_the_tensors_and_leaves_nothing_on_the_meta_device():
    state = _state(CONFIG)
    codec = Firefly.from_state(CONFIG, state)
    assert codec.state_dict().keys() == state.keys()
    assert codec.head.conv_pre.conv.weight.data_ptr() == state["head.conv_pre.conv.weight"].data_ptr()
    assert not any(t.is_meta for t in [*codec.parameters(), *codec.buffers()])


def test_a_state_of_another_geometry_is_refused():
    state = _state(CONFIG)
    del state["backbone.norm.bias"]
    with pytest.raises(RuntimeError, match=r"backbone\.norm\.bias"):
        Firefly.from_state(CONFIG, state)


def test_half_precision_weights_work_and_audio_stays_float32():
    codec = Firefly.from_state(CONFIG, _state(CONFIG)).to(torch.bfloat16)
    codes, _ = codec.encode(torch.randn(1, 20 * HOP))
    audio = codec.decode(codes)
    assert audio.dtype == torch.float32
    reference = Firefly.from_state(CONFIG, _state(CONFIG)).decode(codes)
    assert (audio - reference).square().mean() < 0.05 * reference.square().mean()


def test_every_weight_can_be_trained_through_the_quantiser():
    codec = Firefly(CONFIG)
    codec.load_state_dict(_state(CONFIG))
    with torch.inference_mode():
        codec.encode(torch.randn(1, 4 * HOP))  # constants made here must not be lost to training
    features, codes = codec.quantize(torch.randn(2, CONFIG.n_mels, 24))
    audio = codec.synthesize(features)
    assert audio.shape == (2, codes.shape[2] * HOP)
    audio.square().mean().backward()
    untrained = [name for name, p in codec.named_parameters() if p.grad is None or not p.grad.any()]
    assert untrained == []
