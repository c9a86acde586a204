"""Keys and values of the positions seen so far, per layer and row. Grows in buckets; knows nothing of attention.

Layout: (layers, rows, positions, kv_heads, head_dim), so that one position of one row is contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.errors import OutOfMemoryError

_POSITION_BUCKET = 128  # growing moves the whole cache, so it happens in steps of at least this many positions


class KVCache:
    """K and V of up to `max_positions` positions for as many rows as are used.

    A forward pass first calls `open` (which rows, which positions), then each layer calls `write` once.
    """

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.max_positions = max_positions
        empty = torch.empty(layers, 0, 0, kv_heads, head_dim, dtype=dtype, device=device)
        self.keys, self.values = empty, empty.clone()
        self._rows = slice(0, 0)
        self._positions: Tensor | None = None
        self._row_index: Tensor | None = None
        self._span = slice(0, 0)
        self._longest = 0

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def reserve(self, rows: int, positions: int) -> None:
        """Make room for `rows` rows of `positions` positions, keeping what is there.

        Raises:
            OutOfMemoryError: the device has no room.
        """
        layers, have_rows, have_positions, kv_heads, head_dim = self.keys.shape
        if rows <= have_rows and positions <= have_positions:
            return
        rows = max(have_rows, 1 << (rows - 1).bit_length())
        if positions > have_positions:
            positions = max(positions, have_positions * 3 // 2)
            positions = -(-positions // _POSITION_BUCKET) * _POSITION_BUCKET
        positions = min(max(positions, have_positions), self.max_positions)
        shape = (layers, rows, positions, kv_heads, head_dim)
        try:
            # zeros, not empty: masked places are multiplied by zero, and garbage could be NaN
            keys, values = self.keys.new_zeros(shape), self.values.new_zeros(shape)
        except (RuntimeError, MemoryError) as error:
            raise OutOfMemoryError(
                f"no memory for a KV cache of {rows} rows x {positions} positions; lower the batch limit"
            ) from error
        keys[:, :have_rows, :have_positions] = self.keys
        values[:, :have_rows, :have_positions] = self.values
        self.keys, self.values = keys, values

    def release(self) -> None:
        """Give all memory back; the contents are lost."""
        shape = (self.keys.shape[0], 0, 0, *self.keys.shape[3:])
        self.keys, self.values = self.keys.new_empty(shape), self.values.new_empty(shape)

    def open(self, rows: slice, positions: Tensor, longest: int, uniform: bool) -> None:
        """Say where the next writes go: `positions` (B or 1, T) of `rows`; reads cover `longest` positions."""
        self.reserve(rows.stop, longest)
        self._rows, self._longest = rows, longest
        length = positions.shape[1]
        if uniform:
            self._span = slice(longest - length, longest)
            self._row_index = None
        else:
            self._positions = positions
            self._row_index = torch.arange(rows.start, rows.stop, device=positions.device)[:, None]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, T, kv_heads, head_dim) and return views (B, longest, kv_heads, head_dim) on all that is stored."""
        k, v = self.keys[layer], self.values[layer]
        if self._row_index is None:
            k[self._rows, self._span], v[self._rows, self._span] = keys, values
        else:
            k[self._row_index, self._positions] = keys
            v[self._row_index, self._positions] = values
        return k[self._rows, : self._longest], v[self._rows, : self._longest]

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one row over another's."""
        self.keys[:, target, :length] = self.keys[:, source, :length]
        self.values[:, target, :length] = self.values[:, source, :length]

    def read_row(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        """A private copy (layers, length, kv_heads, head_dim) of a row's beginning."""
        return self.keys[:, row, :length].clone(), self.values[:, row, :length].clone()

    def fill_row(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Put a copy made by `read_row` at the beginning of a row."""
        length = keys.shape[1]
        self.reserve(row + 1, length)
        self.keys[:, row, :length] = keys
        self.values[:, row, :length] = values
