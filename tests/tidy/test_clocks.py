"""A clock that is set anew moves no deadline, lease or timeout: whatever waits or is late reads monotonic time."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
TREES = ("aegis", "decode", "memory", "prefill", "proxy")
WALL = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}
TOLD = {
    "aegis/metadata/claims.py": "when a call came, for who reads its record",
    "aegis/node/catalogue/model.py": "when a model was created, as OpenAI's API tells it",
    "aegis/node/live_view_builder.py": "which start of the server a page has seen, told from others by its time",
    "aegis/telemetry/otlp.py": "spans for other programs, which date them",
    "proxy/http/openai/chat.py": "when an answer was created, as OpenAI's API tells it",
    "proxy/http/openai/completions.py": "the same",
    "proxy/http/responses/responses.py": "the same, and when it was complete",
    "proxy/http/openai/rerank.py": "the same",
}
"""What is told to people as a date, and compared with nothing."""


def wall_clock_reads(tree: ast.AST) -> Iterator[int]:
    """Lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if (owner, node.attr) in WALL:
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and any((node.module, alias.name) in WALL for alias in node.names):
            yield node.lineno


def test_only_dates_for_people_are_read_from_the_wall_clock() -> None:
    found = {
        str(path.relative_to(ROOT))
        for tree in TREES
        for path in (ROOT / tree).rglob("*.py")
        if any(wall_clock_reads(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert found == TOLD.keys()


def test_reads_are_found() -> None:
    code = "import time, datetime\nfrom time import time_ns\ntime.time()\ndatetime.datetime.now()\ntime.monotonic()"
    assert sorted(wall_clock_reads(ast.parse(code))) == [2, 3, 4]
