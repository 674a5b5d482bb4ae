"""HTML and SVG as values: a text is escaped once, an element never."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


class Markup(str):
    """Text that needs no escaping."""

    __slots__ = ()


EMPTY = Markup("")
_VOID = {"meta", "path", "line", "rect", "circle", "polyline", "br", "hr"}


def element(tag: str, /, *content: str | None, **attributes: object) -> Markup:
    """`class_` and `aria_label` become `class` and `aria-label`; None and False are left out, True is the name."""
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    inner = "".join(map(text, content))
    return Markup(f"<{tag}{written}/>" if tag in _VOID and not inner else f"<{tag}{written}>{inner}</{tag}>")


def text(content: str | None) -> Markup:
    if isinstance(content, Markup):
        return content
    return Markup(escape(content, quote=False)) if content else EMPTY


def joined(parts: Iterable[str]) -> Markup:
    return Markup("".join(map(text, parts)))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str | None = None) -> Markup:
    """The first cell of a row is its heading; wide tables scroll by themselves."""
    titles = element("tr", *(element("th", title, scope="col") for title in head))
    body = [
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])) for row in rows
    ]
    inner = element(
        "table",
        element("caption", caption) if caption else None,
        element("thead", titles),
        element("tbody", *body),
    )
    return element("div", inner, class_="wide", tabindex="0", role="region", aria_label=caption or "Table")


def _attribute(key: str, value: object) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'
