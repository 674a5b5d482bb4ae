from __future__ import annotations

import threading
import time

import pytest

from aegis.control.progress import STEP_S_MAX, LaneProgress, LoopProgress, Progress


def test_a_main_loop_that_turns_gets_on() -> None:
    loop_progress = LoopProgress()
    progress = Progress(loop_progress)
    first = progress.value(0.5, 0.1)
    loop_progress.passes += 1
    assert progress.value(1.0, 0.1) > first


def test_one_that_waits_for_ever_does_not() -> None:
    progress = Progress(LoopProgress())
    values = [progress.value(0.5 * n, 0.1 + 0.001 * n) for n in range(1, 10)]
    assert len(set(values)) == 1


def test_what_the_thread_that_asks_uses_is_not_the_main_loop_s(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter(range(1, 10))
    monkeypatch.setattr(time, "monotonic", lambda: next(now_s))
    monkeypatch.setattr(time, "process_time", lambda: 10 + time.thread_time())
    progress = Progress(LoopProgress())
    assert len({_spun(progress) for _ in range(3)}) == 1


def _spun(progress: Progress) -> int:
    """What is said after the processor was used for more than a main loop that waits would use in a second."""
    until_s = time.thread_time() + 0.03
    while time.thread_time() < until_s:
        pass
    return progress.now()


def test_a_long_step_gets_on_while_it_uses_the_processor() -> None:
    progress = Progress(LoopProgress())
    values = [progress.value(0.5 * n, 0.4 * n) for n in range(1, 21)]
    assert values == sorted(set(values))


def test_a_step_may_not_take_for_ever_however_busy_it_is() -> None:
    progress = Progress(LoopProgress())
    end = int(STEP_S_MAX) + 2
    values = [progress.value(float(n), float(n)) for n in range(end, 2 * end)]
    assert len(set(values[-2:])) == 1


def looked_at(*, began_s: float | None, steps: list[int], used_s: list[float]) -> tuple[list[int], LoopProgress]:
    """What heartbeats say, one after the other, of a process whose main loop turns and which has one lane."""
    loop_progress, lane = LoopProgress(), LaneProgress(1)
    loop_progress.lanes = (lane,)
    lane.began_s = began_s
    progress, values = Progress(loop_progress), list[int]()
    for number, (made, used) in enumerate(zip(steps, used_s, strict=True)):
        loop_progress.passes += 1
        lane.steps = made
        values.append(progress.value(0.5 * (number + 1), 0.01 * number, [(lane, used)]))
    return values, loop_progress


def test_a_lane_that_makes_steps_gets_on() -> None:
    values, loop_progress = looked_at(began_s=0.0, steps=[1, 2, 3, 4], used_s=[0.1] * 4)
    assert values == [1, 2, 3, 4]
    assert not loop_progress.hangs


def test_a_lane_in_a_long_step_gets_on_while_it_uses_a_processor() -> None:
    values, loop_progress = looked_at(began_s=0.0, steps=[1] * 4, used_s=[0.1, 0.5, 0.9, 1.3])
    assert values == [1, 2, 3, 4]
    assert not loop_progress.hangs


def test_a_run_that_waits_for_ever_hangs_though_the_main_loop_turns() -> None:
    values, loop_progress = looked_at(began_s=0.0, steps=[1] * 4, used_s=[0.1] * 4)
    assert values == [1, 1, 1, 1]
    assert loop_progress.hangs


def test_a_lane_whose_thread_has_ended_is_passed_over() -> None:
    """An instance ends its lanes' threads while heartbeats go on."""
    loop_progress, ended = LoopProgress(), threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    assert thread.ident is not None
    lane = LaneProgress(time.pthread_getcpuclockid(thread.ident))
    lane.began_s, loop_progress.lanes = 0.0, (lane,)
    ended.set()
    thread.join()
    progress = Progress(loop_progress)
    assert progress.now() == 1
    assert not loop_progress.hangs


def test_a_lane_without_a_run_does_not_hang() -> None:
    values, loop_progress = looked_at(began_s=None, steps=[1] * 4, used_s=[0.1] * 4)
    assert values == [1, 2, 3, 4]
    assert not loop_progress.hangs


def test_a_step_on_a_lane_may_not_take_for_ever_however_busy_it_is() -> None:
    looks = 2 * int(STEP_S_MAX) + 4
    values, loop_progress = looked_at(began_s=0.0, steps=[1] * looks, used_s=[0.5 * number for number in range(looks)])
    assert values[-1] == values[-2]
    assert loop_progress.hangs


def test_heartbeats_say_how_long_each_run_has_lasted() -> None:
    loop_progress = LoopProgress()
    running, idle = LaneProgress(1), LaneProgress(1)
    loop_progress.lanes = (running, idle)
    running.began_s = time.monotonic() - 2.0
    lasted_ns, none_ns = Progress(loop_progress).lanes_ns()
    assert lasted_ns >= 2_000_000_000
    assert none_ns == 0


def test_how_long_a_lane_was_idle_says_nothing_of_its_next_run() -> None:
    loop_progress, lane = LoopProgress(), LaneProgress(1)
    progress, late_s = Progress(loop_progress), 2 * STEP_S_MAX
    for now_s, began_s, used_s in ((0.5, 0.0, 0.5), (1.0, None, 0.5), (late_s, late_s, 1.0), (late_s + 1, late_s, 2.0)):
        lane.began_s = began_s
        progress.value(now_s, used_s, [(lane, used_s)])
        assert not loop_progress.hangs
