"""The REST interface in words and as an OpenAPI file, both made from the request schema: `shoal schema docs`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from shoal import __version__
from shoal.serving.audio import CONTENT_TYPES
from shoal.serving.limits import Limits
from shoal.serving.schema import INFO_PATH, OpenAISpeechRequest, ReferenceAudio, TTSRequest

_MODEL = "/predictions/fish_speech"
_ERRORS = {
    400: "Something in the request is wrong; the message says what, and what is allowed.",
    404: "Nothing is served at this path.",
    413: "Text or reference audio is beyond a limit.",
    500: "The server's own fault; its log has more under the id in the message.",
    503: "No room now; Retry-After says when to come again.",
    504: "Not done within the time that a request may take.",
    507: "Out of memory, also with fewer requests at a time.",
}
_HEADERS = {
    "X-Shoal-Cache": "hit: the utterance was known; miss: it was decoded",
    "X-Shoal-Seed": "what to send as seed for the same sound again",
    "X-Shoal-Audio-Seconds": "length of the sound (whole replies)",
    "X-Shoal-Batch-Size": "the most requests that it decoded together with (whole replies)",
    "X-Shoal-Time-Ms": "from admission to reply (whole replies)",
}


def openapi() -> dict[str, Any]:
    """The interface as an OpenAPI 3.1 document."""
    schemas: dict[str, Any] = {}
    for model in (TTSRequest, OpenAISpeechRequest):
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[model.__name__] = schema
    # texts are checked for something to say, and names for their length, in ways that a pattern cannot express
    schemas["Error"] = {
        "type": "object",
        "required": ["code", "type", "message"],
        "properties": {"code": {"type": "integer"}, "type": {"type": "string"}, "message": {"type": "string"}},
    }
    sound = {
        "description": "The sound, whole or as it is made.",
        "headers": {name: {"description": text, "schema": {"type": "string"}} for name, text in _HEADERS.items()},
        "content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in _kinds()},
    }
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    errors = {str(code): {"description": text, "content": error} for code, text in _ERRORS.items()}

    def speaks(model: type[BaseModel], summary: str, *, plain: bool) -> dict[str, Any]:
        content: dict[str, Any] = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
        if plain:
            content["text/plain"] = {"schema": {"type": "string"}}
        body = {"required": True, "content": content}
        return {"post": {"summary": summary, "requestBody": body, "responses": {"200": sound} | errors}}

    info = {"200": {"description": "Engine, checkpoint, voices, limits, cache.", "content": {"application/json": {}}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Shoal", "version": __version__, "license": {"name": "Apache-2.0"}},
        "servers": [{"url": "http://127.0.0.1:8080"}],
        "paths": {
            _MODEL: speaks(TTSRequest, "Speak, with upstream's field names", plain=True),
            f"{_MODEL}/1.0/v1/audio/speech": speaks(OpenAISpeechRequest, "Speak, with OpenAI's", plain=False),
            f"{_MODEL}/1.0/{INFO_PATH}": {"get": {"summary": "What serves here", "responses": info}},
        },
        "components": {"schemas": schemas},
    }


def rest_markdown() -> str:
    """The interface for people to read."""
    lines = [
        "# REST reference",
        "",
        "Made from the request schema by `shoal schema docs`; [openapi.json](openapi.json) is the same for programs.",
        "",
        f"- `POST {_MODEL}`: JSON with upstream's field names, or text/plain, which is the text.",
        f"- `POST {_MODEL}/1.0/v1/audio/speech`: OpenAI's body. Its client works with the base URL",
        f"  `http://127.0.0.1:8080{_MODEL}/1.0/v1` and any API key.",
        f"- `GET {_MODEL}/1.0/{INFO_PATH}`: what serves: engine, checkpoint, voices, limits, cache, and the last",
        "  10 seconds in figures.",
        "",
        "A field that is not listed is a 400, as is a number written as a string. `fish_speech` is the archive's name.",
        "",
    ]
    for title, model in (
        ("Upstream's fields", TTSRequest),
        ("One of `references`", ReferenceAudio),
        ("OpenAI's fields", OpenAISpeechRequest),
    ):
        lines += [f"## {title}", "", "| field | type | default | |", "|---|---|---|---|", *_rows(model), ""]
    lines += ["## Replies", "", "| format | Content-Type |", "|---|---|"]
    lines += [f"| {fmt} | {kind} |" for fmt, kind in CONTENT_TYPES.items()]
    lines += [
        "| stream_format sse | text/event-stream: `speech.audio.delta` with base64, then `speech.audio.done` |",
        "",
        "A streamed WAV says in its header that it lasts until the end; FLAC that its length is unknown.",
        "",
        "| header | |",
        "|---|---|",
        *(f"| {name} | {text} |" for name, text in _HEADERS.items()),
        "",
        "## Errors",
        "",
        'JSON: `{"code": 400, "type": "invalid_request_error", "message": "..."}`, and on OpenAI\'s route an `error`',
        "object besides. An error is of one request alone. Once a stream has begun, only its early end can tell; as",
        "`sse`, an error event does.",
        "",
        "| status | |",
        "|---|---|",
        *(f"| {code} | {text} |" for code, text in _ERRORS.items()),
        "",
        "## Limits",
        "",
        "Defaults, to be changed in `handler/model-config.yaml`:",
        "",
        "| limit | default |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in Limits().model_dump().items()),
        "",
        "TorchServe itself refuses bodies above 64 MB (`max_request_size` in config.properties) with an empty 413.",
        "",
    ]
    return "\n".join(lines)


def write_docs(directory: Path) -> list[Path]:
    """Write rest.md and openapi.json into a directory."""
    files = {"rest.md": rest_markdown(), "openapi.json": json.dumps(openapi(), indent=1, ensure_ascii=False) + "\n"}
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")
    return [directory / name for name in files]


def _rows(model: type[BaseModel]) -> list[str]:
    schema = model.model_json_schema()
    required, rows = schema.get("required", []), []
    for name, field in schema["properties"].items():
        default = "required" if name in required else f"`{json.dumps(field.get('default'))}`"
        rows.append(f"| `{name}` | {_type(field)} | {default} | {field.get('description', '')} |")
    return rows


def _type(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_type(part) for part in field["anyOf"])
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "$ref" in field:
        return field["$ref"].rsplit("/", 1)[-1]
    if field.get("type") == "array":
        return f"list of {_type(field['items'])}"
    low, high = field.get("minimum", field.get("exclusiveMinimum")), field.get("maximum")
    bounds = ""
    if high is not None:
        bounds = f", {low} to {high}"
    elif low is not None:
        bounds = f" from {low}"
    return f"{field.get('type', 'any')}{bounds}"


def _kinds() -> list[str]:
    return [*CONTENT_TYPES.values(), "text/event-stream"]
