"""What one request may cost, and how the handler is set up: the `handler:` section of model-config.yaml, checked.

Knows nothing of TorchServe and loads no model: a mistake in the file is reported before anything heavy starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from shoal.errors import RequestError, ShoalError
from shoal.sizes import parse_bytes


class SettingsError(ShoalError):
    """model-config.yaml holds a value that cannot be used: names the key, what is wrong and what is allowed."""


class Limits(BaseModel):
    """Bounds on one request; every default is safe on a small machine."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_text_chars: int = Field(20_000, gt=0)
    max_references: int = Field(4, ge=0)
    max_reference_bytes: int = Field(8 * 1024 * 1024, gt=0)  # decoded bytes, all references of a request together
    max_reference_seconds: float = Field(60.0, gt=0)  # all references of a request together
    max_new_tokens: int = Field(2048, gt=0)  # frames (1/21.5 s each) per sentence
    max_seconds: float = Field(300.0, gt=0)  # wall clock from admission to the last byte; then 504
    max_waiting: int = Field(64, ge=0)  # requests admitted and not yet decoding; then 503
    retry_after_s: float = Field(2.0, ge=0)  # what the 503 tells the client


class HandlerSettings(BaseModel):
    """The `handler:` section of model-config.yaml."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())

    checkpoint: str | None = None  # directory; relative means relative to the archive; None: SHOAL_CHECKPOINT or inside
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"
    codec_dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int | None = Field(None, gt=0)
    max_batch_size: int = Field(16, gt=0)  # slots of the engine
    batch_limit: int | None = Field(None, gt=0)  # rows decoded at once, can be lowered live; None: all slots
    cache_bytes: int = Field(64 * 1024 * 1024, ge=0)
    cache_entries: int = Field(10_000, ge=0)  # 0 keeps nothing in memory
    cache_disk: str | None = None  # directory of the tier on disk, absolute; None: no such tier
    cache_disk_bytes: int = Field(1024**3, gt=0)
    cache_redis: str | None = None  # URL of the tier on a Redis or Valkey server; None: no such tier
    cache_redis_ttl_s: float | None = Field(None, gt=0)  # None: entries stay as long as the server likes
    memory_limit: int | None = Field(None, gt=0)  # of the whole process (CPU) or its share of the GPU; None: no limit
    audio_cache_bytes: int = Field(0, ge=0)  # encoded replies; 0 keeps none
    warm_phrases: str | list[str] = []  # texts to decode before the worker reports ready, or a file of them
    warm_voices: list[str | None] = [None]  # and the voices to decode them in; None: no voice
    slice_ms: float = Field(50.0, gt=0, le=10_000)
    voices: str | None = None  # folder of registered voices; relative means relative to the archive
    log_texts: bool = False
    control: str | None = None  # file of live limits, absolute; None: $SHOAL_CONTROL, else none (serving/control.py)
    limits: Limits = Limits()

    @field_validator("cache_bytes", "cache_disk_bytes", "audio_cache_bytes", "memory_limit", mode="before")
    @classmethod
    def _size(cls, value: Any) -> Any:
        """Sizes may be written like "1.5GB"."""
        try:
            return parse_bytes(value) if isinstance(value, str) else value
        except RequestError as error:
            raise ValueError(str(error)) from None


def load_settings(section: Any) -> HandlerSettings:
    """Check the `handler:` section as YAML gave it (a mapping, or None for all defaults). Raises SettingsError."""
    if section is None:
        section = {}
    if not isinstance(section, dict):
        raise SettingsError(f"model-config.yaml: 'handler' must be a mapping, not {type(section).__name__}")
    try:
        return HandlerSettings.model_validate(section)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        where = ".".join(str(part) for part in ("handler", *first["loc"]))
        raise SettingsError(f"model-config.yaml: {where}: {first['msg']} (found {first['input']!r})") from None


def resolve_checkpoint(settings: HandlerSettings, model_dir: str | Path, environ: dict[str, str]) -> Path:
    """The checkpoint directory to load: the setting, else $SHOAL_CHECKPOINT, else `checkpoint/` inside the archive."""
    named = settings.checkpoint or environ.get("SHOAL_CHECKPOINT") or "checkpoint"
    path = Path(named).expanduser()
    return path if path.is_absolute() else Path(model_dir) / path
