"""The laws of who is served in a turn, in its pauses and beside it can be broken: where they are, it is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from msgspec.structs import replace as struct_replace

from aegis.core.clock import NS_PER_MS
from aegis.core.errors import LawBroken
from aegis.core.lane_views import LaneChoice, LanesView
from aegis.core.model import Slo
from aegis.core.views import BatchView, Turn
from aegis.sim.faults.fake_models import make_spec
from decode.policies.least_slack import LeastSlack
from decode.sequences import Sequence as Decoding
from decode.worklist import Batch, WorkList
from tests.sim import seeds
from tests.sim.starvation import Watched
from tests.sim.test_cores import play
from tests.sim.test_starvation import FLOOD

SLO = Slo(40 * NS_PER_MS, 5 * NS_PER_MS, 4 * NS_PER_MS)
PIECES = replace(
    FLOOD,
    specs=tuple(make_spec(i, image_pages=2, block_bytes=65536, slo=SLO) for i in range(3)),
    prompt_max=400,
    output_max=40,
)
LANES = replace(
    PIECES,
    specs=tuple(struct_replace(spec, slo=Slo(40 * NS_PER_MS, 50 * NS_PER_MS)) for spec in PIECES.specs),
    lane_shares=((250, 750), (500, 500), (750, 250)),
)


@dataclass(frozen=True)
class Passing(LeastSlack):
    """Beside a decode, its own prompt is the last that it thinks of."""

    def beside(self, lanes: LanesView, now_ns: int) -> LaneChoice | None:
        others = [each for each in lanes.companions if each.batch.batch != lanes.decoding.batch]
        return super().beside(struct_replace(lanes, companions=others or lanes.companions), now_ns)


def test_least_slack_serves_who_is_in_its_turns_beside_them_and_in_pauses() -> None:
    for seed in range(3):
        play(PIECES, seed)
        play(LANES, seed)


@pytest.mark.parametrize("seed", [681, 2474, 2621])
def test_streams_and_prompts_that_run_alone_take_turns(seed: int) -> None:
    """In these a step that prompts share fails, each of them runs alone then, and the streams waited for all."""
    seeds.run_seed(seed)


def test_a_prompt_waits_for_nothing_that_cannot_begin_on_the_second_lane() -> None:
    """In this another prompt was chosen, for which there was no room, and the streams went on alone."""
    seeds.run_seed(3420)


def _bars_nobody(work: WorkList, batch: Batch, now_ns: int) -> bool:
    return now_ns < batch.stuck_until_ns


def _last_come(batch: Batch) -> Decoding:
    return max([s for s in batch.sequences if s.lacks and not s.beside], key=lambda s: s.rank_ns)


def _nobody(_: object) -> list[Decoding]:
    return []


def _steps_first(*_: object) -> bool:
    return True


@pytest.mark.parametrize(
    ("what", "wrong", "law"),
    [
        ("decode.worklist.WorkList._bars", _bars_nobody, r"W6: two pauses"),
        ("decode.worklist.Batch.next_waiting", _last_come, r"W8: .* after one of a higher rank"),
        ("decode.core.with_a_block", _nobody, r"W8: .* in neither of two runs"),
        ("decode.second_lane.SecondLane.takes", _steps_first, r"W8: .* could be prefilled"),
    ],
    ids=["pauses one after another", "the last prompt first", "streams left out", "prompts left out"],
)
def test_who_is_not_served_is_found(
    monkeypatch: pytest.MonkeyPatch, what: str, wrong: Callable[..., object], law: str
) -> None:
    monkeypatch.setattr(what, wrong)
    with pytest.raises(LawBroken, match=law):
        for seed in range(8):
            play(PIECES, seed)


HURRIED = Slo(NS_PER_MS, 5 * NS_PER_MS, 4 * NS_PER_MS)
STREAMS = replace(
    PIECES,
    specs=tuple(make_spec(i, image_pages=2, block_bytes=65536, slo=HURRIED) for i in range(2)),
    prompt_max=60,
    output_max=80,
    requests=120,
    gap_ns=300_000,
)


@dataclass(frozen=True)
class Neglecting(LeastSlack):
    """The oldest batch has all turns, and pauses for each stream of the others, not for their prompts."""

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        turns = [turn for turn in super().plan(batches, now_ns) if not turn.pause]
        front, *others = sorted(turns, key=lambda turn: turn.batch)
        streams = [batch.batch for batch in batches if batch.there and batch.stream_ns is not None]
        pauses = [Turn(turn.batch, 1, prefills=False, pause=True) for turn in others if turn.batch in streams]
        return [*pauses, front, *others]


def test_a_prompt_whose_batch_has_nothing_but_pauses_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are steps of its streams."""

    def unchecked(watched: Watched, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        watched.note(now_ns)
        plan = watched.policy.plan(batches, now_ns)
        watched.quantum_ns = min([turn.quota_ns for turn in plan if turn.quota_ns and not turn.pause])
        return plan

    monkeypatch.setattr(Watched, "plan", unchecked)
    with pytest.raises(LawBroken, match=r"W[34]"):
        for seed in range(8):
            play(replace(STREAMS, policy=Neglecting()), seed)


def test_a_prompt_that_is_passed_over_on_the_second_lane_is_found() -> None:
    with pytest.raises(LawBroken, match=r"W7: .* before the prompt"):
        for seed in range(8):
            play(replace(LANES, policy=Passing()), seed)
