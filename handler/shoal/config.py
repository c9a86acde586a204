"""Sizes of the two networks, read from config.json and codec.json. Knows nothing of tensors or files' contents.

Field names are those of Fish Speech 1.5's own config.json. The codec has no config file as published; its geometry is
the default of `CodecConfig`, and an optional codec.json in the checkpoint directory names another one.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

# Keys of newer Fish Speech generations that change the arithmetic: loading them as 1.5 would give noise, not an error.
_NOT_1_5 = ("attention_qk_norm", "fast_attention_qk_norm", "norm_fastlayer_input", "attention_o_bias")


def _find_multiple(n: int, k: int) -> int:
    return n if n % k == 0 else n + k - n % k


class DualARConfig(BaseModel):
    """Geometry of the dual-AR transformer, with upstream 1.5's defaults and derivations."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    model_type: str = "dual_ar"
    vocab_size: int = Field(32000, gt=0)
    n_layer: int = Field(32, gt=0)
    n_head: int = Field(32, gt=0)
    dim: int = Field(4096, gt=0)
    intermediate_size: int = Field(0, ge=0)
    n_local_heads: int = -1
    rope_base: float = Field(10000.0, gt=0)
    norm_eps: float = Field(1e-5, gt=0)
    max_seq_len: int = Field(2048, gt=1)
    tie_word_embeddings: bool = True
    attention_qkv_bias: bool = False
    codebook_size: int = Field(160, gt=1)
    num_codebooks: int = Field(4, gt=0)
    share_codebook_embeddings: bool = True
    n_fast_layer: int = Field(4, gt=0)
    fast_dim: int = 0
    fast_n_head: int = 0
    fast_n_local_heads: int = 0
    fast_intermediate_size: int = 0
    fast_attention_qkv_bias: bool = False
    one_sentence_prompts: bool = False  # Shoal's own: it was taught single sentences, so none are joined in a prompt

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, data: Any) -> Any:
        """Fill in what upstream derives; null and absent mean the same there."""
        if not isinstance(data, dict):
            return data
        data = {k: v for k, v in data.items() if v is not None}
        if data.get("model_type", "dual_ar") != "dual_ar":
            raise ValueError(f"model_type is {data['model_type']!r}, only 'dual_ar' (Fish Speech 1.5) is supported")
        for key in _NOT_1_5:
            if data.get(key):
                raise ValueError(f"{key} is set: this is a newer Fish Speech generation, not 1.5")
        if data.get("is_reward_model"):
            raise ValueError("is_reward_model is set: a reward model cannot speak")
        fields = cls.model_fields
        dim = data.get("dim", fields["dim"].default)
        n_head = data.get("n_head", fields["n_head"].default)
        if data.get("n_local_heads", -1) == -1:
            data["n_local_heads"] = n_head
        if not data.get("intermediate_size"):
            data["intermediate_size"] = _find_multiple(int(8 * dim / 3), 256)
        data["fast_dim"] = data.get("fast_dim") or dim
        data["fast_n_head"] = data.get("fast_n_head") or n_head
        data["fast_n_local_heads"] = data.get("fast_n_local_heads") or data["n_local_heads"]
        data["fast_intermediate_size"] = data.get("fast_intermediate_size") or data["intermediate_size"]
        data.setdefault("fast_attention_qkv_bias", data.get("attention_qkv_bias", False))
        return data

    @model_validator(mode="after")
    def _check(self) -> DualARConfig:
        for prefix, dim, heads, kv in (
            ("", self.dim, self.n_head, self.n_local_heads),
            ("fast_", self.fast_dim, self.fast_n_head, self.fast_n_local_heads),
        ):
            if dim % heads or (dim // heads) % 2:
                raise ValueError(f"{prefix}dim {dim} does not split into {prefix}n_head {heads} heads of even size")
            if kv < 1 or heads % kv:
                raise ValueError(f"{prefix}n_head {heads} is not a multiple of {prefix}n_local_heads {kv}")
        return self

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_head

    @property
    def fast_head_dim(self) -> int:
        return self.fast_dim // self.fast_n_head

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of slow KV cache that one position of one row takes."""
        return 2 * self.n_layer * self.n_local_heads * self.head_dim * itemsize


class CodecConfig(BaseModel):
    """Geometry of the Firefly codec; the defaults are the published firefly-gan-vq-fsq-8x1024-21hz."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sample_rate: int = Field(44100, gt=0)
    n_fft: int = Field(2048, gt=0)
    win_length: int = Field(2048, gt=0)
    hop_length: int = Field(512, gt=0)
    n_mels: int = Field(160, gt=0)
    depths: tuple[int, ...] = (3, 3, 9, 3)
    dims: tuple[int, ...] = (128, 256, 384, 512)
    encoder_kernel_size: int = Field(7, gt=0)
    n_groups: int = Field(8, gt=0)
    n_codebooks: int = Field(1, gt=0)  # residual quantisers per group
    levels: tuple[int, ...] = (8, 5, 5, 5)
    downsample_factor: tuple[int, ...] = (2, 2)
    upsample_rates: tuple[int, ...] = (8, 8, 2, 2, 2)
    upsample_kernel_sizes: tuple[int, ...] = (16, 16, 4, 4, 4)
    upsample_initial_channel: int = Field(512, gt=0)
    resblock_kernel_sizes: tuple[int, ...] = (3, 7, 11)
    resblock_dilations: tuple[int, ...] = (1, 3, 5)
    pre_conv_kernel_size: int = Field(13, gt=0)
    post_conv_kernel_size: int = Field(13, gt=0)

    @model_validator(mode="after")
    def _check(self) -> CodecConfig:
        if len(self.depths) != len(self.dims):
            raise ValueError(f"depths {self.depths} and dims {self.dims} differ in length")
        if math.prod(self.upsample_rates) != self.hop_length:
            raise ValueError(f"upsample_rates {self.upsample_rates} multiply to another number than hop_length")
        if len(self.upsample_rates) != len(self.upsample_kernel_sizes):
            raise ValueError("upsample_rates and upsample_kernel_sizes differ in length")
        if self.dims[-1] % self.n_groups:
            raise ValueError(f"the last of dims, {self.dims[-1]}, is not a multiple of n_groups {self.n_groups}")
        return self

    @property
    def num_codebooks(self) -> int:
        return self.n_groups * self.n_codebooks

    @cached_property
    def codebook_size(self) -> int:
        return math.prod(self.levels)

    @property
    def samples_per_frame(self) -> int:
        """Audio samples that one frame of codes stands for."""
        return self.hop_length * math.prod(self.downsample_factor)

    @property
    def frames_per_second(self) -> float:
        return self.sample_rate / self.samples_per_frame


# What the published checkpoint's config.json says.
FISH_SPEECH_1_5 = DualARConfig(
    vocab_size=102_048,
    n_layer=24,
    n_head=16,
    n_local_heads=2,
    dim=1024,
    intermediate_size=4096,
    max_seq_len=8192,
    rope_base=1e6,
    norm_eps=1e-6,
    tie_word_embeddings=False,
    codebook_size=1024,
    num_codebooks=8,
)
