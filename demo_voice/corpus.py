"""The phrase book spoken by flite and espeak-ng: one 16 kHz wav per phrase and voice. Knows nothing of models.

Two voices: `slt` (flite's female US voice) and `rms` (flite's male US voice). What flite cannot read, Korean and
Japanese, espeak-ng reads for both, with a female and a male timbre. A request without a voice gets `slt`.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import soxr

from .phrases import PHRASES, Phrase, reading_parts

SAMPLE_RATE = 16_000
SAMPLES_PER_FRAME = 1024  # of the demo codec: whole frames, so that codes and audio have one length
LEAD_SECONDS = 0.064  # silence before speech: one frame, the same start for every phrase
TAIL_SECONDS = 0.128
TARGET_RMS = 0.08  # of the spoken part, about -22 dBFS


@dataclass(frozen=True)
class Voice:
    """Who reads what."""

    name: str
    flite: str  # flite's voice for English
    espeak_variant: str  # espeak-ng's timbre for the other languages
    espeak_pitch: int
    reference: str  # the phrase whose recording is the voice's reference audio


VOICES: tuple[Voice, ...] = (
    Voice("slt", flite="slt", espeak_variant="f2", espeak_pitch=50, reference="Hello, nice to meet you."),
    Voice("rms", flite="rms", espeak_variant="m3", espeak_pitch=35, reference="Hello, nice to meet you."),
)
DEFAULT_VOICE = VOICES[0]

_ESPEAK_LANGUAGE = {"en": "en-us", "ko": "ko", "ja": "ja"}
_ESPEAK_WORDS_PER_MINUTE = {"en": 150, "ko": 140, "ja": 150}


def _run_to_wav(command: list[str], out: Path) -> np.ndarray:
    subprocess.run(command, check=True, capture_output=True)
    audio, rate = soundfile.read(out, dtype="float32")
    return soxr.resample(audio, rate, SAMPLE_RATE)


def _speak(words: str, language: str, voice: Voice, *, flite: bool, folder: Path) -> np.ndarray:
    out = folder / "part.wav"
    if flite:
        return _run_to_wav(["flite", "-voice", voice.flite, "-t", words, "-o", str(out)], out)
    command = ["espeak-ng", "-v", f"{_ESPEAK_LANGUAGE[language]}+{voice.espeak_variant}"]
    command += ["-s", str(_ESPEAK_WORDS_PER_MINUTE[language]), "-p", str(voice.espeak_pitch), "-w", str(out), words]
    return _run_to_wav(command, out)


def trim(audio: np.ndarray, threshold_db: float = -42.0) -> np.ndarray:
    """Cut what is quieter than `threshold_db` below the loudest 10 ms at both ends. audio: (samples,) float32."""
    hop = SAMPLE_RATE // 100
    blocks = audio[: len(audio) // hop * hop].reshape(-1, hop)
    level = np.sqrt((blocks**2).mean(axis=1) + 1e-12)
    loud = np.flatnonzero(level > level.max() * 10 ** (threshold_db / 20))
    return audio[loud[0] * hop : (loud[-1] + 1) * hop]


def finish(audio: np.ndarray) -> np.ndarray:
    """Trimmed speech at the corpus's level, with silence around it, a whole number of frames long."""
    audio = trim(audio)
    audio = audio * min(TARGET_RMS / np.sqrt((audio**2).mean()), 0.9 / np.abs(audio).max())
    fade = SAMPLE_RATE // 200
    ramp = np.linspace(0, 1, fade, dtype=np.float32)
    audio[:fade] *= ramp
    audio[-fade:] *= ramp[::-1]
    lead, tail = round(LEAD_SECONDS * SAMPLE_RATE), round(TAIL_SECONDS * SAMPLE_RATE)
    tail += -(lead + len(audio) + tail) % SAMPLES_PER_FRAME
    return np.pad(audio, (lead, tail)).astype(np.float32)


def speak(phrase: Phrase, voice: Voice) -> np.ndarray:
    """One recording of the corpus: (samples,) float32 at 16 kHz, whole frames."""
    parts = reading_parts(phrase)
    with tempfile.TemporaryDirectory() as folder:
        flite = phrase.language == "en"
        spoken = [trim(_speak(words, lang, voice, flite=flite, folder=Path(folder))) for lang, words in parts]
    pause = np.zeros(SAMPLE_RATE // 10, np.float32)
    joined = [piece for part in spoken for piece in (part, pause)][:-1]
    return finish(np.concatenate(joined))


def build_corpus(work: Path) -> list[dict]:
    """Speak the whole book into work/corpus/, skipping what is there; return and write its index."""
    folder = work / "corpus"
    folder.mkdir(parents=True, exist_ok=True)
    index = []
    for voice in VOICES:
        for phrase in PHRASES:
            path = folder / f"{voice.name}_{phrase.key}.wav"
            if not path.exists():
                soundfile.write(path, speak(phrase, voice), SAMPLE_RATE, subtype="PCM_16")
            seconds = soundfile.info(path).frames / SAMPLE_RATE
            index.append(
                {
                    "file": path.name,
                    "voice": voice.name,
                    "language": phrase.language,
                    "group": phrase.group,
                    "text": phrase.text,
                    "seconds": round(seconds, 3),
                }
            )
        print(f"corpus: {voice.name}: {sum(r['seconds'] for r in index if r['voice'] == voice.name):.0f} s of speech")
    (folder / "index.json").write_text(json.dumps(index, ensure_ascii=False, indent=1), encoding="utf-8")
    return index
