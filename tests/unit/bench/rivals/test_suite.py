"""The figures that `aegis bench rivals` shows of a run."""

from __future__ import annotations

import json

from bench.common.provenance import RESULTS
from bench.rivals.suite import CONTENDERS, SCENES, Run


def test_a_run_is_a_line() -> None:
    run = Run("market", "ttft=2,tbt=0.1", "least-slack", "--mixed 2", 0.993, 1100.6, 2)
    assert str(run) == "market         least-slack    tokens on time  99.3%,   1101 a second; failed    2"


def test_what_was_measured_is_every_contender_in_every_scene() -> None:
    measured = json.loads((RESULTS / "rivals.json").read_text(encoding="utf-8"))
    told = [(run["scene"], run["contender"], run["launched"]) for run in measured["runs"]]
    assert told == [(scene.name, name, " ".join(words)) for scene in SCENES for name, words in CONTENDERS.items()]
