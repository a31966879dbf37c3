"""What tests of reports look at: a small DOM of the page, and what a terminal prints."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from io import StringIO
from typing import Any

from rich.console import Console

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Node:
    def __init__(self, tag: str, attributes: dict[str, str], parent: Node | None) -> None:
        self.tag, self.attributes, self.parent = tag, attributes, parent
        self.children: list[Node | str] = []

    def walk(self) -> Iterator[Node]:
        yield self
        for child in self.children:
            if isinstance(child, Node):
                yield from child.walk()

    def all(self, tag: str, **attributes: str) -> list[Node]:
        wanted = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}

        def fits(node: Node) -> bool:
            return node.tag == tag and all(
                value in node.attributes.get(name, "").split() or node.attributes.get(name) == value
                for name, value in wanted.items()
            )

        return [node for node in self.walk() if fits(node)]

    def one(self, tag: str, **attributes: str) -> Node:
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


def section(page: Node, name: str) -> Node:
    (found,) = [s for s in page.all("section") if s.attributes.get("aria-labelledby") == name]
    return found
