"""docs/rest.md and docs/openapi.json are what the schema says now."""

from __future__ import annotations

import json

from shoal.cli import app
from shoal.project import project_root
from shoal.serving.openapi import openapi
from shoal.serving.schema import OpenAISpeechRequest, TTSRequest
from typer.testing import CliRunner


def test_the_pages_in_docs_are_up_to_date(tmp_path):
    done = CliRunner().invoke(app, ["schema", str(tmp_path)])
    assert done.exit_code == 0, done.output
    for name in ("rest.md", "openapi.json"):
        committed = (project_root() / "docs" / name).read_text(encoding="utf-8")
        assert (tmp_path / name).read_text(encoding="utf-8") == committed, "run `shoal schema docs`"


def test_every_field_is_described():
    page = (project_root() / "docs" / "rest.md").read_text(encoding="utf-8")
    for model in (TTSRequest, OpenAISpeechRequest):
        assert all(f"| `{name}` |" in page for name in model.model_fields)
    document = openapi()
    assert json.loads(json.dumps(document)) == document
    assert set(document["components"]["schemas"]["TTSRequest"]["properties"]) == set(TTSRequest.model_fields)


def test_a_place_that_does_not_exist_is_named(tmp_path):
    failed = CliRunner().invoke(app, ["schema", str(tmp_path / "nowhere")])
    assert failed.exit_code == 1 and "no directory" in failed.output
