"""Reports: what is shown is what the records say, whatever the records say."""

import copy
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from deepseal.apps.report import plots, story, text, words
from deepseal.apps.report.html import render
from deepseal.record import Record, read_record

RECORDS = Path(__file__).resolve().parents[1] / "data" / "records"
CSS = Path(plots.__file__).with_name("page.css")
VOID = {"meta", "br", "hr", "img", "input", "link"}
HOSTILE = (
    "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>{{ 7*7 }}{% raw %}[bold]x[/bold]\x1b[31m\x00\u202e\ud800"
)


ATTACKS = ["Attack prune", "Attack fine-tune", "Attack overwrite"]


# A small DOM


class Node:
    def __init__(self, tag: str, attributes: dict[str, str], parent: "Node | None") -> None:
        self.tag, self.attributes, self.parent = tag, attributes, parent
        self.children: list[Node | str] = []

    def walk(self) -> Iterator["Node"]:
        yield self
        for child in self.children:
            if isinstance(child, Node):
                yield from child.walk()

    def all(self, tag: str, **attributes: str) -> list["Node"]:
        wanted = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}

        def fits(node: Node) -> bool:
            return node.tag == tag and all(
                value in node.attributes.get(name, "").split() or node.attributes.get(name) == value
                for name, value in wanted.items()
            )

        return [node for node in self.walk() if fits(node)]

    def one(self, tag: str, **attributes: str) -> "Node":
        (found,) = self.all(tag, **attributes)
        return found

    @property
    def text(self) -> str:
        parts = (child if isinstance(child, str) else child.text for child in self.children)
        return " ".join("".join(parts).replace("\u00a0", " ").split())


