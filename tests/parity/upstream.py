"""Upstream's own Fish Speech 1.5 code, as an oracle for tests: the modules of the PyPI package fish-speech-lib.

Importing that package imports torchaudio, librosa and more, which a machine for tests need not have. So its modules are
loaded here file by file, with empty stand-ins for the packages above them and for the few names that they import and
never need: nothing of the arithmetic is replaced. Nothing outside tests uses this.

What to know before comparing with upstream (tested, and easy to trip over):

- `generate` does not look for `<|im_end|>` in the first frame, only from the second on; the frame with `<|im_end|>` is
  in its result.
- The window of the repetition penalty holds the 16 frames before the current one, but starts with the second generated
  frame and is filled with zeros at first: id 0 is penalised (once) while there are zeros left. The first frame
  is sampled without any penalty.
- `logits_to_probs` writes the penalty into the logits it is given.
- The table of rotary embeddings is bfloat16 whatever the weights are; `model.to(float32)` only widens it.
- `generate_long` throws the first frame of each piece away and keeps the one with `<|im_end|>`.
- `generate_long` has no system line where `prompt_text` is None, but has one where it is an empty list, which
  is what upstream's server and command line pass when there is no reference.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from shoal.checkpoint import open_checkpoint
from torch import Tensor

PACKAGE = "fish_speech_lib.fish_speech"
_INSTALL = "pip install --no-deps fish-speech-lib==0.1.1.1 (and the extra shoal[baseline])"


class UpstreamMissing(ImportError):
    """Upstream's code is not installed; the message says how to get it."""


def skip_reason() -> str | None:
    """Why upstream's code cannot be used here, for pytest.mark.skipif; None where it can."""
    if _package_dir() is None:
        return f"the oracle is not installed: {_INSTALL}"
    missing = [name for name in ("loguru", "einops", "loralib", "click", "tqdm") if not _installed(name)]
    return f"the oracle needs {', '.join(missing)}: pip install 'shoal[baseline]'" if missing else None


def load(name: str) -> ModuleType:
    """Upstream's module `name` below its fish_speech package, e.g. "models.text2semantic.llama".

    Raises UpstreamMissing where `skip_reason()` is not None.
    """
    _prepare()
    with _without_transformers():
        return importlib.import_module(f"{PACKAGE}.{name}")


def tokenizer() -> ModuleType:
    """FishTokenizer, ALL_SPECIAL_TOKENS."""
    return load("tokenizer")


def conversation() -> ModuleType:
    """Conversation, Message, TextPart, VQPart."""
    return load("conversation")


def text() -> ModuleType:
    """clean_text, split_text."""
    return load("text")


def llama() -> ModuleType:
    """DualARTransformer, DualARModelArgs."""
    return load("models.text2semantic.llama")


def inference() -> ModuleType:
    """generate, generate_long, decode_one_token_ar, encode_tokens, logits_to_probs, SamplingRng."""
    module = load("models.text2semantic.inference")
    module.tqdm = lambda frames: frames  # no progress bar
    return module


