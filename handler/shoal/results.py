"""Measured results to keep: one JSON record with machine, versions and parameters, and two of them side by side."""

from __future__ import annotations

import importlib.metadata
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.errors import RequestError, ShoalError

FORMAT = "shoal.result.1"
_LARGEST_FILE = 8 * 2**20
_PACKAGES = ("shoal", "torch", "fish-speech", "torchserve", "numpy")

Value = str | int | float | bool | None


class Result(BaseModel):
    """What was measured, where and with what. `rows` are the figures, told apart by the column `key`."""

    model_config = ConfigDict(extra="forbid")

    format: Literal["shoal.result.1"] = FORMAT
    kind: str = Field(min_length=1)  # batch_search, guide_strategies, ...: only results of one kind can be compared
    title: str
    made: datetime
    machine: dict[str, Any]
    versions: dict[str, str]
    parameters: dict[str, Any]
    key: str
    rows: list[dict[str, Value]] = Field(min_length=1)


@dataclass(frozen=True)
class Difference:
    """One figure in two results; `ratio` is the second over the first, None where that means nothing."""

    row: str
    column: str
    first: float
    second: float
    ratio: float | None


def new_result(
    kind: str, title: str, rows: Sequence[Mapping[str, Value]], key: str, parameters: Mapping[str, Any] | None = None
) -> Result:
    """A record of figures measured here and now.

    Raises:
        RequestError: no rows, or one without `key`, or two with the same; the message says which.
    """
    names = [row.get(key) for row in rows]
    if not rows or None in names or len(set(names)) != len(names):
        raise RequestError(f"{kind}: rows must differ in their {key!r}, and have one: {names[:20]}")
    return Result(
        kind=kind,
        title=title,
        made=datetime.now(timezone.utc),
        machine=describe_machine(),
        versions=versions(),
        parameters=dict(parameters or {}),
        key=key,
        rows=[{column: _plain(value) for column, value in row.items()} for row in rows],
    )


def describe_machine() -> dict[str, Any]:
    """The processor, its cores, the memory and the GPUs, as `shoal.hardware` finds them."""
    import torch

    from shoal.hardware import inspect_machine

    found = inspect_machine()
    return {
        "cpu": found.cpu,
        "cores": found.cores,
        "threads": torch.get_num_threads(),
        "memory_gb": round(found.memory_total / 1e9, 1),
        "gpu": ", ".join(gpu.name for gpu in found.gpus) or None,
    }


def versions() -> dict[str, str]:
    """Of Python and of the packages that matter to a figure, where they are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def save_result(result: Result, path: str | Path) -> Path:
    """Write it as JSON; folders are made. Raises RequestError if it cannot be written."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror}") from None
    return path


def load_result(path: str | Path) -> Result:
    """What `save_result` wrote.

    Raises:
        ShoalError: it is missing, too large, no JSON, of a newer Shoal, or something else; the message says which.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise ShoalError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > _LARGEST_FILE:
        raise ShoalError(f"{path} is larger than {_LARGEST_FILE >> 20} MB: no saved result is")
    try:
        return Result.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        if where == "format":
            raise ShoalError(
                f"{path} is {first['input']!r}, this Shoal reads {FORMAT}: use the Shoal that wrote it"
            ) from None
        raise ShoalError(f"{path} is no saved result: {where or 'content'}: {first['msg']}") from None


def compare_results(first: Result, second: Result) -> list[Difference]:
    """Every figure that both have, row by row.

    Raises:
        RequestError: they are of different kinds, or have no row in common.
    """
    if first.kind != second.kind:
        raise RequestError(f"a result of {first.kind} and one of {second.kind} cannot be compared")
    theirs = {row[second.key]: row for row in second.rows}
    found = []
    for row in first.rows:
        other = theirs.get(row[first.key])
        for column, a in row.items():
            b = other.get(column) if other else None
            if column != first.key and _is_figure(a) and _is_figure(b):
                found.append(Difference(str(row[first.key]), column, a, b, b / a if a else None))
    if not found:
        raise RequestError(f"two results of {first.kind} with no figure in common: their rows are of other names")
    return found


def figures(result: Result) -> list[str]:
    """The columns that hold numbers, in the order in which they first come."""
    columns = dict.fromkeys(column for row in result.rows for column, value in row.items() if _is_figure(value))
    return [column for column in columns if column != result.key]


def _is_figure(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _plain(value: Any) -> Value:
    """JSON has no infinity, and NumPy's numbers are not its own."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
