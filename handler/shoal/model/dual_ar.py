"""The dual-AR transformer of Fish Speech 1.5, for many rows at once. Knows nothing of requests, text or sampling.

The slow transformer reads one column per position (a token and, for speech, the codes of a frame) and gives the hidden
state from which the next token is chosen; the fast one unrolls that hidden state into the frame's codes. The network,
its parameter names and its arithmetic are upstream 1.5's; what differs is how it is run:

- every row has its own position, so rows of different lengths share a step;
- the query heads that share a K/V head are folded into the query length, so K and V are never repeated;
- attention covers the used part of the cache only;
- the head is a matrix of the rows that can be chosen (the caller says which), not of the whole vocabulary;
- a frame takes num_codebooks - 1 fast passes: the first two positions go together, since the first code is known.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.checkpoint import SCALES, Checkpoint, check_state, convert
from shoal.config import DualARConfig
from shoal.model.kv_cache import KVCache
from shoal.model.linear import PACKED_FOR_MANY, Int8Linear, PackedLinear, can_pack, dequantise_rows, replace_linears


class Block(nn.Module):
    """One pre-norm transformer layer; `gate_up` is upstream's w1 and w3 in one matrix."""

    def __init__(self, dim: int, n_head: int, n_kv: int, intermediate: int, qkv_bias: bool, eps: float) -> None:
        super().__init__()
        self.n_head, self.n_kv, self.head_dim, self.eps = n_head, n_kv, dim // n_head, eps
        self.attention_norm = nn.Parameter(torch.empty(dim))
        self.wqkv = nn.Linear(dim, (n_head + 2 * n_kv) * self.head_dim, bias=qkv_bias)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.ffn_norm = nn.Parameter(torch.empty(dim))
        self.gate_up = nn.Linear(dim, 2 * intermediate, bias=False)
        self.w2 = nn.Linear(intermediate, dim, bias=False)

    def forward(self, x: Tensor, rope: Tensor, cache: KVCache, layer: int, mask: Tensor | None) -> Tensor:
        """x: (B, T, dim); rope: (B or 1, T, 1, head_dim/2) complex; the cache's open write says where the T go."""
        batch, length, _ = x.shape
        qkv = self.wqkv(rms_norm(x, self.attention_norm, self.eps))
        qkv = qkv.view(batch, length, self.n_head + 2 * self.n_kv, self.head_dim)
        rotate_(qkv[:, :, : self.n_head + self.n_kv], rope)
        keys, values = cache.write(layer, qkv[:, :, self.n_head :])
        x = x + self.wo(attend(qkv[:, :, : self.n_head], keys, values, mask))
        gate, up = self.gate_up(rms_norm(x, self.ffn_norm, self.eps)).chunk(2, dim=-1)
        return x + self.w2(F.silu(gate) * up)


