"""Trains the demo's dual-AR transformer to say the phrase book, and judges it by what it says, not by its loss.

A network this small learns the corpus's codes by heart. With true codes as its input alone (teacher forcing) it would
learn to continue them, and run away at its first slip. So most of what it hears of itself in training is wrong: codes
replaced at random, frames repeated or left out, and its own earlier attempts; it has to find its place in the text
again from whatever is left. The repetition penalty of the sampler is in the loss too, half of the time.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from shoal.config import DualARConfig
from shoal.model.dual_ar import rms_norm, rope_table
from shoal.prompt import VoicePrompt, text_prompt, voice_prefix
from shoal.sampling import WINDOW
from shoal.tokenizer import Tokenizer
from torch import Tensor, nn

from .bpe import learn_ranks
from .corpus import DEFAULT_VOICE, VOICES
from .train_codec import CODEC, Run, warm_cosine

RANKS = learn_ranks()
TOKENIZER = Tokenizer(RANKS, name="demo")
CONFIG = DualARConfig(
    vocab_size=TOKENIZER.vocab_size,
    dim=192,
    n_layer=6,
    n_head=6,
    n_local_heads=2,
    intermediate_size=512,
    n_fast_layer=2,
    fast_intermediate_size=384,
    num_codebooks=CODEC.num_codebooks,
    codebook_size=1024,
    rope_base=10000.0,
    norm_eps=1e-6,
    max_seq_len=2048,
    tie_word_embeddings=False,
    one_sentence_prompts=True,  # it manages joined phrases half of the time only
)
STEPS, BATCH_TOKENS, PEAK_RATE = 2800, 1600, 1.5e-3
PENALTY = 1.2  # the sampler's default
LONGEST_TEXT = 200  # UTF-8 bytes that the server speaks in one go; sentences are joined up to that
IGNORE = -100


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotary embedding over interleaved pairs, with a gradient. x: (B, T, H, D); rope: (1, T, 1, D / 2) complex."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rope).flatten(-2).to(x.dtype)


class Norm(nn.Module):
    """RMS norm under upstream's parameter name."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, CONFIG.norm_eps)


