"""The page's tables on paper: columns as wide as their words need, headings again on every page."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from typing import Any

from reportlab.lib.colors import HexColor
from reportlab.pdfbase.pdfmetrics import stringWidth
from reportlab.platypus import Paragraph, Table

from deepseal.apps.report.markup import Node
from deepseal.apps.report.paper import BOLD, MONO, PLAIN, colours, inline, spoken, style

_SIZES = (8.0, 7.0, 6.2, 5.4)  # of the type, in points: the first at which every word fits
_BETWEEN = 7.0  # points between two columns
_WIDEST_WORD = 128.0


@dataclasses.dataclass(frozen=True)
class _Cell:
    markup: str
    text: str
    head: bool
    right: bool
    tone: str | None
    spans: int


def table(node: Node, width: float, height: float, targets: Set[str]) -> Table:
    """A table of the page, as wide as the text; ``height`` is a page's."""
    matrix = "matrix" in node.classes
    heads = [row for part in node.elements() if part.tag == "thead" for row in part.elements()]
    rows = [row for part in node.elements() if part.tag == "tbody" for row in part.elements()]
    cells = [[_cell(cell, row, targets, matrix) for cell in row.elements()] for row in [*heads, *rows]]
    return _laid_out(cells, len(heads), width, height, matrix)


def pairs(node: Node, width: float, height: float, targets: Set[str]) -> Table:
    """A list of names and values, one pair a row."""
    rows = [(pair, pair.elements()) for pair in node.elements()]
    cells = [[_cell(cell, pair, targets, False) for cell in found] for pair, found in rows]
    return _laid_out(cells, 0, width, height, False, narrow=0.4)


def _cell(node: Node, row: Node, targets: Set[str], matrix: bool) -> _Cell:
    markup = inline(node, targets, apart=matrix, size=_SIZES[0])
    name = row.attributes.get("id", "")
    if name in targets and row.elements()[0] is node:
        markup = f'<a name="{name}"/>{markup}'
    if "hash" in node.classes:
        markup = f'<font name="{MONO}">{markup}</font>'
    look = node.classes
    tone = next((word for word in look if word in colours() and word[0] == "t"), None)
    spans = int(node.attributes.get("colspan", "1"))
    return _Cell(markup, spoken(markup), node.tag in ("th", "dt"), "n" in look and not matrix, tone, spans)


def _laid_out(
    cells: Sequence[Sequence[_Cell]],
    heads: int,
    width: float,
    height: float,
    matrix: bool,
    narrow: float | None = None,
) -> Table:
    columns = max((sum(cell.spans for cell in row) for row in cells), default=0) or 1
    size = next((size for size in _SIZES if sum(_least(cells, columns, size)) <= width), _SIZES[-1])
    widths = _widths(cells, columns, size, width)
    if narrow is not None:
        widths = [min(widths[0], narrow * width), width - min(widths[0], narrow * width)]
    look: list[Any] = [
        ("VALIGN", (0, 0), (-1, -1), "MIDDLE" if matrix else "TOP"),
        ("LEFTPADDING", (0, 0), (-1, -1), 2 if matrix else 0),
        ("RIGHTPADDING", (0, 0), (-1, -1), 2 if matrix else _BETWEEN),
        ("TOPPADDING", (0, 0), (-1, -1), 2),
        ("BOTTOMPADDING", (0, 0), (-1, -1), 3),
        ("LINEBELOW", (0, 0), (-1, -1), 0.4, HexColor("#ffffff" if matrix else colours()["line"])),
    ]
    if matrix:
        look.append(("INNERGRID", (0, 0), (-1, -1), 1, HexColor("#ffffff")))
    if heads:
        look += [
            ("LINEBELOW", (0, heads - 1), (-1, heads - 1), 0.9, HexColor(colours()["line"])),
            ("VALIGN", (0, 0), (-1, heads - 1), "BOTTOM"),
        ]
    laid: list[list[object]] = []
    for number, row in enumerate(cells):
        line: list[object] = []
        for cell in row:
            place = (len(line), number)
            if cell.tone:
                look.append(("BACKGROUND", place, place, HexColor(colours()[cell.tone])))
            if cell.spans > 1:
                look.append(("SPAN", place, (len(line) + cell.spans - 1, number)))
            middle = matrix and len(line) > 0
            line += [_paragraph(cell, size, number < heads, middle), *[""] * (cell.spans - 1)]
        laid.append([*line, *[""] * (columns - len(line))])
    made = Table(laid or [[""]], colWidths=widths, repeatRows=heads, style=look, hAlign="LEFT", spaceAfter=6)
    made.wrap(width, height)
    made.splitInRow = int(max(getattr(made, "_rowHeights"), default=0) > 0.5 * height)  # noqa: B009  not in the stubs
    return made


def _paragraph(cell: _Cell, size: float, top: bool, middle: bool) -> Paragraph:
    colour = colours()[f"{cell.tone}-ink" if cell.tone else "soft" if top or cell.head and not middle else "ink"]
    changes = {
        "textColor": HexColor(colour),
        "alignment": 1 if middle else 2 if cell.right else 0,
        "leading": round(1.28 * size, 2),
    }
    return Paragraph(cell.markup, style(f"cell-{size:g}", size, **changes))


def _least(cells: Sequence[Sequence[_Cell]], columns: int, size: float) -> list[float]:
    """The width of each column's longest word."""
    words = [{word for text in _texts(cells, column) for word in text.split(" ")} for column in range(columns)]
    return [_BETWEEN + max((min(_WIDEST_WORD, _length(word, size)) for word in own), default=0) for own in words]


def _widths(cells: Sequence[Sequence[_Cell]], columns: int, size: float, width: float) -> list[float]:
    """As CSS does: every column its longest word, and of what is left as much as its longest text asks for."""
    least = _least(cells, columns, size)
    if sum(least) > width:
        return [width * one / sum(least) for one in least]
    most = [
        max(low, _BETWEEN + max((_length(text, size) for text in _texts(cells, column)), default=0))
        for column, low in enumerate(least)
    ]
    asked = [high - low for high, low in zip(most, least, strict=True)]
    left = width - sum(least)
    share = min(1.0, left / sum(asked)) if sum(asked) else 0.0
    widths = [low + share * more for low, more in zip(least, asked, strict=True)]
    spare = (width - sum(widths)) / columns
    return [one + spare for one in widths]


def _texts(cells: Sequence[Sequence[_Cell]], column: int) -> list[str]:
    return [row[column].text for row in cells if column < len(row) and row[column].spans == 1]


def _length(text: str, size: float) -> float:
    return float(stringWidth(text, BOLD if len(text) < 24 else PLAIN, size))
