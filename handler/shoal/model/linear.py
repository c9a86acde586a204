"""Linear layers in oneDNN's blocked weight layout, for decoding on a CPU. Knows nothing of the networks.

A decode step multiplies few rows by large matrices. A plain matrix has to be rearranged for the processor's vectors in
every such call, which costs several times the product itself; here that is done once, when a model is loaded.
The layout is opaque: a packed layer cannot be trained, converted or saved.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_ROWS = 16  # oneDNN picks the layout for this many rows; measured good from 1 to 32


class PackedLinear(nn.Module):
    """x (..., in) -> (..., out), with the weight and bias of a Linear whose own copy can then be freed."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight_bytes = linear.weight.nbytes
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")


def can_pack(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether this PyTorch has the packed layers for this device and dtype."""
    if torch.device(device).type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return False
    # The operators are those that torch.compile puts into frozen graphs; they are not promised to stay.
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    try:
        with torch.inference_mode():
            plain = nn.Linear(16, 16, dtype=dtype)
            x = torch.ones(2, 16, dtype=dtype)
            return torch.allclose(PackedLinear(plain)(x), plain(x), atol=1e-2)
    except (RuntimeError, NotImplementedError):
        return False


def pack_linears(module: nn.Module) -> None:
    """Replace every Linear below `module` by a packed one, one by one, so that memory holds one of them twice."""
    with torch.inference_mode():
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, PackedLinear(child))
            else:
                pack_linears(child)


def weight_bytes(module: nn.Module) -> int:
    """Bytes of all weights below `module`, packed ones included."""
    packed = sum(m.weight_bytes for m in module.modules() if isinstance(m, PackedLinear))
    return packed + sum(p.nbytes for p in module.parameters())
