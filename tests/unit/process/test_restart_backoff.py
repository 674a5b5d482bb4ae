"""A process that keeps ending is started later and later, and one that never serves not for ever."""

from __future__ import annotations

from aegis.process.restart_backoff import RestartBackoff

SOON, LATE = 1.0, 1000.0


def test_the_first_end_of_one_that_served_long_costs_no_pause() -> None:
    restarts = RestartBackoff()
    restarts.ended(served=True, after_s=LATE)
    assert restarts.pause_s == 0


def test_pauses_grow_to_a_bound_and_are_forgotten() -> None:
    restarts, pauses = RestartBackoff(), list[float]()
    for _ in range(8):
        restarts.ended(served=True, after_s=SOON)
        pauses.append(restarts.pause_s)
    assert pauses == sorted(pauses) and pauses[0] < pauses[3] == pauses[-1]
    restarts.ended(served=True, after_s=LATE)
    assert restarts.pause_s == 0 and not restarts.given_up


def test_what_never_serves_is_given_up() -> None:
    restarts, starts = RestartBackoff(), 0
    while not restarts.given_up:
        starts += 1
        restarts.failed() if starts % 2 else restarts.ended(served=False, after_s=SOON)
    assert starts == 5


def test_what_has_served_is_tried_again_for_minutes_and_not_for_ever() -> None:
    restarts, paused_s = RestartBackoff(), 0.0
    restarts.ended(served=True, after_s=LATE)
    while not restarts.given_up:
        restarts.failed()
        paused_s += restarts.pause_s
    assert 100 < paused_s < 200


def test_serving_once_is_a_new_beginning() -> None:
    restarts = RestartBackoff()
    for _ in range(4):
        restarts.ended(served=False, after_s=SOON)
    restarts.ended(served=True, after_s=SOON)
    restarts.failed()
    assert not restarts.given_up
