"""What is refused at the door, and that long texts take linear time."""

import time
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal.errors import RequestError, TooLargeError
from shoal.text import clean_text, prepare_text, split_sentences, split_text


def test_cleaning():
    assert clean_text("  It’s 🎉 ok,,,, fine  ") == "It's  ok, fine"


def test_cuts_at_sentences_then_commas_then_spaces_then_anywhere():
    assert split_text("This is a test sentence. This is another test sentence. And a third one.", 50) == [
        "This is a test sentence.",
        "This is another test sentence. And a third one.",
    ]
    assert split_text("one two three, four five six, seven", 16) == ["one two three,", "four five six,", "seven"]
    assert split_text("one two three four", 9) == ["one two", "three", "four"]
    assert split_text("abcdefghij", 4) == ["abcd", "efgh", "ij"]
    assert split_text("pi is 3.14159 and e 2.718", 16) == ["pi is 3.14159", "and e 2.718"]


def test_sentences_apart():
    assert split_sentences("Hello, you. It is 3.5 km?! 네. そうです。はい", 200) == [
        "Hello, you.",
        "It is 3.5 km?",
        "네.",
        "そうです。",
        "はい",
    ]
    assert split_sentences("One. One two, three four.", 10) == ["One.", "One two,", "three", "four."]


def test_a_piece_cut_anywhere_exceeds_the_length_by_less_than_a_character():
    pieces = split_text("물고기" * 40, 50)
    assert "".join(pieces) == "물고기" * 40
    assert all(50 <= len(piece.encode()) < 53 for piece in pieces[:-1])


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=200), length=st.integers(4, 100))
def test_nothing_speakable_is_lost(text, length):
    def letters(value):
        return [char for char in value if unicodedata.category(char)[0] in "LN"]

    assert letters("".join(split_text(text, length))) == letters(clean_text(text))


@pytest.mark.parametrize(
    "text",
    [
        "물" * 100_000,
        "1" * 100_000,
        "1." * 50_000,
        "," * 100_000,
        "a b " * 25_000,
        "<1_f_" * 20_000,
        "<" + "1" * 99_999,
        "한 문장입니다. " * 11_000,
        "🐟a" * 50_000,
        "a" + "\u0301" * 20 + "b" * 99_000,
    ],
    ids=["one word", "digits", "floats", "commas", "words", "protected", "open", "sentences", "emoji", "marks"],
)
def test_100_000_characters_take_linear_time(text):
    start = time.perf_counter()
    prepared = prepare_text(text, 200_000) if text[0] != "," else text
    for length in (10, 200, 200_000):
        split_text(prepared, length)
    assert time.perf_counter() - start < 5  # about 0.3 s; the quadratic ways take minutes


def test_prepared_text_is_cleaned_composed_and_without_controls():
    assert prepare_text("  It’s me 🎉 ", 100) == "It's me"
    assert prepare_text("a\x00b\x07c\x0bd\x0ce\x85f\x9bg\x7f\ufeff", 100) == "abc d e fg"
    assert prepare_text("line one\n\tline two\r\n.", 100) == "line one\n\tline two\r\n."
    decomposed = unicodedata.normalize("NFD", "한국어 Größe が")
    assert prepare_text(decomposed, 100) == "한국어 Größe が"


@pytest.mark.parametrize("text", ["1", "가", "漢", "あ", "②", "x!", "٣", "ㅋㅋ", "It’s"])
def test_one_letter_or_digit_is_enough(text):
    assert split_text(prepare_text(text, 10), 200)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "text is empty"),
        ("   \n\t ", "nothing to speak"),
        ("\x00\x01", "nothing to speak"),
        ("🐟🎉", "nothing to speak"),
        ("🤔 ❤️ ♥", "nothing to speak"),
        ("...!?,", "nothing to speak"),
        ("。、！「」…—", "nothing to speak"),
        ("\u200b\u200d\u2060", "nothing to speak"),
        ("ok \ud83d", r"half a surrogate pair \(U\+D83D\) at character 3"),
        ("a" + "\u0301\u0316" * 40, "combining marks"),
        (None, "must be a string, not NoneType"),
        (b"bytes", "must be a string, not bytes"),
    ],
)
def test_what_cannot_be_spoken_is_refused(text, message):
    with pytest.raises(RequestError, match=message) as caught:
        prepare_text(text, 1000)
    assert caught.value.status == 400


def test_too_long():
    assert len(prepare_text("가" * 100, 100)) == 100
    with pytest.raises(TooLargeError, match="101 characters, the limit is 100") as caught:
        prepare_text("가" * 101, 100)
    assert caught.value.status == 413


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.characters(), max_size=60), length=st.integers(1, 60))
def test_what_is_accepted_can_be_split_and_encoded(text, length):
    try:
        prepared = prepare_text(text, 50)
    except RequestError:
        return
    assert split_text(prepared, length)
    assert prepared.encode("utf-8")
