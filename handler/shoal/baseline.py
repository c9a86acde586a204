"""Upstream as shipped, one request at a time: what Shoal's speed and output are compared with.

Runs the PyPI package fish-speech 0.1.0 on a Fish Speech 1.5 checkpoint. That release carries the next generation's
(OpenAudio's) inference code, but given 1.5's sizes and special tokens its transformer is the same network. Its network,
its sampling and its loop run untouched: whole-cache attention, the full vocabulary head, one row, no compilation.
The prompt comes from prompt.py, since the package's own is of the other generation, and so does the codec, which the
package no longer has.

Two properties of upstream's loop to know before comparing codes rather than speed: it rounds temperature, top-p and
penalty to bfloat16, and its repetition penalty for the semantic token looks at the wrong axis of its window.

Upstream samples over the whole vocabulary. Where it picks a text token, it goes on with code 0. Where it picks one of
the padding rows above the semantic range, there is no code and it fails with "index out of range"; here that becomes a
ShoalError. On CUDA the same failure leaves the process without a usable device.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.checkpoint import Checkpoint, check_state, open_checkpoint
from shoal.errors import CheckpointError, DependencyError, RequestError, ShoalError
from shoal.model.firefly import Firefly, fold_weight_norm
from shoal.prompt import VoicePrompt, text_prompt, voice_prefix
from shoal.tokenizer import Tokenizer

_INSTALL = 'install it with `pip install "shoal[baseline]"` and then `pip install --no-deps fish-speech==0.1.0`'


class UpstreamBaseline:
    """Upstream's model and loop on one checkpoint. Calls from several threads take turns, as in upstream's server."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        """See `load`."""
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        self.device = device
        self.tokenizer = Tokenizer.from_file(checkpoint.tokenizer_file, self.config.codebook_size)
        self._inference = _import_upstream("models.text2semantic.inference")
        self.model = _build_model(checkpoint, self.tokenizer).to(device=device, dtype=dtype).eval()
        with torch.device(device):
            self.model.setup_caches(1, self.config.max_seq_len, dtype=dtype)
        self._codec: Firefly | None = None
        self._lock = threading.Lock()

    @classmethod
    def load(
        cls, checkpoint_dir: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> UpstreamBaseline:
        """Load a 1.5 checkpoint directory into upstream's code.

        Raises DependencyError without the package (the message has the commands that install it), CheckpointError for
        a checkpoint that upstream's code cannot run.
        """
        return cls(open_checkpoint(checkpoint_dir), torch.device(device), dtype)

    @property
    def sample_rate(self) -> int:
        """Samples per second of what `synthesize` returns."""
        return self.checkpoint.codec.sample_rate

    def generate_codes(
        self,
        text: str,
        max_new_tokens: int = 1024,
        temperature: float = 0.7,
        top_p: float = 0.7,
        repetition_penalty: float = 1.2,
        seed: int = 0,
        frames: int | None = None,
        voice: VoicePrompt | None = None,
    ) -> Tensor:
        """Codes (num_codebooks, frames) int16 on the CPU, without the frame of `<|im_end|>`.

        The text is one prompt, however long: this release of upstream does not cut it. `frames` generates exactly that
        many, past any `<|im_end|>`, for benchmarks. As upstream never looks for `<|im_end|>` in the first frame, there
        is always one.

        Raises RequestError where prompt and frames do not fit into max_seq_len, ShoalError where upstream samples a
        token that has no code.
        """
        prompt = torch.cat(
            [
                voice_prefix(self.tokenizer, self.config.num_codebooks, voice),
                text_prompt(self.tokenizer, self.config.num_codebooks, text),
            ],
            dim=1,
        )
        length = prompt.shape[1]
        limit = max_new_tokens if frames is None else frames
        room = self.config.max_seq_len - length
        if limit < 1 or room < 2 or (frames is not None and frames > room):
            raise RequestError(
                f"the prompt takes {length} of {self.config.max_seq_len} positions, so 1 to {max(room, 0)} frames can "
                f"follow, not {limit}: shorten the text or ask for fewer frames"
            )
        # Upstream's loop fails if asked for a single frame, and takes 0 for "as many as fit".
        sequence = self._generate(
            prompt.to(self.device),
            max(limit, 2),
            {"temperature": temperature, "top_p": top_p, "repetition_penalty": repetition_penalty},
            seed,
            never_stop=frames is not None,
        )
        generated = sequence[:, length : length + limit].cpu()
        if frames is None and generated.shape[1] > 1 and generated[0, -1] == self.tokenizer.im_end_id:
            generated = generated[:, :-1]
        return generated[1:].to(torch.int16)

    def synthesize(self, text: str, **options: Any) -> np.ndarray:
        """Audio (samples,) float32 in -1 to 1 at `sample_rate`; `options` are those of `generate_codes`."""
        codes = self.generate_codes(text, **options)
        with self._lock, torch.inference_mode():
            if self._codec is None:
                state = fold_weight_norm(self.checkpoint.read_codec())
                self._codec = Firefly.from_state(self.checkpoint.codec, state).to(self.device, torch.float32)
            return self._codec.decode(codes[None].long().to(self.device))[0].cpu().numpy()

    def _generate(
        self, prompt: Tensor, max_new_tokens: int, sampling: dict[str, float], seed: int, never_stop: bool
    ) -> Tensor:
        """Upstream's `generate`: prompt and all frames, (1 + num_codebooks, T + frames)."""
        devices = [self.device] if self.device.type == "cuda" else []
        # Upstream draws from torch's global generator; the fork leaves the caller's as it was.
        with (
            self._lock,
            _endless(self.model.tokenizer) if never_stop else nullcontext(),
            torch.random.fork_rng(devices),
        ):
            torch.manual_seed(seed)
            try:
                return self._inference.generate(
                    model=self.model,
                    prompt=prompt,
                    max_new_tokens=max_new_tokens,
                    audio_masks=None,
                    audio_parts=None,
                    decode_one_token=self._inference.decode_one_token_ar,
                    **sampling,
                )
            except (IndexError, RuntimeError) as error:
                if not isinstance(error, IndexError) and "device-side assert" not in str(error):
                    raise
                after = "" if isinstance(error, IndexError) else "; the CUDA device is lost to this process, restart it"
                raise ShoalError(
                    "upstream sampled a token above the semantic range, which has no code, and failed with "
                    f"'{error}'{after}. Another seed may get through; Shoal's own engine never samples such tokens."
                ) from error