class Attention(nn.Module):
    """Grouped-query attention over whole sequences, which may share the keys and values of a common beginning."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, dim // heads
        self.wqkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.size, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(
        self, x: Tensor, rope: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x: (B, T, dim); past: keys and values (1, KV heads, P, size). Returns the output and x's keys and values."""
        batch, length, _ = x.shape
        start = past[0].shape[2] if past else 0
        qkv = self.wqkv(x).view(batch, length, -1, self.size)
        turned = rotate(qkv[:, :, : self.heads + self.kv_heads], rope[start : start + length, None])
        q, k = turned[:, :, : self.heads].transpose(1, 2), turned[:, :, self.heads :].transpose(1, 2)
        v = qkv[:, :, self.heads + self.kv_heads :].transpose(1, 2)
        own = k, v
        if past:
            k, v = (torch.cat([old.expand(batch, -1, -1, -1), new], dim=2) for old, new in zip(past, own, strict=True))
        # Written out: on these short sequences PyTorch's fused kernels take several times as long, above all backwards.
        groups = self.heads // self.kv_heads
        q = q.reshape(batch, self.kv_heads, groups * length, self.size)
        scores = (q @ k.mT).view(batch, self.heads, length, -1).float() / math.sqrt(self.size)
        future = torch.ones(length, start + length, dtype=torch.bool).triu(start + 1)
        weights = scores.masked_fill(future, -math.inf).softmax(-1).to(v.dtype)
        out = weights.view(batch, self.kv_heads, groups * length, -1) @ v
        out = out.view(batch, self.heads, length, self.size)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1)), own


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, inner, bias=False)
        self.w3 = nn.Linear(dim, inner, bias=False)
        self.w2 = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One pre-norm layer with dropout on both branches."""

    def __init__(self, dim: int, heads: int, kv_heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(dim, heads, kv_heads), FeedForward(dim, inner)
        self.attention_norm, self.ffn_norm = Norm(dim), Norm(dim)
        self.dropout = dropout

    def forward(
        self, x: Tensor, rope: Tensor, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        attended, own = self.attention(self.attention_norm(x), rope, past)
        x = x + F.dropout(attended, self.dropout, self.training)
        return x + F.dropout(self.feed_forward(self.ffn_norm(x)), self.dropout, self.training), own


class TrainableDualAR(nn.Module):
    """The dual-AR network under upstream's parameter names, for whole sequences; shoal.model.dual_ar serves it."""

    def __init__(self, dropout: float = 0.05) -> None:
        super().__init__()
        c = CONFIG
        self.embeddings = nn.Embedding(c.vocab_size, c.dim)
        self.codebook_embeddings = nn.Embedding(c.codebook_size * c.num_codebooks, c.dim)
        self.layers = nn.ModuleList(
            Block(c.dim, c.n_head, c.n_local_heads, c.intermediate_size, dropout) for _ in range(c.n_layer)
        )
        self.norm = Norm(c.dim)
        self.output = nn.Linear(c.dim, c.vocab_size, bias=False)
        self.fast_embeddings = nn.Embedding(c.codebook_size, c.fast_dim)
        self.fast_layers = nn.ModuleList(
            Block(c.fast_dim, c.fast_n_head, c.fast_n_local_heads, c.fast_intermediate_size, 0.0)
            for _ in range(c.n_fast_layer)
        )
        self.fast_norm = Norm(c.fast_dim)
        self.fast_output = nn.Linear(c.fast_dim, c.codebook_size, bias=False)
        self.register_buffer("rope", rope_table(c.max_seq_len, c.head_dim, c.rope_base), persistent=False)
        self.register_buffer("offsets", torch.arange(c.num_codebooks) * c.codebook_size, persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.5 if module is self.embeddings else 0.25)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features))
        for block in [*self.layers, *self.fast_layers]:  # residual branches start small, as in GPT-2
            for last in (block.attention.wo, block.feed_forward.w2):
                last.weight.data.mul_(1 / math.sqrt(2 * c.n_layer))

    def slow(self, columns: Tensor, prefix: Tensor) -> Tensor:
        """columns: (B, T, 1 + num_codebooks) -> hidden states before the final norm, (B, T, dim).

        prefix: (P, 1 + num_codebooks), what all rows begin with; it is computed once.
        """
        x, start = self.embed(columns), self.embed(prefix[None])
        for block in self.layers:
            past = None
            if len(prefix):
                start, past = block(start, self.rope)
            x, _ = block(x, self.rope, past)
        return x

    def embed(self, columns: Tensor) -> Tensor:
        tokens = columns[..., 0]
        speech = (tokens >= TOKENIZER.semantic_begin_id) & (tokens <= TOKENIZER.semantic_end_id)
        codes = self.codebook_embeddings(columns[..., 1:] + self.offsets).sum(dim=2)
        return self.embeddings(tokens) + codes * speech[..., None]

    def fast(self, hidden: Tensor, codes: Tensor) -> Tensor:
        """hidden: (N, dim); codes: (N, num_codebooks) fast inputs. Returns logits of codes 1.., (N, C - 1, size)."""
        x = torch.cat([hidden[:, None], self.fast_embeddings(codes[:, :-1])], dim=1)
        for block in self.fast_layers:
            x, _ = block(x, self.rope)
        return self.fast_output(self.fast_norm(x[:, 1:]))


@dataclass(frozen=True)
class Utterance:
    """One recording of the corpus, as codes."""

    voice: str
    language: str
    group: str
    text: str
    codes: Tensor  # (num_codebooks, frames) int64


def load_utterances(work: Path) -> list[Utterance]:
    index = json.loads((work / "corpus" / "index.json").read_text(encoding="utf-8"))
    codes = torch.load(work / "codes.pt")
    return [
        Utterance(r["voice"], r["language"], r["group"], r["text"], c.long()) for r, c in zip(index, codes, strict=True)
    ]


