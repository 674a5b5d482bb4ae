"""One page of HTML that needs nothing else: styles, script, plots and data are in it."""

from __future__ import annotations

from importlib.resources import files as resources

from bench.report.attainment import attainment, published
from bench.report.folder import Folder
from bench.report.fragmentation import fragmentation
from bench.report.latency import latency
from bench.report.markup import Markup, element, joined
from bench.report.overview import files, results
from bench.report.schedule import schedule
from bench.report.switching import switching
from bench.report.utilisation import instance_use, link_use

_SECTIONS = {
    "results": ("Results", results),
    "attainment": ("Attainment", attainment),
    "published": ("Published", published),
    "latency": ("Latency", latency),
    "switching": ("Switching", switching),
    "utilisation": ("Utilisation", instance_use),
    "links": ("Links", link_use),
    "fragmentation": ("Fragmentation", fragmentation),
    "schedule": ("Schedule", schedule),
    "files": ("Files", files),
}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_ICON = "data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg'/>"


def page(folder: Folder) -> str:
    """The whole page. The same files give the same bytes."""
    title = f"aegis report: {folder.name}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="color-scheme", content="light dark"),
        Markup(f'<link rel="icon" href="{_ICON}"/>'),
        element("title", title),
        element("style", _resource("page.css")),
    )
    links = [element("li", element("a", name, href=f"#{at}")) for at, (name, _) in _SECTIONS.items()]
    body = element(
        "body",
        element("header", element("h1", title), element("nav", element("ul", *links), aria_label="Sections")),
        element("main", *(build(folder) for _, build in _SECTIONS.values())),
        element("script", _resource("timeline.js")),
    )
    return joined((Markup("<!doctype html>\n"), element("html", head, body, lang="en"), "\n"))


def _resource(name: str) -> Markup:
    return Markup((resources("bench.report") / name).read_text(encoding="utf-8"))
