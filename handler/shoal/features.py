"""`Features`: the VQ codes of one utterance and what made them; small, exact, and enough to make its sound again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Features:
    """What the language model said for one text. The codec turns it into the same audio every time."""

    codes: np.ndarray  # (num_codebooks, frames) int16, the sentences one after the other
    sentence_frames: tuple[int, ...]  # frames of each sentence; they sum to the frames of `codes`
    pauses_s: tuple[float, ...]  # silence after each sentence in seconds, 0 after the last
    text: str  # after cleaning
    seed: int
    fingerprint: str  # of the checkpoint

    @property
    def frames(self) -> int:
        return self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + len(self.text.encode("utf-8", "surrogatepass")) + 256

    def sentences(self) -> list[np.ndarray]:
        """The codes of each sentence, (num_codebooks, its frames)."""
        ends = np.cumsum(self.sentence_frames)[:-1]
        return np.split(self.codes, ends, axis=1)