class DualAR(nn.Module):
    """Both transformers. Build one with `load_dual_ar`.

    `head_ids` (n,) are the vocabulary ids that the head's n logits stand for.
    """

    def __init__(self, config: DualARConfig, head_ids: Tensor) -> None:
        super().__init__()
        c = self.config = config
        self.embeddings = nn.Embedding(c.vocab_size, c.dim)
        self.codebook_embeddings = nn.Embedding(c.codebook_size * c.num_codebooks, c.dim)
        self.layers = nn.ModuleList(
            Block(c.dim, c.n_head, c.n_local_heads, c.intermediate_size, c.attention_qkv_bias, c.norm_eps)
            for _ in range(c.n_layer)
        )
        self.norm = nn.Parameter(torch.empty(c.dim))
        self.head = nn.Linear(c.dim, len(head_ids), bias=False)
        self.fast_project_in = nn.Linear(c.dim, c.fast_dim) if c.fast_dim != c.dim else nn.Identity()
        self.fast_embeddings = nn.Embedding(c.codebook_size, c.fast_dim)
        self.fast_layers = nn.ModuleList(
            Block(
                c.fast_dim,
                c.fast_n_head,
                c.fast_n_local_heads,
                c.fast_intermediate_size,
                c.fast_attention_qkv_bias,
                c.norm_eps,
            )
            for _ in range(c.n_fast_layer)
        )
        self.fast_norm = nn.Parameter(torch.empty(c.fast_dim))
        self.fast_output = nn.Linear(c.fast_dim, c.codebook_size, bias=False)
        self.register_buffer("head_ids", head_ids, persistent=False)
        self.register_buffer("rope", rope_table(c.max_seq_len, c.head_dim, c.rope_base), persistent=False)
        self.register_buffer("fast_rope", rope_table(c.num_codebooks, c.fast_head_dim, c.rope_base), persistent=False)
        stride = c.codebook_size if c.share_codebook_embeddings else 0  # upstream's name; it means "one table, offset"
        self.register_buffer("code_offsets", torch.arange(c.num_codebooks) * stride, persistent=False)
        self.register_buffer("_fast_positions", torch.arange(c.num_codebooks)[None], persistent=False)

    @property
    def device(self) -> torch.device:
        return self.norm.device

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.dtype

    def new_cache(self) -> KVCache:
        """An empty cache for the slow transformer; it grows with what is written."""
        c = self.config
        return KVCache(c.n_layer, c.n_local_heads, c.head_dim, c.max_seq_len, self.dtype, self.device)

    def new_fast_cache(self) -> KVCache:
        """A cache for the fast transformer, one frame deep."""
        c = self.config
        return KVCache(c.n_fast_layer, c.fast_n_local_heads, c.fast_head_dim, c.num_codebooks, self.dtype, self.device)

    def embed(self, columns: Tensor, is_speech: Tensor | None = None) -> Tensor:
        """columns: (B, T, 1 + num_codebooks) int64 -> (B, T, dim).

        `is_speech` (B, T) bool marks the positions whose codes count; None means all of them.
        """
        codes = self.codebook_embeddings(columns[..., 1:] + self.code_offsets).sum(dim=2, dtype=self.dtype)
        if is_speech is not None:
            codes = codes * is_speech[..., None]
        return self.embeddings(columns[..., 0]) + codes

    def embed_code(self, code: Tensor) -> Tensor:
        """(B,) codes of one codebook -> (B, fast_dim), the fast transformer's next input."""
        return self.fast_embeddings(code).to(self.dtype)

    def slow(self, x: Tensor, cache: KVCache, rows: slice, starts: Tensor, longest: int, uniform: bool) -> Tensor:
        """Run the slow layers over T new positions of each row and keep their K/V.

        Args:
            x: (B, T, dim) embeddings.
            rows: the cache rows that these B are.
            starts: (B,) int64, the position of each row's first new column.
            longest: the largest of `starts` + T, as a number (the host knows it; reading it back would stall a GPU).
            uniform: all `starts` are equal, so that no row needs a mask of its own.

        Returns:
            (B, T, dim) hidden states before the final norm.
        """
        length = x.shape[1]
        positions = starts[:, None] + torch.arange(length, device=x.device)  # (B, T)
        rope = self.rope[positions[:1] if uniform else positions][:, :, None]
        cache.open(rows, positions, longest, uniform)
        mask = None
        if length > 1 or not uniform:
            mask = causal_mask(positions[:1] if uniform else positions, longest)
        for i, block in enumerate(self.layers):
            x = block(x, rope, cache, i, mask)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, dim) slow hidden states -> (B, n) logits of the tokens `head_ids`."""
        return self.head(rms_norm(hidden, self.norm, self.config.norm_eps))

    def fast(self, x: Tensor, cache: KVCache, position: int) -> Tensor:
        """One fast pass.

        Args:
            x: (B, T, fast_dim), the inputs of codebook positions `position` to `position + T - 1`.

        Returns:
            (B, codebook_size) logits at the last of them.
        """
        batch, length, _ = x.shape
        positions = self._fast_positions[:, position : position + length]
        cache.open(slice(0, batch), positions, position + length, uniform=True)
        rope = self.fast_rope[None, position : position + length, None]
        mask = causal_mask(positions, position + length) if length > 1 else None
        for i, block in enumerate(self.fast_layers):
            x = block(x, rope, cache, i, mask)
        return self.fast_output(rms_norm(x[:, -1], self.fast_norm, self.config.norm_eps))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm (Zhang and Sennrich 2019), in float32, scaled in x's dtype as upstream does."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight


def rope_table(length: int, head_dim: int, base: float) -> Tensor:
    """(length, head_dim / 2) complex64 rotations, rounded to bfloat16 as upstream's table always is."""
    frequencies = 1.0 / base ** (torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(length), frequencies)
    return torch.complex(angles.cos().bfloat16().float(), angles.sin().bfloat16().float())


