"""Text and voice codes -> prompt matrix. The only place that knows Fish Speech 1.5's chat format.

A prompt is a matrix (1 + num_codebooks, T) int64: row 0 holds token ids, the other rows the codes of those positions
that are audio frames, and zeros elsewhere. It has two parts, so that the first can be prefilled once for many texts:

    prefix (voice)   <|im_start|>system\\n Speak out the provided text. <|im_end|>
                     and for each reference
                     <|im_start|>user\\n its text <|im_end|> <|im_start|>assistant\\n <|voice|> its frames <|im_end|>
    text             <|im_start|>user\\n the text <|im_end|> <|im_start|>assistant\\n <|voice|>

Their concatenation is upstream 1.5's prompt, bit for bit, but for texts that spell special tokens (tokenizer.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.errors import RequestError
from shoal.text import clean_text
from shoal.tokenizer import IM_END, IM_START, VOICE, Tokenizer

_SYSTEM_LINE = "Speak out the provided text."


@dataclass(frozen=True, eq=False)
class VoicePrompt:
    """What a voice sounds like: texts and the codes of their recordings, one of each per reference.

    With no reference at all the prompt still has the system line, as in upstream's server and command line; no
    VoicePrompt (None) leaves that out too, as upstream's generate_long does when it is called without references.
    """

    texts: tuple[str, ...] = ()
    codes: tuple[Tensor, ...] = ()  # each (at least num_codebooks, frames), any integer type

    def __post_init__(self) -> None:
        if len(self.texts) != len(self.codes):
            raise RequestError(f"a voice needs a text per reference: {len(self.texts)} texts, {len(self.codes)} codes")


def voice_prefix(tokenizer: Tokenizer, num_codebooks: int, voice: VoicePrompt | None) -> Tensor:
    """The part of the prompt that all texts in one voice share: (1 + num_codebooks, P) int64, P = 0 without a voice.

    Codes with more codebooks than the model has are cut to the model's, as upstream does.

    Raises RequestError where codes have too few codebooks, another shape or values outside of the codebook.
    """
    if voice is None:
        return torch.zeros(1 + num_codebooks, 0, dtype=torch.int64)
    parts = [_message(tokenizer, num_codebooks, "system", _SYSTEM_LINE)]
    for text, codes in zip(voice.texts, voice.codes, strict=True):
        parts += [
            _message(tokenizer, num_codebooks, "user", clean_text(text)),
            _control(tokenizer, num_codebooks, f"{IM_START}assistant\n{VOICE}"),
            _frames(tokenizer, num_codebooks, codes),
            _control(tokenizer, num_codebooks, IM_END),
        ]
    return torch.cat(parts, dim=1)


def text_prompt(tokenizer: Tokenizer, num_codebooks: int, text: str) -> Tensor:
    """The part of the prompt that asks for `text`, which is cleaned first: (1 + num_codebooks, T) int64.

    The model's answer, the first frame, follows right behind it.
    """
    return torch.cat(
        [
            _message(tokenizer, num_codebooks, "user", clean_text(text)),
            _control(tokenizer, num_codebooks, f"{IM_START}assistant\n{VOICE}"),
        ],
        dim=1,
    )


def _message(tokenizer: Tokenizer, num_codebooks: int, role: str, text: str) -> Tensor:
    # Encoded apart, so that no token spans the text and its frame.
    ids = [
        *tokenizer.encode(f"{IM_START}{role}\n", allow_special=True),
        *tokenizer.encode(text),
        *tokenizer.encode(IM_END, allow_special=True),
    ]
    return _columns(ids, num_codebooks)


def _control(tokenizer: Tokenizer, num_codebooks: int, text: str) -> Tensor:
    return _columns(tokenizer.encode(text, allow_special=True), num_codebooks)


def _columns(ids: list[int], num_codebooks: int) -> Tensor:
    columns = torch.zeros(1 + num_codebooks, len(ids), dtype=torch.int64)
    columns[0] = torch.tensor(ids, dtype=torch.int64)
    return columns


def _frames(tokenizer: Tokenizer, num_codebooks: int, codes: Tensor) -> Tensor:
    if codes.ndim == 3 and codes.shape[0] == 1:
        codes = codes[0]
    if codes.ndim != 2 or codes.shape[0] < num_codebooks or codes.is_floating_point():
        raise RequestError(
            f"voice codes must be integers of shape ({num_codebooks}, frames), not {tuple(codes.shape)} {codes.dtype}: "
            "encode the reference audio again with this checkpoint's codec"
        )
    codes = codes[:num_codebooks].to(device="cpu", dtype=torch.int64)
    codebook_size = tokenizer.semantic_end_id - tokenizer.semantic_begin_id + 1
    if codes.numel() and not (int(codes.min()) >= 0 and int(codes.max()) < codebook_size):
        raise RequestError(
            f"voice codes must lie in 0 to {codebook_size - 1}, not {int(codes.min())} to {int(codes.max())}: "
            "they were made with another codec"
        )
    return torch.cat([codes[:1] + tokenizer.semantic_begin_id, codes])
