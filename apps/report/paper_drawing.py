"""The page's pictures on paper: the few SVG elements that our templates use, as ReportLab's shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from reportlab.graphics.shapes import Circle, Drawing, Group, Line, Path, PolyLine, Rect, Shape, String
from reportlab.lib.colors import HexColor, white

from deepseal.apps.report.markup import Node
from deepseal.apps.report.paper import PLAIN, colours, drawable

_TYPE = 11.5
_ANCHORS = {"start": "start", "middle": "middle", "end": "end"}
_LINES: Mapping[str, tuple[str, float, list[float] | None]] = {
    "grid": ("line", 0.75, None),
    "axis": ("soft", 1.0, None),
    "threshold": ("bad", 1.5, None),
    "chance": ("soft", 1.5, [2, 4]),
    "before": ("soft", 1.5, [7, 4]),
    "zero": ("soft", 1.0, None),
    "upright": ("soft", 1.0, [3, 4]),
    "whisker": ("c0", 2.0, None),
}
_LETTERS = {"tick": "soft", "threshold": "bad", "chance": "soft", "before": "soft"}


def drawing(svg: Node, width: float, height: float, look: Sequence[str] = ()) -> Drawing:
    """A picture, as large as fits into a box (in points) and no larger than it was made.

    Args:
        svg: the picture's element.
        width: of the box.
        height: of the box.
        look: classes of the elements around it.
    """
    _, _, wide, high = (float(number) for number in svg.attributes["viewbox"].split())
    scale = min(width / wide, height / high, 1.0)
    picture = Drawing(wide * scale, high * scale)
    canvas = Group(transform=(scale, 0, 0, scale, 0, 0))
    _add(canvas, svg, high, [*look, *svg.classes])
    picture.add(canvas)
    return picture


def _add(canvas: Group, node: Node, high: float, inherited: list[str]) -> None:
    """Shapes of the elements below; y grows upwards on paper, so it is turned."""
    for child in node.elements():
        look = [*inherited, *child.classes]
        if child.tag == "g":
            _add(canvas, child, high, look)
            continue
        for shape in _shapes(child, high, look):
            canvas.add(shape)


def _shapes(node: Node, high: float, look: list[str]) -> list[Shape]:
    at = {name: float(value) for name, value in node.attributes.items() if _is_number(value)}
    if node.tag == "line":
        colour, thick, dashes = next((_LINES[word] for word in look if word in _LINES), ("ink", 1.0, None))
        if any(word.startswith("c") and word[1:].isdigit() for word in look):
            colour, thick = _series(look), max(thick, 1.5) if "whisker" in look else 3.0
        line = Line(at["x1"], high - at["y1"], at["x2"], high - at["y2"])
        return [_stroked(line, colour, thick, dashes)]
    if node.tag == "polyline":
        pairs = [pair.split(",") for pair in node.attributes["points"].split()]
        curve = PolyLine([float(x) if i == 0 else high - float(x) for pair in pairs for i, x in enumerate(pair)])
        curve.strokeLineJoin = 1
        return [_stroked(curve, _series(look), 1.75, None)]
    if node.tag == "circle":
        return [_filled(Circle(at["cx"], high - at["cy"], at["r"]), look)]
    if node.tag == "rect":
        shape = Rect(at["x"], high - at["y"] - at["height"], at["width"], at["height"])
        return [_filled(shape, look)]
    if node.tag == "path":
        return [_filled(_path(node.attributes["d"], high), look)]
    if node.tag == "text":
        return _letters(node, at, high, look)
    return []


def _letters(node: Node, at: Mapping[str, float], high: float, look: list[str]) -> list[Shape]:
    colour = next((_LETTERS[word] for word in look if word in _LETTERS), "ink")
    common: dict[str, Any] = {
        "fontName": PLAIN,
        "fontSize": _TYPE,
        "textAnchor": _ANCHORS.get(node.attributes.get("text-anchor", "start"), "start"),
    }
    said = drawable(node.text)
    shown = String(at["x"], high - at["y"], said, fillColor=HexColor(colours()[colour]), **common)
    if node.attributes.get("transform", "").startswith("rotate(-90"):
        upright = Group(transform=(0, 1, -1, 0, at["x"], high - at["y"]))
        shown.x = shown.y = 0
        upright.add(shown)
        return [upright]
    if "level-label" not in look:
        return [shown]
    halo = String(
        at["x"],
        high - at["y"],
        said,
        fillColor=white,
        textRenderMode=2,
        **common,
    )
    halo.setProperties({"strokeColor": white, "strokeWidth": 3})
    return [halo, shown]


def _path(text: str, high: float) -> Path:
    """A shape of moves (M), relative lines (l, and level ones h) and an end (z)."""
    shape, x, y = Path(), 0.0, 0.0
    for command, numbers in re.findall(r"([Mlhz])([^Mlhz]*)", text):
        values = [float(number) for number in re.findall(r"-?[\d.]+", numbers)]
        values = [number for length in values for number in (length, 0.0)] if command == "h" else values
        for dx, dy in zip(values[::2], values[1::2], strict=True):
            x, y = (dx, dy) if command == "M" else (x + dx, y + dy)
            (shape.moveTo if command == "M" else shape.lineTo)(x, high - y)
    shape.closePath()
    return shape


def _series(look: list[str]) -> str:
    """The colour of a series or curve: ``s2`` and ``c2`` are the third."""
    number = next((word[1:] for word in reversed(look) if word[:1] in "sc" and word[1:].isdigit()), "0")
    return f"c{int(number) % 6}"


def _stroked(shape: Any, colour: str, thick: float, dashes: list[float] | None) -> Shape:
    shape.strokeColor, shape.strokeWidth, shape.strokeDashArray = HexColor(colours()[colour]), thick, dashes
    found: Shape = shape
    return found


def _filled(shape: Any, look: list[str]) -> Shape:
    if "net" in look:
        shape.fillColor, shape.strokeColor, shape.strokeWidth = None, HexColor(colours()["soft"]), 1
    else:
        shape.fillColor, shape.strokeColor, shape.strokeWidth = HexColor(colours()[_series(look)]), white, 0.75
    found: Shape = shape
    return found


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", text) is not None
