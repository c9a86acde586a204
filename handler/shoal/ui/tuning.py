"""`TuningPanel`: settings tried on a trace of arrivals, against what is wanted, and the best of them put to use."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets as widgets
import traitlets

from shoal.arrivals import poisson_arrivals
from shoal.errors import RequestError
from shoal.monitoring import PRESETS
from shoal.sampling import SamplingParams
from shoal.sizes import parse_bytes
from shoal.speech import FishSpeech
from shoal.tuning import Objective, Outcome, Settings, Tuned, powers_of_two, replay_trial, tune
from shoal.ui.controls import Panel, number_slider, panel
from shoal.ui.jobs import Job, JobView
from shoal.ui.svg import bar_chart
from shoal.ui.tables import html_table


class TuningState(Job):
    """What is wanted, the trace, the trials so far, and what was found."""

    p95_s = traitlets.Float(2.0, min=0.05)  # that 95% of requests stay under
    bounded = traitlets.Bool(True)  # False: most texts per second, whatever the delay
    rate = traitlets.Float(4.0, min=0.1)  # requests a second
    requests = traitlets.Int(12, min=1)
    trials = traitlets.List()  # of (Settings, Outcome)
    found = traitlets.Instance(Tuned, allow_none=True)
    preset = traitlets.Enum(["", *PRESETS], "")
    cache_mb = traitlets.Int(0, min=0)  # the larger of the cache sizes that are tried; 0: trials have no cache
    wait_s = traitlets.Float(0.0, min=0.0)  # for company, as last found or preset: for a RealtimeBatchProcessor
    stream = traitlets.Bool(False)  # whether replies should be streamed, as last preset

    def __init__(self, model: FishSpeech, texts: Sequence[str], params: SamplingParams) -> None:
        super().__init__()
        self.model, self.texts, self.params = model, list(texts), params
        self.batch_limits = powers_of_two(model.max_batch_size)
        self.waits_s = (0.0, 0.05)
        self.observe(self._take_preset, "preset")

    def search(self) -> None:
        """Try settings, the best of the trials so far in view."""
        arrivals = poisson_arrivals(self.texts, self.requests, self.rate)
        cache, limit = self.model.cache, self.model.scheduler.batch_limit
        bounds = cache.cache_max_bytes, cache.cache_max_entries
        replayed = replay_trial(self.model, arrivals, self.params, self.cancel)
        trials: list[tuple[Settings, Outcome]] = []

        def trial(settings: Settings) -> Outcome:
            outcome = replayed(settings)
            self.check()
            trials.append((settings, outcome))
            self.post(trials=list(trials))
            return outcome

        try:
            found = tune(
                trial,
                batch_limits=self.batch_limits,
                waits_s=self.waits_s,
                cache_bytes=(0, self.cache_mb * 2**20) if self.cache_mb else (0,),
                objective=Objective(self.p95_s if self.bounded else None),
                progress=lambda done, total, what: self.post(progress=done / total, status=what),
                cancel=self.cancel,
            )
        finally:  # the trials emptied the cache and set its bounds
            self.model.scheduler.batch_limit = limit
            cache.set_capacity(*bounds)
        self.post(found=found)

    def use(self) -> None:
        """Give the model the best settings found; `wait_s` is for who gathers requests."""
        if self.found is None:
            raise RequestError("nothing has been found yet: press Search first")
        best = self.found.best
        self.model.scheduler.batch_limit = best.batch_limit
        if self.cache_mb:  # else the trials had none, and say nothing about it
            self.model.cache.set_capacity(best.cache_bytes, self.model.cache.cache_max_entries)
        self.post(wait_s=best.wait_s, status=f"the batch limit is {best.batch_limit} now")

    def _take_preset(self, _: traitlets.Bunch) -> None:
        if self.preset:
            preset = PRESETS[self.preset]
            self.model.scheduler.batch_limit = min(preset.batch_limit, self.model.max_batch_size)
            self.model.cache.set_capacity(parse_bytes(preset.cache_bytes))
            self.wait_s, self.stream = preset.wait_s, preset.stream


class TuningPanel(Panel):
    """Shows a TuningState."""

    def __init__(self, model: FishSpeech, texts: Sequence[str], params: SamplingParams = SamplingParams()) -> None:
        self.state = state = TuningState(model, texts, params)
        self.job = JobView(state, {"Search": state.search, "Use what was found": state.use})
        self.picture, self.table, self.chosen = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self.bounded = widgets.Checkbox(description="keep 95% within the bound", indent=False)
        self.preset = widgets.Dropdown(
            options=[("choose ...", ""), *((name, name) for name in PRESETS)],
            description="preset",
            style={"description_width": "11em"},
            layout={"width": "26em"},
        )
        traitlets.link((state, "bounded"), (self.bounded, "value"))
        traitlets.link((state, "preset"), (self.preset, "value"))
        self.view = panel(
            "Settings found by trying",
            "자동 조정",
            [
                number_slider(state, "p95_s", "bound in seconds", 0.05, 30.0, 0.05),
                self.bounded,
                number_slider(state, "rate", "requests a second", 0.1, 50.0, 0.1),
                number_slider(state, "requests", "requests per trial", 1, 200),
                number_slider(state, "cache_mb", "cache to try, in MB", 0, 1024),
                self.preset,
                self.chosen,
                self.job.view,
                self.picture,
                self.table,
            ],
        )
        state.observe(lambda _: self._draw(), ["trials", "found"])
        state.observe(lambda _: self._tell(), ["preset", "wait_s", "stream"])

    def _draw(self) -> None:
        trials, found = self.state.trials, self.state.found
        if not trials:
            return
        title = f"{len(trials)} settings tried"
        if found is not None and found.trials == tuple(trials):
            best, outcome = found.best, found.outcome
            title = (
                f"{best.batch_limit} rows and {1000 * best.wait_s:.0f} ms give {outcome.texts_per_s:.1f} texts a second"
            )
        labels = [_label(s) for s, _ in trials]
        self.picture.value = bar_chart(title, labels, [o.texts_per_s for _, o in trials], "texts/s")
        header = ("rows", "wait (ms)", "cache (MB)", "texts per second", "95% within (s)", "failed", "as wanted")
        objective = Objective(self.state.p95_s if self.state.bounded else None)
        self.table.value = html_table(
            header,
            [
                (
                    s.batch_limit,
                    1000 * s.wait_s,
                    s.cache_bytes >> 20,
                    o.texts_per_s,
                    o.p95_s,
                    o.failed,
                    "yes" if objective.met(o) else "no",
                )
                for s, o in trials
            ],
        )

    def _tell(self) -> None:
        state, cache = self.state, self.state.model.cache
        why = PRESETS[state.preset].why if state.preset else {}
        rows = [
            ("rows", state.model.scheduler.batch_limit),
            ("wait for company (ms)", 1000 * state.wait_s),
            ("cache (MB)", "no bound" if cache.cache_max_bytes is None else cache.cache_max_bytes >> 20),
            ("replies", "streamed" if state.stream else "whole"),
            *([("for", f"{why['en']} · {why['ko']}")] if why else []),
        ]
        self.chosen.value = html_table(("setting", "now"), rows)


def _label(settings: Settings) -> str:
    cache = f", {settings.cache_bytes >> 20} MB" if settings.cache_bytes else ""
    return f"{settings.batch_limit} rows, {1000 * settings.wait_s:.0f} ms{cache}"
