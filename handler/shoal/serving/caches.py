"""The caches that model-config.yaml asks for, and the phrases that a server is to know from the start."""

from __future__ import annotations

import logging
from pathlib import Path

from shoal.cache import AudioFeatureCache
from shoal.serving.limits import HandlerSettings, SettingsError
from shoal.tiers import DiskTier, RedisTier, Tier

logger = logging.getLogger(__name__)


def open_cache(settings: HandlerSettings) -> AudioFeatureCache:
    """The feature cache with its tiers. Raises ShoalError where a tier cannot be had at all."""
    tiers: list[Tier] = []
    if settings.cache_disk is not None:
        directory = Path(settings.cache_disk).expanduser()
        if not directory.is_absolute():
            raise SettingsError(f"model-config.yaml: handler.cache_disk: {directory} must be an absolute path")
        tiers.append(DiskTier(directory, settings.cache_disk_bytes))
    if settings.cache_redis is not None:
        tiers.append(RedisTier(settings.cache_redis, ttl_s=settings.cache_redis_ttl_s))
    return AudioFeatureCache(settings.cache_entries, settings.cache_bytes, tiers=tiers)


def read_phrases(file: str | Path) -> list[str]:
    """One phrase per line, in UTF-8; empty lines and those that begin with # are left out. Raises SettingsError."""
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file}: the phrases cannot be read: {error}") from None
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def warm_phrases(settings: HandlerSettings, model_dir: str | Path) -> list[str]:
    """What the server is to know before it reports ready; a file's name is relative to the archive."""
    named = settings.warm_phrases
    return read_phrases(Path(model_dir, Path(named).expanduser())) if isinstance(named, str) else list(named)
