"""Speech in batches, and the search for the batch size that suits a model."""

from __future__ import annotations

import threading

import pytest
import torch
from shoal.batching import BatchMeasurement, BatchSearch, find_best_batch_size, generate_speech_in_batches
from shoal.batching import search_batch_sizes as search
from shoal.errors import CancelledError, RequestError, ShoalError
from shoal.hardware import GUIDE_BATCH_SIZES, compare_with_guide
from shoal.random_checkpoint import write_random_checkpoint
from shoal.results import load_result
from shoal.sampling import SamplingParams
from shoal.speech import FishSpeech

TEXTS = ["One.", "Two and two.", "Three, three, three.", "Four."]
SHORT = SamplingParams(seed=3, max_new_tokens=12)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return FishSpeech.load(write_random_checkpoint(tmp_path_factory.mktemp("smoke")), device="cpu", max_batch_size=8)


@pytest.fixture
def rows_decoded(model, monkeypatch):
    """The number of live rows at the end of each step."""
    seen, step = [], model._engine._sample_frame
    monkeypatch.setattr(
        model._engine, "_sample_frame", lambda hidden, *rest: (seen.append(len(hidden)), step(hidden, *rest))
    )
    return seen


def measured(size, throughput, seconds=10.0):
    return BatchMeasurement(size, (seconds,), throughput * seconds, 4, 1)


def test_batches_are_filled_to_the_limit_and_speak_what_single_calls_speak(model, rows_decoded):
    told = []
    spoken = generate_speech_in_batches(
        TEXTS, model, batch_limit=3, params=SHORT, progress=lambda done, total: told.append((done, total))
    )
    assert max(rows_decoded) == 3 and told == [(i, 4) for i in range(1, 5)]
    for text, speech in zip(TEXTS, spoken, strict=True):
        alone = model.synthesize(text, params=SHORT, use_cache=False)
        assert (speech.features.codes == alone.features.codes).all()


def test_a_bad_text_keeps_its_error_to_itself(model):
    first, bad, last = generate_speech_in_batches(["One.", "", "Two."], model, 2, params=SHORT)
    assert isinstance(bad, RequestError) and first.seconds > 0 and last.seconds > 0
    with pytest.raises(RequestError, match="batch of 0"):
        generate_speech_in_batches(TEXTS, model, batch_limit=0)


def test_every_candidate_is_measured_after_a_warm_up(model, rows_decoded, tmp_path):
    told, file = [], tmp_path / "found.json"
    found = search(
        model,
        TEXTS,
        candidates=(4, 1, 2, 64),
        repeats=2,
        params=SHORT,
        progress=lambda *a: told.append(a),
        save_to=file,
    )
    assert [m.batch_size for m in found.measurements] == [1, 2, 4] and found.left_out == (64,)
    assert all(len(m.seconds) == 2 and m.texts == 4 and m.memory_bytes > 0 for m in found.measurements)
    assert len({round(m.audio_seconds, 6) for m in found.measurements}) == 1, "all sizes speak the same"
    assert found.best in (1, 2, 4) and max(rows_decoded) == 4
    assert told[0] == (0, 9, "batch 1, warm-up") and told[-1] == (8, 9, "batch 4, round 2 of 2")
    saved = load_result(file)
    assert f"{found.best} is best" in saved.title and saved.machine["cores"] >= 1
    assert [row["batch size"] for row in saved.rows] == [1, 2, 4]
    assert saved.rows[0]["seconds"] == found.measurements[0].median_seconds
    assert model.scheduler.batch_limit == 8 and model._engine.kv_bytes == 0, "limit and memory are given back"


def test_the_name_of_the_guide_returns_the_size_alone(model):
    assert find_best_batch_size(model, TEXTS, candidates=[2], repeats=1, params=SHORT) == 2


def test_out_of_memory_ends_the_growth_and_the_model_works_on(model, monkeypatch):
    step = model._engine._sample_frame

    def full(hidden, *rest):
        if len(hidden) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        step(hidden, *rest)

    monkeypatch.setattr(model._engine, "_sample_frame", full)
    found = search(model, TEXTS, candidates=(1, 2, 4, 8), repeats=2, params=SHORT)
    assert [m.out_of_memory for m in found.measurements] == [False, False, True]
    assert found.left_out == (8,) and found.best in (1, 2)
    assert all(len(m.seconds) == 2 for m in found.measurements[:2]), "smaller sizes are measured to the end"
    assert "out of memory" in found.rows()[2] and model._engine.kv_bytes == 0
    assert model.synthesize("Still here.", params=SHORT).seconds > 0


def test_where_not_even_one_fits_it_says_so(model, monkeypatch):
    def full(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(model._engine, "_sample_frame", full)
    with pytest.raises(ShoalError, match="not even the smallest"):
        find_best_batch_size(model, TEXTS, candidates=(1, 2), repeats=1, params=SHORT)


def test_other_errors_are_not_taken_for_memory(model):
    with pytest.raises(RequestError, match=r"nothing|empty|speak"):
        search(model, [""], candidates=[1], repeats=1)
    for wrong in ({"candidates": []}, {"repeats": 0}, {"tolerance": 1.0}, {"candidates": [0, 1]}, {"candidates": [9]}):
        with pytest.raises(RequestError):
            search(model, TEXTS, **wrong)


def test_a_tie_goes_to_the_smaller_batch():
    sizes = (measured(1, 1.0), measured(2, 3.9), measured(4, 4.0), measured(8, 3.0))
    assert BatchSearch(sizes, tolerance=0.05).best == 2
    assert BatchSearch(sizes, tolerance=0.0).best == 4


def test_cancelling_keeps_what_was_measured(model):
    cancel = threading.Event()

    def stop_late(done, total, what):
        if done == 5:  # in the second round
            cancel.set()

    found = search(model, TEXTS, candidates=(1, 2), repeats=3, params=SHORT, progress=stop_late, cancel=cancel)
    assert found.cancelled and [len(m.seconds) for m in found.measurements] == [2, 1]
    with pytest.raises(CancelledError):  # still set: nothing is measured at all
        search(model, TEXTS, candidates=(1,), params=SHORT, cancel=cancel)
    assert model.scheduler.idle and model.scheduler.batch_limit == 8


def test_what_fits_stands_beside_the_guides_table():
    advice = compare_with_guide()
    assert [(a.memory_gb, a.guide) for a in advice] == list(GUIDE_BATCH_SIZES)
    assert [a.fits for a in advice] == sorted(a.fits for a in advice) and advice[-1].fits >= 12