@contextmanager
def _endless(fish_tokenizer: Any) -> Iterator[None]:
    """Upstream's loop asks for the id of `<|im_end|>` at every frame; inside, it is told one that is never sampled."""
    fish_tokenizer.get_token_id = lambda token: -1
    try:
        yield
    finally:
        del fish_tokenizer.get_token_id


@functools.cache
def _import_upstream(module: str) -> ModuleType:
    """A module of fish-speech 0.1.0, without its log lines and progress bars."""
    try:
        inference = importlib.import_module("fish_speech.models.text2semantic.inference")
        found = importlib.import_module(f"fish_speech.{module}")
        from loguru import logger
        from tqdm import tqdm
    except ImportError as error:
        raise DependencyError(f"the baseline needs the package fish-speech 0.1.0 ({error}): {_INSTALL}") from error
    if "audio_masks" not in inspect.signature(inference.generate).parameters:
        raise DependencyError(f"the fish_speech that is installed is not the package fish-speech 0.1.0: {_INSTALL}")
    logger.disable("fish_speech")
    inference.tqdm = functools.partial(tqdm, disable=True)
    return found


def _build_model(checkpoint: Checkpoint, tokenizer: Tokenizer) -> torch.nn.Module:
    """Upstream's DualARTransformer with the checkpoint's weights, on the CPU in the file's dtype."""
    config = checkpoint.config
    if not config.share_codebook_embeddings:
        raise CheckpointError(
            f"{checkpoint.path}/config.json: share_codebook_embeddings is false, which fish-speech 0.1.0 cannot run"
        )
    llama = _import_upstream("models.text2semantic.llama")
    fish_tokenizer = _import_upstream("tokenizer").FishTokenizer(
        str(checkpoint.tokenizer_file), list(tokenizer.special_ids)
    )
    # Its class rejects unknown keys, and takes a head for 64 wide unless told.
    known = {field.name for field in dataclasses.fields(llama.DualARModelArgs)}
    sizes = {key: value for key, value in config.model_dump().items() if key in known}
    args = llama.DualARModelArgs(**sizes, head_dim=config.head_dim, fast_head_dim=config.fast_head_dim)
    model = llama.DualARTransformer(args, tokenizer=fish_tokenizer)
    state = checkpoint.read_dual_ar()
    if config.tie_word_embeddings:
        state.pop("output.weight", None)
    check_state(checkpoint.model_file, {name: tensor.shape for name, tensor in model.state_dict().items()}, state)
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False)
