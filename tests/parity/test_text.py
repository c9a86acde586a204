"""Cleaning and cutting give what upstream gives, on chosen texts and on random ones."""

import pytest
import upstream
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal.text import clean_text, split_text

pytestmark = pytest.mark.skipif(upstream.skip_reason() is not None, reason=str(upstream.skip_reason()))

TEXTS = [
    "안녕하세요. 저는 물고기입니다! 만나서 반가워요?",
    "오늘의 기온은 23.5도이고, 습도는 61.2퍼센트입니다. 내일은 3.14도 내려갑니다.",
    "띄어쓰기없이아주길게이어지는한국어문장입니다마침표도쉼표도없이계속해서이어집니다",
    "서울특별시 강남구 테헤란로 123번지, 우편번호 06236. 전화 02-555-1234!",
    "The quick brown fox jumps over the lazy dog. Then it sleeps.",
    "A price of $1,234.56 and a version 1.2.3.4 and an address 192.168.0.1...",
    "This is a test sentence with only commas, and no dots, and no exclamation marks, and no newlines,,,",
    "It’s ‘quoted’, isn’t it?",
    "こんにちは。私は魚です！元気ですか？",
    "東京都千代田区丸の内一丁目、とても長い文章なので途中で切らなければなりません、そうでしょう",
    "你好，世界！今天天气不错。你想去哪里？我们一起去吧。",
    "这是一段很长的中文文本,而且没有句号,也没有感叹号,也没有问号,也没有换行符。",
    "Hello 안녕 こんにちは 你好. Mixed, 섞인, 混ぜた, 混合! 3.14 pi?",
    "0123456789 3.14 2.718 10.000.000 .5 5. 1.2.3",
    "<3_f_14> and <1.5_f_2> <<1_f_2>>",
    "🐟🐠 물고기 떼 🎉🚀 happy 😀",
    "🇰🇷 대한민국 🇯🇵 日本 👍🏽 ❤️ 🤔",
    "!!! ??? ... ,,, ;;; :::",
    "wait... what?! no!!! yes,,, (really) [ok] {fine} ~",
    "。。。！！！",
    "  \t leading and trailing \n\n newlines \r\n here  ",
    "line one\nline two\nline three\n\n\nparagraph two",
    "a,aaaaaa3.14",
    "\u3000全角スペース\u3000テスト\u00a0nbsp",
    "٣.١٤ und Größe, Straße; naïve café — em-dash – en-dash…",
    "x" * 500,
    "가" * 300,
    "",
    "   ",
    "a",
]
LENGTHS = (1, 5, 10, 50, 100, 150, 200, 1000)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_same_as_upstream(text):
    theirs = upstream.text()
    assert clean_text(text) == theirs.clean_text(text)
    for length in LENGTHS:
        assert split_text(text, length) == theirs.split_text(text, length)


# Dense in what the rules look at, so that random texts meet them.
pieces = st.sampled_from(
    [*".!?,。！？， ", "\n", "1", "3.14", "1.2.3", "<3_f_14>", "_f_", "‘", "가", "漢", "🐟", "🇰🇷", "ab"]
)
texts = st.lists(pieces | st.text(max_size=4), max_size=60).map("".join)


@settings(max_examples=400, deadline=None)
@given(text=texts, length=st.integers(1, 120))
def test_same_as_upstream_on_random_text(text, length):
    theirs = upstream.text()
    assert clean_text(text) == theirs.clean_text(text)
    assert split_text(text, length) == theirs.split_text(text, length)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=200), length=st.integers(1, 100))
def test_same_as_upstream_on_any_unicode(text, length):
    assert split_text(text, length) == upstream.text().split_text(text, length)
