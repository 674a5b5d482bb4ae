"""Section: what others have published of what suites simulate."""

from __future__ import annotations

from bench.common.numbers import NONE
from bench.report.folder import Folder
from bench.report.markup import Markup, element, table
from bench.report.section import lacking, section
from bench.simulate.sweep import GOAL


def published(folder: Folder) -> Markup:
    rows = [
        (sweep.name, each.policy, each.ours, each.theirs, _difference(each.difference_percent), each.source)
        for sweep in folder.sweeps
        for each in sweep.beside
    ]
    head = ("figure", "policy", "here", "there", "difference", "there is")
    claims = [element("p", element("strong", name), f": {claim}.") for name, claim in folder.claims.items()]
    return section(
        "published",
        "Beside what was published",
        f"Where curves fall below {GOAL:.0%} here and elsewhere, and what papers say of a figure in words.",
        *([table(head, rows, caption=f"Falls below {GOAL:.0%} at")] if rows else []),
        *claims,
        lacking(
            "published figures",
            [] if rows or claims else [folder.name],
            "`aegis simulate --suite fig11a` writes some beside its own",
        ),
    )


def _difference(percent: float | None) -> str:
    return NONE if percent is None else f"{percent:+.1f} %"
