"""Linear layers whose weights are kept in another form than a plain matrix. Knows nothing of the networks.

`PackedLinear`, for a CPU: a decode step multiplies few rows by large matrices. A plain matrix has to be rearranged for
the processor's vectors in every such call, which costs several times the product itself; here that is done once, when a
model is loaded. The layout is oneDNN's own and opaque: a packed layer cannot be trained, converted or saved. There is
another for one row, which reads memory at its full speed: a third faster with one row, a tenth slower with more.

`Int8Linear`: one byte a weight, for machines whose memory or its bandwidth is short.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

PACKED_FOR_MANY = 16  # rows that oneDNN picks the layout for; measured good from 2 to 32


class PackedLinear(nn.Module):
    """x (..., in) -> (..., out), with the weight and bias of a Linear whose own copy can then be freed.

    rows: how many rows of x the layout is for; any number is computed.
    """

    def __init__(self, linear: nn.Linear, rows: int = PACKED_FOR_MANY) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight_bytes = linear.weight.nbytes
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), rows)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")


class Int8Linear(nn.Module):
    """x (..., in) -> (..., out) with int8 weights, one scale per output; activations go through in bfloat16.

    Each weight is off by at most half of its row's largest weight / 127 (symmetric rounding to nearest).
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        quantised, scale = quantise_rows(linear.weight.detach())
        self.register_buffer("quantised", quantised, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).to(torch.bfloat16)
        if x.device.type == "cpu":
            out = torch.ops.aten._weight_int8pack_mm(rows, self.quantised, self.scale)
        else:
            out = nn.functional.linear(rows, self.quantised.to(torch.bfloat16)) * self.scale
        out = out.to(x.dtype).view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix (out, in) as int8 and one bfloat16 scale a row, (out,): symmetric, rounded to nearest.

    What `dequantise_rows` gives back becomes the same int8 values and scales again.
    """
    weight = weight.float()
    scale = (weight.abs().amax(dim=1).clamp_min(1e-12) / 127).to(torch.bfloat16)
    rounded = (weight / scale.float()[:, None]).round().clamp(-127, 127)
    return rounded.to(torch.int8), scale


def dequantise_rows(quantised: Tensor, scale: Tensor) -> Tensor:
    """float32 (out, in) of what `quantise_rows` made."""
    return quantised.float() * scale.float()[:, None]


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


def replace_linears(module: nn.Module, kind: Callable[[nn.Linear], nn.Module]) -> None:
    """Replace every Linear below `module` by what `kind` makes of it; one by one, so that only one is held twice."""
    with torch.inference_mode():
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, kind(child))
            else:
                replace_linears(child, kind)


def weight_bytes(module: nn.Module) -> int:
    """Bytes of all weights below `module`, whatever their form."""
    packed = sum(m.weight_bytes for m in module.modules() if isinstance(m, PackedLinear))
    quantised = sum(m.quantised.nbytes + m.scale.nbytes for m in module.modules() if isinstance(m, Int8Linear))
    return packed + quantised + sum(p.nbytes for p in module.parameters())