class Parser(HTMLParser):
    """Refuses tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = self.current = Node("#", {}, None)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute twice in {tag}"
        node = Node(tag, {name: value or "" for name, value in attrs}, self.current)
        self.current.children.append(node)
        if tag not in VOID:
            self.current = node

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.current.tag == tag, f"</{tag}> closes <{self.current.tag}>"
        assert self.current.parent is not None
        self.current = self.current.parent

    def handle_data(self, data: str) -> None:
        self.current.children.append(data)


def parse(page: str) -> Node:
    parser = Parser()
    parser.feed(page)
    parser.close()
    assert parser.current is parser.root, f"<{parser.current.tag}> is never closed"
    return parser.root


def check_page(page: str) -> Node:
    """What holds for every page: well formed, self-contained, no script, accessible."""
    page.encode()
    root = parse(page)
    nodes = list(root.walk())
    assert root.one("html").attributes["lang"] == "en"
    assert root.one("head").one("title").text == root.one("h1").text
    allowed = {"#", "html", "head", "meta", "title", "style", "body", "header", "main", "footer", "section", "figure"}
    allowed |= {"figcaption", "h1", "h2", "h3", "p", "a", "span", "data", "code", "div", "ul", "li", "dl", "dt", "dd"}
    allowed |= {"table", "caption", "thead", "tbody", "tr", "th", "td", "details", "summary"}
    allowed |= {"svg", "g", "desc", "line", "polyline", "circle", "rect", "path", "text"}
    assert {node.tag for node in nodes} <= allowed
    names = {name for node in nodes for name in node.attributes}
    assert not {name for name in names if name.startswith("on")} | (names & {"src", "srcset", "style", "action"})
    identifiers = [node.attributes["id"] for node in nodes if "id" in node.attributes]
    assert len(identifiers) == len(set(identifiers))
    for node in nodes:
        if "href" in node.attributes:
            assert node.tag == "a" and node.attributes["href"].startswith("#")
            assert node.attributes["href"][1:] in identifiers
        for reference in ("aria-labelledby", "aria-describedby"):
            assert node.attributes.get(reference, identifiers[0]) in identifiers
        if node.tag == "th":
            assert node.attributes.get("scope") in ("row", "col")
        if node.tag == "svg" and "aria-hidden" not in node.attributes:
            assert node.attributes["role"] == "img" and node.one("desc").text
    style = root.one("style").text
    assert "url(" not in style and "@import" not in style and "http" not in style
    return root


# The records and small changes to them


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return [read_record(path) for path in sorted(RECORDS.glob("*.json"))]


@pytest.fixture(scope="module")
def page(records: list[Record]) -> Node:
    return check_page(render(records))


def changed(record: Record, **fields: Any) -> Record:
    return record.model_copy(update=fields, deep=True)


def of_kind(records: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in records if record.kind == kind]


def printed(renderable: Any, width: int = 200) -> str:
    stream = StringIO()
    Console(file=stream, width=width, force_terminal=True, color_system=None).print(renderable)
    return stream.getvalue()


def squeezed(renderable: Any, width: int = 200) -> str:
    return " ".join(printed(renderable, width).split())


def check_rows(page: Node) -> dict[int, Node]:
    """Rows of the table of checks by the number of the run they show."""
    (section,) = [s for s in page.all("section") if s.attributes.get("aria-labelledby") == "checks"]
    rows = section.one("tbody").all("tr")
    return {int(row.all("a", class_="run")[0].attributes["href"].removeprefix("#run-")): row for row in rows}


def cell(row: Node, label: str) -> Node:
    return row.one("td", data_label=label)


def exact(node: Node) -> list[float]:
    return [float(data.attributes["value"]) for data in node.all("data")]


# The page of the real records


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


# Pictures


def figure(page: Node, attack: str) -> tuple[Node, Node]:
    (found,) = [f for f in page.all("figure") if f.one("figcaption").text.startswith(f"Attack {attack}")]
    accuracy, bits = (node for node in found.all("svg") if node.attributes.get("role") == "img")
    return accuracy, bits


def test_the_pictures_show_the_records_values(page: Node, records: list[Record]) -> None:
    attacks = {
        r.fingerprints.get("attacked"): r for r in of_kind(records, "attack.run") if r.params["attack"] == "prune"
    }
    checks = [r for r in of_kind(records, "watermark.verify") if r.fingerprints["model"] in attacks]
    accuracy, bits = figure(page, "prune, by sparsity")
    expected = [
        (
            attacks[r.fingerprints["model"]].params["attack_params"]["sparsity"],
            attacks[r.fingerprints["model"]].results["accuracy_after"],
            r.results["bit_errors"],
        )
        for r in checks
    ]
    expected.sort()
    assert len(expected) == 4
    for picture, column in ((accuracy, 1), (bits, 2)):
        points = picture.all("g", class_="point")
        assert [(float(p.attributes["data-x"]), float(p.attributes["data-y"])) for p in points] == [
            (row[0], row[column]) for row in expected
        ]
        assert all(f"sparsity {row[0]}" in p.one("title").text for row, p in zip(expected, points, strict=True))
        assert len(picture.one("polyline").attributes["points"].split()) == 4


def test_points_stand_where_the_axis_says(page: Node) -> None:
    for attack in ("prune", "fine-tune", "overwrite"):
        for picture in figure(page, attack):
            ticks = [
                (float(t.attributes["y"]) - 4, t.text)
                for t in picture.all("text", class_="tick")
                if t.attributes["text-anchor"] == "end"
            ]
            values = [(y, float(t.rstrip("%").replace(",", "")) / (100 if t.endswith("%") else 1)) for y, t in ticks]
            (y0, v0), (y1, v1) = values[0], values[-1]
            for point in picture.all("g", class_="point"):
                shown = [node for node in point.children if isinstance(node, Node) and node.tag != "title"]
                if shown[0].tag == "circle":
                    value = v0 + (float(shown[0].attributes["cy"]) - y0) * (v1 - v0) / (y1 - y0)
                    assert value == pytest.approx(float(point.attributes["data-y"]), abs=1e-3 * abs(v1 - v0))


def test_the_threshold_and_chance_are_drawn_and_labelled(page: Node) -> None:
    _, bits = figure(page, "prune")
    threshold, chance = bits.one("line", class_="threshold"), bits.one("line", class_="chance")
    assert bits.one("text", class_="threshold").text == "allowed at 1 × 10⁻⁹: 80"
    assert bits.one("text", class_="chance").text == "chance: 128"
    y80, y128, y0 = float(threshold.attributes["y1"]), float(chance.attributes["y1"]), plots.BOTTOM
    assert (y0 - y80) / (y0 - y128) == pytest.approx(80 / 128, abs=1e-3)
    assert float(threshold.attributes["x2"]) - float(threshold.attributes["x1"]) == plots.RIGHT - plots.LEFT
    assert "allowed at 1 × 10⁻⁹: 80" in bits.one("desc").text


def test_points_are_below_the_threshold_exactly_when_owned(page: Node) -> None:
    for attack in ("prune", "overwrite"):
        _, bits = figure(page, attack)
        limit = float(bits.one("line", class_="threshold").attributes["y1"])
        for circle in bits.all("circle"):
            assert circle.parent is not None
            assert (float(circle.attributes["cy"]) >= limit) == circle.parent.one("title").text.endswith(", owned")


def test_where_fewer_bits_are_readable_the_threshold_is_drawn_by_point(page: Node) -> None:
    _, bits = figure(page, "fine-tune")
    assert {node.text for node in bits.all("text", class_="threshold")} == {
        "allowed at 1 × 10⁻⁹: 80",
        "allowed at 1 × 10⁻⁹: 31",
    }
    assert {node.text for node in bits.all("text", class_="chance")} == {"chance: 128", "chance: 65"}
    assert len(bits.all("line", class_="threshold")) == 3


def test_a_single_point_is_not_connected_and_series_have_a_legend(page: Node) -> None:
    accuracy, bits = figure(page, "overwrite, by strength")
    for picture in (accuracy, bits):
        assert len(picture.all("g", class_="point")) == 1 and not picture.all("polyline")
    (tuned,) = [f for f in page.all("figure") if f.one("figcaption").text.startswith("Attack fine-tune")]
    legend = [item.text for item in tuned.one("ul", class_="legend").all("li")]
    assert legend == ["mode ftal", "mode ftal, optimizer sgd, learning_rate 10.0", "mode rtal"]


def test_the_null_attack_has_no_picture(page: Node) -> None:
    assert [f.one("figcaption").text.split(",")[0] for f in page.all("figure")] == ATTACKS


@pytest.mark.parametrize(
    ("values", "logarithmic"),
    [
        ([1.0], False),
        ([0.5, 0.99], False),
        ([1.0, 1000.0], True),
        ([-3.0, 3.0], False),
        ([0.0, 1000.0], False),
        ([1e-12, 1e12], True),
    ],
)
def test_axes_hold_all_their_values(values: list[float], logarithmic: bool, records: list[Record]) -> None:
    row = story.rows(records)[0]
    axis = plots._axis("strength", [plots._Sample(value, value, "", row) for value in values], numeric=True)
    assert axis.logarithmic == logarithmic
    places = [axis.place(value) for value in values]
    assert places == sorted(places) and all(plots.LEFT < place < plots.RIGHT for place in places)
    assert axis.ticks and all(plots.LEFT - 1 <= axis.place(tick) <= plots.RIGHT + 1 for tick, _ in axis.ticks)


# The other sections


def section(page: Node, name: str) -> Node:
    (found,) = [s for s in page.all("section") if s.attributes.get("aria-labelledby") == name]
    return found


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


# Other stories


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


# Records that nobody should trust


def poisoned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: poisoned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [poisoned(item) for item in value]
    return HOSTILE if isinstance(value, str) else value


def test_hostile_text_stays_text(records: list[Record]) -> None:
    bad = [
        changed(
            record,
            params=poisoned(record.params),
            results=poisoned(record.results),
            environment=poisoned(record.environment),
            notes=[HOSTILE],
            error=HOSTILE,
            started=HOSTILE,
            fingerprints={**record.fingerprints, HOSTILE: HOSTILE},
        )
        for record in records
    ]
    bad.append(changed(bad[0], kind=HOSTILE, results={HOSTILE: [{HOSTILE: HOSTILE}]}))
    page = render(bad, title=HOSTILE)
    check_page(page)
    assert "<script>alert(1)</script>" in parse(page).text
    assert not re.search(r"<script|<img|\{\{ 49|\x1b|\x00|\u202e|\ud800", page)
    for record in bad:
        shown = printed(text.show(record))
        assert "\x1b" not in re.sub(r"\x1b\[[0-9;]*m", "", shown) and "\x00" not in shown and "\u202e" not in shown
        assert "\x1b[31m" not in shown
    assert "[bold]x[/bold]" in printed(text.table(bad))


def test_a_huge_owner_name_is_cut_and_counted(records: list[Record]) -> None:
    keygen = of_kind(records, "watermark.keygen")[0]
    huge = changed(keygen, params={**keygen.params, "owner": "<b>" * 1_000_000})
    page = render([huge if record is keygen else record for record in records])
    check_page(page)
    assert len(page) < 400_000 and "3,000,000 characters" in page


ODD: list[Any] = [
    None,
    "",
    "text",
    True,
    -1,
    10**400,
    float("nan"),
    float("inf"),
    -0.0,
    5e-324,
    1e308,
    [],
    [1],
    {},
    {"n": {}},
]


@pytest.mark.parametrize("odd", ODD, ids=lambda value: str(value)[:12])
def test_odd_fields_are_survived(records: list[Record], odd: Any) -> None:
    every = [
        changed(
            record,
            params={**dict.fromkeys(record.params, odd), "attack": record.params.get("attack")},
            results=dict.fromkeys(record.results, odd),
            environment=dict.fromkeys(record.environment, odd),
        )
        for record in records
    ]
    check_page(render(every))
    squeezed(text.table(every))
    for record in every:
        squeezed(text.show(record))


def test_each_missing_field_is_survived_and_said(records: list[Record]) -> None:
    chosen = {record.kind: index for index, record in enumerate(records) if record.status == "ok"}
    for index in chosen.values():
        for part in ("params", "results", "fingerprints"):
            for name in getattr(records[index], part):
                rest = {key: value for key, value in getattr(records[index], part).items() if key != name}
                fewer = [*records[:index], changed(records[index], **{part: rest}), *records[index + 1 :]]
                render(fewer)
    bare = [changed(record, params={}, results={}, fingerprints={}, environment={}) for record in records]
    root = check_page(render(bare))
    assert "not recorded of not recorded" in section(root, "checks").text
    assert "not recorded" in section(root, "cost").text
    for record in bare:
        if record.kind == "watermark.verify":
            assert squeezed(text.show(record)).startswith("not recorded: not recorded of not recorded bits wrong")


FIELDS = {"model", "attack", "attack_params", "sparsity", "accuracy", "accuracy_before", "accuracy_after", "file", "n"}
FIELDS |= {"bits", "bit_errors", "verdict", "p_value", "threshold", "tried", "max_false_positive", "warnings", "owner"}
FIELDS |= {"null", "null_models", "mean_bit_error_rate", "accuracy_interval", "cost", "updates"}
NAMES = sorted(FIELDS)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["owned", "prune"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), inner, max_size=6)
    ),
    max_leaves=20,
)
OBJECT = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=12)
PRINTS = st.dictionaries(st.sampled_from(["model", "marked", "attacked", "key"]), st.sampled_from(["a", "b", "c", ""]))
ANY = st.builds(
    Record,
    kind=st.sampled_from([*story.KNOWN_KINDS, "demo", ""]),
    status=st.sampled_from(["ok", "failed", "interrupted"]),
    environment=OBJECT,
    seed=st.none() | st.integers(),
    params=OBJECT,
    fingerprints=PRINTS,
    results=OBJECT,
    notes=st.lists(st.text(max_size=9), max_size=2),
    error=st.none() | st.text(max_size=9),
    started=st.text(max_size=9) | st.just("2026-01-01T00:00:00+00:00"),
    seconds=st.floats(),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ANY, max_size=6))
def test_no_record_can_break_a_report(some: list[Record]) -> None:
    check_page(render(some))
    printed(text.table(some), 80)
    for record in some:
        printed(text.show(record), 80)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(), st.integers(-5, 300), st.integers(-5, 300), st.none() | st.integers(-5, 300), st.floats(-1, 2)
        ),
        min_size=1,
        max_size=6,
    )
)
def test_pictures_stay_on_their_canvas(values: list[tuple[float, int, int, int | None, float]]) -> None:
    some = []
    for index, (strength, errors, bits, threshold, accuracy) in enumerate(values):
        common: dict[str, Any] = {"status": "ok", "environment": {}, "started": "", "seconds": 0.0}
        attack = {"attack": "prune", "attack_params": {"sparsity": strength}}
        prints = {"model": "m", "attacked": str(index)}
        some.append(
            Record(
                kind="attack.run", params=attack, fingerprints=prints, results={"accuracy_after": accuracy}, **common
            )
        )
        read = {"bit_errors": errors, "bits": bits, "threshold": threshold, "verdict": "owned"}
        some.append(Record(kind="watermark.verify", fingerprints={"model": str(index)}, results=read, **common))
    for panel in plots.panels(story.rows(some)):
        for plot in (panel.accuracy, panel.bits):
            if plot is not None:
                for series in plot.series:
                    assert all(
                        plots.LEFT <= p.x <= plots.RIGHT and plots.TOP <= p.y <= plots.BOTTOM for p in series.points
                    )
                for level in plot.levels:
                    for x1, x2, y in level.segments:
                        assert plots.LEFT <= x1 <= x2 <= plots.RIGHT and plots.TOP <= y <= plots.BOTTOM


# Text


def test_a_verification_reads_verdict_first(records: list[Record]) -> None:
    check = of_kind(records, "watermark.verify")[0]
    assert check.results["p_value"] == pytest.approx(2.0**-256)
    expected = "owned: 0 of 256 bits wrong; a model without this mark would do as well with probability 9e-78"
    expected += "; allowed at 1e-9: 80"
    assert words.sentence(check) == expected
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
    shown = {record.kind: words.sentence(record) for record in reversed(records) if record.status == "ok"}
    train, embed = records[0].results, of_kind(records, "watermark.embed")[0].results
    assert shown["model.train"].startswith(
        f"trained deepseal.adapter.zoo:mlp on digits: accuracy {words.percent(train['accuracy'])} (95% interval "
    )
    assert shown["watermark.keygen"] == "key made: 256 bits, scheme deepsigns, owner Example Ltd, encrypted: yes"
    assert shown["watermark.embed"].startswith("mark embedded: 0 of 256 bits wrong; accuracy ")
    assert words.percent(embed["accuracy_after"]) in shown["watermark.embed"]
    assert shown["attack.run"].startswith("attack none: a plain copy; accuracy ")
    evaluated = changed(records[0], kind="model.evaluate")
    assert words.sentence(evaluated).startswith("accuracy ")
    (failed,) = [record for record in records if record.status == "failed"]
    assert words.sentence(failed) == f"attack.run failed: {failed.error}"


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


# The page as an object


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


def test_text_needs_neither_torch_nor_jinja_nor_matplotlib() -> None:
    code = "import sys, deepseal.apps.report.text; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "jinja2", "matplotlib"} & set(result.stdout.split())
