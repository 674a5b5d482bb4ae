"""The laws of waiting can be broken: by policies that break them, they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from aegis.core.clock import NS_PER_MS
from aegis.core.errors import LawBroken
from aegis.core.ids import InstanceId
from aegis.core.model import Slo
from aegis.core.views import BatchView, DecodeView, Turn, WaitingJobs, Work
from aegis.sim.faults.fake_models import make_spec
from aegis.sim.faults.world import Scenario
from decode.policies.least_slack import LeastSlack
from decode.sequences import Sequence as Decoding
from decode.worklist import RunningTurn
from prefill.policies.least_slack import LeastSlackPrefill
from tests.sim import seeds, starvation
from tests.sim.starvation import Watched, WatchedDecodeCore, WatchedPrefillCore
from tests.sim.test_cores import play

SLO = Slo(5 * NS_PER_MS, 3 * NS_PER_MS)
SLACK = LeastSlack()
FLOOD = Scenario(
    specs=tuple(make_spec(i, image_pages=2, block_bytes=65536, slo=SLO) for i in range(6)),
    pages=200,
    host_slabs=100,
    prefills=0,
    decodes=0,
    mixed=1,
    policy=SLACK,
    decode_core=WatchedDecodeCore,
    prefill_core=WatchedPrefillCore,
    requests=80,
    cancel_share=0.0,
    gap_ns=4 * NS_PER_MS,
    prompt_max=60,
    output_max=20,
)


@dataclass(frozen=True)
class Hostile:
    """A policy that runs the batch first that has to begin last."""

    rules = SLACK.rules

    def place(self, work: Work, lists: DecodeView) -> InstanceId | None:
        return SLACK.place(work, lists)

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        return [turn for turn in SLACK.plan(batches, now_ns) if not turn.pause][::-1]


@dataclass(frozen=True)
class LastComeFirst(LeastSlackPrefill):
    """On a prefill instance."""

    def order(self, waiting: WaitingJobs, now_ns: int) -> list[int]:
        return sorted(range(len(waiting.jobs)), key=lambda at: (-waiting.jobs[at].ranked_ns, at))


def test_least_slack_lets_nobody_starve() -> None:
    for seed in range(3):
        play(FLOOD, seed)


def test_a_plan_with_who_has_time_before_who_has_none_is_found() -> None:
    with pytest.raises(LawBroken, match="W1"):
        play(replace(FLOOD, policy=Hostile()), 0)


def test_who_waits_for_others_again_and_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def unchecked(watched: Watched, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        watched.note(now_ns)
        return watched.policy.plan(batches, now_ns)

    monkeypatch.setattr(Watched, "plan", unchecked)
    with pytest.raises(LawBroken, match="W3"):
        play(replace(FLOOD, policy=Hostile()), 0)


def test_who_is_there_and_left_out_of_the_run_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a turn does not count for who was not in it."""
    begin = WatchedDecodeCore._begin_decode

    def leave_out(core: WatchedDecodeCore, turn: RunningTurn, ready: list[Decoding], now_ns: int) -> None:
        begin(core, turn, ready[1:] or ready, now_ns)

    monkeypatch.setattr(WatchedDecodeCore, "_begin_decode", leave_out)
    with pytest.raises(LawBroken, match="there and not in the run"):
        play(FLOOD, 0)


@pytest.mark.parametrize("seed", [436, 1204, 9515, 9778, 9902])
def test_a_turn_counts_for_no_token_whose_kv_came_too_late_for_its_runs(seed: int) -> None:
    """In these all runs of a turn began without the sequence that it was for; at the end its KV was there."""
    seeds.run_seed(seed)


def test_a_turn_whose_batch_has_left_waits_for_no_weights() -> None:
    """In this its only request is cancelled, and a pause follows that is for somebody who has just had one."""
    seeds.run_seed(6799)


def test_a_turn_that_follows_one_of_the_same_batch_counts_by_itself() -> None:
    """In this the first turn is over, and the run of the next one has begun when that is looked at. It was given for a
    request that had come meanwhile."""
    seeds.run_seed(2377)


def test_a_turn_whose_step_failed_counts_for_no_token() -> None:
    """In this a piece of a prompt fails, and with it the step of the stream that the turn was given for."""
    seeds.run_seed(5033)


def test_a_prompt_without_room_wins_its_batch_no_turns() -> None:
    """In this its batch had turn after turn for it, and streams of the batch filled them."""
    seeds.run_seed(5405)


def test_a_prompt_that_fails_with_others_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has to run alone, or a stream would fail with it again and again."""
    monkeypatch.setattr("decode.core.is_alone", lambda sequence: False)
    monkeypatch.setattr("decode.prompt_rows.is_alone", lambda sequence: False)
    with pytest.raises(LawBroken, match="have failed before"):
        for seed in range(8):
            play(replace(FLOOD, failing_share=0.2), seed)


def test_the_bound_is_not_four_times_too_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    longest_ns = starvation.Wait.longest_ns
    monkeypatch.setattr(starvation.Wait, "longest_ns", lambda wait: longest_ns(wait) // 4)
    with pytest.raises(LawBroken, match="W4"):
        for seed in (5, 10, 12):  # the one that shows it first
            play(replace(FLOOD, requests=300, gap_ns=3 * NS_PER_MS, output_max=40), seed)


def test_a_prefill_that_newcomers_overtake_for_ever_is_found() -> None:
    split = replace(FLOOD, prefills=1, decodes=1, mixed=0, order=LeastSlackPrefill(), gap_ns=NS_PER_MS)
    play(split, 0)
    with pytest.raises(LawBroken, match="W5"):
        play(replace(split, order=LastComeFirst()), 0)
