"""Shoal: Fish Speech 1.5, many requests at a time.

Importing the package imports no torch; the names below load what they need when they are first used.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# Before torch loads its OpenMP: threads that spin while they wait take the core from whoever they wait for. Beside
# another busy program speech took up to 15 times longer.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"

# public name -> module that defines it
_EXPORTS = {
    "ShoalError": "errors",
    "CheckpointError": "errors",
    "RequestError": "errors",
    "CapacityError": "errors",
    "SamplingParams": "sampling",
    "Features": "features",
    "AudioFeatureCache": "cache",
    "AudioCache": "audio_cache",
    "DiskTier": "tiers",
    "RedisTier": "tiers",
    "FishSpeech": "speech",
    "Speech": "speech",
    "OptimizedSpeechPipeline": "pipeline",
    "RealtimeBatchProcessor": "realtime",
    "find_best_batch_size": "batching",
    "generate_speech_in_batches": "batching",
    "measure_initial_performance": "measure",
    "PerformanceTracker": "monitoring",
    "configure_model_caching": "caching",
    "get_recommended_cache_size": "caching",
    "pre_load_common_features": "caching",
}

__all__ = ["__version__", *_EXPORTS]

if TYPE_CHECKING:
    from shoal.audio_cache import AudioCache as AudioCache
    from shoal.batching import find_best_batch_size as find_best_batch_size
    from shoal.batching import generate_speech_in_batches as generate_speech_in_batches
    from shoal.cache import AudioFeatureCache as AudioFeatureCache
    from shoal.caching import configure_model_caching as configure_model_caching
    from shoal.caching import get_recommended_cache_size as get_recommended_cache_size
    from shoal.caching import pre_load_common_features as pre_load_common_features
    from shoal.errors import CapacityError as CapacityError
    from shoal.errors import CheckpointError as CheckpointError
    from shoal.errors import RequestError as RequestError
    from shoal.errors import ShoalError as ShoalError
    from shoal.features import Features as Features
    from shoal.measure import measure_initial_performance as measure_initial_performance
    from shoal.monitoring import PerformanceTracker as PerformanceTracker
    from shoal.pipeline import OptimizedSpeechPipeline as OptimizedSpeechPipeline
    from shoal.realtime import RealtimeBatchProcessor as RealtimeBatchProcessor
    from shoal.sampling import SamplingParams as SamplingParams
    from shoal.speech import FishSpeech as FishSpeech
    from shoal.speech import Speech as Speech
    from shoal.tiers import DiskTier as DiskTier
    from shoal.tiers import RedisTier as RedisTier


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shoal.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
