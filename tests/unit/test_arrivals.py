"""Requests made up by rate and replayed against a RealtimeBatchProcessor."""

from __future__ import annotations

import itertools
import statistics
import threading

import pytest
from shoal.arrivals import poisson_arrivals, replay, zipf_requests
from shoal.errors import CapacityError, RequestError
from shoal.random_checkpoint import write_random_checkpoint
from shoal.realtime import RealtimeBatchProcessor
from shoal.sampling import SamplingParams
from shoal.speech import FishSpeech, Speech

SHORT = SamplingParams(seed=3, max_new_tokens=10)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return FishSpeech.load(write_random_checkpoint(tmp_path_factory.mktemp("smoke")), device="cpu", max_batch_size=8)


def test_arrivals_come_at_the_rate_asked_for_and_the_same_each_time():
    arrivals = poisson_arrivals(["a", "b"], 4000, rate=20, seed=1)
    gaps = [after.at - before.at for before, after in itertools.pairwise(arrivals)]
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.1) and arrivals[0].at == 0
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.1), "as irregular as independent callers are"
    assert [a.text for a in arrivals[:3]] == ["a", "b", "a"]
    assert arrivals == poisson_arrivals(["a", "b"], 4000, rate=20, seed=1)
    with pytest.raises(RequestError):
        poisson_arrivals(["a"], 3, rate=0)


def test_every_request_is_answered_in_batches(model):
    told = []
    with RealtimeBatchProcessor(model, 4, 0.2, use_cache=False) as processor:
        answers = replay(processor, poisson_arrivals(["One.", "Two."], 8, 400), SHORT, on_answer=told.append)
    assert [a.number for a in answers] == list(range(8)) and len(told) == 8
    assert all(isinstance(a.result, Speech) and a.latency > 0 and a.arrived <= a.answered for a in answers)
    assert max(a.batch_size for a in answers) == 4


def test_a_full_queue_refuses_and_a_bad_text_keeps_its_error(model):
    with RealtimeBatchProcessor(model, 1, 0.5, max_queue=1, use_cache=False) as processor:
        answers = replay(processor, poisson_arrivals(["One.", "Two.", "Three."], 3, 1e6), SHORT)
        (bad,) = replay(processor, poisson_arrivals([""], 1, 1), SHORT)
    assert any(isinstance(a.result, CapacityError) for a in answers) and isinstance(answers[0].result, Speech)
    assert isinstance(bad.result, RequestError) and bad.batch_size == 0


def test_cancelling_sends_no_more(model):
    cancel = threading.Event()
    with RealtimeBatchProcessor(model, 4, 0.0, use_cache=False) as processor:
        answers = replay(
            processor, poisson_arrivals(["One."], 100, 5), SHORT, on_answer=lambda _: cancel.set(), cancel=cancel
        )
    assert 1 <= len(answers) < 100


def test_few_texts_make_most_of_the_requests():
    drawn = zipf_requests(["a", "b", "c", "d"], 4000, exponent=1.0, seed=2)
    counts = [drawn.count(text) for text in "abcd"]
    assert counts[0] / counts[1] == pytest.approx(2, rel=0.15) and counts[0] / counts[3] == pytest.approx(4, rel=0.2)
    even = zipf_requests(["a", "b"], 4000, exponent=0.0)
    assert even.count("a") == pytest.approx(2000, rel=0.1)
    with pytest.raises(RequestError):
        zipf_requests([], 3)
