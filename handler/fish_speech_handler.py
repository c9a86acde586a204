"""TorchServe's way into Shoal: `handle` is called once to load, then with requests. Holds no model code.

Continuous mode (the default): TorchServe calls again and again with all live requests; each call decodes for one slice.
A request with nothing to say yet is taken out of `ctx.request_ids`, so TorchServe writes nothing for it and presents it
again. Classic mode (`continuousBatching: false`): one call is one batch, answered whole.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from shoal.memory import limit_memory
from shoal.serving.caches import open_cache, warm_phrases
from shoal.serving.control import ControlFile
from shoal.serving.limits import HandlerSettings, SettingsError, load_settings, resolve_checkpoint
from shoal.serving.metrics import MetricsEmitter
from shoal.serving.replies import Reply
from shoal.serving.service import SpeechService
from shoal.speech import FishSpeech

logger = logging.getLogger(__name__)
requests_log = logging.getLogger("shoal.requests")  # a JSON object per request

_handler: _Handler | None = None


def handle(data: list[dict[str, Any]] | None, ctx: Any) -> list[Any] | None:
    """TorchServe's entry point: data is None for loading, else one row per request."""
    global _handler
    if _handler is None:
        _handler = _Handler(ctx)
    if data is None:
        return None
    return _handler(data, ctx)


class _Handler:
    """One loaded model and how TorchServe talks to it. (Private: TorchServe looks for `handle`, not for a class.)"""

    def __init__(self, ctx: Any) -> None:
        config = ctx.model_yaml_config or {}
        settings = load_settings(config.get("handler"))
        self.continuous = bool(config.get("continuousBatching", False))
        self.service = SpeechService(_load_model(settings, ctx), settings)
        self.control = ControlFile(settings.control or os.environ.get("SHOAL_CONTROL"))
        self.metrics = MetricsEmitter(ctx.metrics, ctx.model_name)
        if phrases := warm_phrases(settings, ctx.system_properties["model_dir"]):
            warmed = self.service.warm(phrases, settings.warm_voices)
            logger.info("warmed up: %d phrases decoded, %d known already", warmed.decoded, warmed.known)
            for phrase, error in warmed.failed.items():
                logger.warning("warm-up: %r: %s", phrase[:80], error)

    def __call__(self, data: list[dict[str, Any]], ctx: Any) -> list[Any]:
        if (limits := self.control.poll(now=not self.service.pending)) is not None:
            self.service.apply(limits)
        out = self._slice(data, ctx) if self.continuous else self._batch(data, ctx)
        records = self.service.take_records()
        for record in records:
            requests_log.info("%s", record.to_json())
        self.metrics.emit(records)
        self.metrics.emit_state(self.service.state)
        return out

    def _slice(self, data: list[dict[str, Any]], ctx: Any) -> list[bytes]:
        """One call of the continuous mode."""
        ids = [ctx.get_request_id(i) for i in range(len(data))]
        for gone in set(self.service.request_ids()).difference(ids):
            self.service.cancel(gone)
        for i, request_id in enumerate(ids):
            if not self.service.knows(request_id):
                self._admit(i, request_id, data[i], ctx, may_stream=True)
        self.service.run_slice()
        replies = self.service.collect()
        out, criteria = [], []
        for i, request_id in enumerate(ids):
            reply = replies.get(request_id)
            if reply is None:
                ctx.request_ids.pop(i)
            else:
                _tell(ctx, i, reply)
            out.append(reply.body if reply else b"")
            criteria.append(_criterion(reply))
        ctx.stopping_criteria = criteria
        return out

    def _batch(self, data: list[dict[str, Any]], ctx: Any) -> list[bytes]:
        """One call of the classic mode: all rows to their end, replies in order."""
        ids = [ctx.get_request_id(i) for i in range(len(data))]
        for i, request_id in enumerate(ids):
            self._admit(i, request_id, data[i], ctx, may_stream=False)
        replies: dict[str, Reply] = {}
        while self.service.pending:
            self.service.run_slice()
            replies.update(self.service.collect())
        for i, request_id in enumerate(ids):
            _tell(ctx, i, replies[request_id])
        return [replies[request_id].body for request_id in ids]

    def _admit(self, i: int, request_id: str, row: dict[str, Any], ctx: Any, *, may_stream: bool) -> None:
        # GET :8081/models/NAME?customized=true. In the continuous mode TorchServe 0.12 puts that request back into its
        # queue for ever, whatever the handler answers: ask /predictions/NAME/1.0/v1/info there instead.
        if ctx.get_request_header(i, "describe") == "True":
            self.service.admit_describe(request_id)
            return
        key = "body" if "body" in row else "data"  # gRPC clients name the part themselves, by custom "data"
        part = ctx.get_request_header(i, key) or {}
        content_type = part.get("content-type") if isinstance(part, dict) else None
        url_path = ctx.get_request_header(i, "url_path")
        self.service.admit(request_id, row.get(key), content_type, url_path, may_stream=may_stream)


def _tell(ctx: Any, i: int, reply: Reply) -> None:
    """Status and headers of row i."""
    ctx.set_response_status(reply.status, reply.phrase, i)
    ctx.set_response_content_type(i, reply.content_type)
    for name, value in reply.headers.items():
        ctx.set_response_header(i, name, value)


def _criterion(reply: Reply | None) -> Any:
    """What TorchServe asks about a row: None is a normal whole reply; False goes on streaming, True ends the stream."""
    answer = None if reply is None or not reply.stream else reply.final
    return lambda _body: answer


def _load_model(settings: HandlerSettings, ctx: Any) -> FishSpeech:
    model_dir, gpu = ctx.system_properties["model_dir"], ctx.system_properties.get("gpu_id")
    device = f"cuda:{gpu}" if settings.device == "auto" and gpu is not None else settings.device
    model = FishSpeech.load(
        resolve_checkpoint(settings, model_dir, dict(os.environ)),
        device=device,
        dtype=settings.dtype,
        codec_dtype=settings.codec_dtype,
        max_batch_size=settings.max_batch_size,
        threads=settings.threads,
        cache=open_cache(settings),
    )
    if settings.voices is not None:
        folder = os.path.join(model_dir, os.path.expanduser(settings.voices))
        if not os.path.isdir(folder):
            raise SettingsError(f"model-config.yaml: handler.voices: {folder} is no directory")
        model.voices.load_folder(folder)
    if settings.memory_limit is not None:
        logger.info("memory: %s", limit_memory(model, settings.memory_limit))
    return model
