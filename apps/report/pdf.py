"""Records as a PDF: the same story as the HTML page, laid out on A4 with numbered pages, from the page itself.

The same records give the same bytes: its date is that of the newest record.
"""

from __future__ import annotations

import datetime
import io
import itertools
from collections.abc import Iterator, Sequence, Set
from typing import Any

from deepseal.apps.report import html
from deepseal.apps.report.markup import Node, parse
from deepseal.errors import InputError
from deepseal.record import Record

try:
    import reportlab  # noqa: F401
except ImportError as error:
    raise InputError("the package reportlab for PDF files", found="none", do="pip install reportlab") from error

from reportlab.lib.colors import HexColor
from reportlab.lib.pagesizes import A4, landscape
from reportlab.lib.units import mm
from reportlab.pdfgen.canvas import Canvas
from reportlab.platypus import CondPageBreak, Flowable, KeepTogether, Paragraph, SimpleDocTemplate, Spacer, Table

from deepseal.apps.report import paper
from deepseal.apps.report.paper import colours, drawable, inline, style
from deepseal.apps.report.paper_drawing import drawing
from deepseal.apps.report.paper_table import pairs, table

_MARGIN = 17 * mm
_INSET = 6.0  # of what stands in the frame of a page
_MANY_COLUMNS = 9  # of more, the page lies on its side
_TOGETHER = 84.0  # points that a heading wants below itself
_HIGHEST = 0.48  # of a picture, as a share of the page
_SIZES = {"h1": 17.0, "h2": 12.5, "h3": 9.5}
_TARGETS = ("h2", "tr")


def render(records: Sequence[Record], *, title: str | None = None) -> bytes:
    """The records as one PDF file.

    Args:
        records: in the order of their numbers on the page; an empty list gives a page that says so.
        title: heading and title; None for one that fits the records.

    Raises:
        InputError: a comparison or an evaluation that is not complete.
    """
    paper.fonts()
    page = parse(html.render(records, title=title))
    size = landscape(A4) if any(_columns(node) > _MANY_COLUMNS for node in page.all("table")) else A4
    targets = {node.attributes["id"] for node in page.all(*_TARGETS) if "id" in node.attributes}
    layout = _Layout(size[0] - 2 * (_MARGIN + _INSET), size[1] - 2 * (_MARGIN + _INSET), targets, itertools.count(1))
    (heading,) = page.all("h1")
    stream = io.BytesIO()
    document = SimpleDocTemplate(
        stream,
        pagesize=size,
        leftMargin=_MARGIN,
        rightMargin=_MARGIN,
        topMargin=_MARGIN,
        bottomMargin=_MARGIN,
        title=heading.text,
        author="",
        subject="",
        creator="DeepSeal",
        producer="DeepSeal",
        lang="en",
        displayDocTitle=True,
        invariant=1,
    )
    date = _date(records)

    def begin(canvas: Canvas, _document: object) -> None:
        canvas.setDateFormatter(lambda *_: date)
        _footer(canvas, drawable(heading.text), size[0])

    document.build(layout.blocks(page), onFirstPage=begin, onLaterPages=begin, canvasmaker=_Counted)
    return stream.getvalue()


class _Counted(Canvas):
    """Pages that say how many there are: the number is drawn once, at the end."""

    def save(self) -> None:
        pages = self.getPageNumber() - 1
        self.beginForm("pages")
        self.setFont(paper.PLAIN, 7)
        self.setFillColor(HexColor(colours()["soft"]))
        self.drawString(0, 0, str(pages))
        self.endForm()
        super().save()


def _footer(canvas: Canvas, title: str, width: float) -> None:
    canvas.saveState()
    canvas.setFont(paper.PLAIN, 7)
    canvas.setFillColor(HexColor(colours()["soft"]))
    right = width - _MARGIN - _INSET - 10
    canvas.drawString(_MARGIN + _INSET, 0.55 * _MARGIN, title if len(title) <= 90 else f"{title[:90]}…")
    canvas.drawRightString(right, 0.55 * _MARGIN, f"Page {canvas.getPageNumber()} of ")
    canvas.translate(right, 0.55 * _MARGIN)
    canvas.doForm("pages")
    canvas.restoreState()


