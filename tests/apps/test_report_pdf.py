"""PDF reports: they say what the page says, whatever the records say, and always in the same bytes."""

import io
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pypdf import PdfReader
from report_records import ANY, HOSTILE, ODD, RECORDS, changed, hostile, oddly, of_kind
from reportlab.pdfbase import pdfmetrics

from deepseal.apps.report import comparison, html, paper, story, words
from deepseal.apps.report.markup import parse
from deepseal.apps.report.pdf import render
from deepseal.record import Record, read_record

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return [read_record(path) for path in sorted(RECORDS.glob("*.json"))]


@pytest.fixture(scope="module")
def compared() -> Record:
    return read_record(BENCHMARKS / "watermark-compare" / "mnist-mlp.json")


def opened(data: bytes) -> PdfReader:
    """What holds for every file: it can be read, carries no script and nothing to load, and numbers its pages."""
    found = PdfReader(io.BytesIO(data), strict=True)
    for word in (b"/JavaScript", b"/JS ", b"/URI", b"/Launch", b"/EmbeddedFile", b"/AcroForm", b"/OpenAction"):
        assert word not in data, word
    for number, page in enumerate(found.pages, start=1):
        text = page.extract_text()
        assert f"Page {number} of {len(found.pages)}" in " ".join(text.split())
        left, bottom, right, top = (float(edge) for edge in page.mediabox)
        assert sorted((right - left, top - bottom)) == pytest.approx([595.3, 841.9], abs=0.1)
    return found


def joined(found: PdfReader) -> str:
    """All text without what a line break or a column's end may add."""
    return squeezed("".join(page.extract_text() for page in found.pages))


def squeezed(text: str) -> str:
    return "".join(text.split())


def test_the_file_tells_the_pages_story(records: list[Record]) -> None:
    found = opened(render(records))
    text, page = joined(found), parse(html.render(records))
    for node in page.all("h1", "h2"):
        if node.text != "Records in full":
            assert squeezed(node.text) in text, node.text
    headline, remarks = story.headline(records, story.rows(records))
    for said in (headline, *remarks):
        assert squeezed(said) in text
    for heading in ("checks", "null", "runs"):
        (section,) = [s for s in page.all("section") if s.attributes.get("aria-labelledby") == heading]
        for cell in section.all("th", "td"):
            assert all(word in text for word in cell.text.split()), cell.text
    for record in records:
        for value in record.fingerprints.values():
            assert value in text


def test_each_parameter_is_told_once_and_results_are_left_to_the_record(records: list[Record]) -> None:
    text = joined(opened(render(records)))
    assert text.count("Parameters") > text.count("Recordsinfull") == 0
    for number, record in enumerate(records, start=1):
        assert f"Run{number}:{record.kind}" in text
        for path, value in words.flat(record.params, "params"):
            assert squeezed(f"{path}{value}") in text


def test_pictures_are_drawn_and_not_pasted(records: list[Record]) -> None:
    found = opened(render(records))
    page = next(page for page in found.pages if "Accuracy after prune" in page.extract_text())
    assert not page.images
    drawn = page.get_contents().get_data()
    assert drawn.count(b" l S") + drawn.count(b" c") > 20
    text = squeezed(page.extract_text())
    assert squeezed("allowed at 1 × 10⁻⁹: 80") in text and "chance:128" in text and "beforetheattack:97.49%" in text


def test_points_stand_where_the_page_has_them() -> None:
    from deepseal.apps.report.paper_drawing import drawing

    svg = parse(
        '<svg viewBox="0 0 200 100"><line class="threshold" x1="10" x2="190" y1="30" y2="40"/>'
        '<g class="point s1"><circle cx="50" cy="20" r="4.5"/><path d="M60 14.5l5.5 10h-11z"/></g>'
        '<polyline class="series s2" points="0,0 100,50"/></svg>'
    ).elements()[0]
    (canvas,) = drawing(svg, 100, 100).contents
    assert canvas.transform == (0.5, 0, 0, 0.5, 0, 0)
    line, points, curve = canvas.contents[0], canvas.contents[1:3], canvas.contents[3]
    assert (line.x1, line.y1, line.x2, line.y2) == (10, 70, 190, 60)
    assert (points[0].cx, points[0].cy) == (50, 80)
    assert points[1].points == [60, 85.5, 65.5, 75.5, 54.5, 75.5]
    assert curve.points == [0, 100, 100, 50]
    colours = paper.colours()
    assert (
        f"#{points[0].fillColor.hexval()[2:]}" == colours["c1"]
        and f"#{curve.strokeColor.hexval()[2:]}" == colours["c2"]
    )


