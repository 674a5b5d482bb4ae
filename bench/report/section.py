"""The elements of the page's sections."""

from __future__ import annotations

from collections.abc import Sequence

from bench.report.markup import EMPTY, Markup, element, joined, text

SPANS = "there are no spans; `aegis simulate --spans FILE` writes them, and a server's are at `/debug/spans`"
RECORDS = "there are no records; `--records FILE` writes them, and a server's are at `/debug/records`"


def section(name: str, title: str, about: str, *content: Markup) -> Markup:
    heading = element("h2", title, id=f"{name}-title")
    return element(
        "section",
        heading,
        element("p", about, class_="about"),
        *_grouped(content),
        id=name,
        aria_labelledby=f"{name}-title",
    )


def card(title: str, plot: Markup, figures: Markup, *, wide: bool = False) -> Markup:
    """A plot, and its figures for those who want to read or hear them."""
    details = element("details", element("summary", "Figures"), figures)
    return element("figure", element("figcaption", title), plot, details, class_="card wider" if wide else "card")


def lacking(what: str, names: Sequence[str], how: str) -> Markup:
    """Says that something is not here, of which runs, and how to get it; nothing where nothing is missing. What stands
    in backticks is code."""
    if not names:
        return EMPTY
    parts = [element("code", part) if at % 2 else text(part) for at, part in enumerate(how.split("`"))]
    return element("p", f"No {what} of ", element("strong", ", ".join(names)), ": ", *parts, ".", class_="lacking")


def _grouped(content: Sequence[Markup]) -> list[Markup]:
    cards = [part for part in content if part.startswith("<figure")]
    others = [part for part in content if part and part not in cards]
    return [element("div", joined(cards), class_="cards"), *others] if cards else others