def reference_of(utterances: list[Utterance], voice: str) -> VoicePrompt:
    """The voice's reference recording, as a request that names the voice would bring it."""
    text = next(v.reference for v in VOICES if v.name == voice)
    found = next(u for u in utterances if u.voice == voice and u.text == text)
    return VoicePrompt((found.text,), (found.codes,))


@dataclass(frozen=True)
class Example:
    """A prompt and the codes that should follow it, with what the network hears of its own speech meanwhile."""

    prompt: Tensor  # (1 + num_codebooks, P), without the voice
    target: Tensor  # (num_codebooks, T)
    heard: Tensor  # (num_codebooks, T): the target, corrupted

    @property
    def length(self) -> int:
        return self.prompt.shape[1] + self.target.shape[1]


class Examples:
    """Draws training examples: which phrases, whose voice, in what surroundings, how corrupted."""

    def __init__(self, utterances: list[Utterance]) -> None:
        self.by_voice = {v.name: [u for u in utterances if u.voice == v.name] for v in VOICES}
        self.references = {v.name: reference_of(utterances, v.name) for v in VOICES}
        self.pool = torch.cat([u.codes for u in utterances], dim=1)  # frames to corrupt with
        self.attempts: dict[tuple[str, str], list[Tensor]] = {}  # own speech, from the last judgements

    def draw(self, rng: np.random.Generator, tokens: int) -> tuple[Tensor, list[Example]]:
        """A voice prefix and examples that follow it, as many of like length as fit into `tokens` positions."""
        voice, prompt = self._surroundings(rng)
        if prompt and prompt.codes and rng.random() < 0.3:
            prompt = VoicePrompt(prompt.texts, (self._replaced(prompt.codes[0], 0.3 * rng.random(), rng),))
        joined = rng.random() < 0.3  # by batches, since joined phrases are so much longer
        drawn = sorted((self._example(voice, joined, rng) for _ in range(48)), key=lambda e: e.length)
        start = end = max(int(rng.integers(-10, len(drawn) - 10)), 0)
        while end < len(drawn) and drawn[end].length * (end + 1 - start) <= tokens:
            end += 1
        return voice_prefix(TOKENIZER, CONFIG.num_codebooks, prompt), drawn[start:end]

    def _surroundings(self, rng: np.random.Generator) -> tuple[str, VoicePrompt | None]:
        kind = rng.choice(["plain", "system", "reference", "phrase"], p=[0.35, 0.07, 0.43, 0.15])
        if kind == "plain":
            return DEFAULT_VOICE.name, None
        if kind == "system":
            return DEFAULT_VOICE.name, VoicePrompt()
        voice = str(rng.choice(list(self.by_voice), p=[0.35, 0.65]))
        if kind == "reference":
            return voice, self.references[voice]
        # The first sentence of a long text is the voice of the others.
        first = self.by_voice[voice][rng.integers(len(self.by_voice[voice]))]
        return voice, VoicePrompt((first.text,), (first.codes,))

    def _example(self, voice: str, joined: bool, rng: np.random.Generator) -> Example:
        said = self.by_voice[voice]
        at = int(rng.integers(len(said)))
        text, target = _careless(said[at].text, rng), said[at].codes
        heard, attempts = target, self.attempts.get((voice, said[at].text), [])
        if attempts and rng.random() < 0.4:
            own = attempts[rng.integers(len(attempts))][:, : target.shape[1]]
            heard = torch.cat([own, target[:, own.shape[1] :]], dim=1)
        for follower in self._followers(said, at, rng) if joined else []:
            if len(f"{text} {follower.text}".encode()) > LONGEST_TEXT:
                break
            text = f"{text} {follower.text}"
            target, heard = (torch.cat([x, follower.codes], dim=1) for x in (target, heard))
        return Example(text_prompt(TOKENIZER, CONFIG.num_codebooks, text), target, self._corrupt(heard, rng))

    def _followers(self, said: list[Utterance], at: int, rng: np.random.Generator) -> list[Utterance]:
        """One to three phrases to say in the same breath: the next ones in the book, or any."""
        count = int(rng.integers(1, 4))
        if rng.random() < 0.5:
            return said[at + 1 : at + 1 + count]
        return [said[i] for i in rng.integers(len(said), size=count)]

    def _corrupt(self, codes: Tensor, rng: np.random.Generator) -> Tensor:
        """Replace some codes; sometimes most of them, sometimes a stretch, sometimes shift a stretch by a frame."""
        kind = rng.random()
        if kind < 0.15:
            return codes
        if kind < 0.25 and codes.shape[1] > 8:
            at, by = int(rng.integers(2, codes.shape[1] - 4)), int(rng.choice([-1, 1]))
            codes = torch.cat([codes[:, :at], codes[:, at:].roll(by, dims=1)], dim=1)
        rate = rng.random() * (0.3 if kind < 0.7 else 0.9)
        return self._replaced(codes, rate, rng)

    def _replaced(self, codes: Tensor, rate: float, rng: np.random.Generator) -> Tensor:
        whole = rng.random() < 0.4  # whole frames at once, or single codes
        shape = (1, codes.shape[1]) if whole else tuple(codes.shape)
        chosen = torch.from_numpy(rng.random(shape) < rate)
        others = self.pool[:, torch.from_numpy(rng.integers(self.pool.shape[1], size=codes.shape[1]))]
        if rng.random() < 0.3:
            others = torch.from_numpy(rng.integers(CODEC.codebook_size, size=tuple(codes.shape)))
        return torch.where(chosen, others, codes)


