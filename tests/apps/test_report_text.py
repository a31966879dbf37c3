"""Reports in a terminal."""

from __future__ import annotations

import subprocess
import sys

import pytest
from report_pages import printed, squeezed
from report_records import changed, of_kind

from deepseal.apps.report import story, text, words
from deepseal.apps.report.headline import sentence
from deepseal.record import Record


def test_a_verification_reads_verdict_first(records: list[Record]) -> None:
    check = of_kind(records, "watermark.verify")[0]
    assert check.results["p_value"] == pytest.approx(2.0**-256)
    expected = "owned: 0 of 256 bits wrong; a model without this mark would do as well with probability 9e-78"
    expected += "; allowed at 1e-9: 80"
    assert sentence(check) == expected
    shown = squeezed(text.show(check))
    assert shown.startswith(expected)
    null = check.results["null"]
    assert (
        f"random keys {null['n']}: {words.percent(null['mean_bit_error_rate'])} of the bits wrong on average" in shown
    )
    assert f"model {check.fingerprints['model']}" in shown and "deepseal 0." in shown


def test_warnings_follow_the_details(records: list[Record]) -> None:
    check = of_kind(records, "watermark.verify")[0]
    warned = changed(check, results={**check.results, "warnings": ["look here"]}, notes=["and here"])
    shown = squeezed(text.show(warned))
    assert shown.index("random keys") < shown.index("warning: look here") < shown.index("note: and here")


def test_every_kind_has_a_sentence(records: list[Record]) -> None:
    shown = {record.kind: sentence(record) for record in reversed(records) if record.status == "ok"}
    train, embed = records[0].results, of_kind(records, "watermark.embed")[0].results
    assert shown["model.train"].startswith(
        f"trained deepseal.adapter.zoo:mlp on digits: accuracy {words.percent(train['accuracy'])} (95% interval "
    )
    assert shown["watermark.keygen"] == "key made: 256 bits, scheme deepsigns, owner Example Ltd, encrypted: yes"
    assert shown["watermark.embed"].startswith("mark embedded: 0 of 256 bits wrong; accuracy ")
    assert words.percent(embed["accuracy_after"]) in shown["watermark.embed"]
    assert shown["attack.run"].startswith("attack none: a plain copy; accuracy ")
    evaluated = changed(records[0], kind="model.evaluate")
    assert sentence(evaluated).startswith("accuracy ")
    (failed,) = [record for record in records if record.status == "failed"]
    assert sentence(failed) == f"attack.run failed: {failed.error}"


def test_the_table_has_one_row_a_model(records: list[Record]) -> None:
    table = text.table(records)
    columns = [list(column.cells) for column in table.columns]
    assert [column.header for column in table.columns] == [
        "model",
        "made by",
        "accuracy",
        "wrong bits",
        "p-value",
        "verdict",
    ]
    rows = story.rows(records)
    for row, cells in zip(rows, zip(*columns, strict=True), strict=True):
        name, how, accuracy, wrong, p_value, verdict = (str(text_) for text_ in cells)
        assert name.startswith(row.name) and how == (row.how or "–")
        if row.reading is not None:
            results = row.reading.results
            assert accuracy == words.percent(row.accuracy)
            assert wrong == f"{results['bit_errors']} of {results['bits']}"
            assert float(p_value) == pytest.approx(results["p_value"], rel=0.5)
            assert verdict == {"owned": "owned", "not-owned": "not owned"}[results["verdict"]]
        else:
            assert row.failure is not None and verdict == f"failed: {row.failure.error}"
    assert len(rows) == len(of_kind(records, "watermark.verify")) + 1


def test_text_fits_a_narrow_terminal(records: list[Record]) -> None:
    for renderable in (text.table(records), *(text.show(record) for record in records)):
        assert max(len(line) for line in printed(renderable, 80).splitlines()) <= 80


