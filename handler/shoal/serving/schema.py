"""What a request may say: upstream's field names, OpenAI's speech body, and how bytes from the wire become either.

Knows nothing of models or of TorchServe. Everything wrong raises RequestError (400), TooLargeError (413) or
UnknownPathError (404) with a message that names the field, what was wrong and what to do.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import json
import re
from collections.abc import Collection
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from typing_extensions import Self

from shoal.errors import RequestError, TooLargeError
from shoal.serving.limits import Limits

AudioFormat = Literal["wav", "pcm", "flac", "mp3", "opus"]
Speed = Annotated[float, Field(ge=0.25, le=4.0, allow_inf_nan=False)]  # OpenAI's bounds
SampleRate = Literal[8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000]

# A voice is looked up by name in a table, never joined to a path; the pattern keeps names printable all the same.
_VOICE_NAME = re.compile(r"\w[\w .-]{0,63}")
# Names that OpenAI's clients send when nobody chose a voice: the default voice unless one of that name is registered.
OPENAI_VOICES = frozenset(
    ("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse")
)
_OPENAI_PCM_RATE: SampleRate = 24000  # OpenAI's "pcm" is 16 bit mono at 24 kHz and carries no header that could say so
_OPENAI_PATH = "v1/audio/speech"
_UPSTREAM_PATH = "v1/tts"
INFO_PATH = "v1/info"  # tells what serves here; needs no body


class UnknownPathError(RequestError):
    """The path after the model name is none of those that Shoal answers."""

    status = 404


def check_text(value: str, what: str = "text") -> str:
    """Refuse what cannot be spoken or encoded: empty, NUL, lone surrogates. Returns the text unchanged."""
    if not value.strip():
        raise ValueError(f"{what} is empty; send at least one character that can be spoken")
    if "\x00" in value:
        raise ValueError(f"{what} contains a NUL character at position {value.index(chr(0))}; remove it")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise ValueError(
            f"{what} contains half of a surrogate pair (\\u{ord(value[exc.start]):04x}) at position {exc.start}; "
            "send valid Unicode"
        ) from None
    return value


def _voice_name(value: Any) -> Any:
    if isinstance(value, str) and not _VOICE_NAME.fullmatch(value):
        raise ValueError("is not a voice name: use letters, digits, space, '_', '-' and '.', at most 64 characters")
    return value


VoiceName = Annotated[str, BeforeValidator(_voice_name)]


class ReferenceAudio(BaseModel):
    """One voice sample: its sound (base64 on the wire, bytes here) and the words spoken in it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    audio: bytes = Field(repr=False, description="A sound file in base64: WAV, FLAC, OGG, MP3, AIFF and others.")
    text: str = Field(description="What is said in it.")

    @field_validator("audio", mode="before")
    @classmethod
    def _decode(cls, value: Any, info: ValidationInfo) -> bytes:
        if not isinstance(value, str):
            raise ValueError("must be a base64 string")
        if value.startswith("data:"):
            value = value.partition(",")[2]
        limit = _limits(info).max_reference_bytes
        if len(value) > limit * 4 // 3 + 4:
            raise TooLargeError(f"reference audio is larger than {limit} bytes; send a shorter or compressed sample")
        try:
            raw = base64.b64decode("".join(value.split()), validate=True)
        except (binascii.Error, ValueError):
            raise ValueError("is not valid base64; encode the bytes of an audio file") from None
        if not raw:
            raise ValueError("is empty; encode the bytes of an audio file")
        return raw

    @field_validator("text")
    @classmethod
    def _text(cls, value: str) -> str:
        check_text(value)
        if len(value) > 2000:
            raise ValueError(f"has {len(value)} characters; the words of a reference may have 2000")
        return value


