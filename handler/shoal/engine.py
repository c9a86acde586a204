"""Continuous batching over one dual-AR model: sequences wait, take a row, decode a frame per step, leave when done.

Knows prompts as matrices of tokens and codes; knows nothing of text, voices or audio.

One step is one frame for every live row: newcomers are prefilled, the others advance by one position, then all rows
together sample their frame. The rows in use are always 0 to n-1: when one leaves, the last row moves into its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from shoal.errors import RequestError
from shoal.graphs import StepGraphs, position_bucket, row_bucket
from shoal.model.dual_ar import DualAR
from shoal.rows import RowState
from shoal.sampling import NoiseSource, RowSampling, SamplingParams, exponential_noise, sample

_PREFILL_COLUMNS = 512  # columns of one prefill pass: bounds the attention scores held at once


@dataclass(frozen=True, eq=False)
class KVPrefix:
    """K and V of a prompt's beginning, ready to be copied into a row."""

    kv: Tensor  # (layers, length, 2 * kv_heads, head_dim), keys before values

    @property
    def length(self) -> int:
        return self.kv.shape[1]

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes


@dataclass(eq=False)
class Sequence:
    """One prompt on its way through the engine; made by `Engine.submit`."""

    prompt: Tensor  # (1 + num_codebooks, T) int64, without the prefix
    params: SamplingParams
    seed: int
    prefix: KVPrefix | None
    min_frames: int
    max_frames: int
    frames: int = 0  # decoded so far
    reason: Literal["stop", "length", "cancelled"] | None = None  # None while it lives or waits
    batch_size: int = 0  # the largest batch it decoded in
    _engine: Engine | None = field(default=None, repr=False)
    _row: int = -1
    _codes: Tensor | None = None

    @property
    def done(self) -> bool:
        return self.reason is not None

    @property
    def start(self) -> int:
        """Position of the first generated frame."""
        return self.prompt.shape[1] + (self.prefix.length if self.prefix else 0)

    def codes(self, begin: int = 0) -> Tensor:
        """(num_codebooks, frames - begin) int16 on the host: what has been decoded so far from frame `begin` on."""
        if self._codes is not None:
            return self._codes[:, begin:]
        if self._engine is None or self._row < 0:
            return torch.empty(self.prompt.shape[0] - 1, 0, dtype=torch.int16)
        return self._engine.read_codes(self._row, begin, self.frames)


