"""Our transformer and engine against upstream's own code on the same weights, in float32: equal, in any batch."""

from __future__ import annotations

import functools

import pytest
import torch
import upstream
from shoal.checkpoint import open_checkpoint
from shoal.engine import Engine
from shoal.model.dual_ar import load_dual_ar
from shoal.model.linear import PACKED_FOR_MANY
from shoal.prompt import VoicePrompt, text_prompt, voice_prefix
from shoal.random_checkpoint import write_random_checkpoint
from shoal.sampling import SamplingParams
from shoal.tokenizer import Tokenizer

from tests.parity.test_prompt import SPEAKABLE

reason = upstream.skip_reason()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

GEOMETRIES = {
    "smoke": {},
    "tied-bias-narrow-fast": {
        "tie_word_embeddings": True,
        "attention_qkv_bias": True,
        "fast_dim": 32,
        "fast_n_head": 4,
        "fast_n_local_heads": 1,
        "fast_intermediate_size": 96,
    },
    "four-codebooks": {"num_codebooks": 4, "n_layer": 3, "n_head": 8, "n_local_heads": 1, "head_dim": 8},
    "own-embeddings": {"share_codebook_embeddings": False, "n_layer": 3, "dim": 96, "n_head": 6, "n_local_heads": 6},
}
FRAMES = 24


class Pair:
    """The same weights in upstream's code and in ours."""

    def __init__(self, directory, full_vocabulary: bool = False, pack: int = PACKED_FOR_MANY) -> None:
        checkpoint = open_checkpoint(directory)
        self.config = checkpoint.config
        self.tokenizer = Tokenizer.from_file(checkpoint.tokenizer_file)
        begin = self.tokenizer.semantic_begin_id
        semantic = [self.tokenizer.im_end_id, *range(begin, begin + self.config.codebook_size)]
        self.head_ids = list(range(self.config.vocab_size)) if full_vocabulary else semantic
        self.model = load_dual_ar(checkpoint, self.head_ids, "cpu", torch.float32, pack=pack)
        self.theirs = upstream.load_upstream_model(directory)

    def engine(self, **options) -> Engine:
        return Engine(
            self.model,
            im_end_id=self.tokenizer.im_end_id,
            semantic_begin_id=self.tokenizer.semantic_begin_id,
            **options,
        )

    def prompt(self, text: str) -> torch.Tensor:
        return text_prompt(self.tokenizer, self.config.num_codebooks, text)

    def upstream_codes(self, prompt: torch.Tensor, **options) -> torch.Tensor | None:
        """Upstream's frames without the one that holds the end token, (num_codebooks, frames); None: no comparison."""
        out = upstream.upstream_generate(self.theirs, prompt, FRAMES, **options)
        if options.get("semantic_only") and out[0, 0] == self.tokenizer.im_end_id:
            return None  # upstream cannot end in its first frame, ours does not choose the end token there
        ended = out.shape[1] > 1 and out[0, -1] == self.tokenizer.im_end_id
        return (out[1:, :-1] if ended else out[1:]).to(torch.int16)


@functools.cache
def make_pair(directory, full_vocabulary: bool = False, pack: int = PACKED_FOR_MANY) -> Pair:
    return Pair(directory, full_vocabulary, pack)


@pytest.fixture(scope="module", params=GEOMETRIES)
def directory(request, tmp_path_factory):
    return write_random_checkpoint(
        tmp_path_factory.mktemp("checkpoint") / request.param,
        seed=9,
        overrides={"max_seq_len": 256} | GEOMETRIES[request.param],
    )


@pytest.fixture(scope="module")
def pair(directory):
    return make_pair(directory)


@pytest.fixture(scope="module")
def lone_pair(directory):
    """With the weights in the layout for one row."""
    return make_pair(directory, pack=1)


@pytest.fixture(scope="module", params=[PACKED_FOR_MANY, 0], ids=["packed", "plain"])
def either_pair(request, directory):
    """With the weights in the layout that decodes fastest, and as they are."""
    return make_pair(directory, pack=request.param)


def run(engine: Engine, jobs, params) -> list[torch.Tensor]:
    sequences = [engine.submit(prompt, p, prefix=prefix) for (prompt, prefix), p in zip(jobs, params, strict=True)]
    while engine.live or engine.waiting:
        engine.step()
    return [sequence.codes() for sequence in sequences]


def test_slow_and_fast_logits(either_pair):
    pair = either_pair
    prompt = torch.cat(
        [voice_prefix(pair.tokenizer, pair.config.num_codebooks, a_voice(pair, 12)), pair.prompt(SPEAKABLE[0])], dim=1
    )
    result = pair.theirs.forward_generate(prompt[None], torch.arange(prompt.shape[1]))
    engine = pair.engine()
    with torch.inference_mode():
        hidden = engine._run_prompt(prompt.T[None], pair.model.new_cache(), slice(0, 1), [0])[:, -1]
        logits = pair.model.logits(hidden)
        torch.testing.assert_close(logits, result.logits[:, -1, pair.head_ids], atol=1e-4, rtol=0)

        theirs = [pair.theirs.forward_generate_fast(result.hidden_states[:, -1], torch.tensor([0]))]
        codes = torch.randint(0, pair.config.codebook_size, (pair.config.num_codebooks - 1,))
        for k, code in enumerate(codes, start=1):
            embedded = pair.theirs.fast_embeddings(code[None])
            theirs.append(pair.theirs.forward_generate_fast(embedded, torch.tensor([k])))
        cache = pair.model.new_fast_cache()
        x = torch.stack([pair.model.fast_project_in(hidden), pair.model.fast_embeddings(codes[:1])], dim=1)
        for k in range(1, pair.config.num_codebooks):
            ours = pair.model.fast(x, cache, 0 if k == 1 else k)
            torch.testing.assert_close(ours, theirs[k].view(1, -1), atol=1e-4, rtol=0)
            x = pair.model.fast_embeddings(codes[k : k + 1])[:, None]


