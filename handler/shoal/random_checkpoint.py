"""Writes checkpoints of random weights in the published 1.5 layout, for tests (`smoke`) and benchmarks (`mid`, `real`).

The weights say nothing, but they behave: codes vary from frame to frame, the end token comes up now and then so that
generation ends, text tokens are never the most likely ones, and the codec makes audible noise.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from shoal.config import CodecConfig, DualARConfig
from shoal.errors import RequestError

Size = Literal["smoke", "mid", "real"]

_REAL_RANKS = 100_000
_NUM_SPECIALS = 12  # before the semantic tokens, see tokenizer.py
_NUM_SEMANTIC = 1024
_IM_END = 4  # place among the specials

_LOGIT_STD = 5.0  # of the semantic tokens: far above the flat rest of a 102,048-row head
_END_STD = 1.8  # the end token's spread over the semantic ones': about one frame in 30 ends

_COMMON: dict[str, Any] = {
    "model_type": "dual_ar",
    "codebook_size": 1024,
    "num_codebooks": 8,
    "rope_base": 1e6,
    "norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_qkv_bias": False,
    "share_codebook_embeddings": True,
    "dropout": 0.1,
    "initializer_range": 0.02,
}
_DUAL_AR: dict[str, dict[str, Any]] = {
    "smoke": {
        "dim": 64,
        "n_layer": 2,
        "n_fast_layer": 2,
        "n_head": 4,
        "n_local_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 1296,
        "max_seq_len": 2048,
    },
    "mid": {
        "dim": 512,
        "n_layer": 8,
        "n_fast_layer": 4,
        "n_head": 8,
        "n_local_heads": 2,
        "head_dim": 64,
        "intermediate_size": 2048,
        "vocab_size": 102_048,
        "max_seq_len": 4096,
    },
    "real": {
        "dim": 1024,
        "n_layer": 24,
        "n_fast_layer": 4,
        "n_head": 16,
        "n_local_heads": 2,
        "head_dim": 64,
        "intermediate_size": 4096,
        "vocab_size": 102_048,
        "max_seq_len": 8192,
    },
}
_CODEC: dict[str, dict[str, Any]] = {
    "smoke": {  # narrow, but with the published timing: 44.1 kHz, 21.5 frames a second
        "n_mels": 32,
        "depths": (1, 1),
        "dims": (16, 32),
        "upsample_initial_channel": 32,
        "resblock_kernel_sizes": (3,),
        "resblock_dilations": (1, 3),
    },
    "mid": {"dims": (64, 128, 192, 256), "upsample_initial_channel": 256},
    "real": {},
}


def write_random_checkpoint(
    directory: str | Path,
    size: Size = "smoke",
    seed: int = 0,
    *,
    overrides: dict[str, Any] | None = None,
    codec_overrides: dict[str, Any] | None = None,
    safetensors: bool = False,
) -> Path:
    """Write a checkpoint; the same arguments give the same weights.

    Args:
        overrides: config.json keys to change, such as {"tie_word_embeddings": True}.
        codec_overrides: codec.json keys to change.
        safetensors: write .safetensors files instead of the published .pth ones.

    Raises:
        RequestError: unknown size.
    """
    if size not in _DUAL_AR:
        raise RequestError(f"size must be one of {', '.join(_DUAL_AR)}, not {size!r}")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    raw = {**_COMMON, **_DUAL_AR[size], **(overrides or {})}
    config = DualARConfig.model_validate(raw)
    codec = CodecConfig(**{**_CODEC[size], **(codec_overrides or {})})
    generator = torch.Generator().manual_seed(seed)
    ranks = 256 if size == "smoke" else _REAL_RANKS
    _write_tokenizer(directory, ranks)
    _write_json(directory / "config.json", raw)
    geometry = codec.model_dump(exclude_defaults=True)
    if geometry:
        _write_json(directory / "codec.json", geometry)
    _save(dict(_dual_ar_weights(config, ranks, generator)), directory / "model", safetensors)
    stem = directory / "firefly-gan-vq-fsq-8x1024-21hz-generator"
    _save(_codec_weights(codec, generator), stem, safetensors)
    return directory


def _dual_ar_weights(config: DualARConfig, ranks: int, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    from shoal.model.dual_ar import expected_shapes

    for name, shape in expected_shapes(config).items():
        if name.endswith("norm.weight"):
            yield name, torch.ones(shape)
            continue
        fan_in = shape[-1]
        std = 1.0 if "embeddings" in name else 1 / math.sqrt(fan_in)
        if name == "codebook_embeddings.weight":
            std /= math.sqrt(config.num_codebooks)
        if name == "fast_output.weight":
            std *= _LOGIT_STD
        weight = torch.randn(shape, generator=generator) * std
        if name == ("embeddings.weight" if config.tie_word_embeddings else "output.weight"):
            weight *= _head_scale(config.vocab_size, ranks, fan_in if name == "output.weight" else 1)[:, None]
        yield name, weight


def _head_scale(vocab_size: int, ranks: int, fan_in: int) -> Tensor:
    """Per vocabulary row, so that logits have the spreads above, given a hidden state of root mean square 1."""
    first = ranks + _NUM_SPECIALS
    scale = torch.full((vocab_size,), 0.05)
    scale[first : first + _NUM_SEMANTIC] = _LOGIT_STD
    scale[ranks + _IM_END] = _LOGIT_STD * _END_STD
    return scale if fan_in > 1 else scale / 4  # a tied matrix also embeds: keep its rows near unit size


def _codec_weights(codec: CodecConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """Weight norm left in where the published file has it: in every convolution of the head."""
    from shoal.model.firefly import Firefly

    with torch.device("meta"):
        names = {name: tensor.shape for name, tensor in Firefly(codec).state_dict().items()}
    state: dict[str, Tensor] = {}
    for name, shape in names.items():
        if name.endswith("gamma"):
            weight = torch.full(shape, 0.2)
        elif name.endswith("weight") and len(shape) == 1:
            weight = torch.ones(shape)
        elif len(shape) == 1:
            weight = torch.randn(shape, generator=generator) * 0.1
        else:
            gain = 3.0 if "project_in" in name else 1.0  # spread over the quantiser's levels
            weight = torch.randn(shape, generator=generator) * (gain / math.sqrt(math.prod(shape[1:])))
        if name.startswith("head.") and name.endswith(".conv.weight"):
            stem = name.removesuffix("weight") + "parametrizations.weight."
            state[stem + "original0"] = weight.flatten(1).norm(dim=1).view(-1, *[1] * (len(shape) - 1))
            state[stem + "original1"] = weight
        else:
            state[name] = weight
    return state


def _write_tokenizer(directory: Path, ranks: int) -> None:
    """256 single bytes, then as many made-up longer tokens as the published vocabulary has, so that ids agree."""
    tokens = itertools.chain(
        (bytes([i]) for i in range(256)),
        (bytes(pair) for pair in itertools.product(range(256), repeat=2)),
        (bytes(triple) for triple in itertools.product(range(97, 123), range(256), range(256))),
    )
    lines = [
        f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(itertools.islice(tokens, ranks))
    ]
    (directory / "tokenizer.tiktoken").write_text("".join(lines), encoding="ascii")
    from shoal.tokenizer import Tokenizer

    specials = Tokenizer.from_file(directory / "tokenizer.tiktoken").special_ids
    _write_json(directory / "special_tokens.json", specials)


def _write_json(file: Path, data: dict[str, Any]) -> None:
    file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _save(state: dict[str, Tensor], stem: Path, safetensors: bool) -> None:
    if safetensors:
        from safetensors.torch import save_file

        save_file(state, f"{stem}.safetensors")
    else:
        torch.save(state, f"{stem}.pth")
