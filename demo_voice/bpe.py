"""Byte-pair ranks learned on the phrase book, so that a phrase is a dozen tokens and not fifty bytes.

All 256 bytes come first, so any text can be encoded.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import regex
from shoal.tokenizer import _PATTERN

from .phrases import PHRASES


def learn_ranks(merges: int = 768) -> dict[bytes, int]:
    """Token bytes -> rank, 256 bytes and then `merges` pairs in the order of their learning."""
    texts = [p.text for p in PHRASES] + ["user\n", "assistant\n", "system\n", "Speak out the provided text."] * 3
    pieces = Counter(piece.encode() for text in texts for piece in regex.findall(_PATTERN_PLAIN, text))
    words = {piece: tuple(bytes([b]) for b in piece) for piece in pieces}
    ranks = {bytes([b]): b for b in range(256)}
    for _ in range(merges):
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for piece, parts in words.items():
            for pair in pairwise(parts):
                pairs[pair] += pieces[piece]
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))  # ties by bytes, so that every run agrees
        ranks[best[0] + best[1]] = len(ranks)
        words = {piece: _merge(parts, best) for piece, parts in words.items()}
    return ranks


_PATTERN_PLAIN = _PATTERN.replace(r"(\?!\S)", r"(?:\?!\S)")  # findall would return the group instead of the piece


def _merge(parts: tuple[bytes, ...], pair: tuple[bytes, bytes]) -> tuple[bytes, ...]:
    merged, i = [], 0
    while i < len(parts):
        if parts[i : i + 2] == pair:
            merged.append(pair[0] + pair[1])
            i += 2
        else:
            merged.append(parts[i])
            i += 1
    return tuple(merged)
