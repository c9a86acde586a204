"""The engine: rows come and go, limits hold, and what is cancelled leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
from shoal.engine import Engine
from shoal.errors import RequestError
from shoal.random_checkpoint import write_random_checkpoint
from shoal.sampling import SamplingParams
from shoal.speech import FishSpeech


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    return FishSpeech.load(write_random_checkpoint(tmp_path_factory.mktemp("smoke")), device="cpu")


@pytest.fixture
def engine(speech):
    return new_engine(speech, max_batch_size=4)


def new_engine(speech, **options) -> Engine:
    ids = {"im_end_id": speech.tokenizer.im_end_id, "semantic_begin_id": speech.tokenizer.semantic_begin_id}
    return Engine(speech.model, **ids, **options)


def prompt(length: int) -> torch.Tensor:
    columns = torch.zeros(9, length, dtype=torch.int64)
    columns[0] = torch.arange(length) % 256
    return columns


def drain(engine):
    finished = []
    while engine.live or engine.waiting:
        finished += engine.step()
    return finished


def test_forced_frames_are_exact_and_max_new_tokens_is_a_limit(engine):
    forced = engine.submit(prompt(10), SamplingParams(seed=1), force_frames=37)
    limited = engine.submit(prompt(10), SamplingParams(seed=1, max_new_tokens=2))
    single = engine.submit(prompt(3), SamplingParams(seed=2, max_new_tokens=1))
    drain(engine)
    assert forced.frames == 37 and forced.codes().shape == (8, 37) and forced.reason == "length"
    assert limited.frames <= 2 and torch.equal(limited.codes(), forced.codes()[:, : limited.frames])
    assert single.codes().shape == (8, 1)
    assert forced.codes().dtype == torch.int16


def test_no_more_rows_than_the_limit_decode_and_freed_rows_are_taken_at_once(engine):
    sequences = [engine.submit(prompt(5), SamplingParams(seed=i), force_frames=2 + i % 3) for i in range(12)]
    most = 0
    while engine.live or engine.waiting:
        engine.step()
        most = max(most, engine.live)
    assert most <= 4 and all(s.batch_size == 4 for s in sequences[:9])
    assert engine.steps <= 12  # 36 frames in 4 rows take 9 steps; a batch that waits for its longest takes 12
    assert [s.frames for s in sequences] == [2 + i % 3 for i in range(12)]


def test_the_limit_can_be_lowered_and_raised_while_rows_decode(engine):
    for i in range(12):
        engine.submit(prompt(5), SamplingParams(seed=i), force_frames=6)
    engine.step()
    assert engine.live == 4
    engine.batch_limit = 1
    for _ in range(6):
        engine.step()
    assert engine.live == 1, "rows that decode finish, but only one newcomer is let in"
    engine.batch_limit = 4
    engine.step()
    assert engine.live == 4


def test_cancelled_sequences_free_their_row_and_disturb_nobody(engine):
    alone = engine.submit(prompt(9), SamplingParams(seed=5), force_frames=20)
    drain(engine)
    victims = [engine.submit(prompt(4 + i), SamplingParams(seed=i), force_frames=50) for i in range(3)]
    kept = engine.submit(prompt(9), SamplingParams(seed=5), force_frames=20)
    waiting = engine.submit(prompt(3), SamplingParams(seed=9), force_frames=5)
    for _ in range(6):
        engine.step()
    for sequence in (*victims[:2], waiting):
        engine.cancel(sequence)
    assert engine.live == 2 and engine.waiting == 0
    engine.cancel(victims[2])
    drain(engine)
    assert torch.equal(kept.codes(), alone.codes())
    assert victims[0].reason == "cancelled" and victims[0].codes().shape == (8, 6)
    engine.cancel(kept)  # no effect on one that is done
    assert kept.reason == "length"


def test_codes_can_be_read_while_they_grow(engine):
    sequence = engine.submit(prompt(6), SamplingParams(seed=3), force_frames=12)
    assert sequence.codes().shape == (8, 0)
    parts = []
    while not sequence.done:
        seen = sum(part.shape[1] for part in parts)
        engine.step()
        parts.append(sequence.codes(seen))
    assert torch.equal(torch.cat(parts, dim=1), sequence.codes())


def test_looking_for_ended_rows_less_often_changes_nothing(speech):
    results = []
    for check_every in (1, 4):
        engine = new_engine(speech, max_batch_size=3, check_every=check_every)
        sequences = [engine.submit(prompt(4 + i), SamplingParams(seed=i, max_new_tokens=60)) for i in range(9)]
        drain(engine)
        results.append(sequences)
    assert "stop" in {s.reason for s in results[0]}
    for a, b in zip(*results, strict=True):
        assert a.frames == b.frames and torch.equal(a.codes(), b.codes())


def test_long_prompts_are_prefilled_in_parts(speech, engine):
    long, short = prompt(1300), prompt(20)
    together = [engine.submit(p, SamplingParams(temperature=0), force_frames=5) for p in (long, short)]
    drain(engine)
    other = new_engine(speech, max_batch_size=1)
    alone = [other.submit(p, SamplingParams(temperature=0), force_frames=5) for p in (long, short)]
    drain(other)
    assert all(torch.equal(a.codes(), b.codes()) for a, b in zip(together, alone, strict=True))


def test_a_prompt_that_fills_the_context_is_refused_and_one_that_nearly_does_is_cut(speech, engine):
    context = speech.model.config.max_seq_len
    with pytest.raises(RequestError, match="shorten"):
        engine.submit(prompt(context), SamplingParams())
    nearly = engine.submit(prompt(context - 3), SamplingParams(seed=1), force_frames=50)
    shorter = engine.submit(prompt(7), SamplingParams(seed=1), force_frames=10)
    drain(engine)
    assert nearly.frames == 3 and shorter.frames == 10


def test_the_cache_grows_with_what_is_used_and_can_be_given_back(speech):
    engine = new_engine(speech, max_batch_size=32)
    engine.submit(prompt(5), SamplingParams(seed=0), force_frames=3)
    drain(engine)
    small = engine.kv_bytes
    for i in range(32):
        engine.submit(prompt(100), SamplingParams(seed=i), force_frames=100)
    drain(engine)
    c = speech.model.config
    whole = c.kv_bytes_per_token(4) * 32 * c.max_seq_len
    assert small < whole / 100 and engine.kv_bytes < whole / 5
    engine.abort()
    assert engine.kv_bytes == 0
    again = engine.submit(prompt(5), SamplingParams(seed=0), force_frames=3)
    drain(engine)
    assert again.frames == 3
