"""Layers with packed and quantised weights compute what a plain Linear computes, as closely as their form allows."""

from __future__ import annotations

import pytest
import torch
from shoal.model.linear import PACKED_FOR_MANY, Int8Linear, PackedLinear, can_pack, replace_linears, weight_bytes
from shoal.random_checkpoint import write_random_checkpoint
from shoal.sampling import SamplingParams
from shoal.speech import FishSpeech
from torch import nn


def plain(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(96, 200, bias=bias)


@pytest.mark.skipif(not can_pack("cpu", torch.float32), reason="this PyTorch has no packed layers")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, PACKED_FOR_MANY])
@pytest.mark.parametrize("shape", [(1,), (16,), (3, 5), (2, 700)])
def test_packed_layers_equal_plain_ones(bias, shape, rows):
    linear, x = plain(bias), torch.randn(*shape, 96)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(linear, rows)(x), linear(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(1,), (16,), (3, 5)])
def test_int8_layers_are_close(shape):
    linear, x = plain(), torch.randn(*shape, 96)
    with torch.inference_mode():
        ours, exact = Int8Linear(linear)(x), linear(x)
    assert ours.dtype == torch.float32 and ours.shape == exact.shape
    assert (ours - exact).norm() / exact.norm() < 0.02


def test_linears_are_replaced_and_their_bytes_counted():
    network = nn.Sequential(plain(bias=False), nn.Sequential(nn.Linear(200, 64, bias=False)))
    before = weight_bytes(network)
    replace_linears(network, Int8Linear)
    assert isinstance(network[1][0], Int8Linear) and before / 5 < weight_bytes(network) < before / 3


def test_an_int8_model_speaks_and_is_small(tmp_path):
    write_random_checkpoint(tmp_path)
    exact, small = (FishSpeech.load(tmp_path, device="cpu", dtype=dtype) for dtype in ("float32", "int8"))
    assert weight_bytes(small.model.layers) < 0.3 * weight_bytes(exact.model.layers)
    params = SamplingParams(temperature=0, max_new_tokens=20)
    together = small.generate_batch(["Hello.", "Again and again."], params=params, use_cache=False)
    alone = small.synthesize("Hello.", params=params, use_cache=False)
    assert together[0].features.frames == alone.features.frames and together[1].seconds > 0


def test_packing_can_be_switched_off(tmp_path):
    write_random_checkpoint(tmp_path)
    packed, plain_one = (FishSpeech.load(tmp_path, device="cpu", pack_weights=pack) for pack in (True, False))
    kinds = [{type(m) for m in model.model.modules()} for model in (packed, plain_one)]
    assert nn.Linear in kinds[1] and PackedLinear not in kinds[1]
    assert PackedLinear in kinds[0] or not can_pack("cpu", torch.float32)
    params = SamplingParams(temperature=0, max_new_tokens=20)
    codes = [model.synthesize("Hello.", params=params, use_cache=False).features.codes for model in (packed, plain_one)]
    assert (codes[0] == codes[1]).all()