class _Layout:
    """Elements of the page as ReportLab's flowables; in a box, none of those that turn the page."""

    def __init__(
        self, width: float, height: float, targets: Set[str], numbers: Iterator[int], *, boxed: bool = False
    ) -> None:
        self._width, self._height, self._targets, self._numbers, self._boxed = width, height, targets, numbers, boxed

    def blocks(self, node: Node) -> list[Flowable]:
        """What an element gives, one below the other."""
        tag, look = node.tag, node.classes
        if tag in ("head", "style", "title", "desc"):
            return []
        if tag in _SIZES:
            return [*self._room(), self._heading(node)]
        if tag in ("p", "figcaption", "caption", "summary"):
            return self._text(node)
        if tag == "table":
            captions = [flowable for part in node.elements() if part.tag == "caption" for flowable in self._text(part)]
            return [*captions, table(node, self._width, self._height, self._targets)]
        if tag == "dl":
            return [pairs(node, self._width, self._height, self._targets)] if node.elements() else []
        if tag == "ul":
            return [flowable for item in node.elements() for flowable in self._item(item, look)]
        if tag == "svg":
            return [drawing(node, self._width, _HIGHEST * self._height)]
        if tag == "section" and "verdict" in look:
            return [self._verdict(node), Spacer(1, 8)]
        if "pair" in look and tag == "div" or "pair-of-figures" in look:
            return [self._side_by_side(node.elements())]
        if "full" in look:
            node = _parameters(node)
        inner = [flowable for child in node.elements() for flowable in self.blocks(child)]
        return [KeepTogether(inner), Spacer(1, 6)] if tag == "figure" and not self._boxed else inner

    def _room(self) -> list[Flowable]:
        """A new page where little is left of this one."""
        return [] if self._boxed else [CondPageBreak(_TOGETHER)]

    def _box(self, width: float) -> _Layout:
        return _Layout(width, self._height, self._targets, self._numbers, boxed=True)

    def _heading(self, node: Node) -> Flowable:
        size = _SIZES[node.tag]
        name = node.attributes.get("id", "")
        anchor = f'<a name="{name}"/>' if name in self._targets else ""
        shown = style(node.tag, size, fontName=paper.BOLD, spaceBefore=0.9 * size, spaceAfter=0.35 * size)
        markup = f"{anchor}{inline(node, self._targets, size=size)}"
        heading = _Heading(markup, shown)
        if node.tag != "h1":
            heading.entry = (drawable(node.text), f"heading-{next(self._numbers)}", int(node.tag[1]) - 2)
        return heading

    def _text(self, node: Node) -> list[Flowable]:
        small = "by" in node.classes or node.tag == "caption" or "plot-title" in node.classes
        changes: dict[str, object] = {"spaceAfter": 4, "spaceBefore": 4 if node.tag == "summary" else 0}
        if small or "missing" in node.classes:
            changes["textColor"] = HexColor(colours()["soft"])
        if node.tag in ("figcaption", "summary"):
            changes["fontName"] = paper.BOLD
        size = 8.0 if small or node.tag == "summary" else 9.0
        text = Paragraph(inline(node, self._targets, size=size), style(node.tag, size, **changes))
        return [*self._room(), text] if node.tag == "summary" else [text]

    def _item(self, node: Node, look: Sequence[str]) -> list[Flowable]:
        said = inline(node, self._targets, size=8.0)
        pictures = node.all("svg")
        if pictures:
            row = [drawing(pictures[0], 14, 12, node.classes), Paragraph(said, style("key", 8.0))]
            return [Table([row], colWidths=[20, self._width - 20], style=_BARE, hAlign="LEFT")]
        tones = [word for part in node.all("span") for word in part.classes if word in colours()]
        if tones:
            fill, ink = colours()[tones[0]], colours()[f"{tones[0]}-ink"]
            (sign, *_) = node.all("span")
            rest = said.removeprefix(sign.text)
            shown = f'<font backColor="{fill}" color="{ink}">\u00a0{sign.text}\u00a0</font> {rest}'
            return [Paragraph(shown, style("key", 8.0, spaceAfter=3))]
        bullet = style("item", 9.0, leftIndent=10, bulletIndent=0, spaceAfter=3)
        return [Paragraph(said, bullet, bulletText="•")]

    def _verdict(self, node: Node) -> Flowable:
        tone = next((paper.TONES[word] for word in node.classes if word in paper.TONES), "soft")
        inside = self._box(self._width - 20)
        inner = [flowable for child in node.elements() for flowable in inside.blocks(child)]
        look: list[Any] = [
            ("BACKGROUND", (0, 0), (-1, -1), HexColor(colours()["wash"])),
            ("LINEBEFORE", (0, 0), (0, -1), 4, HexColor(colours()[tone])),
            ("LEFTPADDING", (0, 0), (-1, -1), 12),
            ("RIGHTPADDING", (0, 0), (-1, -1), 8),
            ("TOPPADDING", (0, 0), (-1, -1), 2),
            ("BOTTOMPADDING", (0, 0), (-1, -1), 4),
        ]
        return Table([[inner]], colWidths=[self._width], style=look, splitInRow=1, hAlign="LEFT")

    def _side_by_side(self, nodes: Sequence[Node]) -> Flowable:
        half = self._width / 2
        cells = [self._box(half - 7).blocks(node) for node in nodes]
        rows = [cells[i : i + 2] for i in range(0, len(cells), 2)]
        rows = [[*row, *[[]] * (2 - len(row))] for row in rows]
        return Table(rows, colWidths=[half, half], style=_BARE, hAlign="LEFT")


