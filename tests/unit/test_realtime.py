"""The real-time processor answers every request exactly once and in bounded time, however requests arrive."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shoal.errors import CancelledError, CapacityError, RequestError, ShoalError
from shoal.random_checkpoint import write_random_checkpoint
from shoal.realtime import RealtimeBatchProcessor
from shoal.sampling import SamplingParams
from shoal.speech import FishSpeech, Speech

P = SamplingParams(seed=3, max_new_tokens=20)


class StubUtterance:
    def __init__(self, text, steps):
        self.text, self.left = text, steps
        self.result = self.error = None

    @property
    def done(self):
        return self.result is not None or self.error is not None


class StubModel:
    """A scheduler that takes a fixed number of steps per request, and remembers how full its batches were."""

    def __init__(self, steps=3, step_s=0.001):
        self.scheduler, self.steps, self.step_s = self, steps, step_s
        self.active, self.batches, self.submitted, self.fail_steps = [], [], [], 0

    def submit(self, request):
        self.submitted.append(request.text)
        if request.text.startswith("bad"):
            raise RequestError(f"{request.text} cannot be spoken")
        if request.text.startswith("bug"):
            raise ZeroDivisionError(request.text)
        utterance = StubUtterance(request.text, self.steps)
        self.active.append(utterance)
        return utterance

    def step(self):
        time.sleep(self.step_s)
        if self.fail_steps:
            self.fail_steps -= 1
            raise RuntimeError("boom")
        self.batches.append(len(self.active))
        for utterance in self.active:
            utterance.left -= 1
            if utterance.left <= 0:
                utterance.result = f"spoken {utterance.text}"
        self.active = [u for u in self.active if not u.done]

    def cancel(self, utterance, error):
        if not utterance.done:
            utterance.error = error
            self.active.remove(utterance)


class Answers:
    def __init__(self):
        self.got, self.times, self.changed = {}, {}, threading.Condition()

    def callback(self, name):
        def call(result):
            with self.changed:
                self.got.setdefault(name, []).append(result)
                self.times[name] = time.monotonic()
                self.changed.notify_all()

        return call

    def wait(self, count, timeout=10):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.got) >= count, timeout), f"{len(self.got)} of {count}"


def test_a_lone_request_needs_no_other(tmp_path):
    model, answers = StubModel(), Answers()
    with RealtimeBatchProcessor(model, 8, 0.1) as processor:
        for name in "ab":  # also after a pause
            begin = time.monotonic()
            processor.enqueue_request(name, answers.callback(name))
            answers.wait(len(answers.got) + (name not in answers.got))
            took = answers.times[name] - begin
            assert 0.1 <= took < 0.1 + 0.003 + 0.15
    assert answers.got == {"a": ["spoken a"], "b": ["spoken b"]}


def test_a_full_batch_does_not_wait():
    model, answers = StubModel(), Answers()
    with RealtimeBatchProcessor(model, 4, 5.0) as processor:
        for i in range(4):
            processor.enqueue_request(str(i), answers.callback(i))
        answers.wait(4, timeout=2)
    assert max(model.batches) == 4


def test_under_load_batches_fill_and_newcomers_join():
    model, answers = StubModel(steps=5), Answers()
    with RealtimeBatchProcessor(model, 8, 0.02, max_queue=200) as processor:
        for i in range(100):
            processor.enqueue_request(str(i), answers.callback(i))
        answers.wait(100)
    assert max(model.batches) == 8 and sorted(model.batches)[len(model.batches) // 2] == 8
    assert model.submitted == [str(i) for i in range(100)]


def test_a_newcomer_joins_those_who_decode():
    model, answers = StubModel(steps=300), Answers()
    with RealtimeBatchProcessor(model, 4, 0.0) as processor:
        processor.enqueue_request("long", answers.callback("long"))
        time.sleep(0.05)
        model.steps = 3
        begin = time.monotonic()
        processor.enqueue_request("short", answers.callback("short"))
        answers.wait(1)
        assert "short" in answers.got and answers.times["short"] - begin < 0.15


def test_a_full_queue_refuses():
    model, answers = StubModel(steps=10_000), Answers()
    processor = RealtimeBatchProcessor(model, 1, 0.0, max_queue=3)
    processor.enqueue_request("first", answers.callback("first"))
    while not model.submitted:
        time.sleep(0.001)
    for i in range(3):
        processor.enqueue_request(str(i), answers.callback(i))
    assert processor.waiting == 3
    with pytest.raises(CapacityError, match="3 requests are waiting"):
        processor.enqueue_request("over", answers.callback("over"))
    assert processor.close(drain=False, timeout=5)
    assert all(isinstance(answers.got[name][0], CancelledError) for name in ("first", 0, 1, 2))
    assert "over" not in answers.got and len(answers.got) == 4


def test_errors_reach_the_callback_of_the_request():
    model, answers = StubModel(), Answers()
    with RealtimeBatchProcessor(model, 8, 0.01) as processor:
        for name in ("good", "bad", "bug", "fine"):
            processor.enqueue_request(name, answers.callback(name))
        answers.wait(4)
        assert isinstance(answers.got["bad"][0], RequestError)
        assert "ZeroDivisionError" in str(answers.got["bug"][0]) and isinstance(answers.got["bug"][0], ShoalError)
        assert answers.got["good"] == ["spoken good"] and answers.got["fine"] == ["spoken fine"]
        model.fail_steps = 1
        processor.enqueue_request("doomed", answers.callback("doomed"))
        answers.wait(5)
        assert "boom" in str(answers.got["doomed"][0])
        processor.enqueue_request("after", answers.callback("after"))
        answers.wait(6)
        assert answers.got["after"] == ["spoken after"]


def test_callbacks_may_raise_and_may_enqueue():
    model, answers = StubModel(), Answers()
    with RealtimeBatchProcessor(model, 8, 0.01) as processor:

        def again(result):
            processor.enqueue_request("second", answers.callback("second"))
            raise ValueError("a callback's own mistake")

        processor.enqueue_request("first", again)
        answers.wait(1)
    assert answers.got == {"second": ["spoken second"]}


def test_closing_drains_at_once_and_ends_the_thread():
    model, answers = StubModel(), Answers()
    processor = RealtimeBatchProcessor(model, 8, 60.0)
    for i in range(5):
        processor.enqueue_request(str(i), answers.callback(i))
    begin = time.monotonic()
    assert processor.close(timeout=10) and time.monotonic() - begin < 2  # not the minute that they might have waited
    assert len(answers.got) == 5 and not processor._worker.is_alive()
    assert processor.close()
    with pytest.raises(ShoalError, match="closed"):
        processor.enqueue_request("late", answers.callback("late"))


def test_a_callback_may_close():
    model, closed = StubModel(), []
    processor = RealtimeBatchProcessor(model, 8, 0.0)
    processor.enqueue_request("a", lambda result: closed.append(processor.close()))
    processor._worker.join(5)
    assert closed == [False] and not processor._worker.is_alive()


def test_leaving_the_block_by_an_error_drops_what_waits():
    model, answers = StubModel(steps=10_000), Answers()
    with pytest.raises(KeyError), RealtimeBatchProcessor(model, 1, 0.0) as processor:
        processor.enqueue_request("a", answers.callback("a"))
        raise KeyError
    assert isinstance(answers.got["a"][0], CancelledError)


@pytest.mark.parametrize("wrong", [(0, 0.1, 1), (1, -1, 1), (1, 0.1, 0)])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(RequestError):
        RealtimeBatchProcessor(StubModel(), wrong[0], wrong[1], max_queue=wrong[2])


arrivals = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0, 0.0, 0.001, 0.004, 0.012]),  # seconds since the one before
        st.sampled_from(["good", "good", "good", "bad", "bug"]),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    arrivals=arrivals,
    capacity=st.integers(1, 5),
    wait=st.sampled_from([0.0, 0.005, 0.02]),
    steps=st.integers(1, 4),
    queue=st.sampled_from([3, 1000]),
    fail_steps=st.integers(0, 1),
    end=st.sampled_from(["wait", "drain", "drop"]),
)
def test_every_request_is_answered_once_and_in_time(arrivals, capacity, wait, steps, queue, fail_steps, end):
    model, answers = StubModel(steps, 0.0005), Answers()
    model.fail_steps = fail_steps
    processor = RealtimeBatchProcessor(model, capacity, wait, max_queue=queue)
    enqueued, refused = {}, set()
    for i, (gap, kind) in enumerate(arrivals):
        if gap:
            time.sleep(gap)
        try:
            enqueued[i] = time.monotonic()
            processor.enqueue_request(f"{kind} {i}", answers.callback(i))
        except CapacityError:
            refused.add(i)
            del enqueued[i]
    if end == "wait":
        answers.wait(len(enqueued))
    assert processor.close(drain=end != "drop", timeout=10)
    assert set(answers.got) == set(enqueued) and not refused & set(answers.got)
    assert all(len(results) == 1 for results in answers.got.values())
    assert queue == 3 or not refused
    # own time, the wait, and the turns of those before it; a busy machine may add to each step
    allowed = wait + (len(arrivals) / capacity + 2) * (steps + 1) * 0.005 + 0.5
    assert all(answers.times[i] - begin < allowed for i, begin in enqueued.items())
    assert all(batch <= capacity for batch in model.batches)
    for i, (_, kind) in enumerate(arrivals):
        if i in enqueued and kind == "good" and not fail_steps and end != "drop":
            assert answers.got[i] == [f"spoken good {i}"]


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    return FishSpeech.load(write_random_checkpoint(tmp_path_factory.mktemp("smoke")), device="cpu", max_batch_size=8)


def test_a_real_model_answers_in_batches(speech):
    answers = Answers()
    with RealtimeBatchProcessor(speech, 4, 0.05, params=P) as processor:
        for i in range(10):
            processor.enqueue_request(f"Request number {i}.", answers.callback(i))
        processor.enqueue_request("", answers.callback("empty"))
        processor.enqueue_request("Request number 3.", answers.callback("repeated"))
        processor.enqueue_request("Hello.", answers.callback("unknown"), voice="nobody")
        answers.wait(13, timeout=60)
    assert isinstance(answers.got["empty"][0], RequestError) and isinstance(answers.got["unknown"][0], RequestError)
    spoken = [answers.got[i][0] for i in range(10)]
    assert all(isinstance(s, Speech) and s.features.text == f"Request number {i}." for i, s in enumerate(spoken))
    assert max(s.batch_size for s in spoken) == 4 and answers.got["repeated"][0].cache_hit
    assert speech.scheduler.idle