def rotate_(x: Tensor, rope: Tensor) -> None:
    """Rotary embedding (Su et al. 2021) over interleaved pairs, in place; x (B, T, H, D), rope (B or 1, T, 1, D/2)."""
    pairs = x.unflatten(-1, (-1, 2))
    if x.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(rope)
    else:
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()) * rope))


def causal_mask(positions: Tensor, longest: int) -> Tensor:
    """positions (B, T) -> (B, 1, T, longest) bool, True where a query may look: at its own position and before."""
    return torch.arange(longest, device=positions.device) <= positions[:, None, :, None]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention without repeating K or V.

    Args:
        q: (B, T, H, D); k, v: (B, L, KVH, D) views on the cache; mask: (B or 1, 1, T, L) bool or None.

    Returns:
        (B, T, H * D).
    """
    batch, length, heads, size = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    q = q.unflatten(2, (kv_heads, group))
    if length == 1:
        out = F.scaled_dot_product_attention(q[:, 0], k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
        return out.reshape(batch, 1, heads * size)
    # heads of a group become extra queries of their K/V head: (B, KVH, G * T, D), group outermost
    q = q.permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, group * length, size)
    if mask is not None:
        mask = mask.repeat(1, 1, group, 1)
    out = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
    return out.unflatten(2, (group, length)).permute(0, 3, 1, 2, 4).reshape(batch, length, heads * size)


def expected_shapes(config: DualARConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a 1.5 weight file for this configuration."""
    c = config
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.weight": (c.vocab_size, c.dim),
        "codebook_embeddings.weight": (c.codebook_size * c.num_codebooks, c.dim),
        "norm.weight": (c.dim,),
        "fast_embeddings.weight": (c.codebook_size, c.fast_dim),
        "fast_norm.weight": (c.fast_dim,),
        "fast_output.weight": (c.codebook_size, c.fast_dim),
    }
    if not c.tie_word_embeddings:
        shapes["output.weight"] = (c.vocab_size, c.dim)
    if c.fast_dim != c.dim:
        shapes["fast_project_in.weight"] = (c.fast_dim, c.dim)
        shapes["fast_project_in.bias"] = (c.fast_dim,)
    slow = (c.n_layer, c.dim, c.n_head, c.n_local_heads, c.intermediate_size, c.attention_qkv_bias)
    fast = (
        c.n_fast_layer,
        c.fast_dim,
        c.fast_n_head,
        c.fast_n_local_heads,
        c.fast_intermediate_size,
        c.fast_attention_qkv_bias,
    )
    for stem, (layers, dim, heads, kv, inner, bias) in (("layers", slow), ("fast_layers", fast)):
        total = (heads + 2 * kv) * (dim // heads)
        for i in range(layers):
            shapes[f"{stem}.{i}.attention.wqkv.weight"] = (total, dim)
            if bias:
                shapes[f"{stem}.{i}.attention.wqkv.bias"] = (total,)
            shapes[f"{stem}.{i}.attention.wo.weight"] = (dim, dim)
            shapes[f"{stem}.{i}.feed_forward.w1.weight"] = (inner, dim)
            shapes[f"{stem}.{i}.feed_forward.w3.weight"] = (inner, dim)
            shapes[f"{stem}.{i}.feed_forward.w2.weight"] = (dim, inner)
            shapes[f"{stem}.{i}.attention_norm.weight"] = (dim,)
            shapes[f"{stem}.{i}.ffn_norm.weight"] = (dim,)
    return shapes


def load_dual_ar(
    checkpoint: Checkpoint,
    head_ids: Sequence[int],
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    pack: int = PACKED_FOR_MANY,
    int8: bool = False,
) -> DualAR:
    """The transformer with a checkpoint's weights, its head reduced to the vocabulary rows `head_ids`.

    `pack` puts the weights into the layout that a CPU multiplies with so many rows fastest, where there is one
    (model/linear.py); 0 leaves them plain.
    `int8` keeps the layers' weights in one byte each and the embeddings in two.

    Raises:
        CheckpointError: a tensor is missing, surplus or of the wrong shape.
    """
    state = checkpoint.read_dual_ar()
    config = checkpoint.config
    if config.tie_word_embeddings:
        state.pop("output.weight", None)  # some exports write the tied matrix twice
    expected = expected_shapes(config)
    scales = {name: state.pop(name) for name in list(state) if name.endswith(SCALES)}
    check_state(checkpoint.model_file, expected, state)
    quantised = {k.removesuffix(".weight") + SCALES: expected[k][:1] for k, v in state.items() if v.dtype == torch.int8}
    check_state(checkpoint.model_file, quantised, scales)

    def take(name: str) -> Tensor:
        tensor = state.pop(name)
        if tensor.dtype != torch.int8:
            return tensor
        return dequantise_rows(tensor, scales[name.removesuffix(".weight") + SCALES])

    ids = torch.tensor(list(head_ids), dtype=torch.int64)
    with torch.device("meta"):
        model = DualAR(config, ids)
    head = state.pop("embeddings.weight" if config.tie_word_embeddings else "output.weight")
    ours = {"head.weight": convert(head[ids], dtype, device)}
    if config.tie_word_embeddings:
        state["embeddings.weight"] = head
    for name in list(state):
        if name.endswith("feed_forward.w3.weight"):
            continue  # goes with w1
        tensor = take(name)  # one by one, so that source and copy are never both held in full
        if name.endswith("feed_forward.w1.weight"):
            other = take(name.replace("w1", "w3"))
            both = torch.empty(2 * tensor.shape[0], tensor.shape[1], dtype=dtype, device=device)
            both[: len(tensor)] = convert(tensor, dtype, device)
            both[len(tensor) :] = convert(other, dtype, device)
            ours[name.replace("feed_forward.w1", "gate_up")] = both
        else:
            ours[_our_name(name)] = convert(tensor, dtype, device)
    model.load_state_dict(ours, strict=True, assign=True)
    model.head_ids = ids.to(device)
    model.rope = rope_table(config.max_seq_len, config.head_dim, config.rope_base).to(device)
    model.fast_rope = rope_table(config.num_codebooks, config.fast_head_dim, config.rope_base).to(device)
    stride = config.codebook_size if config.share_codebook_embeddings else 0
    model.code_offsets = (torch.arange(config.num_codebooks) * stride).to(device)
    model._fast_positions = torch.arange(config.num_codebooks, device=device)[None]
    model.requires_grad_(False).eval()
    del ours, head, tensor  # or memory would hold the plain weights beside those in another form
    if int8:
        replace_linears(model.layers, Int8Linear)
        replace_linears(model.fast_layers, Int8Linear)
        for table in (model.embeddings, model.codebook_embeddings, model.fast_embeddings):
            table.weight.data = table.weight.data.bfloat16()
    if pack and can_pack(device, dtype):
        replace_linears(model, lambda linear: PackedLinear(linear, pack))
    return model


def _our_name(name: str) -> str:
    name = name.replace("attention.wqkv", "wqkv").replace("attention.wo", "wo").replace("feed_forward.w2", "w2")
    return name.removesuffix(".weight") if name.endswith("norm.weight") else name
