"""`CachePanel`: what a cache answers and what it saves, as requests repeat themselves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import ipywidgets as widgets
import numpy as np
import traitlets

from shoal.arrivals import zipf_requests
from shoal.cache import CacheStats
from shoal.sampling import SamplingParams
from shoal.sizes import format_bytes
from shoal.speech import FishSpeech, Speech
from shoal.ui.ab import ABPlayer
from shoal.ui.controls import Panel, number_slider, panel
from shoal.ui.jobs import Job, JobView
from shoal.ui.svg import dot_chart
from shoal.ui.tables import html_table


@dataclass(frozen=True)
class Asked:
    """One request of a run."""

    text: str
    seconds: float
    hit: bool


class CacheState(Job):
    """The cache's bounds, the requests of the last run, and the first text as made and as remembered."""

    max_entries = traitlets.Int(100, min=0)
    keep_sound = traitlets.Bool(False)
    count = traitlets.Int(30, min=1)
    exponent = traitlets.Float(1.0)  # of Zipf's law: 0 draws all texts alike
    asked = traitlets.List()  # of Asked
    stats = traitlets.Instance(CacheStats)
    takes = traitlets.List()  # (label, Speech)

    def __init__(self, model: FishSpeech, texts: Sequence[str], params: SamplingParams) -> None:
        entries = model.cache.cache_max_entries
        super().__init__(stats=model.cache.stats(), keep_sound=model.audio_cache is not None)
        self.max_entries = 100 if entries is None else entries
        self.model, self.texts, self.params = model, list(texts), params
        if entries is None:  # bounded by bytes alone so far
            model.cache.set_capacity(model.cache.cache_max_bytes, self.max_entries)
        self.observe(self._set_bounds, ["max_entries", "keep_sound"])

    def run(self) -> None:
        """Ask for `count` texts, some of them again and again, one after the other."""
        before, asked = self.model.cache.stats(), []
        made: dict[str, Speech] = {}
        heard: list[tuple[str, Speech]] = []
        for text in zipf_requests(self.texts, self.count, self.exponent, seed=1):
            self.check()
            begin = time.perf_counter()
            speech = self.model.synthesize(text, params=self.params)
            asked.append(Asked(text, time.perf_counter() - begin, speech.cache_hit))
            if speech.cache_hit and text in made and not heard:
                heard = [("decoded, the first time", made[text]), ("from the cache, later", speech)]
                self.post(takes=heard)
            if not speech.cache_hit:
                made.setdefault(text, speech)
            self.post(
                asked=list(asked),
                stats=_since(self.model.cache.stats(), before),
                progress=len(asked) / self.count,
                status=f"{len(asked)} of {self.count} requests",
            )

    def clear(self) -> None:
        """Forget everything."""
        self.model.cache.clear()
        if self.keep_sound:
            self.model.enable_audio_cache()
        self.post(stats=replace(CacheStats()), asked=[], takes=[])

    def _set_bounds(self, change: traitlets.Bunch) -> None:
        if change.name == "max_entries":
            self.model.cache.set_capacity(self.model.cache.cache_max_bytes, self.max_entries)
        else:
            self.model.enable_audio_cache("256MB" if self.keep_sound else 0)
        self.stats = replace(self.stats, entries=self.model.cache.stats().entries, bytes=self.model.cache.stats().bytes)


class CachePanel(Panel):
    """Shows a CacheState.

    Args:
        params: without a seed any earlier answer to a text will do; with one only that seed's.
    """

    def __init__(self, model: FishSpeech, texts: Sequence[str], params: SamplingParams = SamplingParams()) -> None:
        self.state = CacheState(model, texts, params)
        self.job = JobView(self.state, {"Send requests": self.state.run, "Clear the cache": self.state.clear})
        self.picture, self.table, self.player = widgets.HTML(), widgets.HTML(), ABPlayer()
        self.keep_sound = widgets.Checkbox(
            description="keep finished sound too", indent=False, value=self.state.keep_sound
        )
        traitlets.link((self.state, "keep_sound"), (self.keep_sound, "value"))
        self.view = panel(
            "What is remembered",
            "기억하는 것",
            [
                number_slider(
                    self.state, "max_entries", "entries at most", 0, max(100, len(texts), self.state.max_entries)
                ),
                number_slider(self.state, "count", "requests", 1, 500),
                number_slider(self.state, "exponent", "repetition (Zipf)", 0.0, 2.0, 0.1),
                self.keep_sound,
                self.job.view,
                self.picture,
                self.table,
                self.player,
            ],
        )
        self.state.observe(lambda _: self._draw(), "asked")
        self.state.observe(lambda _: self._count(), "stats")
        self.state.observe(lambda _: self._listen(), "takes")
        self._count()

    def _draw(self) -> None:
        asked: list[Asked] = self.state.asked
        if not asked:
            self.picture.value = ""
            return
        dots = {
            name: [(i + 1, a.seconds) for i, a in enumerate(asked) if a.hit == hit]
            for name, hit in (("decoded", False), ("from the cache", True))
        }
        title = f"{np.mean([a.hit for a in asked]):.0%} of {len(asked)} requests come from the cache"
        if all(dots.values()):
            miss, hit = (np.median([seconds for _, seconds in line]) for line in dots.values())
            title += f", {miss / hit:.1f} times as fast"
        self.picture.value = dot_chart(title, dots, "request", "seconds")

    def _count(self) -> None:
        stats = self.state.stats
        header = ("hits", "misses", "hit rate", "evicted", "entries now", "memory now", "decoding saved (s)")
        row = (stats.hits, stats.misses, f"{stats.hit_rate:.0%}", stats.evictions, stats.entries)
        self.table.value = html_table(header, [(*row, format_bytes(stats.bytes), stats.seconds_saved)])

    def _listen(self) -> None:
        takes: list[tuple[str, Speech]] = self.state.takes
        title = takes[0][1].features.text if takes else ""
        self.player.set_takes([(label, s.audio, s.sample_rate) for label, s in takes], title)


def _since(now: CacheStats, before: CacheStats) -> CacheStats:
    """The counts of one run, and what memory holds now."""
    return replace(
        now,
        hits=now.hits - before.hits,
        misses=now.misses - before.misses,
        evictions=now.evictions - before.evictions,
        seconds_saved=now.seconds_saved - before.seconds_saved,
    )
