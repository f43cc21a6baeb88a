"""What the page of an audit says, read back from its HTML; it knows nothing of how that is written."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

EMPTY = ("meta", "link")  # elements without an end


@dataclass
class Element:
    """Element of a page. `inside` has elements and texts."""

    tag: str
    attributes: dict[str, str]
    inside: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(part if isinstance(part, str) else part.text for part in self.inside)

    def all(self, tag: str, look: str = "") -> list[Element]:
        """All elements of a kind below this one, in order."""
        found = []
        for part in self.inside:
            if isinstance(part, Element):
                classes = part.attributes.get("class", "").split()
                found += [part] if part.tag == tag and (not look or look in classes) else []
                found += part.all(tag, look)
        return found

    def one(self, tag: str, look: str = "") -> Element:
        (found,) = self.all(tag, look)
        return found


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.stack = [Element("page", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.stack[-1].inside.append(element)
        if tag not in EMPTY:
            self.stack.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self.stack[-1].inside.append(data)


def read(page: str) -> Element:
    """Return the page as a tree. Every element that begins must end."""
    parser = _Parser()
    parser.feed(page)
    parser.close()
    (root,) = parser.stack
    return root


def number(text: str) -> int:
    """Return the first number in a text."""
    found = re.search(r"[\d,]+", text)
    assert found, text
    return int(found[0].replace(",", ""))


def cells(bar: Element) -> dict[str, set[int]]:
    """Return the cells of a bar in which something is drawn, by kind."""
    found: dict[str, set[int]] = {}
    for path in bar.all("path"):
        boxes = re.findall(r"M(\d+) \d+h(\d+)v\d+h-\d+z", path.attributes["d"])
        drawn = [range(int(place), int(place) + int(width)) for place, width in boxes]
        found[path.attributes["class"]] = {cell for run in drawn for cell in run}
    return found


def bars(lanes: Element) -> dict[str, tuple[int, set[int]]]:
    """Return by kind, or by trainer, how many records a list of bars says, and in which cells they are."""
    found = {}
    for item in lanes.all("li"):
        label, records = item.one("span", "what").inside
        (drawn,) = cells(item.one("svg")).items()
        name = label.text if drawn[0] == "trainer" else drawn[0]
        found[name] = number(records.text), drawn[1]
    return found


def figures(page: Element) -> dict[str, int]:
    """Return the figures of the only dataset."""
    rows = page.one("dl").all("div")
    return {row.one("dt").text: number(row.one("dd").text) for row in rows}
