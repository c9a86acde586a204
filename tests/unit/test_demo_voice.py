"""The demo checkpoint in model_store/demo/: complete, small, and it says its phrase book at the right length."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from shoal import FishSpeech, SamplingParams
from shoal.checkpoint import open_checkpoint
from shoal.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "model_store" / "demo"
GUIDE = (
    "안녕하세요, 반갑습니다.",
    "Hello, nice to meet you.",
    "こんにちは、はじめまして。",
    "오늘 날씨가 참 좋네요.",
    "How can I help you today?",
    "무엇을 도와드릴까요?",
    "잠시만 기다려 주세요.",
    "감사합니다.",
    "Thank you for calling.",
)


@pytest.fixture(scope="module")
def phrases() -> list[tuple[str, str, str]]:
    """(language, group, text) of the book."""
    header, *lines = (DEMO / "phrases.tsv").read_text(encoding="utf-8").splitlines()
    assert header == "language\tgroup\ttext"
    return [tuple(line.split("\t")) for line in lines]


@pytest.fixture(scope="module")
def speech() -> FishSpeech:
    return FishSpeech.load(DEMO, device="cpu", max_batch_size=8)


def test_the_directory_is_a_checkpoint_like_any_other():
    checkpoint = open_checkpoint(DEMO)
    assert checkpoint.config.num_codebooks == checkpoint.codec.num_codebooks
    assert checkpoint.codec.codebook_size <= checkpoint.config.codebook_size
    tokenizer = Tokenizer.from_file(checkpoint.tokenizer_file, checkpoint.config.codebook_size)
    assert tokenizer.vocab_size == checkpoint.config.vocab_size
    assert (DEMO / "MODEL_CARD.md").read_text(encoding="utf-8").count("Apache-2.0")


def test_it_is_small_enough_to_live_in_the_repository():
    assert sum(file.stat().st_size for file in DEMO.rglob("*") if file.is_file()) < 25e6


def test_the_book_has_the_guides_sentences_and_enough_of_each_language(phrases):
    texts = [text for _, _, text in phrases]
    assert len(set(texts)) == len(texts) >= 120
    assert set(GUIDE) <= set(texts)
    counts = Counter(language for language, _, _ in phrases)
    assert counts["en"] >= 60
    assert counts["ko"] >= 40
    assert counts["ja"] >= 5
    assert counts["mixed"] >= 3


def test_the_book_is_what_the_recipe_says(phrases):
    recipe = pytest.importorskip("demo_voice.phrases")
    assert [(p.language, p.group, p.text) for p in recipe.PHRASES] == phrases


def test_every_voice_has_a_recording_and_its_words(speech):
    names = sorted(folder.name for folder in (DEMO / "voices").iterdir())
    assert len(names) >= 2
    assert speech.voices.names() == names


@pytest.mark.parametrize("voice", [None, "slt", "rms"])
def test_phrases_come_out_as_long_as_they_were_taught(speech, phrases, voice):
    lengths = json.loads((DEMO / "corpus.json").read_text(encoding="utf-8"))[voice or "slt"]
    texts = [text for _, _, text in phrases][::8]
    spoken = speech.generate_batch(texts, voice, SamplingParams(seed=1), use_cache=False)
    off = {t: abs(s.seconds / lengths[t] - 1) for t, s in zip(texts, spoken, strict=True)}
    wrong = {t: round(o, 2) for t, o in off.items() if o > 0.15}
    assert len(wrong) <= len(texts) // 10, wrong  # it samples: about one phrase in fifty slips


def test_phrases_joined_in_one_request_come_out_as_long_as_alone(speech, phrases):
    lengths = json.loads((DEMO / "corpus.json").read_text(encoding="utf-8"))["slt"]
    texts = [text for language, _, text in phrases if language in ("en", "ko")]
    joined = [texts[i : i + 3] for i in range(0, len(texts), 12)]
    spoken = speech.generate_batch([" ".join(t) for t in joined], None, SamplingParams(seed=1), use_cache=False)
    frames = {t: round(seconds * speech.codec.config.frames_per_second) for t, seconds in lengths.items()}
    wrong = []
    for group, result in zip(joined, spoken, strict=True):
        assert len(result.features.sentence_frames) == len(group)
        wrong += [
            (text, made)
            for text, made in zip(group, result.features.sentence_frames, strict=True)
            if abs(made / frames[text] - 1) > 0.15
        ]
    assert len(wrong) <= sum(map(len, joined)) // 10, wrong


def test_make_demo_and_the_notebook_speak_phrases_of_the_book(phrases):
    from shoal.serving.demo import ALONE, TOGETHER

    book = {text for _, _, text in phrases}
    notebook = json.loads((ROOT / "notebooks" / "02_baseline.ipynb").read_text(encoding="utf-8"))
    parameters = {}
    exec("".join(notebook["cells"][1]["source"]), parameters)
    assert book.issuperset((*ALONE, *TOGETHER, *parameters["TEXTS"]))


def test_sound_made_in_bfloat16_is_the_same_speech(speech):
    """Its codes are equal, and what the arithmetic adds to the sound is far below it."""
    rough = FishSpeech.load(DEMO, device="cpu", codec_dtype="bfloat16")
    params = SamplingParams(seed=3)
    exact, made = (m.synthesize("Thank you for calling.", params=params, use_cache=False) for m in (speech, rough))
    assert (exact.features.codes == made.features.codes).all()
    noise = made.audio - exact.audio
    assert 0 < (noise**2).mean() < (exact.audio**2).mean() / 1000
    voice = speech.voices.names()[0]
    codes = [m.voices.resolve(voice).prompt.codes[0] for m in (speech, rough)]
    assert (codes[0] == codes[1]).all()