def _careless(text: str, rng: np.random.Generator) -> str:
    """The phrase as people also type it: without the full stop, without capitals."""
    if rng.random() < 0.1:
        text = text.rstrip(".。!?")
    return text.lower() if rng.random() < 0.08 else text


@dataclass(frozen=True)
class Batch:
    """Right-padded columns, and the (row, position) pairs from which a frame or the end is predicted."""

    prefix: Tensor  # (P, 1 + num_codebooks), common to all rows
    columns: Tensor  # (B, T, 1 + num_codebooks)
    rows: Tensor  # (N,)
    positions: Tensor  # (N,)
    tokens: Tensor  # (N,) semantic token or the end
    codes: Tensor  # (N, num_codebooks), IGNORE where the end is predicted
    recent: Tensor  # (N, WINDOW, num_codebooks) the codes that the sampler would penalise, -1 where none


def collate(prefix: Tensor, examples: list[Example]) -> Batch:
    longest = max(e.length for e in examples)
    columns = torch.zeros(len(examples), longest, 1 + CONFIG.num_codebooks, dtype=torch.int64)
    rows, positions, tokens, codes, recent = [], [], [], [], []
    for i, e in enumerate(examples):
        start, frames = e.prompt.shape[1], e.target.shape[1]
        columns[i, :start] = e.prompt.T
        columns[i, start : start + frames, 0] = e.heard[0] + TOKENIZER.semantic_begin_id
        columns[i, start : start + frames, 1:] = e.heard.T
        rows.append(torch.full((frames + 1,), i))
        positions.append(torch.arange(start - 1, start + frames))
        tokens.append(F.pad(e.target[0] + TOKENIZER.semantic_begin_id, (0, 1), value=TOKENIZER.im_end_id))
        codes.append(F.pad(e.target.T, (0, 0, 0, 1), value=IGNORE))
        past = F.pad(e.target.T, (0, 0, WINDOW, 0), value=-1)  # frame t sees t - WINDOW .. t - 1
        recent.append(past.unfold(0, WINDOW, 1).transpose(1, 2))
    return Batch(prefix.T, columns, *(torch.cat(x) for x in (rows, positions, tokens, codes, recent)))


def penalise(logits: Tensor, recent: Tensor) -> Tensor:
    """The sampler's repetition penalty, differentiable. logits: (N, V); recent: (N, W) ids, -1 where none."""
    with torch.no_grad():
        ids = recent.clamp_min(0)
        factor = torch.where(logits.gather(1, ids) < 0, PENALTY, 1 / PENALTY)
        ids = torch.where(recent < 0, logits.shape[1], ids)
        factors = logits.new_ones(logits.shape[0], logits.shape[1] + 1).scatter_(1, ids, factor)
    return logits * factors[:, :-1]