def load_upstream_model(checkpoint_dir: str | Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Upstream's DualARTransformer with the weights of a checkpoint directory, on the CPU, caches set up for one row.

    Its tokenizer is upstream's own, read from the same directory. It always has 1,024 semantic tokens, also where the
    checkpoint's codebook is smaller.
    """
    checkpoint = open_checkpoint(checkpoint_dir)
    module = llama()
    fields = {field.name for field in dataclasses.fields(module.DualARModelArgs)}
    args = module.DualARModelArgs(**{k: v for k, v in checkpoint.config.model_dump().items() if k in fields})
    fish_tokenizer = tokenizer().FishTokenizer(str(checkpoint.tokenizer_file))
    model = module.DualARTransformer(args, tokenizer=fish_tokenizer).to(dtype)
    model.load_state_dict(checkpoint.read_dual_ar(), strict=True)
    model.requires_grad_(False).eval()
    model.setup_caches(1, args.max_seq_len, dtype=dtype)
    return model


def noise_sizes(model: torch.nn.Module) -> list[int]:
    """Lengths of one frame's noise vectors: the whole vocabulary, then each codebook but the first."""
    return [model.config.vocab_size] + [model.config.codebook_size] * (model.config.num_codebooks - 1)


def upstream_generate(
    model: torch.nn.Module,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.7,
    top_p: float = 0.7,
    repetition_penalty: float = 1.2,
    noise: int | Iterable[Tensor | Sequence[Tensor]] = 0,
    semantic_only: bool = False,
) -> Tensor:
    """What upstream's own loop generates after `prompt` (1 + C, T): (1 + C, frames), at most `max_new_tokens` frames.

    The last frame is the one with `<|im_end|>`, if that was sampled after the first frame.

    `noise` is a seed for upstream's SamplingRng, or gives the noise of frame after frame, each a flat tensor or a
    sequence of tensors with the lengths of `noise_sizes(model)`; a token is the argmax of probability / noise.
    `semantic_only` takes all tokens but the semantic ones and `<|im_end|>` out of the slow head's logits; without it
    the loop raises IndexError as soon as a row above the semantic range is sampled.
    """
    if max_new_tokens < 2:
        raise ValueError("upstream's loop cannot generate fewer than 2 frames (0 means: until the cache is full)")
    module = inference()
    rng = module.SamplingRng("cpu", noise) if isinstance(noise, int) else _GivenNoise(model, noise)
    with _semantic_head(model) if semantic_only else nullcontext():
        sequence = module.generate(
            model=model,
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            decode_one_token=module.decode_one_token_ar,
            temperature=torch.tensor(temperature),
            top_p=torch.tensor(top_p),
            repetition_penalty=torch.tensor(repetition_penalty),
            rng=rng,
        )
    return sequence[:, prompt.shape[1] :].clone()


def upstream_prompts(
    fish_tokenizer: Any,
    num_codebooks: int,
    text: str,
    prompt_text: Sequence[str] | None = None,
    prompt_tokens: Sequence[Tensor] | None = None,
    chunk_length: int = 1_000_000,
) -> list[Tensor]:
    """The prompt matrices (1 + C, T) that upstream's generate_long hands to its loop, one for each piece of `text`.

    Each piece is answered with a single frame of zeros, which the next prompt then contains.
    """
    module = inference()
    prompts: list[Tensor] = []

    def record(*, prompt: Tensor, **_: Any) -> Tensor:
        prompts.append(prompt)
        return torch.cat([prompt, prompt.new_zeros(prompt.shape[0], 1)], dim=1)

    model = torch.nn.Linear(1, 1)
    model.tokenizer = fish_tokenizer
    model.config = types.SimpleNamespace(num_codebooks=num_codebooks)
    generate, module.generate = module.generate, record
    try:
        for _ in module.generate_long(
            model=model,
            decode_one_token=None,
            text=text,
            chunk_length=chunk_length,
            max_length=1_000_000,
            prompt_text=prompt_text,
            prompt_tokens=prompt_tokens,
        ):
            pass
    finally:
        module.generate = generate
    return prompts


class _GivenNoise:
    """Takes the place of upstream's SamplingRng and hands out the caller's noise, one frame a call."""

    def __init__(self, model: torch.nn.Module, frames: Iterable[Tensor | Sequence[Tensor]]) -> None:
        self._sizes = noise_sizes(model)
        self._frames = iter(frames)

    def exponential_parts(self, shapes: Sequence[tuple[int, ...]], *, device: Any, dtype: Any) -> tuple[Tensor, ...]:
        frame = next(self._frames)
        parts = frame.split(self._sizes) if isinstance(frame, Tensor) else frame
        assert [tuple(part.shape) for part in parts] == list(shapes), (
            "the noise has not the shapes that upstream asks for"
        )
        return tuple(part.to(device=device, dtype=dtype) for part in parts)


@contextmanager
def _semantic_head(model: torch.nn.Module) -> Iterator[None]:
    """Only semantic tokens and `<|im_end|>` can be sampled inside."""
    begin = model.tokenizer.semantic_begin_id
    keep = torch.zeros(model.config.vocab_size, dtype=torch.bool)
    keep[begin : begin + model.config.codebook_size] = True
    keep[model.tokenizer.get_token_id("<|im_end|>")] = True
    forward = model.forward_generate

    def masked(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        result.logits = result.logits.masked_fill(~keep, float("-inf"))
        return result

    model.forward_generate = masked
    try:
        yield
    finally:
        del model.forward_generate


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@functools.cache
def _package_dir() -> Path | None:
    spec = importlib.util.find_spec("fish_speech_lib")  # finds a top-level package without running it
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / "fish_speech"
    return path if path.is_dir() else None


@functools.cache
def _prepare() -> None:
    """Put empty packages into sys.modules in place of those whose __init__ imports what is not there."""
    reason = skip_reason()
    if reason:
        raise UpstreamMissing(reason)
    root = _package_dir()
    assert root is not None
    for name, path in (
        ("fish_speech_lib", root.parent),
        (PACKAGE, root),
        (f"{PACKAGE}.models", root / "models"),
        (f"{PACKAGE}.models.text2semantic", root / "models" / "text2semantic"),
    ):
        _add_module(name, path)
    _add_module(f"{PACKAGE}.utils", root / "utils", RankedLogger=_SilentLogger)
    from loguru import logger

    for package in (PACKAGE, "fish_speech_lib"):
        logger.disable(package)


def _add_module(name: str, path: Path, **attributes: Any) -> None:
    module = sys.modules.get(name)
    if module is None:
        module = types.ModuleType(name)
        module.__path__ = [str(path)]
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__spec__.submodule_search_locations = module.__path__
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    for key, value in attributes.items():
        if not hasattr(module, key):
            setattr(module, key, value)


@contextmanager
def _without_transformers() -> Iterator[None]:
    """Upstream imports AutoTokenizer and never uses it; importing transformers for real takes seconds."""
    if "transformers" in sys.modules:
        yield
        return
    sys.modules["transformers"] = types.ModuleType("transformers")
    sys.modules["transformers"].AutoTokenizer = None
    try:
        yield
    finally:
        del sys.modules["transformers"]


class _SilentLogger:
    """Stands in for upstream's logger, which needs lightning."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None