_BARE = [
    ("VALIGN", (0, 0), (-1, -1), "TOP"),
    ("LEFTPADDING", (0, 0), (-1, -1), 0),
    ("RIGHTPADDING", (0, 0), (-1, -1), 6),
    ("TOPPADDING", (0, 0), (-1, -1), 1),
    ("BOTTOMPADDING", (0, 0), (-1, -1), 1),
]


class _Heading(Paragraph):
    """A heading that is in the reader's list of contents."""

    entry: tuple[str, str, int] | None = None  # title, name and level; of a part that a page's end split off, none

    def draw(self) -> None:
        if self.entry is not None:
            title, name, level = self.entry
            self.canv.bookmarkHorizontal(name, 0, self.height)
            self.canv.addOutlineEntry(title, name, level, closed=1)
        super().draw()


def _parameters(node: Node) -> Node:
    """Of the records in full what the sections before do not tell: the parameters. The rest is in the JSON."""
    kept = []
    for record in node.all("details"):
        (title,), rows = record.all("summary"), [p for p in record.all("div") if p.text.startswith("params.")]
        if rows:
            kept += [title, Node("dl", {"class": "facts"}, list(rows))]
    return Node("section", {}, [Node("h2", {}, ["Parameters"]), *kept] if kept else [])


def _columns(node: Node) -> int:
    return max((len(row.elements()) for row in node.all("tr")), default=0)


def _date(records: Sequence[Record]) -> str:
    """The newest record's, as PDF writes dates; that of the epoch where no record has one."""
    found = []
    for record in records:
        try:
            found.append(datetime.datetime.fromisoformat(record.started).astimezone(datetime.timezone.utc))
        except (ValueError, OverflowError, TypeError):
            continue
    newest = max(found, default=datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc))
    return newest.strftime("D:%Y%m%d%H%M%SZ")
