"""Runs of prefills: as many first tokens saved as can be, in runs where that costs nobody a deadline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from aegis.core.ids import ModelId
from aegis.core.views import PrefillJob
from prefill.policies.prefill_runs import HEAD, Schedule

A, B, C = (ModelId(name) for name in "abc")
NOW_NS = 1000


def job(model: ModelId, due: int, prefill: int = 10) -> PrefillJob:
    return PrefillJob(model, 0, NOW_NS + due, NOW_NS + due, 1000, prefill, switch_ns=20)


def scheduled(line: Sequence[PrefillJob], load_ns: Mapping[ModelId, int]) -> Schedule:
    schedule = Schedule(line, load_ns, NOW_NS)
    assert schedule.save() == (not schedule.sacrificed)
    return schedule


def by_deadline(line: Sequence[PrefillJob]) -> list[int]:
    return sorted(range(len(line)), key=lambda at: line[at].due_ns)


def planned(schedule: Schedule) -> list[list[int]]:
    return [run.jobs for run in schedule.runs]


def on_time(line: Sequence[PrefillJob], load_ns: Mapping[ModelId, int], order: Sequence[int]) -> set[int]:
    """Who is, where jobs run in this order: models come one after the other, while jobs run. A model that has left the
    turn comes anew."""
    now_ns = loaded_ns = NOW_NS
    running, before, done = None, set(), set()
    for at in order:
        view = line[at]
        if view.model != running:
            to_load_ns = view.switch_ns if view.model in before else load_ns.get(view.model, 0)
            loaded_ns += to_load_ns
            now_ns = max(now_ns, loaded_ns) if to_load_ns else now_ns
            running = view.model
            before.add(running)
        now_ns += view.prefill_ns
        if now_ns <= view.due_ns:
            done.add(at)
    return done


lines = st.lists(st.builds(job, st.sampled_from([A, B, C]), st.integers(1, 300), st.integers(1, 60)), max_size=12)
loads = st.dictionaries(st.sampled_from([A, B, C]), st.integers(1, 80))


@given(st.lists(st.builds(job, st.just(A), st.integers(1, 60), st.integers(1, 20)), max_size=6), st.integers(0, 20))
def test_of_one_model_as_many_are_saved_as_in_any_order(line: list[PrefillJob], load: int) -> None:
    """So that all are where all can be, and then in order of deadlines."""
    load_ns = {A: load} if load else {}
    schedule = scheduled(line, load_ns)
    best = max(len(on_time(line, load_ns, order)) for order in permutations(range(len(line))))
    assert len(line) - len(schedule.sacrificed) == best
    saved = [at for at in by_deadline(line) if at not in schedule.sacrificed]
    assert [at for jobs in planned(schedule) for at in jobs] == saved


@given(lines, loads)
def test_whom_a_schedule_saves_it_saves(line: list[PrefillJob], load_ns: dict[ModelId, int]) -> None:
    """And nobody is left out."""
    schedule = scheduled(line, load_ns)
    saved = set(range(len(line))) - set(schedule.sacrificed)
    assert saved <= on_time(line, load_ns, [at for jobs in planned(schedule) for at in jobs])
    order = schedule.order()
    assert saved <= on_time(line, load_ns, order) and sorted(order) == list(range(len(line)))


@given(lines, loads)
def test_all_or_none_ends_where_one_cannot_be_saved(line: list[PrefillJob], load_ns: dict[ModelId, int]) -> None:
    saves_all = not scheduled(line, load_ns).sacrificed
    assert Schedule(line, load_ns, NOW_NS).save(all_or_none=True) == saves_all


@given(lines)
def test_with_all_models_there_nobody_is_sacrificed_who_need_not_be(line: list[PrefillJob]) -> None:
    schedule = scheduled(line, {})
    assert len(line) - len(schedule.sacrificed) >= len(on_time(line, {}, by_deadline(line)))


def test_of_a_long_line_those_due_first_are_looked_at() -> None:
    """All that come later in it are too many to be saved; the head still is, and nobody is left out."""
    line = [job((A, B, C)[at % 3], 1000 + 11 * at, 10) for at in range(HEAD)]
    line += [job((A, B, C)[at % 3], 1000 + 11 * HEAD + at, 10) for at in range(HEAD)]
    load_ns = {A: 20, B: 20, C: 20}
    schedule = scheduled(line, load_ns)
    order, whole = schedule.order(), set(range(len(line)))
    assert not schedule.sacrificed and set(order) == whole
    assert set(range(HEAD)) <= on_time(line, load_ns, order)
    assert on_time(line, load_ns, order) < whole, "or one run of each model would do"


def test_a_job_runs_beside_others_of_its_model_where_that_makes_nobody_late() -> None:
    line = [job(A, 50), job(B, 100), job(A, 200)]
    assert planned(scheduled(line, {A: 20, B: 20})) == [[0, 2], [1]]
    line[1] = job(B, 55)
    assert planned(scheduled(line, {A: 20, B: 20})) == [[0, 2], [1]], "its model comes meanwhile"
    line[1] = job(B, 55, 20)
    assert planned(scheduled(line, {A: 20})) == [[0], [1], [2]], "it has five to spare only"


def test_a_job_that_would_be_late_itself_does_not_wait_beside_others() -> None:
    line = [job(A, 20), *[job(A, 1000, 100) for _ in range(3)], job(B, 900)]
    assert planned(scheduled(line, {})) == [[0, 1, 2, 3], [4]] or planned(scheduled(line, {})) == [[0], [4], [1, 2, 3]]


def test_who_takes_the_longest_is_sacrificed_and_a_load_for_one_counts() -> None:
    line = [job(A, 40, 30), job(A, 45, 10), job(A, 49, 10)]
    assert scheduled(line, {}).sacrificed == [0]
    line = [job(A, 100, 40), job(B, 85, 20), job(C, 95, 30)]
    assert scheduled(line, {B: 50}).sacrificed == [1]


def test_a_model_whose_run_is_sacrificed_is_loaded_for_its_next_one() -> None:
    line = [job(A, 60, 30), job(B, 75, 10), job(A, 90, 10), job(C, 92, 20)]
    schedule = scheduled(line, {A: 30, B: 15})
    assert schedule.sacrificed == [0]
    assert [(run.model, run.load_ns, run.start_ns - NOW_NS) for run in schedule.runs] == [
        (B, 15, 15),
        (A, 30, 45),
        (C, 0, 55),
    ]


def test_whose_model_is_there_runs_while_others_come() -> None:
    line = [job(A, 100), job(B, 200), job(B, 300)]
    assert scheduled(line, {A: 50}).order() == [1, 2, 0]
    tight = [job(A, 62), job(B, 200, 70)]
    assert scheduled(tight, {A: 50}).order() == [0, 1], "it would be too late for a"


def test_who_is_sacrificed_runs_beside_others_of_its_model_if_nobody_else_gets_late() -> None:
    line = [job(A, 100), job(B, 120), job(A, -5, 30)]
    schedule = scheduled(line, {})
    assert schedule.sacrificed == [2] and schedule.order() == [0, 2, 1]
    tight = [job(A, 45), job(B, 20), job(B, -5, 30)]
    assert scheduled(tight, {}).order() == [1, 0, 2]
    assert scheduled([job(A, 100), job(B, -5)], {}).order() == [0, 1], "there is no run of its model"


def test_priorities_are_compared_and_not_the_deadlines_that_they_are_told_in() -> None:
    """One that is less urgent by 8 deadlines each goes before one that is so by 1 that is ten times as long."""
    low, high = job(A, 100, 60)._replace(ttft_ns=1), job(A, 100, 60)._replace(ttft_ns=10)
    line = [low._replace(urgent_ns=NOW_NS + 108), high._replace(urgent_ns=NOW_NS + 110)]
    assert scheduled(line, {}).sacrificed == [0]


def test_who_has_the_least_priority_is_sacrificed_first() -> None:
    low = job(A, 100, 10)._replace(urgent_ns=NOW_NS + 1100)
    assert scheduled([job(A, 100, 60), low, job(A, 100, 40)], {}).sacrificed == [1]
    assert scheduled([job(A, 100, 60), job(A, 100, 10), job(A, 100, 40)], {}).sacrificed == [0]
