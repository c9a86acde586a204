"""The archive carries the library: it serves where only the packages of handler/requirements.txt are installed."""

import importlib.metadata
import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from shoal.archive import build_archive
from shoal.random_checkpoint import write_random_checkpoint
from shoal.serving.demo import check_wav
from shoal.serving.server import TorchServe

ROOT = Path(__file__).parents[2]
ABSENT = ("shoal", "pytest", "transformers", "typer", "fish_speech", "ipywidgets", "vector_quantize_pytorch")

pytestmark = [pytest.mark.server, pytest.mark.slow]


def closure(requirements):
    """Names of the installed distributions that the requirements need, directly or not, without extras."""
    names, todo = set(), [Requirement(line) for line in requirements]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in names or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        names.add(name)
        todo += [Requirement(text) for text in importlib.metadata.requires(name) or []]
    return names


@pytest.fixture(scope="module")
def runtime_python(tmp_path_factory):
    """The interpreter of an environment that sees the closure only, as links to what is installed here."""
    requirements = [
        line for line in (ROOT / "handler/requirements.txt").read_text().splitlines() if line and line[0] != "#"
    ]
    environment = tmp_path_factory.mktemp("runtime") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    where = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    site_packages = Path(where.stdout.strip())
    for name in closure([*requirements, "torchserve"]):
        distribution = importlib.metadata.distribution(name)
        tops = {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}
        for top in tops:
            link, target = site_packages / top, Path(distribution.locate_file(top))
            if target.exists() and not link.exists():
                link.symlink_to(target)
    return python


def test_what_the_runtime_does_not_need_is_not_there(runtime_python):
    program = "import importlib.util, sys; print([n for n in sys.argv[1:] if importlib.util.find_spec(n)])"
    found = subprocess.run(
        [runtime_python, "-c", program, *ABSENT, "torch"], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "['torch']"


def test_the_archive_serves_there(runtime_python, tmp_path):
    checkpoint = tmp_path / "smoke"
    write_random_checkpoint(checkpoint, size="smoke", seed=0)
    archive = build_archive(tmp_path, checkpoint=checkpoint)
    config = ROOT / "config.properties"
    with TorchServe(archive, config=config, python=str(runtime_python), env={"PYTHONPATH": ""}) as server:
        server.wait_ready(timeout_s=240)
        body = json.dumps({"text": "Hello, nice to meet you.", "seed": 1, "max_new_tokens": 40}).encode()
        request = urllib.request.Request(server.predict_url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as reply:
            assert reply.status == 200
            assert check_wav(reply.read()) > 0
