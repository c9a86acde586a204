"""`BaselinePanel`: several ways of speaking the same texts, timed in turn, to see and to hear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ipywidgets as widgets
import traitlets

from shoal.measure import PerformanceReport, measure_initial_performance, measure_together
from shoal.sampling import SamplingParams
from shoal.speech import FishSpeech
from shoal.ui.ab import ABPlayer
from shoal.ui.controls import Panel, number_slider, panel
from shoal.ui.jobs import Job, JobView
from shoal.ui.svg import bar_chart
from shoal.ui.tables import html_table

UPSTREAM, ALONE, TOGETHER = "upstream as shipped", "Shoal, one at a time", "Shoal, together"


class BaselineState(Job):
    """The reports of the last run, and which text is listened to."""

    reports = traitlets.List(trait=traitlets.Instance(PerformanceReport))
    count = traitlets.Int(4, min=1)  # texts that are spoken
    chosen = traitlets.Int(0, min=0)  # of the texts spoken

    def __init__(self, model: FishSpeech, texts: Sequence[str], upstream: Any, params: SamplingParams) -> None:
        super().__init__(count=len(texts))
        self.model, self.texts, self.upstream, self.params = model, list(texts), upstream, params
        self._warm = False

    def measure(self) -> None:
        """Speak the texts in each way. The first run warms up before, which is not counted."""
        if not self._warm:
            self.post(status="warming up ...")
            self._each_way(self.texts[:1], told=False)
            self._warm = True
        self.post(reports=self._each_way(self.texts[: self.count], told=True), chosen=0)

    def _each_way(self, texts: Sequence[str], *, told: bool) -> list[PerformanceReport]:
        ways, done = ([UPSTREAM] if self.upstream else []) + [ALONE, TOGETHER], 0

        def tell(way: str) -> None:
            nonlocal done
            self.check()
            if told:
                self.post(status=f"{way} ...", progress=done / ((len(ways) - 1) * len(texts) + 1))
            done += 1

        def upstream_speaks(text: str) -> Any:
            tell(UPSTREAM)
            return self.upstream.synthesize(text, seed=self.params.seed or 0, max_new_tokens=self.params.max_new_tokens)

        def shoal_speaks(text: str) -> Any:
            tell(ALONE)
            return self.model.synthesize(text, params=self.params, use_cache=False)

        reports = []
        if self.upstream:
            reports.append(measure_initial_performance(texts, self.upstream, name=UPSTREAM, speak=upstream_speaks))
        reports.append(measure_initial_performance(texts, self.model, name=ALONE, speak=shoal_speaks))
        tell(TOGETHER)
        reports.append(measure_together(texts, self.model, self.params, name=TOGETHER))
        return reports


class BaselinePanel(Panel):
    """Shows a BaselineState.

    Args:
        upstream: an UpstreamBaseline with the same weights; None where its package is missing.
        params: with a seed, so that each run speaks the same.
    """

    def __init__(
        self,
        model: FishSpeech,
        texts: Sequence[str],
        upstream: Any = None,
        params: SamplingParams = SamplingParams(seed=0),
    ) -> None:
        self.state = BaselineState(model, texts, upstream, params)
        self.job = JobView(self.state, {"Measure": self.state.measure})
        self.table, self.picture, self.player = widgets.HTML(), widgets.HTML(), ABPlayer()
        self.text = widgets.Dropdown(description="text", options=[("-", 0)], layout={"width": "32em"})
        traitlets.link((self.state, "chosen"), (self.text, "value"))
        self.view = panel(
            "Upstream and Shoal",
            "원본과 Shoal",
            [
                number_slider(self.state, "count", "texts to speak", 1, len(texts)),
                self.job.view,
                self.table,
                self.picture,
                self.text,
                self.player,
            ],
        )
        self.state.observe(lambda _: self._show(), "reports")
        self.state.observe(lambda _: self._listen(), "chosen")

    def _show(self) -> None:
        reports = self.state.reports
        header = ("way", "seconds", "seconds of sound", "real-time factor", "mean latency (s)", "texts per second")
        self.table.value = html_table(
            header,
            [
                (r.name, r.total_seconds, r.audio_seconds, r.real_time_factor, r.mean_latency, r.texts_per_second)
                for r in reports
            ],
        )
        factors = [r.real_time_factor for r in reports]
        title = (
            f"{reports[-1].name}: a second of sound costs {factors[-1]:.2f} s, {reports[0].name}: {factors[0]:.2f} s"
        )
        self.picture.value = bar_chart(title, [r.name for r in reports], factors, "s per s of sound")
        self.text.options = [(m.text, i) for i, m in enumerate(reports[0].measurements)]
        self._listen()

    def _listen(self) -> None:
        reports, i = self.state.reports, self.state.chosen
        if reports and i < len(reports[0].measurements):
            takes = [(r.name, r.measurements[i].audio, r.measurements[i].sample_rate) for r in reports]
            self.player.set_takes(takes, reports[0].measurements[i].text)
