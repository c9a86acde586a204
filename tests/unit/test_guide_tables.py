"""The guide's tables run on honest lists: distinct where they say so, repeated by a stated law, the same every time."""

from __future__ import annotations

from collections import Counter

from shoal.results import load_result, save_result

from benchmarks.guide_tables import _verdicts, strategies_result
from benchmarks.texts import CALL_CENTRE, LANGUAGES, book, repeated, workloads


def test_texts_are_as_many_and_as_distinct_as_they_say(tmp_path):
    lists = workloads(tmp_path, 100)
    assert {name: len(lines) for name, lines in lists.items()} == {
        "100 texts": 100,
        "50 call-centre prompts": 50,
        "10-minute audiobook": 260,
        "5 languages x 20": 100,
    }
    assert all(len(set(lines)) == len(lines) for lines in lists.values())
    assert len(CALL_CENTRE) == 50 and [len(lines) for lines in LANGUAGES.values()] == [20] * 5
    assert len(set(book(392))) == 392
    assert [len(lines) for lines in workloads(tmp_path, 10).values()] == [10, 5, 26, 10]


def test_a_demo_checkpoints_hundred_come_from_its_phrase_book(tmp_path):
    rows = "".join(f"en\tdemo\tPhrase {i}.\n" for i in range(120))
    (tmp_path / "phrases.tsv").write_text("language\tgroup\ttext\n" + rows, encoding="utf-8")
    assert workloads(tmp_path, 100)["100 texts"] == [f"Phrase {i}." for i in range(100)]


def test_repeats_follow_zipf_over_a_quarter_of_the_texts():
    texts = [str(i) for i in range(400)]
    drawn = repeated(texts, 1.0)
    assert len(drawn) == 400 and drawn == repeated(texts, 1.0) and set(drawn) <= set(texts[:100])
    counts = Counter(repeated([str(i) for i in range(40_000)], 1.0))
    assert 1.6 < counts["0"] / counts["1"] < 2.4 and 8 < counts["0"] / counts["9"] < 12


def test_verdicts_tell_what_was_missed():
    def rows(*factors):
        names = ("none", "batching", "batching + model caching", "everything")
        return {
            name: {"rtf": rtf, "ratio": factors[0] / rtf, "cpu_ratio": 1.0}
            for name, rtf in zip(names, factors, strict=True)
        }

    said = _verdicts({"100 texts, distinct": rows(1.0, 0.2, 0.3, 0.05), "100 texts, repeated": rows(1, 0.5, 0.25, 0.2)})
    assert "reached" in said[0] and "not reached" not in said[0] and "5.0x" in said[1] and "not reached" in said[1]
    assert len(said) == 3 and "batching + model caching was slower than batching" in said[2]


def test_a_run_becomes_a_record_to_keep(tmp_path):
    table = {"none": {"rtf": 0.5, "hit_rate": None}, "everything": {"rtf": 0.1, "hit_rate": 0.75}}
    kept = load_result(save_result(strategies_result(table, {"COUNT": 4}), tmp_path / "run.json"))
    assert kept.rows == [{"strategy": "none", "rtf": 0.5}, {"strategy": "everything", "rtf": 0.1, "hit_rate": 0.75}]
    assert kept.parameters == {"COUNT": 4}
