"""`Features`: the VQ codes of one utterance and what made them; small, exact, and enough to make its sound again."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shoal.packing import DamagedError, pack, unpack

_KIND = "features"


@dataclass(frozen=True, eq=False)
class Features:
    """What the language model said for one text. The codec turns it into the same audio every time."""

    codes: np.ndarray  # (num_codebooks, frames) int16, the sentences one after the other
    sentence_frames: tuple[int, ...]  # frames of each sentence; they sum to the frames of `codes`
    pauses_s: tuple[float, ...]  # silence after each sentence in seconds, 0 after the last
    text: str  # after cleaning
    seed: int
    fingerprint: str  # of the checkpoint
    cost_s: float = 0.0  # its share of the time that the language model took

    @property
    def frames(self) -> int:
        return self.codes.shape[1]

    @cached_property
    def nbytes(self) -> int:
        return self.codes.nbytes + len(self.text.encode("utf-8", "surrogatepass")) + 256

    @cached_property
    def digest(self) -> str:
        """32 hex digits of what its sound depends on: the checkpoint, the codes and the pauses."""
        heading = json.dumps([self.fingerprint, self.codes.shape, self.sentence_frames, self.pauses_s])
        return hashlib.sha256(heading.encode() + np.ascontiguousarray(self.codes).tobytes()).hexdigest()[:32]

    def sentences(self) -> list[np.ndarray]:
        """The codes of each sentence, (num_codebooks, its frames)."""
        ends = np.cumsum(self.sentence_frames)[:-1]
        return np.split(self.codes, ends, axis=1)

    def to_bytes(self) -> bytes:
        """Bytes for a file or a network; `from_bytes` gives the same features back."""
        fields = {
            "sentence_frames": self.sentence_frames,
            "pauses_s": self.pauses_s,
            "text": self.text,
            "seed": self.seed,
            "fingerprint": self.fingerprint,
            "cost_s": self.cost_s,
        }
        return pack(_KIND, fields, [self.codes])

    @classmethod
    def from_bytes(cls, data: bytes) -> Features:
        """Raises DamagedError for bytes that are not, or no longer, features."""
        fields, arrays = unpack(_KIND, data)
        try:
            (codes,) = arrays
            features = cls(
                codes=codes,
                sentence_frames=tuple(int(n) for n in fields["sentence_frames"]),
                pauses_s=tuple(float(s) for s in fields["pauses_s"]),
                text=str(fields["text"]),
                seed=int(fields["seed"]),
                fingerprint=str(fields["fingerprint"]),
                cost_s=float(fields["cost_s"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"its fields are not those of features ({error})") from None
        counts = features.sentence_frames
        if codes.ndim != 2 or not counts or min(counts) < 0 or sum(counts) != codes.shape[1]:
            raise DamagedError("its sentences do not add up to its codes")
        if len(features.pauses_s) != len(counts) or not all(0 <= pause < 60 for pause in features.pauses_s):
            raise DamagedError("its pauses are not those of its sentences")
        return features
