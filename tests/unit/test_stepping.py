"""Decoding goes on while the server is elsewhere, and never while somebody else touches what it decodes."""

from __future__ import annotations

import threading
import time

import pytest
from shoal.errors import ShoalError
from shoal.random_checkpoint import write_random_checkpoint
from shoal.serving.service import SpeechService
from shoal.serving.stepping import Stepper
from shoal.speech import FishSpeech

PATIENCE_S = 20.0


class Work:
    """Something to step: so many steps are left, and each waits for `gate`."""

    def __init__(self, left: int) -> None:
        self.left, self.done, self.inside = left, 0, False
        self.news_at: set[int] = set()
        self.fail_at: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()

    def step(self) -> bool:
        self.inside = True
        assert self.gate.wait(PATIENCE_S)
        self.left, self.done, self.inside = self.left - 1, self.done + 1, False
        if self.done in self.fail_at:
            raise ShoalError(f"step {self.done} failed")
        return self.done in self.news_at

    def idle(self) -> bool:
        return self.left == 0


def until(condition) -> None:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < PATIENCE_S
        time.sleep(0.001)


def test_it_steps_to_the_end_while_it_is_let_go():
    work = Work(50)
    stepper = Stepper(work.step, work.idle)
    assert work.done == 0
    stepper.release()
    until(work.idle)
    stepper.hold()
    work.left = 3
    time.sleep(0.02)
    assert work.done == 50  # held: nobody touched it
    stepper.release()
    stepper.wait(PATIENCE_S)  # returns when there is nothing left
    assert work.done == 53


def test_holding_waits_for_the_step_under_way():
    work = Work(1000)
    work.gate.clear()
    stepper = Stepper(work.step, work.idle)
    stepper.release()
    until(lambda: work.inside)
    threading.Timer(0.05, work.gate.set).start()
    stepper.hold()
    done = work.done
    assert done >= 1 and not work.inside
    time.sleep(0.02)
    assert work.done == done


def test_news_end_the_waiting_and_time_does():
    work = Work(10**9)
    work.news_at = {5}
    stepper = Stepper(work.step, work.idle)
    stepper.release()
    begin = time.monotonic()
    stepper.wait(PATIENCE_S)
    assert time.monotonic() - begin < PATIENCE_S / 2 and work.done >= 5
    stepper.wait(0.03)  # no news: the time decides
    begin = time.monotonic()
    work.news_at = {work.done + n for n in range(1, 200_000)}
    stepper.wait(PATIENCE_S, at_least=0.05)
    assert 0.05 <= time.monotonic() - begin < PATIENCE_S / 2
    stepper.hold()


def test_what_a_step_raises_comes_out_where_it_is_held_and_the_next_step_works():
    work = Work(10)
    work.fail_at = {4}
    stepper = Stepper(work.step, work.idle)
    stepper.release()
    stepper.wait(PATIENCE_S)
    with pytest.raises(ShoalError, match="step 4"):
        stepper.hold()
    assert work.done == 4
    stepper.release()
    stepper.wait(PATIENCE_S)
    stepper.hold()
    assert work.done == 10


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return FishSpeech.load(write_random_checkpoint(tmp_path_factory.mktemp("smoke")), device="cpu", max_batch_size=4)


def body(i: int, **more) -> dict:
    return {"text": f"Number {i}.", "seed": i, "max_new_tokens": 40, "format": "pcm", "use_memory_cache": "off"} | more


def answers(service: SpeechService, count: int) -> dict[str, bytes]:
    """What a server gets that asks again and again, and is busy elsewhere in between."""
    out = {f"r{i}": b"" for i in range(count)}
    for i in range(count):
        service.admit(f"r{i}", body(i, streaming=i % 2 == 0), "application/json")
    open_ones, begin = set(out), time.monotonic()
    while open_ones:
        assert time.monotonic() - begin < 6 * PATIENCE_S
        service.run_slice(0.02)
        for name, reply in service.collect().items():
            assert reply.status == 200, reply.body
            out[name] += reply.body
            if reply.final:
                open_ones.discard(name)
        service.leave()
        service.enter()
    return out


def test_the_sound_is_the_same_as_without_a_thread(model):
    assert answers(SpeechService(model, background=True), 6) == answers(SpeechService(model), 6)


def test_decoding_goes_on_while_the_server_is_elsewhere(model):
    service = SpeechService(model, background=True)
    service.admit("long", body(1, text="On and on it goes. " * 10, max_new_tokens=300), "application/json")
    before = model.scheduler.frames
    service.leave()
    until(lambda: model.scheduler.frames >= before + 20)
    service.enter()
    held = model.scheduler.frames
    time.sleep(0.02)
    assert model.scheduler.frames == held
    service.cancel("long")
    assert model.scheduler.live == 0 and not service.pending


def test_a_step_that_fails_while_the_server_is_elsewhere_fails_its_requests_alone(model, monkeypatch):
    service = SpeechService(model, background=True)
    service.admit("lost", body(1), "application/json")

    def broken() -> list:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(model.scheduler, "step", broken)
    service.leave()
    time.sleep(0.02)
    service.enter()
    monkeypatch.undo()
    service.admit("next", body(2), "application/json")
    replies: dict = {}
    begin = time.monotonic()
    while len(replies) < 2 and time.monotonic() - begin < PATIENCE_S:
        service.run_slice()
        replies |= service.collect()
    assert replies["lost"].status == 500 and b"kernel" not in replies["lost"].body
    assert replies["next"].status == 200
