"""Tuning finds the best of what it tries, and a controlled limit settles within its bounds whatever the load."""

from __future__ import annotations

import itertools
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal.arrivals import poisson_arrivals
from shoal.errors import CancelledError, RequestError
from shoal.random_checkpoint import write_random_checkpoint
from shoal.sampling import SamplingParams
from shoal.speech import FishSpeech
from shoal.tuning import LimitController, Objective, Outcome, Settings, powers_of_two, replay_trial, tune


def simulated(settings: Settings) -> Outcome:
    """A service whose batches cost 0.1 s and 0.02 s a row: throughput grows with rows, and so does delay."""
    step = 0.1 + 0.02 * settings.batch_limit
    return Outcome(p95_s=2 * step + settings.wait_s, texts_per_s=settings.batch_limit / (step + settings.wait_s))


def test_throughput_alone_takes_the_largest_batch():
    found = tune(simulated)
    assert found.best == Settings(16, 0.0) and found.met
    assert len({settings for settings, _ in found.trials}) == len(found.trials) <= 24


def test_a_bound_on_the_delay_holds_the_batch_down():
    found = tune(simulated, objective=Objective(p95_s=0.4))
    assert found.best.batch_limit == 4 and found.met and found.outcome.p95_s <= 0.4


def test_where_no_setting_meets_the_bound_the_quickest_is_taken_and_said():
    found = tune(simulated, objective=Objective(p95_s=0.01))
    assert not found.met and found.best == Settings(1, 0.0)


def test_failures_count_before_everything():
    found = tune(lambda s: Outcome(0.1, 100.0 * s.batch_limit, failed=s.batch_limit > 4))
    assert found.best.batch_limit == 4


def test_ties_go_to_the_smaller_and_trials_are_bounded():
    tried = []
    found = tune(lambda s: (tried.append(s), Outcome(1.0, 1.0))[1], most_trials=3)
    assert len(tried) == 3 and found.best.batch_limit == min(s.batch_limit for s in tried)


def test_progress_and_cancelling():
    seen, cancel = [], threading.Event()

    def trial(settings):
        if len(seen) == 3:
            cancel.set()
        return simulated(settings)

    found = tune(trial, progress=lambda *at: seen.append(at), cancel=cancel)
    assert len(found.trials) == 3 and [done for done, _, _ in seen] == [0, 1, 2]
    with pytest.raises(CancelledError):
        tune(simulated, cancel=cancel)
    with pytest.raises(RequestError):
        tune(simulated, batch_limits=())


def test_a_trace_is_replayed_against_a_real_model(tmp_path):
    model = FishSpeech.load(write_random_checkpoint(tmp_path), device="cpu", max_batch_size=4)
    arrivals = poisson_arrivals(["One.", "Two.", "Three."], 6, rate=50.0)
    trial = replay_trial(model, arrivals, SamplingParams(max_new_tokens=8))
    found = tune(trial, batch_limits=(1, 4), waits_s=(0.0,), cache_bytes=(0, 10**6))
    assert 3 <= len(found.trials) <= 4 and found.met
    assert all(outcome.texts_per_s > 0 and outcome.failed == 0 for _, outcome in found.trials)


def test_a_trial_that_was_cut_off_counts_for_nothing(tmp_path):
    model = FishSpeech.load(write_random_checkpoint(tmp_path), device="cpu", max_batch_size=4)
    cancel = threading.Event()
    arrivals = poisson_arrivals(["One."], 50, rate=5.0)
    threading.Timer(0.3, cancel.set).start()
    with pytest.raises(CancelledError):
        tune(replay_trial(model, arrivals, SamplingParams(max_new_tokens=8), cancel), cancel=cancel)

    def second_is_cut_off(settings):
        if cancelled:
            raise CancelledError("cut off")
        cancelled.append(settings)
        return simulated(settings)

    cancelled = []
    assert len(tune(second_is_cut_off).trials) == 1


def load_of(controller, demand, steps):
    """The limits that a controller chooses while `demand` requests are there at a time."""
    limits = []
    for _ in range(steps):
        live = min(demand, controller.limit)
        step = 0.05 + 0.02 * live
        rounds = max(1.0, demand / max(1, controller.limit))
        limits.append(controller.observe(p95_s=20 * step * rounds / 10, waiting=demand - live, live=live))
    return limits


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=6),
    st.floats(0.05, 5.0),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(1, 5),
)
def test_it_settles_and_never_leaves_its_bounds(demands, bound, start, rest):
    controller = LimitController(start, least=1, most=16, p95_s=bound, rest=rest)
    for demand in demands:
        limits = load_of(controller, demand, 80)
        assert all(1 <= limit <= 16 for limit in limits)
        moves = [b - a for a, b in itertools.pairwise(limits) if a != b]
        turns = sum((a > 0) != (b > 0) for a, b in itertools.pairwise(moves))
        assert turns <= 2, limits
        assert len(set(limits[-20:])) == 1, "a constant load, and it still moves"


def test_it_follows_the_load():
    controller = LimitController(1, most=16, p95_s=1.0)
    assert load_of(controller, 2, 40)[-1] <= 2
    assert load_of(controller, 60, 60)[-1] >= 8
    with pytest.raises(RequestError, match="not within"):
        LimitController(20, most=16)
    assert powers_of_two(12) == [1, 2, 4, 8, 12]
