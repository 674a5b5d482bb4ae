"""The laws of the lifecycle table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.core.lifecycle import TABLE, TERMINAL, State, Step, advance


def reachable(start: State) -> set[State]:
    found, todo = {start}, [start]
    while todo:
        for state in TABLE[todo.pop()].values():
            if state not in found:
                found.add(state)
                todo.append(state)
    return found


@pytest.mark.parametrize("state", [state for state in State if state not in TERMINAL])
def test_law_1_every_request_can_end_in_each_terminal_state(state: State) -> None:
    assert reachable(state) >= TERMINAL
    assert {advance(state, step) for step in (Step.FINISH, Step.FAIL, Step.CANCEL)} == TERMINAL


@given(st.lists(st.sampled_from(list(Step)), max_size=20))
def test_law_1_a_life_has_at_most_one_terminal_state(steps: list[Step]) -> None:
    states = [State.QUEUED]
    for step in steps:
        if step in TABLE[states[-1]]:
            states.append(advance(states[-1], step))
    assert sum(state in TERMINAL for state in states) <= 1
    assert not any(state in TERMINAL for state in states[:-1])


@pytest.mark.parametrize("step", list(Step))
@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_law_2_a_terminal_state_is_never_left(state: State, step: Step) -> None:
    with pytest.raises(AssertionError):
        advance(state, step)


@pytest.mark.parametrize(
    ("state", "step"), [(state, step) for state in State for step in Step if step not in TABLE[state]]
)
def test_law_3_what_a_state_does_not_list_is_a_bug(state: State, step: Step) -> None:
    with pytest.raises(AssertionError, match=f"{step} is impossible in {state}"):
        advance(state, step)


def test_a_life_without_trouble() -> None:
    state, seen = State.QUEUED, []
    for step in (Step.START, Step.FIRST_TOKEN, Step.RESUME, Step.PREEMPT, Step.RESUME, Step.FINISH):
        state = advance(state, step)
        seen.append(state)
    assert [s.value for s in seen] == ["prefilling", "handed_off", "decoding", "preempted", "decoding", "finished"]


def test_every_state_can_be_reached_and_every_living_one_replayed() -> None:
    assert reachable(State.QUEUED) == set(State) == set(TABLE)
    assert {advance(state, Step.REPLAY) for state in State if state not in TERMINAL} == {State.QUEUED}