@pytest.mark.parametrize(
    ("value", "limit", "shown"),
    [
        (8.636e-78, 1e-9, "9e-78"),
        (0.2149, 1e-9, "0.21"),
        (1.0, None, "1"),
        (1e-9, 1e-9, "1e-9"),
        (1.04e-9, 1e-9, "1.04e-9"),
        (0.99e-9, 1e-9, "1e-9"),
        (1e-6, None, "1e-6"),
        (0.0, None, "<1e-300"),
        (None, None, "not recorded"),
        ("1", None, "not recorded"),
        (float("nan"), None, "not recorded"),
    ],
)
def test_probabilities_never_round_across_the_limit(value: object, limit: float | None, shown: str) -> None:
    assert words.probability(value, limit) == shown


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (words.percent(0.97771), "97.77%"),
        (words.points(-0.2785), "−0.28 points"),
        (words.points(0.0), "0.00 points"),
        (words.points(1.5), "+1.50 points"),
        (words.count(301066), "301,066"),
        (words.seconds(10.86), "10.9 s"),
        (words.seconds(3600.0), "3,600 s"),
        (words.one_in(1e-9), "1 in 1,000,000,000"),
        (words.scientific(9e-78), "9\u00a0×\u00a010⁻⁷⁸"),
        (words.moment("2026-11-30T08:40:48+00:00"), "2026-11-30 08:40:48 UTC"),
        (words.file_name("C:\\models\\a.safetensors"), "a.safetensors"),
        (words.clean("a\n b\u202ec"), "a b\\u202ec"),
        (words.null(None), "not asked for"),
    ],
)
def test_values_read_as_people_write_them(shown: str, expected: str) -> None:
    assert shown == expected


def test_text_needs_neither_torch_nor_jinja_nor_matplotlib() -> None:
    code = "import sys, deepseal.apps.report.text; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "jinja2", "matplotlib"} & set(result.stdout.split())


@pytest.mark.parametrize(
    ("kind", "results", "expected"),
    [
        ("model.inspect", {"architecture": "m:f", "parameters": 1234}, "m:f, 1,234 parameters"),
        ("model.serve", {"queries": 256, "requests": 4, "refused": 1}, "answered 256 queries in 4 requests, 1 refused"),
        (
            "watermark.inspect",
            {"advised": 320, "limit": 10240, "layers": [{}]},
            "room for 320 bits that last, 10,240 at most, in 1 layer",
        ),
        ("watermark.inspect", {"scheme": "adi", "bits": 100, "owner": "Ex"}, "a key of Ex: adi, 100 bits"),
        ("attack.list", {"attacks": [{}, {}]}, "2 attacks to choose from"),
        ("private.serve", {"clients": 1, "questions": 2, "failures": 0}, "served 1 client, 2 questions, 0 failures"),
        ("report.html", {"file": "r.html", "records": 1}, "wrote r.html from 1 record"),
        ("report.pdf", {"file": 7, "records": "many"}, "wrote not recorded from not recorded records"),
        ("somebody.elses", {"file": "x"}, "somebody.elses: done"),
    ],
)
def test_headlines(records: list[Record], kind: str, results: dict[str, object], expected: str) -> None:
    assert sentence(changed(records[0], kind=kind, results=results)) == expected


def test_a_log_of_requests_is_one_line(records: list[Record]) -> None:
    row = {"inputs": 64, "milliseconds": 50.0, "request_sha256": "a" * 64, "error": None}
    check = of_kind(records, "watermark.verify")[0]
    asked = changed(check, results={**check.results, "query_log": [row, {**row, "error": "late"}]})
    shown = squeezed(text.show(asked))
    assert "queries 2 requests, 128 inputs, 0.1 s, 1 failed; each is in the record (--json)" in shown
    assert "aaaa" not in shown
    for odd in (None, [], "text", [1, 2], {"inputs": 3}):
        assert words.requests(odd) is None
        assert "queries" in squeezed(text.show(changed(check, results={**check.results, "query_log": odd})))
    assert words.requests([{"inputs": "many", "milliseconds": None}]).startswith("1 request, 0 inputs, 0 s, all")
