"""The pinned dependencies against the database of known flaws, where it can be reached."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from shoal.project import project_root

# Flaws that are known and do not reach us, with the reason; an entry that is no longer reported is removed.
ACCEPTED: dict[str, str] = {}


def test_no_pinned_package_has_a_known_flaw():
    pytest.importorskip("pip_audit", reason="pip-audit is not installed (pip install pip-audit)")
    command = [
        sys.executable,
        "-m",
        "pip_audit",
        "-r",
        str(project_root() / "constraints.txt"),
        "--no-deps",
        "--disable-pip",
    ]
    done = subprocess.run([*command, "-f", "json", "--timeout", "10"], capture_output=True, text=True, timeout=300)
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        pytest.skip(f"the database of flaws cannot be reached: {done.stderr.strip().splitlines()[-1:]}")
    audited = [package for package in found if "skip_reason" not in package]
    if len(audited) < len(found) / 2:  # an index that is no PyPI knows the packages, and nothing of their flaws
        pytest.skip(
            f"the database of flaws knows {len(audited)} of {len(found)} packages: it cannot be reached from here"
        )
    flaws = {
        f"{package['name']} {package['version']}: {flaw['id']}"
        for package in audited
        for flaw in package.get("vulns", ())
        if flaw["id"] not in ACCEPTED
    }
    assert not flaws, "update these pins in constraints.txt, or say in ACCEPTED why they do no harm"