class TTSRequest(BaseModel):
    """A request with upstream's field names. `sample_rate` and `stream_format` are Shoal's own."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    text: str = Field(description="What to say, in any language the checkpoint speaks.")
    reference_id: VoiceName | None = Field(None, description="Name of a registered voice.")
    references: list[ReferenceAudio] = Field([], description="Voice samples to speak like; not with reference_id.")
    format: AudioFormat = Field("wav", description="pcm is raw 16 bit little-endian mono.")
    sample_rate: SampleRate | None = Field(None, description="Hz of the reply; null is the model's own.")
    streaming: bool = Field(False, description="Send audio as it is made instead of all at the end.")
    stream_format: Literal["audio", "sse"] = Field("audio", description="sse: OpenAI's server-sent events.")
    seed: int | None = Field(None, ge=0, lt=2**63, description="The same seed gives the same audio.")
    temperature: float = Field(0.7, ge=0, le=2, allow_inf_nan=False, description="0 always takes the likeliest code.")
    top_p: float = Field(0.7, gt=0, le=1, allow_inf_nan=False)
    repetition_penalty: float = Field(1.2, ge=0.5, le=2, allow_inf_nan=False)
    max_new_tokens: int = Field(1024, ge=1, description="Most frames (1/21.5 s) per sentence.")
    chunk_length: int = Field(200, ge=50, le=1000, description="Bytes of UTF-8 per sentence chunk, about.")
    normalize: bool = Field(True, description="Accepted for upstream's clients; texts are always cleaned.")
    use_memory_cache: Literal["on", "off"] = Field("on", description="off: neither look up nor keep the result.")
    speed: Speed = Field(1.0, description="Tempo; the pitch stays. 2 is twice as fast.")
    loudness: float | None = Field(
        None,
        ge=-50,
        le=-5,
        allow_inf_nan=False,
        description="LUFS of a whole reply, as near as full scale allows; not with streaming.",
    )
    # Fish Audio's clients send these; the encoders here choose their own rates, so they have no effect.
    mp3_bitrate: int | None = Field(None, description="Without effect, for Fish Audio's clients.")
    opus_bitrate: int | None = Field(None, description="Without effect, for Fish Audio's clients.")
    latency: str | None = Field(None, description="Without effect, for Fish Audio's clients.")

    @field_validator("text")
    @classmethod
    def _text(cls, value: str, info: ValidationInfo) -> str:
        limit = _limits(info).max_text_chars
        if len(value) > limit:
            raise TooLargeError(
                f"text has {len(value)} characters, {limit} are allowed; split it into several requests"
            )
        return check_text(value)

    @field_validator("references")
    @classmethod
    def _references(cls, value: list[ReferenceAudio], info: ValidationInfo) -> list[ReferenceAudio]:
        limits = _limits(info)
        if len(value) > limits.max_references:
            raise ValueError(f"holds {len(value)} samples, {limits.max_references} are allowed")
        total = sum(len(ref.audio) for ref in value)
        if total > limits.max_reference_bytes:
            raise TooLargeError(f"references hold {total} bytes, {limits.max_reference_bytes} are allowed together")
        if value and info.data.get("reference_id") is not None:
            raise ValueError("cannot be given together with reference_id; send one of the two")
        return value

    @model_validator(mode="after")
    def _loudness(self) -> Self:
        if self.loudness is not None and (self.streaming or self.stream_format == "sse"):
            raise ValueError("loudness is measured over the whole sound: ask for it without streaming")
        return self

    @field_validator("max_new_tokens")
    @classmethod
    def _frames(cls, value: int, info: ValidationInfo) -> int:
        limit = _limits(info).max_new_tokens
        if value > limit:
            raise ValueError(f"must be at most {limit}")
        return value


class OpenAISpeechRequest(BaseModel):
    """The body of OpenAI's POST /v1/audio/speech. `model` and `instructions` have no effect here."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    input: str
    voice: VoiceName | None = None
    response_format: AudioFormat = "mp3"
    speed: Speed = 1.0
    stream_format: Literal["audio", "sse"] | None = None
    model: str | None = Field(None, description="Without effect: the archive is the model.")
    instructions: str | None = Field(None, description="Without effect.")
    seed: int | None = Field(None, ge=0, lt=2**63)

    @field_validator("input")
    @classmethod
    def _input(cls, value: str, info: ValidationInfo) -> str:
        limit = _limits(info).max_text_chars
        if len(value) > limit:
            raise TooLargeError(f"input has {len(value)} characters, {limit} are allowed; split it")
        return check_text(value, "input")

    def to_tts(self, voice_names: Collection[str] = ()) -> TTSRequest:
        """The same request in upstream's terms."""
        voice = self.voice if self.voice in voice_names or self.voice not in OPENAI_VOICES else None
        return TTSRequest.model_construct(
            text=self.input,
            reference_id=voice,
            format=self.response_format,
            sample_rate=_OPENAI_PCM_RATE if self.response_format == "pcm" else None,
            streaming=self.stream_format is not None,
            stream_format=self.stream_format or "audio",
            seed=self.seed,
            speed=self.speed,
        )


def is_openai_path(url_path: str | None) -> bool:
    """Whether the path after the model's name and version is OpenAI's speech route."""
    return (url_path or "").strip("/") == _OPENAI_PATH


