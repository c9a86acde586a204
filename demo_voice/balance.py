"""Losses of unlike scales, weighed by what they do to the output instead of by their values."""

from __future__ import annotations

import torch
from torch import Tensor


class Balancer:
    """Scales the gradient of each loss at the network's output to its weight, over a running mean of its size."""

    def __init__(self, weights: dict[str, float], decay: float = 0.99) -> None:
        self.weights, self.decay = weights, decay
        self._sizes: dict[str, float] = {}

    def gradient(self, losses: dict[str, Tensor], output: Tensor) -> Tensor:
        """What to pass to the network's backward; `output` is a leaf that the losses were computed from."""
        total = torch.zeros_like(output)
        names = list(losses)
        for name in names:
            (gradient,) = torch.autograd.grad(losses[name], output, retain_graph=name != names[-1])
            size = gradient.norm().item()
            self._sizes[name] = self.decay * self._sizes.get(name, size) + (1 - self.decay) * size
            total += gradient * (self.weights[name] / max(self._sizes[name], 1e-8))
        return total

    def state_dict(self) -> dict[str, float]:
        return dict(self._sizes)

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._sizes = dict(state)
