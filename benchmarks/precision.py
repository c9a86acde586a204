"""How far a quantised model is from the exact one: both are shown the same frames, and their choices compared."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from shoal.prompt import text_prompt
from shoal.sampling import SamplingParams
from shoal.speech import FishSpeech
from torch import Tensor

from benchmarks.engine import new_engine

_TEXTS = ("Good morning, how are you today?", "The weather is fine.", "안녕하세요, 반갑습니다.", "Press one for sales.")


@torch.inference_mode()
def compare(exact: FishSpeech, rough: FishSpeech, frames: int = 24) -> dict[str, float]:
    """Cosine of the logits, and the share of equal likeliest choices, of the token and of the other codes.

    The exact model speaks a few texts, at the default temperature with fixed seeds; then both compute the logits of
    each of its choices, given all that was chosen before.
    """
    token: list[tuple[Tensor, Tensor]] = []
    codes: list[tuple[Tensor, Tensor]] = []
    for seed, text in enumerate(_TEXTS):
        prompt = text_prompt(exact.tokenizer, exact.num_codebooks, text)
        engine = new_engine(exact, 1)
        sequence = engine.submit(prompt, SamplingParams(), seed=seed, force_frames=frames)
        while not sequence.done:
            engine.step()
        spoken = sequence.codes().long()
        columns = torch.cat([exact.tokenizer.semantic_begin_id + spoken[:1], spoken])
        columns = torch.cat([prompt, columns[:, :-1]], dim=1).T[None].to(exact.device)
        first = prompt.shape[1] - 1
        token.append((_tokens(exact, columns, first), _tokens(rough, columns, first)))
        hidden = _hidden(exact, columns, first)
        codes.append((_codes(exact, hidden, spoken), _codes(rough, hidden, spoken)))
    return {
        "token_cosine": _cosine(token),
        "token_equal": _equal(token),
        "code_cosine": _cosine(codes),
        "code_equal": _equal(codes),
    }


def _hidden(speech: FishSpeech, columns: Tensor, first: int) -> Tensor:
    """(frames, dim): the slow transformer's states from position `first` on; columns (1, T, 1 + num_codebooks)."""
    model, tokens = speech.model, columns[..., 0]
    begin = speech.tokenizer.semantic_begin_id
    x = model.embed(columns, (tokens >= begin) & (tokens < begin + model.config.codebook_size))
    start, length = torch.zeros(1, dtype=torch.int64, device=x.device), columns.shape[1]
    return model.slow(x, model.new_cache(), slice(0, 1), start, length, True)[0, first:]


def _tokens(speech: FishSpeech, columns: Tensor, first: int) -> Tensor:
    return speech.model.logits(_hidden(speech, columns, first)).float()


def _codes(speech: FishSpeech, hidden: Tensor, spoken: Tensor) -> Tensor:
    """Logits (frames * (num_codebooks - 1), codebook_size) of the fast transformer, each given the codes before."""
    model, cache = speech.model, speech.model.new_fast_cache()
    spoken = spoken.to(hidden.device)
    x = torch.stack([model.fast_project_in(hidden), model.embed_code(spoken[0])], dim=1)
    logits = []
    for k in range(1, len(spoken)):
        logits.append(model.fast(x, cache, 0 if k == 1 else k).float())
        x = model.embed_code(spoken[k])[:, None]
    return torch.cat(logits)


def _cosine(pairs: list[tuple[Tensor, Tensor]]) -> float:
    exact, rough = (torch.cat(side) for side in zip(*pairs, strict=True))
    return round(float(F.cosine_similarity(exact, rough, dim=1).mean()), 5)


def _equal(pairs: list[tuple[Tensor, Tensor]]) -> float:
    exact, rough = (torch.cat(side) for side in zip(*pairs, strict=True))
    return round(float((exact.argmax(1) == rough.argmax(1)).float().mean()), 4)
