"""How the cores of a CPU are shared between the language model and the codec's workers. Knows only the model's size."""

from __future__ import annotations

import torch

from shoal.model.dual_ar import DualAR
from shoal.model.linear import weight_bytes

# Below this many bytes of layers a step is so short that a second thread waits longer than it helps. Measured: 24 MB
# gain nothing from two cores, 400 MB nearly all.
_SMALL_MODEL = 64 * 2**20

_lowered_from: int | None = None  # PyTorch's number of threads before a small model lowered it for the whole process


def share_cores(model: DualAR, threads: int | None, codec_workers: int | None) -> int:
    """Set how many threads PyTorch computes with, for the whole process; returns the number of codec workers.

    Args:
        threads: cores to use; None: as many as PyTorch would.
        codec_workers: None: one for each core where the model is small, and one beside a GPU; none for a large model
            on a CPU, which was 10% faster with all cores taking turns (two cores). With 0 all threads compute together,
            for the model and the codec in turn; else a small model leaves all but one to the codec.
    """
    global _lowered_from
    current = torch.get_num_threads()
    cores = threads or (_lowered_from if current == 1 and _lowered_from else current)
    if model.device.type != "cpu":
        return 1 if codec_workers is None else codec_workers
    small = weight_bytes(model.layers) + weight_bytes(model.fast_layers) < _SMALL_MODEL
    workers = (cores if small else 0) if codec_workers is None else codec_workers
    wanted = 1 if small and workers else cores
    if wanted != current:
        torch.set_num_threads(wanted)
    _lowered_from = cores if wanted < cores else None
    return workers
