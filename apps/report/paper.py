"""Type on paper: fonts, colours and styles of a PDF, and the page's inline markup in ReportLab's."""

from __future__ import annotations

import functools
import importlib.util
import re
import threading
from collections.abc import Mapping, Set
from html import unescape
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from reportlab.lib.styles import ParagraphStyle
from reportlab.pdfbase import pdfmetrics
from reportlab.pdfbase.ttfonts import TTFont

from deepseal.apps.report.markup import Node, squeezed
from deepseal.errors import InputError

PLAIN, BOLD, MONO = "DeepSealSans", "DeepSealSans-Bold", "DeepSealMono"
_FILES = {PLAIN: "DejaVuSans.ttf", BOLD: "DejaVuSans-Bold.ttf", MONO: "DejaVuSansMono.ttf"}
_SIGNS = {"owned": "●", "not-owned": "○", "inconclusive": "◐", "failed": "✕", "interrupted": "✕", "none": "–"}
TONES = {"owned": "good", "not-owned": "plain", "inconclusive": "doubt", "failed": "bad", "interrupted": "bad"}
_FIXED = "\u00a0"  # a space at which no line breaks
_OWN_LINE = ("file", "kind")  # spans that the page shows as blocks
_lock = threading.Lock()


@functools.cache
def colours() -> Mapping[str, str]:
    """The page's colours in print, and the fills of its matrix (``t0`` … ``t4`` and the text on them)."""
    folder = Path(__file__).parent
    printed = (folder / "page.css").read_text().partition("@media print")[2]
    found = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", printed))
    for name, fill, ink in re.findall(
        r"\.(t\d) \{ background: (#\w+); color: (#\w+); \}", (folder / "comparison.css").read_text()
    ):
        found[name] = fill
        found[f"{name}-ink"] = "#ffffff" if ink == "#fff" else ink
    return {**found, "wash": "#f4f6f8"}


def fonts() -> None:
    """Make the fonts known to ReportLab; they come with matplotlib.

    Raises:
        InputError: matplotlib lies elsewhere than its package.
    """
    with _lock:
        if MONO in pdfmetrics.getRegisteredFontNames():
            return
        found = importlib.util.find_spec("matplotlib")
        folders = found.submodule_search_locations if found is not None else None
        folder = Path(next(iter(folders or [""]))) / "mpl-data" / "fonts" / "ttf"
        for name, file in _FILES.items():
            if not (folder / file).is_file():
                raise InputError(f"matplotlib's font {file}", found="none", do="reinstall matplotlib")
            pdfmetrics.registerFont(TTFont(name, str(folder / file)))
        pdfmetrics.registerFontFamily(PLAIN, normal=PLAIN, bold=BOLD, italic=PLAIN, boldItalic=BOLD)
        pdfmetrics.registerFontFamily(MONO, normal=MONO, bold=MONO, italic=MONO, boldItalic=MONO)


def drawable(text: str, font: str = PLAIN) -> str:
    """Text in characters that the font has; of others the code is spelled out, so that nothing is an empty box."""
    face: Any = getattr(pdfmetrics.getFont(font), "face")  # noqa: B009  the stubs know of fonts without one
    known = face.charToGlyph
    return "".join(
        c if ord(c) in known else f"\\u{ord(c):04x}" if ord(c) < 0x10000 else f"\\U{ord(c):08x}" for c in text
    )


def style(name: str, size: float = 9.0, **changes: Any) -> ParagraphStyle:
    """A style of paragraphs; the lines are half as high again as the type."""
    given: dict[str, Any] = {
        "fontName": PLAIN,
        "fontSize": size,
        "leading": round(1.38 * size, 2),
        "textColor": colours()["ink"],
        "splitLongWords": 1,
        **changes,
    }
    return ParagraphStyle(name, **given)


def inline(node: Node, targets: Set[str], *, apart: bool = False, size: float = 9.0) -> str:
    """The text in an element with its marks, in ReportLab's markup.

    Args:
        node: the element.
        targets: names that links may go to; other links are plain text.
        apart: put small print on a line of its own.
        size: of the text around it, in points.
    """
    return "".join(_inline(child, targets, apart, size) for child in node.children).removeprefix("<br/>").strip()


def spoken(markup: str) -> str:
    """The characters that ReportLab's markup shows."""
    return unescape(re.sub(r"<[^>]+>", " ", markup))


def _fixed(markup: str) -> str:
    return markup.strip().replace(" ", _FIXED) if "<" not in markup else markup


def _inline(node: Node | str, targets: Set[str], apart: bool, size: float) -> str:
    if isinstance(node, str):
        spaced = f"{' ' * node[:1].isspace()}{squeezed(node)}{' ' * node[-1:].isspace()}" if node.strip() else " "
        return escape(drawable(spaced))
    if node.tag == "br":
        return "<br/>"
    if node.tag == "svg":
        return ""
    shown = "".join(_inline(child, targets, apart, size) for child in node.children)
    look = node.classes
    if node.tag == "a" and node.attributes.get("href", "#")[1:] in targets:
        shown = f"<a href={quoteattr(node.attributes['href'])} color={quoteattr(colours()['c0'])}>{shown.strip()}</a>"
    if node.tag == "strong":
        shown = f"<b>{shown}</b>"
    if node.tag == "code" or "hash" in look:
        shown = f"<font name={quoteattr(MONO)} size={quoteattr(f'{0.92 * size:.2f}')}>{shown}</font>"
    if "mark" in look:
        code = next((word for word in look if word in _SIGNS), "none")
        tone = colours()[TONES.get(code, "soft")]
        shown = f"<font color={quoteattr(tone)}><b>{_SIGNS[code]}{_FIXED}{_fixed(shown)}</b></font>"
    if node.tag == "data":
        shown = _fixed(shown)
    if {"by", "run", "missing", *_OWN_LINE} & set(look) and node.tag != "a":
        shown = f"<font color={quoteattr(colours()['soft'])}>{shown}</font>"
    if node.tag == "small":
        shown = f"<font size={quoteattr(f'{0.86 * size:.2f}')}>{shown.strip()}</font>"
        return f"<br/>{shown}" if apart else shown
    if "file" in look:
        return f"<br/>{shown.strip()}"
    return f"{shown.strip()}<br/>" if "kind" in look else shown
