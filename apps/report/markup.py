"""The report's own page as a tree, for what lays it out on paper."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from html.parser import HTMLParser

_VOID = ("meta", "br", "hr", "link")


@dataclasses.dataclass
class Node:
    """An element of the page: its tag, attributes, and the texts and elements in it."""

    tag: str
    attributes: dict[str, str] = dataclasses.field(default_factory=dict)
    children: list[Node | str] = dataclasses.field(default_factory=list)

    @property
    def classes(self) -> list[str]:
        """The words of the attribute ``class``."""
        return self.attributes.get("class", "").split()

    @property
    def text(self) -> str:
        """All of its text, on one line."""
        parts = (child if isinstance(child, str) else child.text for child in self.children)
        return squeezed("".join(parts))

    def elements(self) -> list[Node]:
        """The elements right below."""
        return [child for child in self.children if isinstance(child, Node)]

    def walk(self) -> Iterator[Node]:
        """Itself and every element below, in the order of the page."""
        yield self
        for child in self.elements():
            yield from child.walk()

    def all(self, *tags: str) -> list[Node]:
        """Every element below with one of these tags."""
        return [node for node in self.walk() if node.tag in tags]


def parse(page: str) -> Node:
    """The tree of a page that is well formed, as ours are."""
    parser = _Parser()
    parser.feed(page)
    parser.close()
    return parser.root


def squeezed(text: str) -> str:
    """Text with single spaces; those that may not break a line stay."""
    return " ".join(part for part in text.replace("\n", " ").replace("\t", " ").split(" ") if part)


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Node("#")
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {name: value or "" for name, value in attrs})
        self._open[-1].children.append(node)
        if tag not in _VOID:
            self._open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].children.append(Node(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if len(self._open) > 1 and self._open[-1].tag == tag:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)
