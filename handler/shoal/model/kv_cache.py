"""Keys and values of the positions seen so far, per layer and row. Grows in buckets; knows nothing of attention.

Layout: (layers, rows, positions, 2 * kv_heads, head_dim), keys before values, so that one position of one row is
contiguous and written at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.errors import OutOfMemoryError

_POSITION_BUCKET = 128  # growing moves the whole cache, so it happens in steps of at least this many positions
_MAX_VIEWS = 64


class KVCache:
    """K and V of up to `max_positions` positions for as many rows as are used.

    A forward pass first calls `open` (which rows, which positions), then each layer calls `write` once.
    """

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.max_positions, self.kv_heads = max_positions, kv_heads
        self._kv = torch.empty(layers, 0, 0, 2 * kv_heads, head_dim, dtype=dtype, device=device)
        self._rows = slice(0, 0)
        self._longest = 0
        self._index: tuple[Tensor, Tensor] | None = None  # rows and positions to write, where they differ per row
        # Per layer where to write and what to read. The fast transformer opens the same few places in every frame, and
        # slicing takes as long as its arithmetic.
        self._views: dict[tuple[int, ...], list[tuple[Tensor, Tensor, Tensor]]] = {}
        self._opened: list[tuple[Tensor, Tensor, Tensor]] = []

    @property
    def nbytes(self) -> int:
        return self._kv.nbytes

    @property
    def storage(self) -> int:
        """Where the memory begins: changes whenever the cache grows."""
        return self._kv.data_ptr()

    def reserve(self, rows: int, positions: int) -> None:
        """Make room for `rows` rows of `positions` positions, keeping what is there.

        Raises:
            OutOfMemoryError: the device has no room.
        """
        layers, have_rows, have_positions, *heads = self._kv.shape
        if rows <= have_rows and positions <= have_positions:
            return
        rows = max(have_rows, 1 << (rows - 1).bit_length())
        if positions > have_positions:
            positions = max(positions, have_positions * 3 // 2)
            positions = -(-positions // _POSITION_BUCKET) * _POSITION_BUCKET
        positions = min(max(positions, have_positions), self.max_positions)
        try:
            # zeros, not empty: masked places are multiplied by zero, and garbage could be NaN
            grown = self._kv.new_zeros((layers, rows, positions, *heads))
        except (RuntimeError, MemoryError) as error:
            raise OutOfMemoryError(
                f"no memory for a KV cache of {rows} rows x {positions} positions; lower the batch limit"
            ) from error
        grown[:, :have_rows, :have_positions] = self._kv
        self._kv = grown
        self._views.clear()

    def release(self) -> None:
        """Give all memory back; the contents are lost."""
        self._kv = self._kv.new_empty((self._kv.shape[0], 0, 0, *self._kv.shape[3:]))
        self._views.clear()
        self._opened = []

    def open(self, rows: slice, positions: Tensor, longest: int, uniform: bool) -> None:
        """Say where the next writes go: `positions` (B or 1, T) of `rows`; reads cover `longest` positions."""
        self.reserve(rows.stop, longest)
        length = positions.shape[1]
        if uniform:
            key = (rows.start, rows.stop, length, longest)
            if key not in self._views:
                if len(self._views) >= _MAX_VIEWS:
                    self._views.clear()
                span = slice(longest - length, longest)
                self._views[key] = [(layer[rows, span], *self._read(layer[rows, :longest])) for layer in self._kv]
            self._opened = self._views[key]
            self._index = None
        else:
            self._rows, self._longest = rows, longest
            self._index = (torch.arange(rows.start, rows.stop, device=positions.device)[:, None], positions)

    def write(self, layer: int, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, T, 2 * kv_heads, head_dim); returns all K and V so far, (B, longest, kv_heads, head_dim) each."""
        if self._index is None:
            target, keys, values = self._opened[layer]
            target.copy_(kv)
            return keys, values
        self._kv[layer][self._index] = kv
        return self._read(self._kv[layer, self._rows, : self._longest])

    def _read(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        return kv[:, :, : self.kv_heads], kv[:, :, self.kv_heads :]

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one row over another's."""
        self._kv[:, target, :length] = self._kv[:, source, :length]

    def read_row(self, row: int, length: int) -> Tensor:
        """A private copy (layers, length, 2 * kv_heads, head_dim) of a row's beginning."""
        return self._kv[:, row, :length].clone()

    def fill_row(self, row: int, kv: Tensor) -> None:
        """Put a copy made by `read_row` at the beginning of a row."""
        length = kv.shape[1]
        self.reserve(row + 1, length)
        self._kv[:, row, :length] = kv
