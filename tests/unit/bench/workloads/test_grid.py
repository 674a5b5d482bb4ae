"""Every batch size with every length of prompts, for every model, in an order that is drawn."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from aegis.core.rng import Stream
from bench.workloads.arrival import Arrival
from bench.workloads.grid import Grid


def groups(grid: Grid, seed: int = 1) -> list[list[Arrival]]:
    return [list(group) for _, group in groupby(grid.arrivals(Stream(seed)), key=lambda arrival: arrival.at_ns)]


def test_each_model_has_each_size_with_each_prompt_once() -> None:
    made = groups(Grid(models=3, rows=5, prompt=640, answer=8))
    assert Counter((group[0].model, len(group), group[0].input_tokens) for group in made) == Counter(
        (model, rows, prompt) for model in ("m000", "m001", "m002") for rows in (1, 2, 4) for prompt in (10, 160, 640)
    )
    assert all(len({(each.model, each.input_tokens) for each in group}) == 1 for group in made)


def test_as_many_requests_as_it_says() -> None:
    grid = Grid(models=2, rows=16)
    assert sum(map(len, groups(grid))) == grid.requests == 2 * 31 * 3


def test_groups_are_evenly_apart() -> None:
    assert [group[0].at_ns for group in groups(Grid(models=1, rows=2, every_s=0.25))] == [
        n * 250_000_000 for n in range(6)
    ]


def test_answers_end_one_by_one_from_half_the_longest_on() -> None:
    answers = {each.output_tokens for group in groups(Grid(answer=9)) for each in group}
    assert answers == set(range(5, 10))
    assert {each.output_tokens for group in groups(Grid(answer=1)) for each in group} == {1}


def test_a_short_context_has_short_prompts() -> None:
    assert {each.input_tokens for group in groups(Grid(prompt=8)) for each in group} == {1, 2, 8}


def test_no_size_is_always_at_the_same_place() -> None:
    """Every fifth observation is held out of a fit, and there are five sizes."""
    sizes = [len(group) for group in groups(Grid())]
    assert set(sizes[4::5]) == {1, 2, 4, 8, 16}
    assert sizes != [len(group) for group in groups(Grid(), seed=2)]
