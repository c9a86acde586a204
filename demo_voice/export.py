"""Writes model_store/demo/: the trained networks in the published layout, the phrase book, the voices and a card."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from .corpus import DEFAULT_VOICE, VOICES
from .phrases import PHRASES, write_tsv
from .train_codec import CODEC, load_codec, load_corpus
from .train_dual_ar import CONFIG, RANKS, TOKENIZER, TrainableDualAR, half_state

CODEC_FILE = "firefly-gan-vq-fsq-8x1024-21hz-generator.safetensors"

_CARD = """---
license: apache-2.0
language: [en, ko, ja]
pipeline_tag: text-to-speech
---

# Shoal's demo checkpoint

A very small text-to-speech model in Fish Speech 1.5's own directory format, so that everything in this project can be
tried, heard and tested on any machine without the real weights (which are 1.4 GB and CC-BY-NC-SA-4.0).

**It knows its phrase book and nothing else.** The {phrases} phrases in `phrases.tsv` ({counts}) it says clearly; any
other text makes it babble. It is no measure of Fish Speech's quality, and no use beyond demonstrations and tests.

| | |
|---|---|
| transformer | dual-AR, dim {dim}, {layers} + {fast_layers} layers, {codebooks} codebooks, {lm_params:.1f} M weights |
| codec | Firefly geometry at {rate} kHz, {fps:.1f} frames a second, {codec_params:.1f} M weights |
| tokenizer | byte pairs learned on the phrase book, all bytes included |
| voices | none given: `{default}`; by reference audio: {voices} (in `voices/`) |

Trained from scratch by `python -m demo_voice` on {minutes:.0f} minutes of synthetic speech: the phrase book read by
flite for English (its voices slt and rms, from Carnegie Mellon University, under flite's BSD-like licence), and by
espeak-ng for Korean, Japanese and the mixed phrases. No recording made for this project and no weights of another model
went into it. The design of the networks is Fish Speech's (Fish Audio); the weights here are new.

`corpus.json` gives the length of each phrase as it was taught. Licence of the weights: Apache-2.0, as the project.
"""


def export(work: Path, target: Path) -> None:
    """Write the checkpoint directory from work/dual_ar.pt and work/vocoder.pt."""
    target.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG.model_dump(), "dropout": 0.0, "head_dim": CONFIG.head_dim, "initializer_range": 0.02}
    _write_json(target / "config.json", config)
    _write_json(target / "codec.json", CODEC.model_dump(mode="json"))
    ranks = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in RANKS.items())
    (target / "tokenizer.tiktoken").write_text(ranks)
    _write_json(target / "special_tokens.json", TOKENIZER.special_ids)

    model = TrainableDualAR()
    model.load_state_dict(torch.load(work / "dual_ar.pt", weights_only=False)["average"])
    save_file(half_state(model), target / "model.safetensors", metadata={"format": "pt"})
    codec = load_codec(work, vocoder=True)
    save_file(half_state(codec), target / CODEC_FILE, metadata={"format": "pt"})

    index, _ = load_corpus(work)
    write_tsv(target / "phrases.tsv")
    lengths = {v.name: {r["text"]: r["seconds"] for r in index if r["voice"] == v.name} for v in VOICES}
    _write_json(target / "corpus.json", lengths)
    for voice in VOICES:
        folder = target / "voices" / voice.name
        folder.mkdir(parents=True, exist_ok=True)
        row = next(r for r in index if r["voice"] == voice.name and r["text"] == voice.reference)
        shutil.copyfile(work / "corpus" / row["file"], folder / "reference.wav")
        (folder / "reference.txt").write_text(voice.reference + "\n", encoding="utf-8")
    (target / "MODEL_CARD.md").write_text(_card(model, codec, index), encoding="utf-8")
    size = sum(f.stat().st_size for f in target.rglob("*") if f.is_file())
    print(f"export: {target} written, {size / 1e6:.1f} MB")


def _card(model: torch.nn.Module, codec: torch.nn.Module, index: list[dict]) -> str:
    names = {"en": "English", "ko": "Korean", "ja": "Japanese", "mixed": "mixed"}
    counts = ", ".join(f"{sum(p.language == k for p in PHRASES)} {name}" for k, name in names.items())
    return _CARD.format(
        phrases=len(PHRASES),
        counts=counts,
        dim=CONFIG.dim,
        layers=CONFIG.n_layer,
        fast_layers=CONFIG.n_fast_layer,
        codebooks=CONFIG.num_codebooks,
        lm_params=sum(p.numel() for p in model.parameters()) / 1e6,
        rate=CODEC.sample_rate // 1000,
        fps=CODEC.frames_per_second,
        codec_params=sum(p.numel() for p in codec.parameters()) / 1e6,
        default=DEFAULT_VOICE.name,
        voices=" and ".join(f"`{v.name}`" for v in VOICES),
        minutes=sum(r["seconds"] for r in index) / 60,
    )


def _write_json(path: Path, data: dict) -> None:
    path.write_text(json.dumps(data, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
