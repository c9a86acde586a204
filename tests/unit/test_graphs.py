"""Steps in fixed shapes decode what steps in exact shapes do; graphs are made, kept and dropped when they should be."""

from __future__ import annotations

import pytest
import torch
from shoal.engine import Engine
from shoal.graphs import StepGraphs, position_bucket, row_bucket
from shoal.prompt import text_prompt
from shoal.random_checkpoint import write_random_checkpoint
from shoal.sampling import SamplingParams
from shoal.speech import FishSpeech

TEXTS = ("One.", "A second text, longer than the first by far, so that the rows differ.", "Three!", "Number four.", "5")


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    return FishSpeech.load(write_random_checkpoint(tmp_path_factory.mktemp("smoke")), device="cpu")


def decode(speech, graphs, *, temperatures=(0.7, 0.0, 1.0, 0.7, 0.9), frames=150):
    """Five texts of different lengths over three rows, so that rows come and go; their codes and why they ended."""
    engine = Engine(
        speech.model,
        im_end_id=speech.tokenizer.im_end_id,
        semantic_begin_id=speech.tokenizer.semantic_begin_id,
        max_batch_size=3,
        graphs=graphs,
    )
    sequences = [
        engine.submit(
            text_prompt(speech.tokenizer, speech.num_codebooks, text),
            SamplingParams(temperature=temperature, max_new_tokens=frames - 13 * i),
            seed=i,
        )
        for i, (text, temperature) in enumerate(zip(TEXTS, temperatures, strict=True))
    ]
    while not all(s.done for s in sequences):
        engine.step()
    assert engine.live == 0
    return [(s.codes(), s.reason, s.batch_size) for s in sequences]


@pytest.mark.parametrize("temperatures", [(0.7, 0.0, 1.0, 0.7, 0.9), (0.0,) * 5])
def test_fixed_shapes_decode_the_same(speech, temperatures):
    exact, fixed = (decode(speech, graphs, temperatures=temperatures) for graphs in ("off", "on"))
    for (a, why, batch), (b, because, together) in zip(exact, fixed, strict=True):
        assert torch.equal(a, b) and why == because and batch == together
        assert a.shape[1] > 0


def test_a_row_may_fill_the_whole_context(tmp_path):
    speech = FishSpeech.load(write_random_checkpoint(tmp_path, overrides={"max_seq_len": 200}), device="cpu")
    exact, fixed = (decode(speech, graphs, frames=1000) for graphs in ("off", "on"))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(exact, fixed, strict=True))


def test_shapes_are_few():
    assert [row_bucket(n, 48) for n in (1, 2, 3, 5, 9, 33, 48)] == [1, 2, 4, 8, 16, 48, 48]
    assert {row_bucket(n, 128) for n in range(1, 129)} == {1, 2, 4, 8, 16, 32, 64, 128}
    lengths = [position_bucket(n, 8192) for n in range(1, 8193)]
    assert all(n <= bucket <= 8192 for n, bucket in enumerate(lengths, 1)) and len(set(lengths)) < 40
    assert all(bucket - n < max(128, n / 4 + 1) for n, bucket in enumerate(lengths, 1))
    assert position_bucket(150, 200) == 200


class FakeGraphs(StepGraphs):
    """Captures as a GPU would, to watch when; replaying runs the step."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__(torch.device("cpu"))
        self._captures, self.captured, self.fails = True, [], fails

    def _capture(self, shape, step):
        self.captured.append(shape)
        if self.fails:
            self._captures = False
            return False

        class Graph:
            def replay(self):
                step()

        self._graphs[shape] = Graph()
        return True


def test_a_shape_is_captured_the_second_time_and_anew_when_memory_moves():
    graphs, done = FakeGraphs(), []
    for storage in (1, 2):
        for _ in range(3):
            graphs.run((1, 128), (storage,), lambda: done.append(1))
    graphs.run((2, 128), (2,), lambda: done.append(2))
    assert done == [1] * 6 + [2]
    assert graphs.captured == [(1, 128), (1, 128)]


def test_where_a_step_cannot_be_captured_it_runs_as_it_is():
    graphs, done = FakeGraphs(fails=True), []
    for _ in range(4):
        graphs.run((1, 128), (1,), lambda: done.append(1))
    assert done == [1] * 4 and len(graphs.captured) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_captured_steps_decode_the_same(speech, tmp_path):
    cuda = FishSpeech.load(write_random_checkpoint(tmp_path), device="cuda", dtype="float32")
    exact, captured = (decode(cuda, graphs) for graphs in ("off", "auto"))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(exact, captured, strict=True))