def losses(model: TrainableDualAR, batch: Batch, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Cross-entropy of tokens and of codes 1..C-1."""
    hidden = model.slow(batch.columns, batch.prefix)[batch.rows, batch.positions]
    logits = model.output(model.norm(hidden)).float()
    speaking = batch.codes[:, 0] != IGNORE
    codes, recent = batch.codes[speaking], batch.recent
    inputs = codes.clone()
    wrong = torch.from_numpy(rng.random(tuple(codes.shape)) < 0.1 * (rng.random() < 0.7))
    inputs = torch.where(wrong, torch.from_numpy(rng.integers(CODEC.codebook_size, size=tuple(codes.shape))), inputs)
    code_logits = model.fast(hidden[speaking], inputs).float()
    if rng.random() < 0.5:
        first = recent[:, :, 0]
        logits = penalise(logits, torch.where(first < 0, -1, first + TOKENIZER.semantic_begin_id))
        later = recent[speaking][:, :, 1:].transpose(1, 2).reshape(-1, WINDOW)
        code_logits = penalise(code_logits.flatten(0, 1), later).view(code_logits.shape)
    slow_loss = F.cross_entropy(logits, batch.tokens)
    fast_loss = F.cross_entropy(code_logits.flatten(0, 1), codes[:, 1:].flatten())
    return slow_loss, fast_loss


def train_dual_ar(work: Path, steps: int = STEPS, seed: int = 4, judge_every: int = 500) -> None:
    """Writes work/dual_ar.pt; prints every `judge_every` steps how much of the book comes out right."""
    torch.manual_seed(seed)
    utterances = load_utterances(work)
    examples, model = Examples(utterances), TrainableDualAR()
    decay = [p for n, p in model.named_parameters() if p.ndim > 1 and "embeddings" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim <= 1 or "embeddings" in n]
    optimiser = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}],
        lr=PEAK_RATE,
        betas=(0.9, 0.98),
    )
    schedule = warm_cosine(optimiser, 200, steps)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.995))
    parts = {"model": model, "optimiser": optimiser, "schedule": schedule, "average": average.module}
    run = Run(work / "dual_ar.pt", parts, steps)
    for step in run:
        rng = np.random.default_rng((seed, step))
        torch.manual_seed(seed * 1_000_003 + step)
        batch = collate(*examples.draw(rng, BATCH_TOKENS))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            slow_loss, fast_loss = losses(model, batch, rng)
        optimiser.zero_grad(set_to_none=True)
        (slow_loss + fast_loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        average.update_parameters(model)
        run.log(tokens=slow_loss.item(), codes=fast_loss.item())
        if (step + 1) % judge_every == 0 or step + 1 == steps:
            share = 1.0 if step + 1 == steps else 0.3
            verdict = judge(average.module, utterances, work, seed=step, share=share)
            examples.attempts.update(verdict.attempts)
            print(f"dual_ar: step {step + 1}: {verdict}", flush=True)


@dataclass
class Verdict:
    """Freely generated speech against the corpus, at the sampler's defaults."""

    exact: dict[str, float]  # share of utterances equal in every code, by condition
    close: dict[str, float]  # share with the same length and at least 95% of the codes
    attempts: dict[tuple[str, str], list[Tensor]]
    seconds: float

    def __str__(self) -> str:
        shown = "  ".join(f"{k} {self.exact[k]:.0%}/{self.close[k]:.0%}" for k in self.exact)
        return f"exact/close {shown}  ({self.seconds:.0f} s)"


def conditions(
    utterances: list[Utterance], rng: np.random.Generator
) -> list[tuple[str, VoicePrompt | None, Utterance]]:
    """(condition, voice prompt, what should come out) for all that the demo promises, and a sample of the rest."""
    by_voice = {v.name: [u for u in utterances if u.voice == v.name] for v in VOICES}
    wanted: list[tuple[str, VoicePrompt | None, Utterance]] = []
    for u in by_voice[DEFAULT_VOICE.name]:
        wanted.append(("plain", None, u))
    for voice, said in by_voice.items():
        reference = reference_of(utterances, voice)
        wanted += [(voice, reference, u) for u in said]
        for u in rng.permutation(len(said))[:30]:
            first = said[rng.integers(len(said))]
            wanted.append(("phrase", VoicePrompt((first.text,), (first.codes,)), said[u]))
    said = by_voice[DEFAULT_VOICE.name]
    wanted += [("system", VoicePrompt(), said[i]) for i in rng.permutation(len(said))[:30]]
    for i in rng.permutation(len(said) - 2)[:24]:  # half of them as in the book, half at random
        parts = said[i : i + 3] if i % 2 else [said[i], said[rng.integers(len(said))]]
        text, codes = " ".join(u.text for u in parts), torch.cat([u.codes for u in parts], dim=1)
        if len(text.encode()) <= LONGEST_TEXT:
            wanted.append(("joined", None, Utterance(said[i].voice, said[i].language, said[i].group, text, codes)))
    return wanted


def judge(model: TrainableDualAR, utterances: list[Utterance], work: Path, seed: int, share: float = 1.0) -> Verdict:
    """Let the serving engine speak (a share of) the book with these weights; compare its codes with the corpus's."""
    from shoal.engine import Engine
    from shoal.sampling import SamplingParams

    started = time.time()
    serving = serving_model(model, work)
    engine = Engine(
        serving,
        im_end_id=TOKENIZER.im_end_id,
        semantic_begin_id=TOKENIZER.semantic_begin_id,
        max_batch_size=48,
    )
    jobs = []
    rng = np.random.default_rng(seed)
    wanted = [job for job in conditions(utterances, rng) if rng.random() < share]
    wanted.sort(key=lambda job: job[2].codes.shape[1])
    for i, (condition, voice, u) in enumerate(wanted):
        prompt = torch.cat(
            [
                voice_prefix(TOKENIZER, CONFIG.num_codebooks, voice),
                text_prompt(TOKENIZER, CONFIG.num_codebooks, u.text),
            ],
            dim=1,
        )
        params = SamplingParams(seed=seed * 1000 + i, max_new_tokens=u.codes.shape[1] + 20)
        jobs.append((condition, u, engine.submit(prompt, params)))
    while engine.live or engine.waiting:
        engine.step()
    exact: dict[str, list[bool]] = {}
    close: dict[str, list[bool]] = {}
    attempts: dict[tuple[str, str], list[Tensor]] = {}
    for condition, u, job in jobs:
        made = job.codes().long()
        same_length = made.shape == u.codes.shape
        share = (made == u.codes).float().mean().item() if same_length else 0.0
        exact.setdefault(condition, []).append(share == 1.0)
        close.setdefault(condition, []).append(share >= 0.95)
        if share < 1.0 and made.shape[1]:
            attempts.setdefault((u.voice, u.text), []).append(made)
    return Verdict(
        {k: float(np.mean(v)) for k, v in exact.items()},
        {k: float(np.mean(v)) for k, v in close.items()},
        attempts,
        time.time() - started,
    )


def half_state(model: nn.Module) -> dict[str, Tensor]:
    """The weights as they are stored: upstream's names, half precision."""
    return {k: v.detach().half().contiguous() for k, v in model.state_dict().items()}


def serving_model(model: nn.Module, work: Path) -> nn.Module:
    """The same weights in the serving network, through the file format that serving reads."""
    from safetensors.torch import save_file
    from shoal.checkpoint import Checkpoint
    from shoal.model.dual_ar import load_dual_ar

    file = work / "judged.safetensors"
    save_file(half_state(model), file)
    checkpoint = Checkpoint(work, CONFIG, CODEC, model_file=file, codec_file=file, tokenizer_file=file)
    head = [TOKENIZER.im_end_id, *range(TOKENIZER.semantic_begin_id, TOKENIZER.semantic_end_id + 1)]
    return load_dual_ar(checkpoint, head, "cpu", torch.float32)
