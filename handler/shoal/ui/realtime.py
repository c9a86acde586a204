"""`RealtimePanel`: requests that come one by one, gathered into batches by number and by time."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import ipywidgets as widgets
import numpy as np
import traitlets

from shoal.arrivals import Answer, poisson_arrivals, replay
from shoal.realtime import RealtimeBatchProcessor
from shoal.sampling import SamplingParams
from shoal.speech import FishSpeech, Speech
from shoal.ui.ab import ABPlayer
from shoal.ui.controls import Panel, number_slider, panel
from shoal.ui.jobs import Job, JobView
from shoal.ui.svg import span_chart
from shoal.ui.tables import html_table

_KINDS = ("alone", "2 or 3 together", "4 to 7 together", "8 or more together")


class RealtimeState(Job):
    """How requests come and are gathered; the answers of the last run, and a summary of each run so far."""

    max_batch_capacity = traitlets.Int(8, min=1)
    max_wait_ms = traitlets.Int(100, min=0)
    rate = traitlets.Float(8.0)  # requests a second
    count = traitlets.Int(24, min=1)
    answers = traitlets.List()  # of Answer, in the order of arrival
    runs = traitlets.List()  # rows of a table

    def __init__(self, model: FishSpeech, texts: Sequence[str], params: SamplingParams) -> None:
        super().__init__(max_batch_capacity=min(8, model.max_batch_size))
        self.model, self.texts, self.params = model, list(texts), params

    def run(self) -> None:
        """Send `count` requests at the present rate and wait for the answers."""
        settings = (self.max_batch_capacity, self.max_wait_ms, self.rate)
        arrivals = poisson_arrivals(self.texts, self.count, self.rate, seed=1)
        answers: list[Answer] = []

        def show(answer: Answer) -> None:
            answers.append(answer)
            self.post(
                answers=sorted(answers, key=lambda a: a.number),
                progress=len(answers) / len(arrivals),
                status=f"{len(answers)} of {len(arrivals)} answered",
            )

        processor = RealtimeBatchProcessor(
            self.model, settings[0], settings[1] / 1000, max_queue=len(arrivals), use_cache=False
        )
        watcher = threading.Thread(target=self._close_when_cancelled, args=(processor,), daemon=True)
        watcher.start()
        try:
            answers = replay(processor, arrivals, self.params, on_answer=show, cancel=self.cancel)
        finally:
            processor.close(drain=False)
        self.check()
        self.post(answers=answers, runs=[*self.runs, (*settings, *_summary(answers))])

    def _close_when_cancelled(self, processor: RealtimeBatchProcessor) -> None:
        while self.running and not self.cancel.wait(0.1):
            pass
        processor.close(drain=False)


class RealtimePanel(Panel):
    """Shows a RealtimeState."""

    def __init__(
        self, model: FishSpeech, texts: Sequence[str], params: SamplingParams = SamplingParams(seed=0)
    ) -> None:
        self.state = RealtimeState(model, texts, params)
        self.job = JobView(self.state, {"Send requests": self.state.run})
        self.picture, self.table, self.player = widgets.HTML(), widgets.HTML(), ABPlayer()
        self.view = panel(
            "Requests one by one",
            "하나씩 오는 요청",
            [
                number_slider(self.state, "max_batch_capacity", "batch capacity", 1, model.max_batch_size),
                number_slider(self.state, "max_wait_ms", "longest wait (ms)", 0, 1000, 10),
                number_slider(self.state, "rate", "requests a second", 0.5, 50.0, 0.5),
                number_slider(self.state, "count", "requests", 1, 200),
                self.job.view,
                self.picture,
                self.table,
                self.player,
            ],
        )
        self.state.observe(lambda _: self._draw(), "answers")
        self.state.observe(lambda _: self._finish(), "runs")

    def _draw(self) -> None:
        answers = self.state.answers
        if not answers:
            return
        spans = [(a.arrived, a.answered, min(3, max(0, a.batch_size).bit_length() - 1)) for a in answers]
        p50, p95 = np.percentile([a.latency for a in answers], [50, 95])
        title = f"Half of {len(answers)} requests are answered within {p50:.2f} s, 95% within {p95:.2f} s"
        spans = [(begin, end, max(0, kind)) for begin, end, kind in spans]
        self.picture.value = span_chart(title, spans, _KINDS, "seconds, one bar per request from arrival to answer")

    def _finish(self) -> None:
        header = ("capacity", "wait (ms)", "requests/s", "p50 (s)", "p95 (s)", "mean batch", "answers/s", "errors")
        self.table.value = html_table(header, self.state.runs)
        spoken = [a for a in self.state.answers if isinstance(a.result, Speech)]
        chosen = sorted({0, len(spoken) // 2, len(spoken) - 1} if spoken else ())
        takes = [(f"request {spoken[i].number + 1}, batch of {spoken[i].batch_size}", spoken[i].result) for i in chosen]
        self.player.set_takes([(label, s.audio, s.sample_rate) for label, s in takes], "What callers hear")


def _summary(answers: Sequence[Answer]) -> tuple[float, float, float, float, int]:
    """p50, p95, mean batch, answers a second, errors."""
    spoken = [a for a in answers if isinstance(a.result, Speech)]
    if not spoken:
        return (float("nan"), float("nan"), 0.0, 0.0, len(answers))
    p50, p95 = np.percentile([a.latency for a in spoken], [50, 95])
    span = max(a.answered for a in spoken)
    mean = float(np.mean([a.batch_size for a in spoken]))
    return float(p50), float(p95), mean, len(spoken) / span, len(answers) - len(spoken)
