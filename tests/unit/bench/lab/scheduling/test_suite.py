"""The benchmark's stream of requests is a steady one, and its figures are told. How fast anything was is not judged."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench.lab.scheduling.placements import Replay, Size
from bench.lab.scheduling.suite import PLACING, Result, run
from bench.lab.scheduling.turns import TimedPolicy, Turns
from decode.policies.least_slack import LeastSlack


def test_requests_pass_through_at_a_steady_rate() -> None:
    size = Size(8, 20)
    replay = Replay(size)
    replay.measure(400)
    counts = {what: len(durations_ns) for what, durations_ns in replay.durations_ns.items()}
    assert counts["arrival"] == 400 and counts["cancel"] == 20
    left = counts["last token"] + counts["cancel"]
    assert counts["first token"] == counts["start"] == counts["KV arrived"] == pytest.approx(400, abs=20)
    assert left == pytest.approx(400, abs=80)
    assert counts["token"] == pytest.approx(20 * 400, rel=0.2)
    assert 0 < counts["switch"] < counts["first token"]


def test_every_turn_is_planned_over_all_batches() -> None:
    policy = TimedPolicy(LeastSlack(), 4)
    turns = Turns(policy, 4)
    planned = len(policy.durations_ns)
    turns.measure(6)
    assert len(turns.durations_ns) == 6
    assert len(policy.durations_ns) - planned >= 6, "and one where a turn ends besides"


def test_decisions_are_told_beside_their_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results" / "schedule.json"
    result = run(path, {Size(8, 20): 50.0, Size(3, 2): 60.0}, arrivals=40, rounds=3)
    assert msgspec.json.decode(path.read_bytes(), type=Result) == result
    judged = [each for each in result.decisions if each.limit_us is not None]
    assert [(each.setting, each.event) for each in judged] == [
        *((size, event) for size in ("8 × 20", "3 × 2") for event in PLACING),
        ("64 batches", "decode round"),
        ("64 models", "turn, the plan"),
    ]
    assert all(each.p50_us <= each.p99_us <= each.max_us for each in result.decisions)
    shown = capsys.readouterr().out
    assert "8 × 20" in shown and "≤ 50" in shown and "≤ 1000" in shown
