"""The life of a request, as one table: code, tests and docs read it from here.

queued → prefilling → handed_off → decoding ⇄ preempted → finished | failed | cancelled

Laws: (1) every request ends in exactly one terminal state; (2) a terminal state is never left; (3) an event that a
state does not list is a bug, and `advance` says so.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class State(StrEnum):
    QUEUED = "queued"
    PREFILLING = "prefilling"
    HANDED_OFF = "handed_off"
    DECODING = "decoding"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Step(StrEnum):
    START = "start"  # the instance that prefills it took it up
    FIRST_TOKEN = "first_token"  # prefill done, KV on its way to where it goes on, or there already
    RESUME = "resume"  # its batch has the turn
    PREEMPT = "preempt"  # another batch has the turn
    FINISH = "finish"
    FAIL = "fail"
    CANCEL = "cancel"
    REPLAY = "replay"  # its instance was lost, or its KV given up: from prompt and tokens sent


TERMINAL: Final = frozenset({State.FINISHED, State.FAILED, State.CANCELLED})

_ENDS = {Step.FINISH: State.FINISHED, Step.FAIL: State.FAILED, Step.CANCEL: State.CANCELLED, Step.REPLAY: State.QUEUED}

TABLE: Final[dict[State, dict[Step, State]]] = {
    State.QUEUED: {Step.START: State.PREFILLING, **_ENDS},
    State.PREFILLING: {Step.FIRST_TOKEN: State.HANDED_OFF, **_ENDS},
    State.HANDED_OFF: {Step.RESUME: State.DECODING, Step.PREEMPT: State.PREEMPTED, **_ENDS},
    State.DECODING: {Step.RESUME: State.DECODING, Step.PREEMPT: State.PREEMPTED, **_ENDS},
    State.PREEMPTED: {Step.RESUME: State.DECODING, Step.PREEMPT: State.PREEMPTED, **_ENDS},
    State.FINISHED: {},
    State.FAILED: {},
    State.CANCELLED: {},
}


def advance(state: State, step: Step) -> State:
    """The state after `step`. An impossible step is a bug of ours, hence an assertion."""
    after = TABLE[state].get(step)
    assert after is not None, f"{step} is impossible in {state}"
    return after
