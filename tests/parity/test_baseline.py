"""The baseline (fish-speech 0.1.0 on a 1.5 checkpoint) is upstream 1.5's network, and its loop gives the same codes."""

import importlib

import pytest
import torch
import upstream
from shoal import baseline
from shoal.errors import CheckpointError, DependencyError, RequestError, ShoalError
from shoal.prompt import VoicePrompt, text_prompt, voice_prefix
from shoal.random_checkpoint import write_random_checkpoint

TEXT = "안녕하세요, a shoal of fish."


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("smoke"), overrides={"max_seq_len": 512})


@pytest.fixture(scope="module")
def model(directory):
    try:
        return baseline.UpstreamBaseline.load(directory)
    except DependencyError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def oracle(directory):
    if reason := upstream.skip_reason():
        pytest.skip(reason)
    return upstream.load_upstream_model(directory)


def prompt_of(model, voice=None):
    parts = [
        voice_prefix(model.tokenizer, model.config.num_codebooks, voice),
        text_prompt(model.tokenizer, model.config.num_codebooks, TEXT),
    ]
    return torch.cat(parts, dim=1)


@torch.inference_mode()
def test_logits_equal_upstream_1_5s_to_the_last_bit(model, oracle):
    codes = torch.randint(0, 1024, (8, 9), generator=torch.Generator().manual_seed(0))
    prompt = prompt_of(model, VoicePrompt(("참고 음성",), (codes,)))
    positions = torch.arange(prompt.shape[1])
    steps = [(prompt, positions), (prompt[:, 30:31], positions[-1:] + 1)]
    for columns, at in steps:
        ours, theirs = (network.forward_generate(columns[None], at) for network in (model.model, oracle))
        assert torch.equal(ours.logits, theirs.logits)
        assert torch.equal(ours.hidden_states, theirs.hidden_states)
    hidden = theirs.hidden_states
    for codebook in range(model.config.num_codebooks):
        at = torch.tensor([codebook])
        ours, theirs = (network.forward_generate_fast(hidden, at) for network in (model.model, oracle))
        assert torch.equal(ours, theirs)
        hidden = model.model.fast_embeddings(theirs.argmax(-1))


def test_loop_gives_upstream_1_5s_codes(model, oracle):
    """With the penalty off, where the two releases differ, and values that bfloat16 can hold."""
    torch.manual_seed(11)
    noise = [[torch.empty(size).exponential_(1) for size in upstream.noise_sizes(oracle)] for _ in range(24)]
    sampling = {"temperature": 0.5, "top_p": 0.75, "repetition_penalty": 1.0}
    expected = upstream.upstream_generate(oracle, prompt_of(model), 24, noise=noise, **sampling)
    ended = bool(expected[0, -1] == model.tokenizer.im_end_id)
    codes = model.generate_codes(TEXT, 24, seed=11, **sampling)
    assert codes.shape[1] > 8
    assert codes.dtype == torch.int16
    assert torch.equal(codes.long(), expected[1:, : expected.shape[1] - ended].long())


def test_a_fixed_number_of_frames_goes_on_past_the_end_token(model):
    free = model.generate_codes(TEXT, 200, seed=1)
    fixed = model.generate_codes(TEXT, seed=1, frames=free.shape[1] + 8)
    assert free.shape[1] < 200  # it did end by itself
    assert fixed.shape == (8, free.shape[1] + 8)
    assert torch.equal(fixed[:, : free.shape[1]], free)
    assert model.generate_codes(TEXT, seed=1, frames=1).shape == (8, 1)


def test_same_seed_same_codes_and_the_callers_generator_is_left_alone(model):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = model.generate_codes(TEXT, seed=2, frames=6)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, model.generate_codes(TEXT, seed=2, frames=6))
    assert not torch.equal(first, model.generate_codes(TEXT, seed=3, frames=6))


def test_synthesize(model):
    audio = model.synthesize(TEXT, seed=4, frames=5)
    assert audio.dtype == "float32"
    assert audio.shape == (5 * model.checkpoint.codec.samples_per_frame,)
    assert 0 < abs(audio).max() <= 1
    assert model.sample_rate == 44100


def test_output_is_silent(model, capfd):
    model.generate_codes(TEXT, seed=4, frames=4)
    assert capfd.readouterr() == ("", "")


def test_too_long_for_the_model(model):
    with pytest.raises(RequestError, match=r"of 512 positions"):
        model.generate_codes("a" * 600)
    with pytest.raises(RequestError, match=r"of 512 positions"):
        model.generate_codes(TEXT, frames=500)


def test_upstreams_crash_beyond_the_semantic_range_is_explained(model):
    weight = model.model.output.weight
    saved = weight[-1].clone()
    try:  # make the last vocabulary row, which is padding, the likely one
        weight[-1] = weight[model.tokenizer.semantic_begin_id : -4].abs().max() * 100
        with pytest.raises(ShoalError, match="above the semantic range"):
            for seed in range(8):
                model.generate_codes(TEXT, seed=seed, frames=4)
    finally:
        weight[-1] = saved


def test_a_missing_package_names_the_commands(monkeypatch, directory):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    baseline._import_upstream.cache_clear()
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(DependencyError, match=r"pip install --no-deps fish-speech==0\.1\.0"):
        baseline.UpstreamBaseline.load(directory)


def test_checkpoints_that_it_cannot_run_are_refused(model, tmp_path):
    write_random_checkpoint(tmp_path, overrides={"share_codebook_embeddings": False, "max_seq_len": 64})
    with pytest.raises(CheckpointError, match="share_codebook_embeddings"):
        baseline.UpstreamBaseline.load(tmp_path)


def test_the_oracles_noise_can_be_given_frame_by_frame(model, oracle):
    generator = torch.Generator().manual_seed(3)
    frames = [torch.empty(sum(upstream.noise_sizes(oracle))).exponential_(1, generator=generator) for _ in range(12)]
    prompt = prompt_of(model)
    seeded = upstream.upstream_generate(oracle, prompt, 12, noise=3, semantic_only=True)
    assert torch.equal(upstream.upstream_generate(oracle, prompt, 12, noise=frames, semantic_only=True), seeded)
    inside = (seeded[0] >= model.tokenizer.semantic_begin_id) & (seeded[0] <= model.tokenizer.semantic_end_id)
    assert (inside | (seeded[0] == model.tokenizer.im_end_id)).all()
