"""Settings for all tests: one thread each, since the networks are tiny and spinning threads slow each other down."""

import os
import signal
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts background jobs with Ctrl-C ignored, and what they start inherits that; these tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """For two processes (`-n 2 --dist loadgroup`): what starts servers, kernels and browsers stays in one of them."""
    for item in items:
        part = Path(item.path).relative_to(Path(__file__).parent)
        group = "servers" if part.parts[0] in ("serving", "notebooks") else str(part)
        item.add_marker(pytest.mark.xdist_group(group))
