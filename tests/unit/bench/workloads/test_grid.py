"""Every batch size with every length of prompts, for every model and again, in an order that is drawn."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from aegis.core.rng import Stream
from bench.workloads.arrival import Arrival
from bench.workloads.grid import Grid


def groups(grid: Grid, seed: int = 1) -> list[list[Arrival]]:
    return [list(group) for _, group in groupby(grid.arrivals(Stream(seed)), key=lambda arrival: arrival.at_ns)]


def test_each_model_has_each_size_with_each_prompt_as_often() -> None:
    made = groups(Grid(models=3, rows=5, prompt=640, answer=8, repeats=2))
    cells = [
        (model, rows, prompt) for model in ("m000", "m001", "m002") for rows in (1, 2, 4) for prompt in (10, 160, 640)
    ]
    assert Counter((group[0].model, len(group), group[0].input_tokens) for group in made) == Counter(2 * cells)
    assert all(len(set(group)) == 1 for group in made)


def test_large_groups_have_no_long_prompts() -> None:
    made = groups(Grid(models=1, rows=64, prompt=4096, repeats=1))
    assert {(len(group), group[0].input_tokens) for group in made if group[0].input_tokens > 64} == {
        (1, 4096), (2, 4096), (4, 4096), (1, 1024), (2, 1024), (4, 1024), (8, 1024), (16, 1024)
    }  # fmt: skip
    assert max(len(group) for group in made) == 64


def test_a_prompt_too_long_for_any_group_comes_alone() -> None:
    made = groups(Grid(models=1, rows=2, prompt=100_000, repeats=1))
    assert [len(group) for group in made if group[0].input_tokens == 100_000] == [1]


def test_as_many_requests_as_it_says() -> None:
    grid = Grid(models=2, rows=16, prompt=1024, repeats=3)
    assert sum(map(len, groups(grid))) == grid.requests == 2 * 31 * 3 * 3


def test_groups_are_evenly_apart() -> None:
    assert [group[0].at_ns for group in groups(Grid(models=1, rows=2, repeats=1, every_s=0.25))] == [
        n * 250_000_000 for n in range(6)
    ]


def test_a_short_context_has_short_prompts() -> None:
    assert {each.input_tokens for group in groups(Grid(prompt=8)) for each in group} == {1, 2, 8}


def test_no_size_is_always_at_the_same_place() -> None:
    """Every fifth observation is held out of a fit, and there are seven sizes."""
    sizes = [len(group) for group in groups(Grid())]
    assert set(sizes[4::5]) == {1, 2, 4, 8, 16, 32, 64}
    assert sizes != [len(group) for group in groups(Grid(), seed=2)]
