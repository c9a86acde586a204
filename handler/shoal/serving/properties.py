"""Reads and writes values of Java properties files, as config.properties is one."""

from __future__ import annotations

from pathlib import Path


def read_properties(path: Path) -> dict[str, str]:
    """Keys and values of a Java properties file of plain `key=value` lines."""
    values = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.lstrip().startswith(("#", "!")):
            values[key.strip()] = value.strip()
    return values


def escaped(value: str) -> str:
    """Java reads properties files as Latin-1, with backslash escapes and UTF-16 units as \\uXXXX."""
    units = value.replace("\\", "\\\\").encode("utf-16-be")
    codes = [int.from_bytes(units[i : i + 2], "big") for i in range(0, len(units), 2)]
    return "".join(chr(code) if code < 128 else f"\\u{code:04x}" for code in codes)
