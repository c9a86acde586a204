"""The pipeline: order, hits among misses, duplicates, errors in their slots, cancelling, long lists in little room."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from shoal.errors import CancelledError, RequestError, ShoalError
from shoal.pipeline import OptimizedSpeechPipeline
from shoal.random_checkpoint import write_random_checkpoint
from shoal.sampling import SamplingParams
from shoal.scheduler import SpeechRequest
from shoal.speech import FishSpeech, Speech

P = SamplingParams(seed=3, max_new_tokens=20)
TEXTS = [f"Sentence number {i}, spoken in its turn." for i in range(12)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return FishSpeech.load(write_random_checkpoint(tmp_path_factory.mktemp("smoke")), device="cpu", max_batch_size=8)


@pytest.fixture
def pipeline(model):
    model.cache.clear()
    return OptimizedSpeechPipeline(model)


def idle(model):
    return model.scheduler.idle and model.scheduler.live == 0 and not model.scheduler._leaders


def test_results_are_those_of_single_calls_in_the_order_of_the_texts(pipeline, model):
    alone = [model.synthesize(text, params=P, use_cache=False) for text in TEXTS]
    results = pipeline.generate_optimized_speech(TEXTS, params=P)
    for single, result in zip(alone, results, strict=True):
        assert np.array_equal(single.features.codes, result.features.codes)
        np.testing.assert_allclose(single.audio, result.audio, atol=1e-5)
    assert {r.batch_size for r in results} <= {1, 2, 3, 4} and max(r.batch_size for r in results) == 4
    assert pipeline.generate_optimized_speech([], params=P) == []


def test_hits_and_misses_mix_and_hits_take_no_rows(pipeline, model):
    known = TEXTS[::2]
    pipeline.generate_optimized_speech(known, params=P)
    results = pipeline.generate_optimized_speech(TEXTS, params=P)
    assert [r.cache_hit for r in results] == [True, False] * 6
    assert [r.features.text for r in results] == TEXTS
    assert max(r.batch_size for r in results) == 4  # misses fill the batch although every other text is a hit


def test_duplicates_in_one_call_decode_once(pipeline, model, monkeypatch):
    prompts = []
    submit = model._engine.submit
    monkeypatch.setattr(model._engine, "submit", lambda *a, **k: prompts.append(1) or submit(*a, **k))
    texts = [TEXTS[i] for i in (0, 1, 0, 0, 2, 1, 3, 0, 2, 2)]
    results = pipeline.generate_optimized_speech(texts, params=P)
    assert len(prompts) == 4 and [r.features.text for r in results] == texts
    uncached = OptimizedSpeechPipeline(model, enable_feature_caching=False)
    before = model.cache.stats()
    results = uncached.generate_optimized_speech(texts, params=P)
    assert len(prompts) == 4 + len(texts) and not any(r.cache_hit for r in results)
    assert model.cache.stats() == before


def test_a_failing_text_keeps_its_error_to_its_slot(pipeline, model, monkeypatch):
    texts = [TEXTS[0], "", TEXTS[1], "🐟", "x" * 30_000, TEXTS[2], "cannot fit", TEXTS[3]]
    submit = model._engine.submit

    def picky(prompt, *args, **kwargs):
        if prompt.shape[1] == unfit:
            raise ShoalError("does not fit")
        return submit(prompt, *args, **kwargs)

    from shoal.prompt import text_prompt

    unfit = text_prompt(model.tokenizer, model.num_codebooks, "cannot fit").shape[1]
    monkeypatch.setattr(model._engine, "submit", picky)
    results = pipeline.generate_optimized_speech(texts, params=P)
    assert [isinstance(r, Speech) for r in results] == [True, False, True, False, False, True, False, True]
    assert all(isinstance(results[i], RequestError) for i in (1, 3, 4)) and "fit" in str(results[6])
    assert [results[i].features.text for i in (0, 2, 5, 7)] == TEXTS[:4]
    unknown = pipeline.generate_optimized_speech(TEXTS[:3], voice=[None, "nobody", None], params=P)
    assert [isinstance(r, Speech) for r in unknown] == [True, False, True]
    assert idle(model)


def test_an_error_of_the_engine_loses_only_what_was_in_it(pipeline, model, monkeypatch):
    real, calls = model._engine._sample_frame, itertools.count()

    def explode_once(*args):
        if next(calls) == 2:
            raise RuntimeError("boom")
        return real(*args)

    monkeypatch.setattr(model._engine, "_sample_frame", explode_once)
    results = pipeline.generate_optimized_speech(TEXTS, params=P)
    lost = [r for r in results if isinstance(r, ShoalError)]
    assert 1 <= len(lost) <= 4 and "boom" in str(lost[0])
    assert [r.features.text for r in results if isinstance(r, Speech)] == TEXTS[len(lost) :]


def test_progress_is_told(pipeline):
    seen = []
    pipeline.generate_optimized_speech(TEXTS[:5], params=P, progress=lambda *at: seen.append(at))
    assert seen == [(i, 5) for i in range(1, 6)]
    list(pipeline.iter_optimized_speech(iter(TEXTS[:2]), params=P, progress=lambda *at: seen.append(at)))
    assert seen[5:] == [(1, None), (2, None)]


def test_cancelling_keeps_what_is_done(pipeline, model):
    cancel = threading.Event()
    results = pipeline.generate_optimized_speech(
        TEXTS, params=P, cancel=cancel, progress=lambda done, total: done == 3 and cancel.set()
    )
    assert len(results) == len(TEXTS) and all(isinstance(r, Speech) for r in results[:3])
    assert isinstance(results[-1], CancelledError) and idle(model)
    assert all(isinstance(r, (Speech, CancelledError)) for r in results)
    before = pipeline.generate_optimized_speech(TEXTS[:2], params=P, cancel=cancel)
    assert all(isinstance(r, CancelledError) for r in before)
    assert len(list(pipeline.iter_optimized_speech(TEXTS, params=P, cancel=cancel))) == 0


def test_another_thread_may_cancel(pipeline, model):
    cancel = threading.Event()
    endless = (f"Word {i} of a book without an end." for i in itertools.count())
    results = pipeline.iter_optimized_speech(endless, params=P, cancel=cancel)
    assert isinstance(next(results), Speech)
    threading.Timer(0.2, cancel.set).start()
    assert isinstance(list(results)[-1], CancelledError) and idle(model)


def test_a_long_list_is_read_and_held_only_a_little_ahead(pipeline, model):
    read, ahead = [], 0

    def book():
        for i in range(100):
            read.append(i)
            yield f"Page {i % 30}."

    for i, result in enumerate(pipeline.iter_optimized_speech(book(), params=P, batch_size=2)):
        assert isinstance(result, Speech)
        ahead = max(ahead, len(read) - i)
        assert len(model.scheduler._active) <= 8
    assert i == 99 and ahead <= 10


def test_leaving_the_generator_frees_its_rows(pipeline, model):
    results = pipeline.iter_optimized_speech(TEXTS, params=P)
    next(results)
    results.close()
    assert idle(model)


def test_it_waits_where_others_fill_the_scheduler(pipeline, model, monkeypatch):
    monkeypatch.setattr(model.scheduler, "max_waiting", 2)
    others = [model.scheduler.submit(SpeechRequest(f"Other {i}.", params=P)) for i in range(2)]
    results = pipeline.generate_optimized_speech(TEXTS[:6], params=P)
    assert all(isinstance(r, Speech) for r in results) and all(o.done for o in others)


def test_threads_may_share_a_pipeline(pipeline, model):
    results = {}

    def call(name):
        results[name] = pipeline.generate_optimized_speech(TEXTS, params=P)

    threads = [threading.Thread(target=call, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for speeches in results.values():
        assert [s.features.text for s in speeches] == TEXTS
    assert len(results) == 3 and idle(model)


def test_voices_and_parameters_may_differ_per_text(pipeline):
    params = [SamplingParams(seed=i, max_new_tokens=20) for i in range(3)]
    results = pipeline.generate_optimized_speech(["Same."] * 3, params=params)
    assert [r.seed for r in results] == [0, 1, 2] and not any(r.cache_hit for r in results)
    with pytest.raises(RequestError, match="one for all"):
        pipeline.generate_optimized_speech(TEXTS, params=params)
    for call in (lambda: pipeline.generate_optimized_speech(TEXTS, batch_size=0), lambda: type(pipeline)(None, 0)):
        with pytest.raises(RequestError, match="batch of 0"):
            call()
