"""Sampling: parameters are checked, draws follow the distribution, and a row's noise is its own."""

from __future__ import annotations

import math

import pytest
import torch
from shoal.errors import RequestError
from shoal.sampling import MAX_SEED, WINDOW, RowSampling, SamplingParams, exponential_noise, penalise, sample


def rows(count, temperature=1.0, top_p=1.0, penalty=1.0):
    return RowSampling(*(torch.full((count, 1), float(value)) for value in (temperature, top_p, penalty)))


def every(count, candidates):
    return torch.arange(candidates).expand(count, candidates)


def noise_for(count):
    seeds, frames = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    return lambda candidates: exponential_noise(seeds, frames, 0, candidates)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": "hot"},
        {"temperature": True},
        {"top_p": 1.5},
        {"repetition_penalty": 0},
        {"max_new_tokens": 0},
        {"seed": -1},
        {"seed": 2**70},
    ],
)
def test_parameters_out_of_range_are_named(wrong):
    with pytest.raises(RequestError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_seeds():
    assert SamplingParams(seed=5).resolve_seed() == 5
    drawn = {SamplingParams().resolve_seed() for _ in range(20)}
    assert len(drawn) == 20 and all(0 <= seed <= MAX_SEED for seed in drawn)


def test_noise_is_exponential_and_depends_on_each_of_its_inputs():
    seeds, frames = torch.arange(64), torch.zeros(64, dtype=torch.int64)
    noise = exponential_noise(seeds, frames, 0, every(64, 4096))
    assert abs(noise.mean() - 1) < 0.01 and abs(noise.var() - 1) < 0.02
    assert abs((noise < math.log(2)).float().mean() - 0.5) < 0.005
    for other in (
        exponential_noise(seeds, frames + 1, 0, every(64, 4096)),
        exponential_noise(seeds, frames, 1, every(64, 4096)),
        exponential_noise(seeds + (1 << 40), frames, 0, every(64, 4096)),
    ):
        correlation = torch.corrcoef(torch.stack([noise.flatten(), other.flatten()]))[0, 1]
        assert abs(correlation) < 0.01
    between_rows = torch.corrcoef(noise).fill_diagonal_(0)
    assert between_rows.abs().max() < 0.08


def test_a_rows_noise_does_not_depend_on_the_batch():
    seeds, frames = torch.tensor([3, 2**62 + 1, 77]), torch.tensor([0, 9, 1000])
    together = exponential_noise(seeds, frames, 4, every(3, 100))
    for i in range(3):
        assert torch.equal(together[i], exponential_noise(seeds[i : i + 1], frames[i : i + 1], 4, every(1, 100))[0])


def test_draws_follow_the_distribution():
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = probabilities.log().expand(20_000, 4)
    window = torch.full((20_000, WINDOW), 4)
    drawn = sample(logits, rows(20_000), window, noise_for(20_000))
    shares = drawn.bincount(minlength=4) / 20_000
    torch.testing.assert_close(shares, probabilities, atol=0.015, rtol=0)


def test_top_p_keeps_the_most_likely_candidates_and_at_least_one():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(4000, 4)
    noise = noise_for(4000)
    window = torch.full((4000, WINDOW), 4)
    assert set(sample(logits, rows(4000, top_p=0.85), window, noise).tolist()) == {0, 1}
    assert set(sample(logits, rows(4000, top_p=0.0), window, noise).tolist()) == {0}


def test_zero_temperature_is_greedy_also_beside_sampled_rows():
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    mixed = rows(8)
    mixed.temperature[::2] = 0
    noise = noise_for(8)
    window = torch.full((8, WINDOW), 50)
    assert torch.equal(sample(logits, mixed, window, noise)[::2], logits.argmax(-1)[::2])
    assert torch.equal(sample(logits, rows(8, temperature=0), window, None), logits.argmax(-1))


def test_the_penalty_makes_recent_candidates_less_likely():
    logits = torch.tensor([[2.0, -2.0, 1.0]])
    window = torch.tensor([[0, 1, 0] + [3] * (WINDOW - 3)])  # 3 marks an empty place
    expected = torch.tensor([[1.0, -4.0, 1.0]])
    assert torch.equal(penalise(logits, window, torch.tensor([[2.0]])), expected)
    assert logits[0, 0] == 2.0, "the caller's logits are left alone"


@pytest.mark.parametrize("top_p", [0.3, 0.999, 1.0])
def test_looking_at_few_candidates_first_changes_nothing(monkeypatch, top_p):
    logits = 3 * torch.randn(200, 1025, generator=torch.Generator().manual_seed(0))
    window = torch.full((200, WINDOW), 1025)
    few = sample(logits, rows(200, top_p=top_p), window, noise_for(200))
    monkeypatch.setattr("shoal.sampling._FEW", 2000)
    assert torch.equal(few, sample(logits, rows(200, top_p=top_p), window, noise_for(200)))
