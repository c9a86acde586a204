"""Cleaning, checking and cutting of what is to be spoken. Knows nothing of tokens, voices or models.

`clean_text` and `split_text` give what upstream 1.5 gives, since the model's prompts and pauses depend on both, but in
time that grows with the length of the text and not with its square. `prepare_text` is Shoal's own: the check at the
door.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator

from shoal.errors import RequestError, TooLargeError

_QUOTES = str.maketrans({"\u2018": "'", "\u2019": "'"})
# Flags, then pictographs, faces and transport. Newer emoji blocks pass, as they do upstream.
_EMOJI = re.compile("[\U0001f1e0-\U0001f1ff\U0001f300-\U0001f64f\U0001f680-\U0001f6ff]+")
_ENDS = ".!?。！？"
_COMMAS = re.compile(",{2,}")

# A float's point must not end a sentence. The look-behind changes no match, but without it a long run of digits is
# scanned once per digit.
_FLOAT = re.compile(r"(?<!\d)(\d+)\.(\d+)")
_PROTECTED_FLOAT = re.compile(r"<(\d+)_f_(\d+)>")
_ASCII_PUNCTUATION = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")

_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL_SPACES = re.compile("[\x0b\x0c\x1c-\x1f\x85]")
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\ufeff]")
# The bound of Unicode's stream-safe format (UAX 15): no language needs more, and normalising is quadratic in it.
_MAX_COMBINING_RUN = 30


def prepare_text(text: str, max_chars: int) -> str:
    """`text` as it will be spoken and cached: composed (NFC), without control characters, cleaned and stripped.

    Letters that arrive decomposed (macOS writes Korean so) are composed, as the model only knows them in that form.
    Control characters come with text copied from documents and have no sound: those that separate (vertical tab, form
    feed, ...) become a space, the others, NUL and the byte order mark among them, are dropped. Tab and line ends stay.

    What this returns always leaves `split_text` at least one piece.

    Raises TooLargeError beyond `max_chars` characters; RequestError for half a surrogate pair, for more than 30
    combining marks in a row, and for a text with no letter or digit left to speak.
    """
    if not isinstance(text, str):
        raise RequestError(f"text must be a string, not {type(text).__name__}")
    if len(text) > max_chars:
        raise TooLargeError(f"text has {len(text)} characters, the limit is {max_chars}: send it in several requests")
    if not text:
        raise RequestError("text is empty")
    if surrogate := _SURROGATE.search(text):
        raise RequestError(
            f"text has half a surrogate pair (U+{ord(surrogate.group()):04X}) at character {surrogate.start()}: "
            "it was cut or escaped wrongly before it was sent; send it as UTF-8"
        )
    if not text.isascii():
        _check_combining_runs(text)
        text = unicodedata.normalize("NFC", text)
    text = _CONTROLS.sub("", _CONTROL_SPACES.sub(" ", text))
    text = clean_text(text).strip()
    if not any(unicodedata.category(char)[0] in "LN" for char in text):
        raise RequestError(
            "text has nothing to speak: no letter or digit is left without spaces, emoji and punctuation"
        )
    return text


def clean_text(text: str) -> str:
    """Strip, turn curly single quotes straight, drop emoji, and make one comma of several."""
    return _COMMAS.sub(",", _EMOJI.sub("", text.strip().translate(_QUOTES)))


def split_text(text: str, length: int) -> list[str]:
    """Cut the cleaned `text` into pieces of about `length` UTF-8 bytes, at the best places there are.

    A text that is too long is cut after sentence ends, what is still too long after commas, then after spaces, then
    anywhere; neighbours are then joined again as long as they fit. Pieces are stripped, and pieces of only spaces and
    ASCII punctuation are dropped, so the result may be empty. Only a piece cut "anywhere" can exceed `length`, by less
    than one character.
    """
    # Lengths are compared while floats are protected, four bytes longer each, as upstream does.
    pieces: Iterable[str] = _cut_after([_FLOAT.sub(r"<\1_f_\2>", clean_text(text))], _ENDS, length)
    pieces = (_PROTECTED_FLOAT.sub(r"\1.\2", piece) for piece in pieces)
    pieces = _cut_after(pieces, ",，", length)
    pieces = _cut_after(pieces, " ", length)
    pieces = _cut_anywhere(pieces, length)
    return [piece for piece in map(str.strip, _join(pieces, length)) if _has_content(piece)]


def split_sentences(text: str, length: int) -> list[str]:
    """Cut the cleaned `text` after every sentence end, and what is longer than `length` as `split_text` does."""
    sentences = _cut_after([_FLOAT.sub(r"<\1_f_\2>", clean_text(text))], _ENDS, 0)
    return [piece for sentence in sentences for piece in split_text(_PROTECTED_FLOAT.sub(r"\1.\2", sentence), length)]


def _has_content(piece: str) -> bool:
    return any(char not in _ASCII_PUNCTUATION and not char.isspace() for char in piece)


def _check_combining_runs(text: str) -> None:
    run = 0
    for position, char in enumerate(text):
        run = run + 1 if unicodedata.combining(char) else 0
        if run > _MAX_COMBINING_RUN:
            raise RequestError(
                f"text stacks more than {_MAX_COMBINING_RUN} combining marks on one letter at character {position}"
            )


def _utf8_len(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _cut_after(pieces: Iterable[str], ends: str, length: int) -> Iterator[str]:
    """Cut pieces longer than `length` after each character of `ends`."""
    pattern = re.compile(f"[^{ends}]*[{ends}]|[^{ends}]+")
    for piece in pieces:
        if _utf8_len(piece) <= length:
            yield piece
        else:
            yield from pattern.findall(piece)


def _cut_anywhere(pieces: Iterable[str], length: int) -> Iterator[str]:
    """Cut pieces longer than `length` after the character that reaches it."""
    for piece in pieces:
        if _utf8_len(piece) <= length:
            yield piece
            continue
        start = size = 0
        for position, char in enumerate(piece, start=1):
            size += _utf8_len(char)
            if size >= length:
                yield piece[start:position]
                start, size = position, 0
        if start < len(piece):
            yield piece[start:]


def _join(pieces: Iterable[str], length: int) -> Iterator[str]:
    """Join neighbours as long as they fit into `length`."""
    joined: list[str] = []
    size = 0
    for piece in pieces:
        piece_size = _utf8_len(piece)
        if size + piece_size > length:
            yield "".join(joined)
            joined, size = [], 0
        joined.append(piece)
        size += piece_size
    yield "".join(joined)
