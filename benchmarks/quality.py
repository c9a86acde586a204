"""Is the demo checkpoint understood, clean, and the right speaker, in every way that speech can be asked for?

    python -m benchmarks.quality --seeds 5

Measured against the corpus it was trained on (`python -m demo_voice corpus` makes that, with flite and espeak-ng), for
each of the modes, and for the codec alone, the best that any language model could reach:

- word error rate of the English phrases through Whisper tiny.en, digits read as words; a phrase is right when it has at
  most one error in ten words more than its own recording in the corpus;
- DNSMOS (overall);
- speaker similarity to the mean voice of each speaker's English recordings: how many phrases are nearer to their own;
- Korean phrases: log-mel distance to the corpus along the best alignment, and a picture of the spectrograms.

The batch mode runs with every seed; the others with the first, and what they differ by from the batch is set against
what seeds differ by. `benchmarks.listening` names the packages that this needs beside Shoal; matplotlib draws the
picture. Prints tables and ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import soundfile
import torch
from shoal import FishSpeech, SamplingParams

from benchmarks.common import closing_line, table
from benchmarks.listening import RATE, Bench, Clip, Judges

ROOT = Path(__file__).resolve().parents[1]
MODES = ("batch", "one", "stream", "features", "int8", "plain")  # plain: no voice named, so the default voice's phrases
FIGURES = ("wer", "right", "mos", "own_voice", "korean_distance")
WER_OVER, MOS_UNDER, RIGHT = 0.10, 0.5, 0.95  # what the checkpoint has to keep to


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
    if mode in ("batch", "int8", "plain"):
        speeches = model.generate_batch(texts, None if mode == "plain" else voices, params, use_cache=False)
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


def compared(rows: dict[str, dict], seeds: list[str], modes: list[str]) -> dict[str, dict[str, float | bool]]:
    """Per figure: what the sources `seeds` differ by among themselves, and `modes` at most from the first of them."""
    result = {}
    for figure in FIGURES:
        values = [rows[source][figure] for source in seeds]
        if None in values:
            continue
        among_seeds = max(values) - min(values)
        among_modes = max((abs(rows[source][figure] - values[0]) for source in modes), default=0.0)
        result[figure] = {
            "seeds": round(among_seeds, 4),
            "modes": round(among_modes, 4),
            "within": among_modes <= among_seeds + 1e-9,
        }
    return result


def requirements(rows: dict[str, dict], seeds: list[str], differences: dict[str, dict]) -> dict[str, bool]:
    """What is asked of the checkpoint, and whether it holds in everything that was spoken."""

    def each(figure: str) -> list[float]:
        return [row[figure] for source, row in rows.items() if source not in ("corpus", "codec")]

    return {
        f"word error rate at most {WER_OVER:.0%} over the corpus's": max(each("wer_over")) <= WER_OVER,
        f"DNSMOS at most {MOS_UNDER} under the corpus's": max(each("mos_under")) <= MOS_UNDER,
        "every English phrase nearer to its own voice": min(each("own_voice")) == 1.0,
        f"at least {RIGHT:.0%} of English phrases right over {len(seeds)} seeds": float(
            np.mean([rows[source]["right"] for source in seeds])
        )
        >= RIGHT,
        "modes differ by no more than seeds": all(d["within"] for d in differences.values()),
    }


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
    parser.add_argument("--modes", default=",".join(MODES), help=f"beside batch: {', '.join(MODES[1:])}")
    parser.add_argument("--seeds", type=int, default=2, help="how many, for the batch mode; the others take the first")
    parser.add_argument("--limit", type=int, help="phrases per voice and language")
    parser.add_argument("--picture", type=Path, help="write spectrograms here (.png)")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error("--seeds: at least 1")
    modes = list(dict.fromkeys(["batch", *filter(None, arguments.modes.split(","))]))
    if unknown := set(modes) - set(MODES):
        parser.error(f"unknown mode {unknown.pop()!r}: choose from {', '.join(MODES)}")
    torch.set_num_threads(arguments.threads)

    begin = time.perf_counter()
    model = FishSpeech.load(arguments.checkpoint, max_batch_size=16)
    corpus = load_corpus(arguments.corpus, arguments.limit)
    bench = Bench(corpus, Judges(arguments.threads))
    resynthesis = list(resynthesised(model, corpus))
    plans: dict[str, Iterable[Clip]] = {"corpus": corpus, "codec": resynthesis}
    seeds = [f"batch, seed {seed}" for seed in range(arguments.seeds)]
    plans |= {name: spoken(model, corpus, "batch", seed) for seed, name in enumerate(seeds)}
    for mode in modes[1:]:
        by = FishSpeech.load(arguments.checkpoint, dtype="int8", max_batch_size=16) if mode == "int8" else model
        plans[mode] = spoken(by, corpus, mode, 0)
    rows: dict[str, dict] = {}
    for source, clips in plans.items():
        rows[source] = bench.score(source, clips).row()
        print(f"{source}: {rows[source]}", flush=True)

    header = ["source", *next(iter(rows.values()))]
    print(table(header, ([source, *("-" if v is None else v for v in row.values())] for source, row in rows.items())))
    differences = compared(rows, seeds, [mode for mode in modes[1:] if mode != "plain"])  # plain has other phrases
    for figure, by in differences.items():
        verdict = "within" if by["within"] else "BEYOND"
        print(f"{figure}: seeds differ by {by['seeds']:.4f}, modes by {by['modes']:.4f}: {verdict}")
    met = requirements(rows, seeds, differences)
    for requirement, holds in met.items():
        print(f"{'met' if holds else 'NOT MET'}: {requirement}")
    for source, voice, text, heard in bench.wrong[:40]:
        print(f"wrong: {source}: {voice}: {text!r} was heard as {heard!r}")
    if arguments.picture:
        by_key = {(c.voice, c.text): c for c in resynthesis}
        picked = [c for c in corpus if c.language == "ko"][:3] + [c for c in corpus if c.language == "en"][:2]
        made = list(spoken(model, picked, "batch", 0))
        picture(arguments.picture, [(c, by_key[c.voice, c.text], m) for c, m in zip(picked, made, strict=True)])
    print(
        closing_line(
            "quality",
            command=f"python -m benchmarks.quality {' '.join(sys.argv[1:])}".strip(),
            checkpoint=model.fingerprint,
            phrases={key: sum(c.language == key for c in corpus) for key in ("en", "ko")},
            minutes=round((time.perf_counter() - begin) / 60, 1),
            rows=rows,
            differences=differences,
            met=met,
        )
    )


if __name__ == "__main__":
    main()
