"""Joins sentences that were decoded apart: natural pauses, and no click where one ends or begins."""

from __future__ import annotations

import numpy as np

_FADE_S = 0.005
_PAUSE_S = {"sentence": 0.20, "clause": 0.10, "cut": 0.0}


def pause_after(sentence: str) -> float:
    """Seconds of silence that belong between this piece of text and the next one, by the mark it ends with."""
    last = sentence.rstrip("\"'”’»)]』」").rstrip()[-1:]
    if last and last in ".!?。！？…":
        return _PAUSE_S["sentence"]
    return _PAUSE_S["clause"] if last and last in ",，、;:；：" else _PAUSE_S["cut"]


def fade_in(audio: np.ndarray, sample_rate: int) -> np.ndarray:
    """A copy that starts from silence; audio: (samples,) float32."""
    audio = audio.copy()
    n = min(len(audio), int(_FADE_S * sample_rate))
    audio[:n] *= np.linspace(0, 1, n, endpoint=False, dtype=np.float32)
    return audio


def fade_out(audio: np.ndarray, sample_rate: int) -> np.ndarray:
    """A copy that ends in silence."""
    return fade_in(audio[::-1], sample_rate)[::-1]


def silence(seconds: float, sample_rate: int) -> np.ndarray:
    return np.zeros(round(seconds * sample_rate), dtype=np.float32)