def test_a_comparison_lies_on_its_side(compared: Record) -> None:
    found = opened(render([compared]))
    assert float(found.pages[0].mediabox.width) > float(found.pages[0].mediabox.height)
    text = joined(found)
    for pair in compared.results["pairs"]:
        assert squeezed(comparison.headline(pair)) in text
        for scheme in pair["schemes"]:
            assert scheme["scheme"] in text
        squares = [square for _, row in comparison.squares(pair["schemes"]) for square in row]
        assert squares and all(squeezed(square.share) in text for square in squares)
    assert "MPAI-NNW" in text and "Changeofaccuracybythemark,inpoints" in text


def test_the_same_records_give_the_same_bytes(records: list[Record], compared: Record) -> None:
    assert render(records) == render(records)
    assert render([compared]) == render([compared])
    assert render(records) != render(records[:-1])


def test_the_date_is_the_newest_records(records: list[Record]) -> None:
    newest = max(datetime.fromisoformat(record.started) for record in records)
    about = opened(render(records, title="Who owns it?")).metadata
    assert about is not None
    assert about.creation_date == about.modification_date == newest.astimezone(timezone.utc)
    assert about.title == "Who owns it?" and about.producer == about.creator == "DeepSeal"
    undated = opened(render([changed(record, started="yesterday") for record in records])).metadata
    assert undated is not None and undated.creation_date == datetime(1970, 1, 1, tzinfo=timezone.utc)


def test_headings_are_the_contents_and_runs_are_links(records: list[Record]) -> None:
    found = opened(render(records))
    titles = [entry["/Title"] for entry in found.outline if isinstance(entry, dict)]
    headline, _ = story.headline(records, story.rows(records))
    assert titles[0] == headline and titles[-1] == "Parameters" and "All runs" in titles
    links = [note.get_object() for page in found.pages for note in page.get("/Annots", [])]
    assert len(links) > len(records)
    numbers = {page.indirect_reference: number for number, page in enumerate(found.pages)}
    (runs,) = [entry for entry in found.outline if isinstance(entry, dict) and entry["/Title"] == "All runs"]
    first = found.get_destination_page_number(runs)
    told = [note for note in links if numbers[note["/Dest"][0]] in (first, first + 1)]
    assert all(note["/Subtype"] == "/Link" for note in links) and len(told) >= len(records)


def test_no_character_is_an_empty_box(records: list[Record]) -> None:
    keygen = of_kind(records, "watermark.keygen")[0]
    owner = "Ärzte €5 ελ Жук 株式会社 🛡"
    named = changed(keygen, params={**keygen.params, "owner": owner})
    text = joined(opened(render([named if record is keygen else record for record in records])))
    assert squeezed("Ärzte €5 ελ Жук \\u682a\\u5f0f\\u4f1a\\u793e \\U0001f6e1") in text
    paper.fonts()
    known = pdfmetrics.getFont(paper.PLAIN).face.charToGlyph
    printed = "".join(html.render(records)) + "●○◐✕–•…"
    assert not {c for c in printed if c.isprintable() and ord(c) not in known}


def test_hostile_text_stays_text(records: list[Record]) -> None:
    bad = hostile(records)
    text = joined(opened(render(bad, title=HOSTILE)))
    assert "<script>alert(1)</script>" in text and "{{7*7}}" in text and "[bold]x[/bold]\\u001b[31m\\u0000" in text


@pytest.mark.parametrize("odd", ODD, ids=lambda value: str(value)[:12])
def test_odd_fields_are_survived(records: list[Record], odd: Any) -> None:
    kinds = {record.kind: record for record in records}
    every = [oddly(record, odd) for record in [*kinds.values(), records[-2]]]
    opened(render(every))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ANY, max_size=5))
def test_no_record_can_break_a_file(some: list[Record]) -> None:
    opened(render(some))


def test_long_words_wide_tables_and_rows_higher_than_a_page_fit(records: list[Record]) -> None:
    row = {f"column-{'x' * 40}-{n}": "W" * 250 for n in range(12)}
    wide = changed(records[0], kind="demo", results={"rows": [row] * 12, "name": "n" * 10_000})
    named = {f"model {n}": "f" * 64 for n in range(60)}
    again = [changed(record, fingerprints=named) for record in records] * 2
    found = opened(render([wide, *again]))
    assert len(found.pages) > 25


def test_no_records_give_a_file_that_says_so() -> None:
    assert "Noownershipcheckisamongtheserecords." in joined(opened(render([])))
