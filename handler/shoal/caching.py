"""Caches set up for a machine, and filled before the first request: sizes, and phrases known in advance."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from shoal.errors import ShoalError
from shoal.pipeline import run_in_order
from shoal.sampling import SamplingParams
from shoal.scheduler import SpeechRequest
from shoal.speech import FishSpeech, VoiceLike, one_each

# GPU memory in GB, from which on that much may go to caches
_RECOMMENDED = ((24, "5GB"), (12, "3GB"), (8, "1.5GB"))
_WITHOUT_GPU = "0.5GB"


@dataclass
class WarmUp:
    """What `pre_load_common_features` found and did."""

    decoded: int = 0  # texts that were new
    known: int = 0  # texts that a cache had already, or that came twice
    failed: dict[str, ShoalError] = field(default_factory=dict)  # by text


def get_recommended_cache_size(gpu_bytes: int | None = None) -> str:
    """How much memory to give to all caches together: "1.5GB", "3GB" or "5GB" by the GPU's memory, else "0.5GB".

    Args:
        gpu_bytes: the GPU's memory; None asks the first GPU of this machine, if it has one.
    """
    if gpu_bytes is None:
        import torch

        gpu_bytes = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
    gigabytes = round(gpu_bytes / 1024**3)  # a card sold as 8 GB shows 7.6 to 8.0
    return next((size for least, size in _RECOMMENDED if gigabytes >= least), _WITHOUT_GPU)


def configure_model_caching(model: FishSpeech, cache_size: int | str | None = None) -> FishSpeech:
    """Turn on what saves work: features are kept, weights are shared in this process, caches get their memory.

    Args:
        cache_size: for all caches together, as bytes or "3GB"; None takes what `get_recommended_cache_size` says.

    Returns:
        the same model.
    """
    model.config.enable_intermediate_feature_caching = True
    model.enable_model_weights_cache()
    model.set_internal_cache_capacity(get_recommended_cache_size() if cache_size is None else cache_size)
    return model


def pre_load_common_features(
    model: FishSpeech,
    texts: Sequence[str],
    params: SamplingParams = SamplingParams(),
    voice: VoiceLike | Sequence[VoiceLike] = None,
    *,
    batch_size: int = 8,
    chunk_length: int = 200,
    progress: Callable[[int, int], None] | None = None,
    cancel: threading.Event | None = None,
) -> WarmUp:
    """Decode texts in advance, so that requests for them are answered from the cache, its slower tiers included.

    A request finds them only with the same voice, parameters and chunk length. No sound is made, unless the model
    keeps sound too. A text that cannot be spoken does not stop the others.

    Args:
        voice: one for all texts, or one each.
        batch_size: texts that decode at a time.
        progress: called after each text, with the number so far and the number in all.
        cancel: once set, what is not done is left.
    """
    voices = one_each(voice, len(texts), "voice")
    requests = [SpeechRequest(t, v, params, chunk_length=chunk_length) for t, v in zip(texts, voices, strict=True)]
    return warm_up(model, requests, batch_size=batch_size, progress=progress, cancel=cancel)


def warm_up(
    model: FishSpeech,
    requests: Sequence[SpeechRequest],
    *,
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
    cancel: threading.Event | None = None,
) -> WarmUp:
    """`pre_load_common_features` for requests of any kind."""
    with_sound = model.audio_cache is not None
    silent = (replace(request, audio=with_sound, stream=False) for request in requests)
    done = WarmUp()
    results = run_in_order(model.scheduler, silent, batch_size, cancel)
    for i, (request, result) in enumerate(zip(requests, results, strict=False), start=1):
        if isinstance(result, ShoalError):
            done.failed[request.text] = result
        elif result.cache_hit:
            done.known += 1
        else:
            done.decoded += 1
        if progress:
            progress(i, len(requests))
    return done
