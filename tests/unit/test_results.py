"""What was measured is kept as it was, and two of a kind are compared and reported."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from shoal.cli import app
from shoal.errors import RequestError, ShoalError
from shoal.report import comparison_chart, export_report, render_report
from shoal.results import FORMAT, compare_results, figures, load_result, new_result, save_result
from typer.testing import CliRunner

BEFORE = [
    {"strategy": "none", "seconds": 90.0, "texts/s": 1.1, "failed": 0, "note": "as shipped"},
    {"strategy": "everything", "seconds": 7.5, "texts/s": 13.0, "failed": 0, "note": "<b>&"},
]
AFTER = [
    {"strategy": "everything", "seconds": 5.0, "texts/s": 20.0, "failed": 1},
    {"strategy": "new", "seconds": 1.0, "texts/s": 100.0},
]


def result(rows=BEFORE, kind="guide_strategies", title="The guide's strategies", **parameters):
    return new_result(kind, title, rows, "strategy", parameters)


def test_it_comes_back_as_it_was_with_machine_versions_and_parameters(tmp_path):
    made = result(BATCH=8, VOICE=None)
    kept = load_result(save_result(made, tmp_path / "new folder" / "a.json"))
    assert kept == made and kept.rows == BEFORE and kept.parameters == {"BATCH": 8, "VOICE": None}
    assert kept.machine["cores"] >= 1 and kept.machine["memory_gb"] > 0 and kept.versions["torch"]
    assert figures(kept) == ["seconds", "texts/s", "failed"]


def test_numbers_that_json_lacks_are_told_as_missing(tmp_path):
    rows = [{"strategy": "a", "seconds": float("inf"), "p95": np.float64(0.5), "count": np.int64(3)}]
    kept = load_result(save_result(result(rows), tmp_path / "a.json"))
    assert kept.rows == [{"strategy": "a", "seconds": None, "p95": 0.5, "count": 3}]


@pytest.mark.parametrize("rows", [[], [{"seconds": 1.0}], [BEFORE[0], BEFORE[0]]], ids=["none", "nameless", "twice"])
def test_rows_must_have_names_of_their_own(rows):
    with pytest.raises(RequestError, match="strategy"):
        result(rows)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "no saved result"),
        ("[]", "no saved result"),
        ('{"kind": "batch_search", "results": {}}', "no saved result"),
        (json.dumps({"format": "shoal.result.9"}), "reads shoal.result.1"),
        (" " * (9 << 20), "larger than 8 MB"),
        ("\x80pickle", "no saved result"),
    ],
)
def test_what_is_no_result_is_told(tmp_path, content, why):
    file = tmp_path / "other.json"
    file.write_text(content, encoding="latin-1")
    with pytest.raises(ShoalError, match=why) as told:
        load_result(file)
    assert "other.json" in str(told.value)
    with pytest.raises(ShoalError, match=r"missing\.json"):
        load_result(tmp_path / "missing.json")


def test_every_field_is_checked(tmp_path):
    content = json.loads(result().model_dump_json())
    assert content["format"] == FORMAT
    for wrong in ({"rows": []}, {"rows": [{"strategy": [1]}]}, {"made": "yesterday"}, {"surplus": 1}):
        (tmp_path / "a.json").write_text(json.dumps(content | wrong))
        with pytest.raises(ShoalError, match=next(iter(wrong))):
            load_result(tmp_path / "a.json")


def test_two_of_a_kind_are_compared_figure_by_figure():
    found = {(d.row, d.column): d for d in compare_results(result(), result(AFTER))}
    assert set(found) == {("everything", column) for column in ("seconds", "texts/s", "failed")}
    assert found["everything", "seconds"].ratio == pytest.approx(5 / 7.5)
    assert found["everything", "failed"].ratio is None
    with pytest.raises(RequestError, match="cannot be compared"):
        compare_results(result(), result(kind="batch_search"))
    with pytest.raises(RequestError, match="no figure in common"):
        compare_results(result(BEFORE[:1]), result(AFTER[1:]))


def test_a_picture_shows_before_and_after_and_says_what_moved():
    chart = comparison_chart(compare_results(result(), result(AFTER)), "seconds")
    assert "seconds: everything went to 0.67 times" in chart
    assert chart.count("<rect") == 2 and "everything, before" in chart and "everything, after" in chart
    with pytest.raises(RequestError, match="rtf"):
        comparison_chart(compare_results(result(), result(AFTER)), "rtf")


def test_a_report_needs_no_other_file_and_trusts_no_text(tmp_path):
    html = export_report(result(BATCH="<script>alert(1)</script>"), tmp_path / "r.html").read_text(encoding="utf-8")
    assert html.count("<svg") == 3 and "90" in html and "as shipped" in html
    assert "<script" not in html and "<b>&" not in html and "&lt;b&gt;&amp;" in html
    assert not re.search(r"(src|href)=|url\(|@import", html), "nothing is loaded from elsewhere"
    assert "prefers-color-scheme: dark" in html and "cores" in html and "torch" in html
    both = render_report([result(), result(AFTER)])
    assert "before and after" in both and "0.667x" in both and both.count("<svg") == 3
    for wrong in ([], [result()] * 3):
        with pytest.raises(RequestError, match="one result or of two"):
            export_report(wrong, tmp_path / "r.html")
    with pytest.raises(RequestError, match="cannot be written"):
        export_report(result(), tmp_path / "no" / "r.html")


def test_the_command_line_reports(tmp_path):
    for name, rows in (("a", BEFORE), ("b", AFTER)):
        save_result(result(rows), tmp_path / f"{name}.json")
    out = tmp_path / "r.html"
    done = CliRunner().invoke(app, ["report", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "-o", str(out)])
    assert done.exit_code == 0 and str(out) in done.output.replace("\n", "") and "before and after" in out.read_text()
    assert CliRunner().invoke(app, ["report", str(tmp_path / "none.json")]).exit_code == 1
