"""What each row of the engine carries from step to step, as tensors on the device. Knows nothing of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.model.dual_ar import DualAR
from shoal.sampling import WINDOW

if TYPE_CHECKING:
    from shoal.engine import Sequence

NEVER = 2**31 - 1  # the frame at which a row ends that has not ended


class RowState:
    """Rows of which each is one sequence; those that no sequence has hold what the last one left."""

    def __init__(self, rows: int, model: DualAR, candidates: int) -> None:
        c, device = model.config, model.device
        self.full_vocabulary = candidates == c.vocab_size

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        self.columns = zeros(1 + c.num_codebooks)  # the last frame: token and codes
        self.positions, self.frame, self.seeds, self.min_frames, self.ended_at = (zeros() for _ in range(5))
        self.temperature, self.top_p, self.penalty = (zeros(1, dtype=torch.float32) for _ in range(3))
        # Candidates of the last frames per codebook. Upstream fills the window with id 0, so that code 0 is penalised
        # in the first 16 frames; for the first codebook that id is a text token, which a semantic head does not have.
        self.window = zeros(c.num_codebooks, WINDOW)
        self._empty = torch.zeros(c.num_codebooks, 1, dtype=torch.int64, device=device)
        self._empty[0] = 0 if self.full_vocabulary else candidates
        self.frames = torch.zeros(rows, 0, c.num_codebooks, dtype=torch.int16, device=device)

    def start(self, row: int, sequence: Sequence) -> None:
        params = sequence.params
        self.positions[row] = sequence.start - 1  # `record` moves it on to the first frame's own position
        self.frame[row] = 0
        self.seeds[row] = sequence.seed
        self.min_frames[row] = sequence.min_frames
        self.ended_at[row] = NEVER
        self.temperature[row], self.top_p[row] = params.temperature, params.top_p
        self.penalty[row] = params.repetition_penalty
        self.window[row] = self._empty
        short = sequence.max_frames - self.frames.shape[1]
        if short > 0:
            self.frames = torch.nn.functional.pad(self.frames, (0, 0, 0, max(short, 256)))

    def record(self, n: int, token: Tensor, codes: Tensor, chosen: Tensor, ends: Tensor) -> None:
        """Keep one frame of rows 0 to n-1. codes, chosen: (n, num_codebooks)."""
        frame = self.frame[:n]
        every = torch.arange(n, device=frame.device)
        self.columns[:n, 0], self.columns[:n, 1:] = token, codes
        self.frames[every, frame.clamp_max(self.frames.shape[1] - 1)] = codes.to(torch.int16)
        later = frame > 0  # upstream's window does not hold the first frame, nor does the end token end it there
        slot = (frame - 1) % WINDOW
        self.window[every, :, slot] = torch.where(later[:, None], chosen, self.window[every, :, slot])
        ended = ends & later & (self.ended_at[:n] == NEVER)
        self.ended_at[:n] = torch.where(ended, frame, self.ended_at[:n])
        self.positions[:n] += 1
        self.frame[:n] += 1

    def move(self, source: int, target: int) -> None:
        for tensor in vars(self).values():
            if isinstance(tensor, Tensor) and tensor is not self._empty:
                tensor[target] = tensor[source]
