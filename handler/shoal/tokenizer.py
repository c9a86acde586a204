"""Text to token ids and back, for Fish Speech 1.5's `tokenizer.tiktoken`. Knows nothing of prompts or models.

The file holds one byte-pair rank a line: base64 of the token's bytes, a space, the rank. The special tokens are not in
it: they follow right after the ranks, in 1.5's fixed order.

One deliberate difference from upstream: upstream encodes what users write with all special tokens allowed, so that a
text that contains "<|im_end|>" ends the speaker's turn. Here a text is a text: `encode` spells such a string out letter
by letter unless `allow_special` is set, which only the fixed parts of a prompt do.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from pathlib import Path

import tiktoken

from shoal.errors import CheckpointError, RequestError

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
VOICE = "<|voice|>"

_SPECIALS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|pad|>",
    IM_START,
    IM_END,
    *(f"<|placeholder:{i}|>" for i in range(4)),
    "<|text|>",
    VOICE,
    "<|interleave|>",
)

# How the format cuts text before merging bytes. The last but one alternative asks for a literal "?!": surely meant as a
# look-ahead, but the model was trained with it as it stands.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|\p{P}"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(\?!\S)"
    r"|\s+"
)

# Upstream encodes longer texts in pieces of this many characters; ids at the seams depend on it.
_MAX_ENCODE_CHARS = 400_000

_DOWNLOAD_AGAIN = "Download the file again from the Fish Speech 1.5 repository."


class Tokenizer:
    """The tokenizer of one checkpoint: byte-pair ranks, then 12 special tokens, then one token per semantic code."""

    def __init__(self, ranks: dict[bytes, int], num_semantic: int = 1024, name: str = "tokenizer") -> None:
        """`ranks` must number its tokens 0 to len - 1; `num_semantic` is the model's codebook_size."""
        names = (*_SPECIALS, *(f"<|semantic:{i}|>" for i in range(num_semantic)))
        self.special_ids: dict[str, int] = {token: len(ranks) + i for i, token in enumerate(names)}
        self.im_start_id = self.special_ids[IM_START]
        self.im_end_id = self.special_ids[IM_END]
        self.semantic_begin_id = len(ranks) + len(_SPECIALS)
        self.semantic_end_id = self.semantic_begin_id + num_semantic - 1  # inclusive
        self.vocab_size = len(ranks) + len(names)
        self._missing_bytes = frozenset(b for b in range(256) if bytes([b]) not in ranks)
        self._encoding = tiktoken.Encoding(
            name=name, pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens=self.special_ids
        )

    @classmethod
    def from_file(cls, path: str | Path, num_semantic: int = 1024) -> Tokenizer:
        """Read `tokenizer.tiktoken`, and check its ids against a special_tokens.json beside it.

        Raises CheckpointError, naming file and line, when either file is missing, damaged, or not of Fish Speech 1.5.
        """
        path = Path(path)
        tokenizer = cls(_read_ranks(path), num_semantic, name=path.stem)
        specials_path = path.with_name("special_tokens.json")
        if specials_path.is_file():
            _check_special_ids(specials_path, tokenizer.special_ids)
        return tokenizer

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Token ids of `text`; strings such as "<|im_end|>" become control tokens only with `allow_special`.

        Raises RequestError for a character whose bytes the checkpoint's tokenizer does not have.
        """
        if self._missing_bytes and not self._missing_bytes.isdisjoint(text.encode("utf-8", "replace")):
            bad = next(c for c in text if not self._missing_bytes.isdisjoint(c.encode("utf-8", "replace")))
            raise RequestError(f"the tokenizer has no token for {bad!r} (U+{ord(bad):04X}); remove it from the text")
        allowed = set(self.special_ids) if allow_special else set()
        ids: list[int] = []
        for start in range(0, len(text), _MAX_ENCODE_CHARS):
            piece = text[start : start + _MAX_ENCODE_CHARS]
            ids += self._encoding.encode(piece, allowed_special=allowed, disallowed_special=())
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special tokens by name; bytes that are no valid UTF-8 become U+FFFD."""
        return self._encoding.decode(list(ids))


def _read_ranks(path: Path) -> dict[bytes, int]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}). {_DOWNLOAD_AGAIN}") from error
    if not data.strip():
        raise CheckpointError(f"{path}: is empty. {_DOWNLOAD_AGAIN}")
    if data.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{path}, line 1: is a Git LFS pointer, not the file itself. Run `git lfs pull` in the checkpoint's clone."
        )
    if data.lstrip()[:1] == b"<":
        raise CheckpointError(
            f"{path}, line 1: is a web page (a login or error page saved by the download?), not the file itself. "
            + _DOWNLOAD_AGAIN
        )
    ranks: dict[bytes, int] = {}
    lines: dict[int, int] = {}  # rank -> the line that gave it
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        token, rank = _parse_line(path, number, line)
        if token in ranks or rank in lines:
            what, first = ("token", lines[ranks[token]]) if token in ranks else (f"rank {rank}", lines[rank])
            raise CheckpointError(f"{path}, line {number}: repeats the {what} of line {first}. {_DOWNLOAD_AGAIN}")
        ranks[token] = rank
        lines[rank] = number
    # Special tokens are numbered from len(ranks): with a gap in the ranks they would fall on byte-pair tokens.
    highest = max(lines)
    if highest != len(ranks) - 1:
        raise CheckpointError(
            f"{path}, line {lines[highest]}: rank {highest}, but the file has only {len(ranks)} tokens: lines are "
            f"missing. {_DOWNLOAD_AGAIN}"
        )
    return ranks


def _parse_line(path: Path, number: int, line: bytes) -> tuple[bytes, int]:
    shown = repr(line[:40])[1:] + ("..." if len(line) > 40 else "")
    parts = line.split()
    if len(parts) != 2 or not parts[1].isdigit() or len(parts[1]) > 9:
        raise CheckpointError(f"{path}, line {number}: {shown} is not 'base64 rank'. {_DOWNLOAD_AGAIN}")
    try:
        token = base64.b64decode(parts[0], validate=True)
    except binascii.Error as error:
        raise CheckpointError(
            f"{path}, line {number}: {shown} has broken base64 ({error}); the file is truncated or damaged. "
            + _DOWNLOAD_AGAIN
        ) from error
    return token, int(parts[1])


def _check_special_ids(path: Path, expected: dict[str, int]) -> None:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: is not valid JSON ({error}). {_DOWNLOAD_AGAIN}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds a {type(found).__name__}, not token names with ids. {_DOWNLOAD_AGAIN}")
    for token, token_id in expected.items():
        if found.get(token) != token_id:
            theirs = f"the id {found[token]}" if token in found else "no such token"
            raise CheckpointError(
                f"{path}: {token} should have the id {token_id} by tokenizer.tiktoken, but there is {theirs}. Both "
                "files must come from one Fish Speech 1.5 checkpoint; OpenAudio and other generations differ."
            )
