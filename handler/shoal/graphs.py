"""Decode steps as CUDA graphs, one per shape: a step of some hundred small kernels becomes one launch.

Knows nothing of the model: what it is given reads and writes the same tensors each time, whatever is in them. On a
device without graphs the steps run as they are, in the same shapes.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

import torch

log = logging.getLogger(__name__)

_MOST_GRAPHS = 64  # each holds some megabytes of the card
_POSITIONS = 128  # the least step between two lengths of context that have graphs of their own


def row_bucket(rows: int, most: int) -> int:
    """The next power of two, or `most`: the shapes that a step's rows come in."""
    return min(1 << (rows - 1).bit_length(), most)


def position_bucket(positions: int, most: int) -> int:
    """The next length of context that has graphs of its own: up to 128 or a quarter more, or `most`."""
    step = max(_POSITIONS, 1 << max(0, positions.bit_length() - 3))
    return min(-(-positions // step) * step, most)


class StepGraphs:
    """Runs steps of a few shapes, from their second time on as a captured graph.

    The first time of a shape runs as it is: that loads kernels and libraries, which a capture does not allow.
    """

    def __init__(self, device: torch.device) -> None:
        self._captures = device.type == "cuda"
        self._seen: set[tuple[int, ...]] = set()
        self._graphs: OrderedDict[tuple[int, ...], torch.cuda.CUDAGraph] = OrderedDict()
        self._storage: tuple[int, ...] = ()
        self._pool = None  # of memory that all graphs share, as never two run at once

    def run(self, shape: tuple[int, ...], storage: tuple[int, ...], step: Callable[[], None]) -> None:
        """Do what `step` does.

        shape: all numbers that `step` computes with. storage: the addresses of the tensors that it uses, of which the
        graphs know the present ones only.
        """
        if not self._captures:
            step()
            return
        if storage != self._storage:
            self.clear()
            self._storage = storage
        if shape not in self._seen:
            step()
            self._seen.add(shape)
            return
        if shape not in self._graphs and not self._capture(shape, step):
            step()
            return
        self._graphs.move_to_end(shape)
        self._graphs[shape].replay()

    def clear(self) -> None:
        """Forget all graphs and give their memory back."""
        self._graphs.clear()
        self._pool = None

    def _capture(self, shape: tuple[int, ...], step: Callable[[], None]) -> bool:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            # thread_local: the codec's worker may allocate meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                step()
        except RuntimeError:
            log.warning("this step cannot be captured as a CUDA graph: steps run kernel by kernel", exc_info=True)
            self._captures = False
            self.clear()
            return False
        self._graphs[shape] = graph
        if len(self._graphs) > _MOST_GRAPHS:
            self._graphs.popitem(last=False)
        return True