def a_voice(pair: Pair, frames: int) -> VoicePrompt:
    codes = torch.randint(0, 1000, (pair.config.num_codebooks, frames), generator=torch.Generator().manual_seed(1))
    return VoicePrompt(("The reference says this.",), (codes,))


def test_greedy_codes_alone_and_in_batches(pair, lone_pair):
    assert len(SPEAKABLE) >= 20
    prompts = [pair.prompt(text) for text in SPEAKABLE]
    params = SamplingParams(temperature=0, max_new_tokens=FRAMES)
    expected = [pair.upstream_codes(prompt, top_p=0.0, semantic_only=True) for prompt in prompts]
    # the comparison means something
    assert sum(codes is not None for codes in expected) >= 20
    assert len({tuple(codes[0].tolist()) for codes in expected if codes is not None}) > len(prompts) // 2
    jobs = [(prompt, None) for prompt in prompts]
    for batch_size in (1, 5, 16):
        laid_out = lone_pair if batch_size == 1 else pair
        ours = run(laid_out.engine(max_batch_size=batch_size), jobs, [params] * len(jobs))
        for text, a, b in zip(SPEAKABLE, ours, expected, strict=True):
            assert b is None or torch.equal(a, b), f"{text!r} differs in a batch of {batch_size}"


def test_greedy_codes_with_a_prefilled_voice(either_pair):
    pair = either_pair
    voice = voice_prefix(pair.tokenizer, pair.config.num_codebooks, a_voice(pair, 30))
    engine = pair.engine(max_batch_size=4)
    prefix = engine.compute_prefix(voice)
    params = SamplingParams(temperature=0, max_new_tokens=FRAMES)
    prompts = [pair.prompt(text) for text in SPEAKABLE[:6]]
    # rows with and without a voice share the batch
    ours = run(engine, [*((p, prefix) for p in prompts), *((p, None) for p in prompts)], [params] * 12)
    whole = [*(torch.cat([voice, p], dim=1) for p in prompts), *prompts]
    expected = [pair.upstream_codes(p, top_p=0.0, semantic_only=True) for p in whole]
    assert sum(codes is not None for codes in expected) >= 9
    assert all(b is None or torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("full_vocabulary", [False, True], ids=["semantic-head", "whole-vocabulary"])
def test_sampled_codes_with_the_same_noise(directory, full_vocabulary):
    pair = make_pair(directory, full_vocabulary)
    sizes = upstream.noise_sizes(pair.theirs)

    @functools.cache
    def frame_noise(seed: int, frame: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed * 1000 + frame)
        return torch.empty(sum(sizes)).exponential_(1, generator=generator)

    def noise(seeds, frames, codebook, candidates):
        rows = []
        for seed, frame in zip(seeds.tolist(), frames.tolist(), strict=True):
            part = frame_noise(seed, frame).split(sizes)[codebook]
            rows.append(part[pair.head_ids] if codebook == 0 else part)
        return torch.stack(rows).gather(1, candidates)

    settings = [(0.7, 0.7, 1.2), (1.0, 0.95, 1.5), (0.3, 0.5, 1.0), (1.3, 1.0, 0.9)]
    texts = SPEAKABLE[:8]
    prompts = [pair.prompt(text) for text in texts]
    params = [SamplingParams(*settings[i % len(settings)], seed=i, max_new_tokens=FRAMES) for i in range(len(prompts))]
    expected = [
        pair.upstream_codes(
            prompt,
            temperature=p.temperature,
            top_p=p.top_p,
            repetition_penalty=p.repetition_penalty,
            noise=[frame_noise(p.seed, frame) for frame in range(FRAMES)],
            semantic_only=not full_vocabulary,
        )
        for prompt, p in zip(prompts, params, strict=True)
    ]
    compared = [codes for codes in expected if codes is not None]
    assert len(compared) >= 5
    assert max(codes.shape[1] for codes in compared) > 17, "no row reaches past the repetition window"
    jobs = [(prompt, None) for prompt in prompts]
    for batch_size in (1, 3, 8):
        ours = run(pair.engine(max_batch_size=batch_size, noise=noise), jobs, params)
        assert all(b is None or torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_a_rows_codes_do_not_depend_on_its_batch(pair):
    jobs = [(pair.prompt(text), None) for text in SPEAKABLE[:16]]
    params = [SamplingParams(temperature=0.5 + i / 16, seed=i, max_new_tokens=30) for i in range(16)]
    together = run(pair.engine(max_batch_size=16), jobs, params)
    alone = [run(pair.engine(max_batch_size=1), [job], [p])[0] for job, p in zip(jobs, params, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))

    engine = pair.engine(max_batch_size=16)  # the last eight join when the first have decoded some frames
    early = [engine.submit(prompt, p) for (prompt, _), p in zip(jobs[:8], params[:8], strict=True)]
    for _ in range(7):
        engine.step()
    late = [engine.submit(prompt, p) for (prompt, _), p in zip(jobs[8:], params[8:], strict=True)]
    while engine.live or engine.waiting:
        engine.step()
    assert all(torch.equal(s.codes(), b) for s, b in zip([*early, *late], alone, strict=True))