def parse_request(
    body: Any,
    content_type: str | None,
    url_path: str | None,
    limits: Limits | None = None,
    voice_names: Collection[str] = (),
) -> TTSRequest:
    """Turn one request body, as TorchServe hands it over, into a checked TTSRequest.

    body: dict (JSON), str (text/plain: the text itself), bytes (anything TorchServe did not decode) or None (no body,
    which is what form encoding leaves). Raises RequestError, TooLargeError or UnknownPathError.
    """
    limits = limits or Limits()
    path = (url_path or "").strip("/")
    if path not in ("", _OPENAI_PATH, _UPSTREAM_PATH):
        raise UnknownPathError(
            f"nothing is served at {_short(path)}; use no path, '{_UPSTREAM_PATH}', '{_OPENAI_PATH}' or '{INFO_PATH}'"
        )
    fields = _fields_of(body, (content_type or "").partition(";")[0].strip().lower())
    if path != _OPENAI_PATH:
        return _validate(TTSRequest, fields, limits)
    if isinstance(body, str):
        raise RequestError("the OpenAI route takes a JSON body with 'input' and 'voice', not plain text")
    return _validate(OpenAISpeechRequest, fields, limits).to_tts(voice_names)


def _fields_of(body: Any, content_type: str) -> dict[str, Any]:
    hint = 'send JSON with \'Content-Type: application/json\', such as {"text": "Hello."}, or text/plain'
    is_json = "json" in content_type
    if body is None:
        raise RequestError(f"the request has no body (form encoding and multipart are not read); {hint}")
    if isinstance(body, (bytes, bytearray)):
        if content_type.startswith("text/"):
            body = _decode_utf8(bytes(body))
        elif is_json or content_type in ("", "application/octet-stream"):
            body, is_json = _decode_json(bytes(body), hint), True
        else:
            raise RequestError(f"Content-Type {_short(content_type)} is not read; {hint}")
    if isinstance(body, str) and not is_json:
        return {"text": body}
    if not isinstance(body, dict):
        raise RequestError(f"the JSON body must be an object, not {_json_type(body)}; {hint}")
    return body


def _decode_utf8(raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise RequestError(f"the body is not UTF-8 (byte {exc.start}); send it as UTF-8") from None


def _decode_json(raw: bytes, hint: str) -> Any:
    try:
        return json.loads(_decode_utf8(raw))
    except json.JSONDecodeError as exc:
        raise RequestError(
            f"the body is not valid JSON: {exc.msg} (line {exc.lineno}, column {exc.colno}); {hint}"
        ) from None
    except (RecursionError, ValueError):  # nested thousands deep, or a number of thousands of digits
        raise RequestError(
            f"the body is JSON beyond what is read here (too deep or too long a number); {hint}"
        ) from None


def _validate(model: type[Any], fields: dict[str, Any], limits: Limits) -> Any:
    try:
        return model.model_validate(fields, context=limits)
    except ValidationError as exc:
        errors = exc.errors(include_url=False)
        raise RequestError("; ".join(_explain(model, error) for error in errors[:3])) from None


def _explain(model: type[BaseModel], error: Any) -> str:
    """One sentence per validation error: the field, what was wrong, what was found, what to do."""
    loc, kind = [str(part) for part in error["loc"]], error["type"]
    name = ".".join(loc)
    if kind == "extra_forbidden":
        known = list(model.model_fields) if len(loc) == 1 else list(ReferenceAudio.model_fields)
        close = difflib.get_close_matches(loc[-1], known, n=1)
        guess = f"; did you mean '{close[0]}'?" if close else f"; known fields are {', '.join(known)}"
        return f"unknown field {_short(name)}{guess}"
    if kind == "missing":
        return f"field '{name}' is required"
    if kind == "value_error":
        message = str(error["ctx"]["error"])
        if not loc:  # fields that do not go together
            return message
        said = message if message.startswith(loc[-1]) else f"field '{name}' {message}"
        return said if loc[-1] in ("text", "input", "audio", "references") else f"{said} (got {_short(error['input'])})"
    if kind == "string_unicode":
        return f"{f'field {name!r}' if name else 'a field name'} is not valid Unicode (half of a surrogate pair?)"
    if kind == "string_type":
        return f"field '{name}' must be a string, not {_json_type(error['input'])}"
    return f"field '{name}': {error['msg']} (got {_short(error['input'])})"


def _short(value: Any) -> str:
    shown = repr(value) if not isinstance(value, (dict, list)) else _json_type(value)
    return ascii(shown)[1:-1] if len(shown) <= 80 else ascii(shown[:77])[1:-1] + "..."


def _json_type(value: Any) -> str:
    names = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _limits(info: ValidationInfo) -> Limits:
    return info.context if isinstance(info.context, Limits) else Limits()


AUDIO_FORMATS: tuple[str, ...] = get_args(AudioFormat)
