"""make: the list of targets, and what set-up says where the machine lacks something. Installs nothing."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def project(tmp_path):
    """What set-up reads, in a directory of its own (with a space in its name) that has no .venv."""
    copy = tmp_path / "a project"
    (copy / "scripts").mkdir(parents=True)
    for name in ("Makefile", "scripts/setup.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def make(directory, *arguments, **environment):
    # make passes its own flags on to makes that it starts, and these tests may run under one
    inherited = {
        k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHON", "MAKEOVERRIDES")
    }
    return subprocess.run(
        ["make", *arguments], cwd=directory, env=inherited | environment, capture_output=True, text=True, timeout=300
    )


def python_that(tmp_path, *cases):
    """An interpreter that answers some of the questions that set-up asks in its own way, the others as the real one."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\ncase "$*" in\n{"".join(cases)}esac\nexec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return str(path)


def only_line(result):
    """The one line of an error, less make's own word on the failed target."""
    assert result.returncode != 0
    lines = [line for line in result.stderr.splitlines() if not line.startswith("make")]
    assert len(lines) == 1, result.stderr
    return lines[0]


def test_help_is_the_default_and_lists_every_documented_target():
    result = make(ROOT)
    assert result.returncode == 0
    assert result.stdout == make(ROOT, "help").stdout
    for target in ("demo", "test", "serve", "stop", "archive", "notebooks", "lint", "clean"):
        assert re.search(rf"^  make {target} +\S", result.stdout, re.MULTILINE), target


def test_every_target_in_help_exists():
    for line in make(ROOT, "help").stdout.splitlines():
        assert make(ROOT, "--dry-run", line.split()[1]).returncode == 0, line


@pytest.mark.parametrize("answer", ["3.9.2", "3.13.0", ""])
def test_a_python_that_is_too_old_too_new_or_none_is_named_with_the_remedy(project, tmp_path, answer):
    python = python_that(tmp_path, f'*version_info*) echo "{answer}"; exit 0;;\n')
    line = only_line(make(project, "setup", PYTHON=python))
    assert f"PYTHON={python} is '{answer}'" in line
    assert "3.10, 3.11 or 3.12" in line


def test_without_any_python_the_line_says_how_to_get_one(project, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "sh", "make", "dirname", "cat", "cksum", "df", "awk"):
        (tools / tool).symlink_to(shutil.which(tool))
    assert "apt install python3 python3-venv" in only_line(make(project, "setup", PATH=str(tools)))


def test_a_missing_venv_module_is_said_with_the_remedy(project, tmp_path):
    python = python_that(tmp_path, "*ensurepip*) exit 1;;\n")
    assert "apt install python3-venv" in only_line(make(project, "demo", PYTHON=python))
    assert not (project / ".venv").exists()


def test_a_full_disk_is_said_before_anything_is_written(project):
    line = only_line(make(project, "test", PYTHON=sys.executable, SHOAL_MIN_FREE_MB="999999999"))
    assert "the disk is nearly full" in line
    assert not (project / ".venv").exists()


def test_a_failing_pip_is_one_line_that_names_the_log(project):
    result = make(project, "setup", PYTHON=sys.executable, PIP_NO_INDEX="1", PIP_FIND_LINKS="/nonexistent")
    line = only_line(result)
    assert "pip failed" in line
    assert "setuptools" in line
    assert (project / ".venv" / "setup.log").is_file()
    assert not (project / ".venv" / ".shoal-stamp").exists()


def test_stop_without_an_environment_is_no_error(project):
    result = make(project, "stop")
    assert result.returncode == 0
    assert "no server" in result.stdout