class Engine:
    """Decodes up to `max_batch_size` sequences at a time.

    Args:
        model: from `load_dual_ar`; its head says which tokens can be chosen.
        im_end_id, semantic_begin_id: vocabulary ids that end a sequence and that code 0 stands at.
        noise: where a row's randomness comes from; tests hand in upstream's.
        check_every: steps between looks at which rows have ended (a look waits for the device).
        graphs: run steps that take in nobody new in a few fixed shapes, as graphs where the device has them: "auto" on
            a GPU, "on" anywhere (without a GPU the same steps run one kernel after the other), "off" never.
    """

    def __init__(
        self,
        model: DualAR,
        *,
        im_end_id: int,
        semantic_begin_id: int,
        max_batch_size: int = 8,
        noise: NoiseSource = exponential_noise,
        check_every: int = 1,
        graphs: Literal["auto", "on", "off"] = "auto",
    ) -> None:
        self.model = model
        self.max_batch_size = max_batch_size
        self.batch_limit = max_batch_size
        self.steps = 0
        self._im_end_id, self._semantic_begin_id = im_end_id, semantic_begin_id
        self._noise, self._check_every = noise, check_every
        self._waiting: deque[Sequence] = deque()
        self._rows: list[Sequence] = []
        self._cache, self._fast_cache = model.new_cache(), model.new_fast_cache()
        ends = (model.head_ids == im_end_id).nonzero()
        if len(ends) != 1:
            raise ValueError(f"head_ids must hold the end token {im_end_id} once")
        self._end_column = int(ends[0, 0])
        self._state = RowState(max_batch_size, model, len(model.head_ids))
        # An empty utterance helps nobody; but with the whole vocabulary sampling is upstream's to the letter.
        self._least_frames = 0 if self._state.full_vocabulary else 1
        wanted = graphs == "on" or (graphs == "auto" and model.device.type == "cuda")
        self._graphs = StepGraphs(model.device) if wanted else None

    @property
    def live(self) -> int:
        """Rows decoding now."""
        return len(self._rows)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_bytes(self) -> int:
        return self._cache.nbytes + self._fast_cache.nbytes

    def submit(
        self,
        prompt: Tensor,
        params: SamplingParams,
        *,
        prefix: KVPrefix | None = None,
        seed: int | None = None,
        force_frames: int | None = None,
    ) -> Sequence:
        """Queue one prompt, (1 + num_codebooks, T) int64. `force_frames` decodes that many, for benchmarks.

        Raises:
            RequestError: prompt and voice leave no room for a single frame.
        """
        start = prompt.shape[1] + (prefix.length if prefix else 0)
        room = self.model.config.max_seq_len - start
        if room < 1:
            raise RequestError(
                f"text and voice take {start} positions, the model has {self.model.config.max_seq_len}: "
                "shorten the text or the reference audio"
            )
        wanted = force_frames or params.max_new_tokens
        sequence = Sequence(
            prompt=prompt,
            params=params,
            seed=params.resolve_seed() if seed is None else seed,
            prefix=prefix,
            min_frames=force_frames or self._least_frames,
            max_frames=min(wanted, room),
            _engine=self,
        )
        self._waiting.append(sequence)
        return sequence

    @torch.inference_mode()
    def cancel(self, sequence: Sequence) -> None:
        """Drop a sequence; its row is free for the next step. No effect on one that is done."""
        if sequence.done:
            return
        if sequence._row < 0:
            self._waiting.remove(sequence)
        else:
            self._leave([sequence._row])
        sequence.reason = "cancelled"

    @torch.inference_mode()
    def abort(self) -> list[Sequence]:
        """Drop everything and give the cache's memory back, after an error that left rows in an unknown state."""
        dropped = [*self._rows, *self._waiting]
        for sequence in dropped:
            sequence.reason, sequence._row, sequence._codes = "cancelled", -1, sequence.codes()[:, :0]
        self._rows.clear()
        self._waiting.clear()
        self._cache.release()
        self._fast_cache.release()
        if self._graphs:
            self._graphs.clear()
        return dropped

    @torch.inference_mode()
    def compute_prefix(self, prompt: Tensor) -> KVPrefix:
        """Prefill the beginning of a prompt, (1 + num_codebooks, P), once for all sequences that start with it.

        Raises:
            RequestError: it is longer than the model's context.
        """
        length = prompt.shape[1]
        if length >= self.model.config.max_seq_len:
            raise RequestError(
                f"the voice takes {length} positions, the model has {self.model.config.max_seq_len}: "
                "use a shorter reference audio"
            )
        cache = self.model.new_cache()
        columns = prompt.T[None].to(self.model.device)
        self._run_prompt(columns, cache, slice(0, 1), starts=[0])
        return KVPrefix(cache.read_row(0, length))

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """Decode one frame for every live row and return the sequences that ended with it."""
        old = len(self._rows)
        fresh = self._admit()
        if not self._rows:
            return []
        if self._graphs and not fresh:
            self._steady_step()
        else:
            hidden = []
            if old:
                # the column to read is the last frame, so its position is one less than the frames decoded
                at = [s.start + s.frames - 1 for s in self._rows[:old]]
                hidden.append(self._advance(old, max(at) + 1, min(at) == max(at)))
            if fresh:
                hidden.append(self._prefill(fresh))
            greedy = all(s.params.temperature == 0 for s in self._rows)
            self._sample_frame(torch.cat(hidden) if len(hidden) > 1 else hidden[0], greedy)
        for sequence in self._rows:
            sequence.frames += 1
            sequence.batch_size = max(sequence.batch_size, len(self._rows))
        self.steps += 1
        return self._finish()

    def read_codes(self, row: int, begin: int, end: int) -> Tensor:
        """(num_codebooks, end - begin) int16 copy on the host of a row's frames."""
        return self._state.frames[row, begin:end].T.to("cpu", copy=True)

    def _admit(self) -> list[Sequence]:
        """Give free rows to waiting sequences, as many as one step should prefill."""
        fresh: list[Sequence] = []
        columns = 0
        while self._waiting and len(self._rows) < min(self.batch_limit, self.max_batch_size):
            columns += self._waiting[0].prompt.shape[1]
            if fresh and columns > 2 * _PREFILL_COLUMNS:
                break  # the live rows wait for this prefill: keep it short
            sequence = self._waiting.popleft()
            sequence._row = len(self._rows)
            self._rows.append(sequence)
            fresh.append(sequence)
            if sequence.prefix:
                self._cache.fill_row(sequence._row, sequence.prefix.kv)
            self._state.start(sequence._row, sequence)
        return fresh

    def _prefill(self, fresh: Seq[Sequence]) -> Tensor:
        """Hidden states (len(fresh), dim) at the end of each prompt, right-padded to the longest."""
        hidden = []
        limit = self.model.config.max_seq_len
        for group in _groups(fresh, limit):
            longest = max(s.prompt.shape[1] for s in group)
            columns = torch.zeros(len(group), longest, group[0].prompt.shape[0], dtype=torch.int64)
            for i, sequence in enumerate(group):
                columns[i, : sequence.prompt.shape[1]] = sequence.prompt.T
            rows = slice(group[0]._row, group[-1]._row + 1)
            starts = [s.prefix.length if s.prefix else 0 for s in group]
            out = self._run_prompt(columns.to(self.model.device), self._cache, rows, starts)
            last = torch.tensor([s.prompt.shape[1] - 1 for s in group], device=out.device)
            hidden.append(out[torch.arange(len(group), device=out.device), last])
        return torch.cat(hidden)

    def _run_prompt(self, columns: Tensor, cache, rows: slice, starts: list[int]) -> Tensor:
        """columns (B, T, 1 + num_codebooks) -> hidden (B, T, dim), in passes of bounded width."""
        tokens = columns[..., 0]
        end = self._semantic_begin_id + self.model.config.codebook_size
        x = self.model.embed(columns, is_speech=(tokens >= self._semantic_begin_id) & (tokens < end))
        start = torch.tensor(starts, device=x.device)
        uniform = len(set(starts)) == 1
        out = []
        for begin in range(0, x.shape[1], _PREFILL_COLUMNS):
            part = x[:, begin : begin + _PREFILL_COLUMNS]
            longest = max(starts) + begin + part.shape[1]
            out.append(self.model.slow(part, cache, rows, start + begin, longest, uniform))
        return torch.cat(out, dim=1) if len(out) > 1 else out[0]

    def _steady_step(self) -> None:
        """A step without newcomers, in the next larger shape: rows that nobody has decode along, and are not looked at.

        All that it reads lies on the device, so that it can be captured once and replayed.
        """
        state = self._state
        n = row_bucket(len(self._rows), self.max_batch_size)
        longest = max(s.start + s.frames for s in self._rows)
        longest = position_bucket(longest, self.model.config.max_seq_len)
        self._cache.reserve(n, longest)
        self._fast_cache.reserve(n, self.model.config.num_codebooks)

        def step() -> None:
            state.positions[:n].clamp_(max=longest - 1)  # those of rows that nobody has would run away
            self._sample_frame(self._advance(n, longest, uniform=False), greedy=False)

        storage = (self._cache.storage, self._fast_cache.storage, state.frames.data_ptr())
        self._graphs.run((n, longest), storage, step)

    def _advance(self, n: int, longest: int, uniform: bool) -> Tensor:
        """One new position for rows 0 to n-1: hidden states (n, dim). `longest`, `uniform`: as `DualAR.slow`."""
        state = self._state
        columns = state.columns[:n, None]
        tokens = columns[..., 0]
        begin = self._semantic_begin_id
        is_speech = None
        if state.full_vocabulary:
            is_speech = (tokens >= begin) & (tokens < begin + self.model.config.codebook_size)
        x = self.model.embed(columns, is_speech)
        return self.model.slow(x, self._cache, slice(0, n), state.positions[:n], longest, uniform)[:, 0]

    def _sample_frame(self, hidden: Tensor, greedy: bool) -> None:
        """Choose the next token and codes of rows 0 to n-1 from their hidden states (n, dim), and keep them.

        greedy: all rows are, so that no noise is needed.
        """
        state, model, n = self._state, self.model, hidden.shape[0]
        frame, seeds = state.frame[:n], state.seeds[:n]
        first = (frame == 0)[:, None]
        penalty = state.penalty[:n].masked_fill(first, 1.0)  # upstream's first frame knows no window
        rows = RowSampling(state.temperature[:n], state.top_p[:n], penalty)

        def draw(logits: Tensor, codebook: int) -> Tensor:
            noise_of = None if greedy else lambda candidates: self._noise(seeds, frame, codebook, candidates)
            return sample(logits, rows, state.window[:n, codebook], noise_of)

        logits = model.logits(hidden)
        too_early = frame < state.min_frames[:n]
        logits[:, self._end_column].masked_fill_(too_early, float("-inf"))
        choice = draw(logits, 0)
        token = model.head_ids[choice]
        code = (token - self._semantic_begin_id).clamp(0, model.config.codebook_size - 1)
        chosen, codes = [choice], [code]
        x = torch.stack([model.fast_project_in(hidden), model.embed_code(code)], dim=1)
        for k in range(1, model.config.num_codebooks):
            code = draw(model.fast(x, self._fast_cache, 0 if k == 1 else k), k)
            chosen.append(code)
            codes.append(code)
            x = model.embed_code(code)[:, None]
        state.record(n, token, torch.stack(codes, dim=1), torch.stack(chosen, dim=1), token == self._im_end_id)

    def _finish(self) -> list[Sequence]:
        """Take out the rows that have ended: at the end token, or at their frame limit."""
        at_limit = any(s.frames >= s.max_frames for s in self._rows)
        if not at_limit and self.steps % self._check_every:
            return []
        ended_at = self._state.ended_at[: len(self._rows)].tolist()
        done = []
        for row, (sequence, end) in enumerate(zip(self._rows, ended_at, strict=True)):
            if end < min(sequence.frames, sequence.max_frames):
                sequence.frames, sequence.reason = end, "stop"
            elif sequence.frames >= sequence.max_frames:
                sequence.frames, sequence.reason = sequence.max_frames, "length"
            else:
                continue
            sequence._codes = self.read_codes(row, 0, sequence.frames)
            done.append(row)
        finished = [self._rows[row] for row in done]
        self._leave(done)
        return finished

    def _leave(self, rows: Iterable[int]) -> None:
        """Free rows; the last ones move into the holes, so that the rows in use stay 0 to n-1."""
        for row in sorted(rows, reverse=True):
            sequence, last = self._rows[row], len(self._rows) - 1
            if sequence._codes is None:
                sequence._codes = self.read_codes(row, 0, sequence.frames)
            sequence._row = -1
            if row != last:
                mover = self._rows[last]
                self._cache.move_row(last, row, mover.start + mover.frames)
                self._state.move(last, row)
                self._rows[row], mover._row = mover, row
            self._rows.pop()


def _groups(fresh: Seq[Sequence], max_positions: int) -> Iterable[list[Sequence]]:
    """Neighbours that can be padded to one length without running over the model's context."""
    group: list[Sequence] = []
    for sequence in fresh:
        trial = [*group, sequence]
        longest = max(s.prompt.shape[1] for s in trial)
        if group and max(s.start - s.prompt.shape[1] for s in trial) + longest > max_positions:
            yield group
            trial = [sequence]
        group = trial
    if group:
        yield group
