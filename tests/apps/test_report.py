"""The page of a report: what is shown is what the records say, whatever story they tell."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
from report_pages import Node, cell, check_page, check_rows, exact, section, squeezed
from report_records import changed, of_kind

from deepseal.apps.report import plots, story, text, words
from deepseal.apps.report.html import render
from deepseal.record import Record

CSS = Path(plots.__file__).with_name("page.css")


def test_the_page_has_one_section_a_topic(page: Node) -> None:
    headings = [node.text for node in page.all("h2")]
    assert headings[1:] == [
        "What was checked",
        "Runs that did not finish",
        "What each verdict means",
        "Warnings and notes",
        "How the mark stands up to attacks",
        "The same check where there is no mark",
        "What the mark cost",
        "Keys and models",
        "All runs",
        "Versions and machine",
        "Fingerprints (SHA-256)",
        "Records in full",
    ]


def test_the_headline_counts_what_the_verifications_say(page: Node, records: list[Record]) -> None:
    checks = of_kind(records, "watermark.verify")
    owned = sum(record.results["verdict"] == "owned" for record in checks)
    assert page.all("h2")[0].text == f"{owned} of {len(checks)} checks found the mark of “Example Ltd”."
    box = page.one("section", class_="verdict")
    assert "Marked model: 0 of 256 bits wrong; a model without this mark would do as well with probability" in box.text
    assert "marked model 1 of 1; attacked copies" in box.text and "other models 0 of 1" in box.text
    assert "at most 1 × 10⁻⁹ (1 in 1,000,000,000)" in box.text
    assert f"1 of {len(records)} runs did not finish" in box.text


def test_every_number_of_every_verification_is_the_records(page: Node, records: list[Record]) -> None:
    rows, seen = check_rows(page), 0
    for number, record in enumerate(records, start=1):
        if record.kind != "watermark.verify":
            continue
        row, results = rows[number], record.results
        assert exact(cell(row, "wrong bits")) == [results["bit_errors"], results["bits"]]
        assert cell(row, "wrong bits").text == f"{results['bit_errors']} of {results['bits']}"
        assert exact(cell(row, "allowed")) == [results["threshold"]]
        assert exact(cell(row, "probability without the mark")) == [results["p_value"]]
        assert cell(row, "verdict").text == {"owned": "owned", "not-owned": "not owned"}[results["verdict"]]
        assert results["verdict"] in cell(row, "verdict").one("span").attributes["class"].split()
        assert record.params["model"] in row.text
        seen += 1
    assert seen == len(of_kind(records, "watermark.verify")) >= 10


def test_each_verification_is_joined_with_what_made_the_model(page: Node, records: list[Record]) -> None:
    rows = check_rows(page)
    for number, record in enumerate(records, start=1):
        if record.kind != "watermark.verify":
            continue
        row, before = rows[number], records[number - 2]
        made, accuracy = cell(row, "how it was made").text, exact(cell(row, "accuracy"))
        if before.kind == "attack.run" and before.status == "ok":
            assert row.one("th").text.startswith("Attacked copy")
            assert before.params["attack"] in made
            for name, value in before.params["attack_params"].items():
                assert (f"{name} {value}" in made) == (value not in (None, []))
            assert accuracy == [before.results["accuracy_after"]]
        elif before.kind == "watermark.embed":
            assert row.one("th").text.startswith("Marked model")
            assert accuracy == [before.results["accuracy_after"]]
        else:
            assert row.one("th").text.startswith("Another model")
            assert made == "trained on digits, seed 7 run 2"
            assert accuracy == [records[1].results["accuracy"]]


def test_a_copy_that_an_attack_left_unchanged_is_told_from_the_marked_model(records: list[Record]) -> None:
    rows = story.rows(records)
    same = [row for row in rows if row.reading and row.reading.fingerprints["model"] == marked_print(records)]
    assert [(row.role, row.file) for row in same] == [
        ("marked", "marked.safetensors"),
        ("attacked", "none.safetensors"),
    ]


def marked_print(records: list[Record]) -> str:
    return of_kind(records, "watermark.embed")[0].fingerprints["marked"]


def test_failed_runs_are_shown_with_their_error(page: Node, records: list[Record]) -> None:
    (failed,) = [record for record in records if record.status == "failed"]
    number = records.index(failed) + 1
    assert failed.error
    row = check_rows(page)[number]
    assert "failed" in cell(row, "verdict").text and failed.error in row.text
    (section,) = [s for s in page.all("section") if s.attributes.get("aria-labelledby") == "failed"]
    assert failed.error in section.text and "sparsity 1.5" in section.text


def test_a_failed_verification_keeps_its_row_and_gives_no_verdict(records: list[Record]) -> None:
    broken = [
        changed(r, status="failed", error="expected a key; found none", results={}, fingerprints={})
        if r.kind == "watermark.verify"
        else r
        for r in records
    ]
    root = check_page(render(broken))
    assert (
        root.all("h2")[0].text == "Owned: the marked model carries the mark of “Example Ltd”."
    )  # the embedding's check
    for number, record in enumerate(broken, start=1):
        if record.kind == "watermark.verify":
            assert cell(check_rows(root)[number], "verdict").text == "failed"
    rows = story.rows(broken)
    assert next(row for row in rows if row.file == "marked.safetensors").role == "marked"
    assert next(row for row in rows if row.file == "prune-0.9.safetensors").role == "attacked"


def test_the_empirical_null_is_the_records(page: Node, records: list[Record]) -> None:
    rows = section(page, "null").one("tbody").all("tr")
    expected = []
    for row in story.rows(records):
        for name in ("null", "null_models"):
            null = row.reading.results.get(name) if row.reading else None
            if null:
                expected.append([null["n"], null["mean_bit_error_rate"], null["lowest_bit_error_rate"], null["owned"]])
    assert [exact(row) for row in rows] == expected
    assert sum("independent models" in row.text for row in rows) == 1


def test_the_cost_is_the_records(page: Node, records: list[Record]) -> None:
    (embed,) = of_kind(records, "watermark.embed")
    shown = {pair.one("dt").text: exact(pair.one("dd")) for pair in section(page, "cost").one("dl").all("div")}
    results, cost = embed.results, embed.results["cost"]
    assert shown == {
        "Accuracy before the mark": [results["accuracy_before"]],
        "Accuracy with the mark": [results["accuracy_after"]],
        "Change": [results["accuracy_change_points"]],
        "Wrong bits right after embedding": [results["bit_errors"], results["bits"]],
        "Embedding": [cost["updates"], cost["embedding_seconds"]],
        "Time of an update": [cost["seconds_per_update"], cost["seconds_per_training_update"]],
        "Updates of the owner’s training": [cost["owner_updates"]],
        "Embedding as a share of the training": [cost["share_of_training"]],
    }


def test_runs_environment_and_fingerprints_are_complete(page: Node, records: list[Record]) -> None:
    rows = section(page, "runs").one("tbody").all("tr")
    assert len(rows) == len(records)
    for number, (row, record) in enumerate(zip(rows, records, strict=True), start=1):
        assert row.attributes["id"] == f"run-{number}" and row.one("th").text == str(number)
        assert record.kind in row.text
        assert exact(cell(row, "time")) == [record.seconds]
        assert cell(row, "seed").text == ("none" if record.seed is None else str(record.seed))
        assert cell(row, "status").text == ("done" if record.status == "ok" else record.status)
    versions = section(page, "environment").text
    for name, version in records[0].environment["packages"].items():
        assert f"packages.{name}{version}" in versions.replace(" ", "")
    assert records[0].environment["deepseal"] in versions
    prints = {row.one("th").text for row in section(page, "fingerprints").one("tbody").all("tr")}
    assert prints == {value for record in records for value in record.fingerprints.values()}


def test_records_are_in_full(page: Node, records: list[Record]) -> None:
    details = section(page, "records").all("details")
    assert len(details) == len(records)
    for node, record in zip(details, records, strict=True):
        shown = {pair.one("dt").text: pair.one("dd").text for pair in node.all("div")}
        for path, value in words.flat(record.results, "results") + words.flat(record.params, "params"):
            assert shown[path] == " ".join(value.split())
    embed = of_kind(records, "watermark.embed")[0]
    assert ("p_value", repr(embed.results["p_value"])) in words.flat(embed.results)


def test_warnings_are_listed_once_with_their_runs(records: list[Record]) -> None:
    noted = [changed(record, notes=["results.x is null: it was nan"]) for record in records]
    root = check_page(render(noted))
    items = [item.text for item in section(root, "warnings").all("li")]
    assert f"Warnings and notes: {len(items)}." in root.one("section", class_="verdict").text
    assert sum("results.x is null" in item for item in items) == 1
    warned = [w for record in records for w in record.results.get("warnings", [])]
    check = of_kind(records, "watermark.verify")[0]
    alone = check_page(render([changed(check, results={**check.results, "warnings": ["look here"]})]))
    assert "Warning: look here." in alone.one("section", class_="verdict").text
    assert warned and all(any(warning in item for item in items) for warning in warned)


def test_rendering_is_repeatable(records: list[Record]) -> None:
    before = copy.deepcopy(records)
    assert render(records) == render(records)
    assert records == before


@pytest.mark.parametrize(
    ("verdict", "headline"),
    [
        ("owned", "Owned: the marked model carries the mark of “Example Ltd”."),
        ("not-owned", "Not owned: the mark of “Example Ltd” is not in the marked model."),
        ("inconclusive", "Could not decide whether the marked model carries the mark of “Example Ltd”."),
    ],
)
def test_one_verification_gives_a_verdict_in_plain_words(records: list[Record], verdict: str, headline: str) -> None:
    few = [r for r in records if r.kind in ("watermark.keygen", "watermark.embed")]
    check = of_kind(records, "watermark.verify")[0]
    results = {**check.results, "verdict": verdict, "threshold": None if verdict == "inconclusive" else 80}
    root = check_page(render([*few, changed(check, results=results)]))
    assert root.all("h2")[0].text == headline
    assert verdict in root.one("section", class_="verdict").attributes["class"].split()
    assert "Warning" not in root.one("section", class_="verdict").text
    assert ("no number of wrong bits" in root.one("section", class_="verdict").text) == (verdict == "inconclusive")


def test_a_verification_alone_is_of_a_suspect_named_by_its_file(records: list[Record]) -> None:
    check = of_kind(records, "watermark.verify")[0]
    (row,) = story.rows([changed(check, params={**check.params, "model": "/home/eve/suspect.safetensors"})])
    assert (row.role, row.name, row.file, row.accuracy) == ("other", "a suspect", "suspect.safetensors", None)
    root = check_page(render([check]))
    assert root.all("h2")[0].text == "Owned: the model “marked.safetensors” carries the mark of “Example Ltd”."
    assert cell(check_rows(root)[1], "accuracy").text == "not recorded"


def test_a_model_that_only_answers_is_named_by_its_address(records: list[Record]) -> None:
    check = of_kind(records, "watermark.verify")[0]
    params = {name: value for name, value in check.params.items() if name != "model"}
    asked = changed(check, params={**params, "remote": "http://127.0.0.1:8000/", "name": "suspect"}, fingerprints={})
    (row,) = story.rows([asked])
    assert (row.name, row.file) == ("a suspect", "http://127.0.0.1:8000/v2/models/suspect")
    assert row.file in squeezed(text.show(asked))


def test_suspects_are_counted_apart_from_models_that_are_known_to_be_others(records: list[Record]) -> None:
    check = of_kind(records, "watermark.verify")[0]
    prints, params = {**check.fingerprints, "model": "e" * 64}, {**check.params, "model": "e.safetensors"}
    found = changed(check, fingerprints=prints, params=params)
    _, remarks = story.headline([*records, found], story.rows([*records, found]))
    assert any("suspects 1 of 1; other models 0 of 1" in remark for remark in remarks)


def test_an_attack_on_an_attacked_copy_is_a_chain(records: list[Record]) -> None:
    embed, check = of_kind(records, "watermark.embed")[0], of_kind(records, "watermark.verify")[0]
    first, second = [r for r in of_kind(records, "attack.run") if r.params["attack"] == "prune"][:2]
    second = changed(second, fingerprints={"model": first.fingerprints["attacked"], "attacked": "f" * 64})
    check = changed(check, fingerprints={**check.fingerprints, "model": "f" * 64})
    row = next(row for row in story.rows([embed, first, second, check]) if row.reading is check)
    assert row.how == f"{words.attack(first)}; then {words.attack(second)}"
    assert row.accuracy == second.results["accuracy_after"]


def test_attacks_in_a_circle_end(records: list[Record]) -> None:
    check = of_kind(records, "watermark.verify")[0]
    attack = of_kind(records, "attack.run")[1]
    one = changed(attack, fingerprints={"model": "a" * 64, "attacked": "b" * 64})
    two = changed(attack, fingerprints={"model": "b" * 64, "attacked": "a" * 64})
    check = changed(check, fingerprints={"model": "a" * 64, "key": "k"})
    check_page(render([one, two, check]))


def test_an_unverified_mark_and_an_unverified_attack_have_rows(records: list[Record]) -> None:
    some = [r for r in records if r.kind != "watermark.verify" and r.status == "ok"]
    rows = story.rows(some)
    assert [row.verdict for row in rows if row.role == "marked"] == ["owned"]
    assert {row.verdict for row in rows if row.role == "attacked"} == {"not-verified"}
    root = check_page(render(some))
    assert root.all("h2")[0].text == "Owned: the marked model carries the mark of “Example Ltd”."
    assert "not verified" in section(root, "checks").text


def test_two_keys_are_told_apart(records: list[Record]) -> None:
    checks = of_kind(records, "watermark.verify")
    foreign = [changed(r, fingerprints={**r.fingerprints, "key": "e" * 64}) for r in checks]
    root = check_page(render([*records, *foreign]))
    assert "Key" in [th.text for th in section(root, "checks").one("thead").all("th")]
    (prune,) = [f for f in root.all("figure") if f.one("figcaption").text.startswith("Attack prune")]
    assert len(prune.one("ul", class_="legend").all("li")) == 2


@pytest.mark.parametrize("kinds", [(), ("model.train",), ("watermark.keygen", "watermark.embed"), ("attack.run",)])
def test_a_page_without_verifications_is_sensible(records: list[Record], kinds: tuple[str, ...]) -> None:
    some = [record for record in records if record.kind in kinds]
    root = check_page(render(some))
    assert root.all("h2")[0].text
    assert "No check with random keys" in section(root, "null").text
    if "watermark.embed" not in kinds:
        assert root.all("h2")[0].text == "No ownership check is among these records."
        assert "No embedding is among these records." in section(root, "cost").text
    squeezed(text.table(some))


def test_unknown_kinds_are_readable_tables(records: list[Record]) -> None:
    demo = changed(
        records[0],
        kind="demo",
        results={
            "rows": [{"model": "marked", "accuracy": 0.975, "p_value": 9e-78}, {"model": "other"}],
            "report": "r.html",
        },
    )
    root = check_page(render([demo]))
    (found,) = [s for s in root.all("section") if s.one("h2").text.startswith("demo")]
    assert [th.text for th in found.one("thead").all("th")] == ["model", "accuracy", "p_value"]
    assert [[td.text for td in tr.all("td")] for tr in found.one("tbody").all("tr")] == [
        ["marked", "97.50%", "9e-78"],
        ["other", "none", "none"],
    ]
    shown = squeezed(text.show(demo))
    assert shown.startswith("demo: done") and "marked 97.50% 9e-78" in shown and "report r.html" in shown


def test_colours_have_contrast() -> None:
    css = CSS.read_text()

    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    schemes = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    assert len(schemes) == 3
    for scheme in schemes:
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", scheme))
        for name, colour in colours.items():
            if name in ("paper", "wash", "line"):
                continue
            for ground in ("paper", "wash"):
                light, dark = sorted((luminance(colour), luminance(colours[ground])), reverse=True)
                assert (light + 0.05) / (dark + 0.05) >= 4.5, f"{name} on {ground}"
