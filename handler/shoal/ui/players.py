"""Sound players with labels. Loudness is left as it is: a player that normalises hides differences."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

import numpy as np


def players(items: Iterable[tuple[str, np.ndarray, int]]) -> str:
    """HTML with one player for each (label, audio float32 in -1 to 1, sample rate)."""
    from IPython.display import Audio

    rows = []
    for label, audio, rate in items:
        player = Audio(np.clip(audio, -1, 1), rate=rate, normalize=False)._repr_html_()
        rows.append(f'<div role="group" aria-label="{escape(label)}"><div>{escape(label)}</div>{player}</div>')
    return "".join(rows)
