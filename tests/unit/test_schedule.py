"""The schedule of `make test` names tests that exist."""

from __future__ import annotations

from tests.schedule import ROOT, SLOWEST, TOGETHER


def test_every_path_exists() -> None:
    assert [path for path in (*SLOWEST, *TOGETHER) if not (ROOT / path).exists()] == []
