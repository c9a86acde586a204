"""Shoal: Fish Speech 1.5, many requests at a time.

Importing the package imports no torch; the names below load what they need when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
    "FishSpeech": "speech",
    "Speech": "speech",
}

__all__ = ["__version__", *_EXPORTS]

if TYPE_CHECKING:
    from shoal.cache import AudioFeatureCache as AudioFeatureCache
    from shoal.errors import CapacityError as CapacityError
    from shoal.errors import CheckpointError as CheckpointError
    from shoal.errors import RequestError as RequestError
    from shoal.errors import ShoalError as ShoalError
    from shoal.features import Features as Features
    from shoal.sampling import SamplingParams as SamplingParams
    from shoal.speech import FishSpeech as FishSpeech
    from shoal.speech import Speech as Speech


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shoal.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
