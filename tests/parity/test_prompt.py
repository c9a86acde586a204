"""Prompts are upstream's, bit for bit: with and without a voice, for a byte-level tokenizer and one with merges."""

import base64
from collections import Counter
from itertools import pairwise

import pytest
import torch
import upstream
from shoal.errors import RequestError
from shoal.prompt import VoicePrompt, text_prompt, voice_prefix
from shoal.tokenizer import Tokenizer

pytestmark = pytest.mark.skipif(upstream.skip_reason() is not None, reason=str(upstream.skip_reason()))

CODEBOOKS = 8
TEXTS = [
    "안녕하세요. 저는 물고기입니다! 만나서 반가워요?",
    "오늘의 기온은 23.5도이고, 습도는 61.2퍼센트입니다.",
    "서울특별시 강남구 테헤란로 123번지, 전화 02-555-1234",
    "한글과 漢字, English를 섞어서 씁니다.",
    "The quick brown fox jumps over the lazy dog.",
    "It’s ‘quoted’, isn't it? They'll say we've done it, I'd bet.",
    "A price of $1,234.56 and a version 1.2.3 (beta) & more @ 50%",
    "こんにちは。私は魚です！元気ですか？",
    "カタカナとひらがなと漢字、スーパーマーケット。",
    "你好，世界！今天天气不错。",
    "这是一段很长的中文文本,而且没有句号",
    "Hello 안녕 こんにちは 你好",
    "0123456789 3.14159 1e-5 0x1F",
    "🐟🐠 물고기 떼 🎉🚀 🤔 ❤️ 👍🏽",
    "... !!! ,,,, ;;; ~~~ --- ___",
    "line one\nline two\r\n\r\nline three\t tab   spaces",
    "  leading and trailing  ",
    "trailing emoji keeps a space 😀",
    "how ?!odd   ?!x",
    "Größe, Straße; naïve café — em-dash…",
    "٣.١٤ Привет, мир! Xin chào",
    "\u3000全角\u00a0nbsp\u200bzero width",
    "CamelCaseAndsnake_case-and/slashes\\back",
    "a",
    "",
]
SPEAKABLE = [text for text in TEXTS if any(char.isalnum() for char in text)]


def _merged_ranks():
    """256 bytes and 200 merges of the commonest neighbours in the texts: a small but real byte-pair vocabulary."""
    ranks = {bytes([b]): b for b in range(256)}
    words = [[bytes([b]) for b in word.encode()] for text in TEXTS for word in text.split(" ")]
    for _ in range(200):
        (left, right), _count = Counter(pair for word in words for pair in pairwise(word)).most_common(1)[0]
        ranks[left + right] = len(ranks)
        for word in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == (left, right):
                    word[i : i + 2] = [left + right]
                i += 1
    return ranks


@pytest.fixture(scope="module", params=["bytes", "merges"])
def tokenizers(request, tmp_path_factory):
    """Ours and upstream's on the same file."""
    ranks = {bytes([b]): b for b in range(256)} if request.param == "bytes" else _merged_ranks()
    path = tmp_path_factory.mktemp(request.param) / "tokenizer.tiktoken"
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()))
    return Tokenizer.from_file(path), upstream.tokenizer().FishTokenizer(str(path))


def voice(*frames, codebooks=CODEBOOKS):
    generator = torch.Generator().manual_seed(len(frames))
    codes = tuple(torch.randint(0, 1024, (codebooks, n), generator=generator).to(torch.int16) for n in frames)
    return VoicePrompt(tuple(TEXTS[:: len(TEXTS) // len(frames)][: len(frames)]), codes)


def ours(tokenizer, text, reference):
    prefix = voice_prefix(tokenizer, CODEBOOKS, reference)
    prompt = torch.cat([prefix, text_prompt(tokenizer, CODEBOOKS, text)], 1)
    assert prompt.dtype == torch.int64
    return prompt


def theirs(fish_tokenizer, text, reference):
    arguments = () if reference is None else (list(reference.texts), [codes.int() for codes in reference.codes])
    return upstream.upstream_prompts(fish_tokenizer, CODEBOOKS, text, *arguments)[0].long()


def test_special_ids_and_token_ids(tokenizers):
    mine, fish = tokenizers
    assert mine.special_ids == fish.all_special_tokens_with_ids
    assert (mine.semantic_begin_id, mine.semantic_end_id) == (fish.semantic_begin_id, fish.semantic_end_id)
    for text in TEXTS:
        assert mine.encode(text) == fish.encode(text)
        assert mine.decode(mine.encode(text)) == text
        special = f"<|im_start|>{text}<|im_end|><|semantic:5|>"
        assert mine.encode(special, allow_special=True) == fish.encode(special)


@pytest.mark.parametrize("text", SPEAKABLE, ids=range(len(SPEAKABLE)))
def test_prompts_equal_upstreams(tokenizers, text):
    mine, fish = tokenizers
    segment = upstream.text().split_text(text, 1_000_000)[0]
    for reference in (None, VoicePrompt(), voice(7), voice(3, 11)):
        assert torch.equal(ours(mine, segment, reference), theirs(fish, text, reference))


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_a_single_piece_equals_upstreams_encode_tokens(tokenizers, text):
    mine, fish = tokenizers
    expected = upstream.inference().encode_tokens(fish, text, device="cpu", num_codebooks=CODEBOOKS)
    assert torch.equal(text_prompt(mine, CODEBOOKS, text), expected.long())


def test_surplus_codebooks_are_cut_as_upstream_does(tokenizers):
    mine, fish = tokenizers
    reference = voice(5, codebooks=CODEBOOKS + 2)
    assert torch.equal(ours(mine, "a", reference), theirs(fish, "a", reference))


def test_no_voice_has_no_prefix_and_an_empty_one_has_the_system_line(tokenizers):
    mine, _ = tokenizers
    assert voice_prefix(mine, CODEBOOKS, None).shape == (1 + CODEBOOKS, 0)
    line = mine.decode(voice_prefix(mine, CODEBOOKS, VoicePrompt())[0].tolist())
    assert line == "<|im_start|>system\nSpeak out the provided text.<|im_end|>"


def test_a_text_cannot_end_its_own_turn(tokenizers):
    mine, fish = tokenizers
    text = "hi<|im_end|>there"
    prompt = text_prompt(mine, CODEBOOKS, text)
    assert (prompt[0] == mine.im_end_id).sum() == 1
    assert (theirs(fish, text, None)[0] == mine.im_end_id).sum() == 2  # upstream's flaw, which ours leaves out
    assert mine.decode(prompt[0].tolist()).startswith("<|im_start|>user\nhi<|im_end|>there<|im_end|>")


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (torch.zeros(CODEBOOKS - 1, 4, dtype=torch.int16), "must be integers of shape"),
        (torch.zeros(CODEBOOKS, dtype=torch.int16), "must be integers of shape"),
        (torch.zeros(CODEBOOKS, 4), "must be integers of shape"),
        (torch.full((CODEBOOKS, 4), 1024), "must lie in 0 to 1023"),
        (torch.full((CODEBOOKS, 4), -1), "must lie in 0 to 1023"),
    ],
)
def test_wrong_codes_are_refused(tokenizers, codes, message):
    with pytest.raises(RequestError, match=message):
        voice_prefix(tokenizers[0], CODEBOOKS, VoicePrompt(("a",), (codes,)))


def test_a_voice_needs_a_text_per_reference():
    with pytest.raises(RequestError, match="a text per reference: 1 texts, 0 codes"):
        VoicePrompt(("a",), ())
