"""`BatchPanel`: how batch size and throughput go together, the best size for these texts, and how a batch sounds."""

from __future__ import annotations

import time
from collections.abc import Sequence

import ipywidgets as widgets
import traitlets

from shoal.batching import CANDIDATES, BatchSearch, generate_speech_in_batches, search_batch_sizes
from shoal.errors import ShoalError
from shoal.sampling import SamplingParams
from shoal.speech import FishSpeech, Speech
from shoal.ui.ab import ABPlayer
from shoal.ui.controls import Panel, number_slider, panel
from shoal.ui.jobs import Job, JobView
from shoal.ui.svg import line_chart
from shoal.ui.tables import html_table


class BatchState(Job):
    """The batch size to use, what was measured so far, and the first text alone and in the last batch."""

    batch_limit = traitlets.Int(4, min=1)
    speeds = traitlets.Dict()  # batch size -> seconds of sound per second, of single runs
    search = traitlets.Instance(BatchSearch, allow_none=True)
    takes = traitlets.List()  # (label, Speech)

    def __init__(
        self,
        model: FishSpeech,
        texts: Sequence[str],
        params: SamplingParams,
        candidates: Sequence[int],
        repeats: int,
    ) -> None:
        super().__init__(batch_limit=min(4, model.max_batch_size))
        self.model, self.texts, self.params = model, list(texts), params
        self.candidates, self.repeats = tuple(candidates), repeats

    def measure(self) -> None:
        """Speak all texts with the present batch size."""
        size = self.batch_limit
        texts = [self.texts[i % len(self.texts)] for i in range(max(size, len(self.texts)))]
        alone = self.model.synthesize(texts[0], params=self.params, use_cache=False)
        begin = time.perf_counter()
        spoken = generate_speech_in_batches(
            texts,
            self.model,
            size,
            params=self.params,
            progress=lambda done, total: self.post(progress=done / total, status=f"{done} of {total} texts"),
            cancel=self.cancel,
        )
        seconds = time.perf_counter() - begin
        self.check()
        for speech in spoken:
            if isinstance(speech, ShoalError):
                raise speech
        sound = sum(speech.seconds for speech in spoken)
        takes = [("alone", alone), (f"in a batch of {spoken[0].batch_size}", spoken[0])]
        self.post(speeds=self.speeds | {size: sound / seconds}, takes=takes)

    def find(self) -> None:
        """Search for the best size; the batch size becomes that one."""
        found = search_batch_sizes(
            self.model,
            self.texts,
            candidates=[c for c in self.candidates if c <= self.model.max_batch_size],
            repeats=self.repeats,
            params=self.params,
            progress=lambda done, total, what: self.post(progress=done / total, status=what),
            cancel=self.cancel,
        )
        self.post(search=found, batch_limit=found.best)


class BatchPanel(Panel):
    """Shows a BatchState.

    Args:
        params: with a seed, so that each size speaks the same.
        candidates, repeats: of the search.
    """

    def __init__(
        self,
        model: FishSpeech,
        texts: Sequence[str],
        params: SamplingParams = SamplingParams(seed=0),
        *,
        candidates: Sequence[int] = CANDIDATES,
        repeats: int = 3,
    ) -> None:
        self.state = BatchState(model, texts, params, candidates, repeats)
        self.job = JobView(self.state, {"Measure this size": self.state.measure, "Find the best size": self.state.find})
        self.picture, self.table, self.player = widgets.HTML(), widgets.HTML(), ABPlayer()
        self.view = panel(
            "Batch size",
            "배치 크기",
            [
                number_slider(self.state, "batch_limit", "batch size", 1, model.max_batch_size),
                self.job.view,
                self.picture,
                self.table,
                self.player,
            ],
        )
        self.state.observe(lambda _: self._draw(), ["speeds", "search"])
        self.state.observe(lambda _: self._listen(), "takes")
        self._draw()

    def _draw(self) -> None:
        speeds, search = self.state.speeds, self.state.search
        series, title = {}, "Measure some sizes, or find the best one"
        if search:
            series["search, median"] = [(m.batch_size, m.throughput) for m in search.measurements if m.seconds]
            title = f"{search.best} is the smallest batch within {search.tolerance:.0%} of the best throughput"
            header = ("batch size", "seconds", "texts/s", "s of sound per s", "memory (MB)", "")
            self.table.value = html_table(header, search.rows())
        if speeds:
            series["single runs"] = sorted(speeds.items())
            if not search:
                best = max(speeds, key=speeds.get)
                title = f"A batch of {best} makes {speeds[best]:.1f} seconds of sound per second"
        if series:
            self.picture.value = line_chart(title, series, "batch size", "seconds of sound per second", log_x=True)
        else:
            self.picture.value = title

    def _listen(self) -> None:
        takes: list[tuple[str, Speech]] = self.state.takes
        self.player.set_takes([(label, s.audio, s.sample_rate) for label, s in takes], takes[0][1].features.text)
