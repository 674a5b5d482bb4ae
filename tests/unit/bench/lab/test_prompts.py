"""What is made of the rounds of `aegis lab prompts`, and the checkpoint that it serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from aegis.models.checkpoint import open_checkpoint
from bench.lab.prompts import PROMPTS, Round, _figures, _prompt, write_checkpoint


def rounds(*pairs: tuple[float, float], other: int | None = None) -> list[Round]:
    """Seconds of each pair; in round `other` the two sides make other tokens."""
    made = [[Round(True, a, (1, 2)), Round(False, b, (1, 9 if at == other else 2))] for at, (a, b) in enumerate(pairs)]
    return [each for pair in made for each in pair]


def test_the_ratio_is_that_of_the_medians() -> None:
    shared, alone, ratio, *_, same = _figures(rounds((2.0, 3.2), (8.0, 9.0), (1.0, 3.0)), rounds((1.0, 1.0)))
    assert (shared.value, alone.value) == (PROMPTS / 2.0, PROMPTS / 3.2)
    assert ratio.value == pytest.approx(1.6) and ratio.ok and same.ok


def test_other_tokens_and_little_gain_miss_their_bars() -> None:
    _, _, ratio, *_, same = _figures(rounds((2.0, 2.5), (2.0, 2.5)), rounds((1.0, 1.0), (1.0, 1.0), other=1))
    assert ratio.ok is False and same.ok is False and same.value == 0.5


def test_prompts_of_a_round_differ_and_those_of_both_sides_are_the_same() -> None:
    prompts = [_prompt(3, at) for at in range(PROMPTS)]
    assert len(set(map(tuple, prompts))) == PROMPTS and prompts == [_prompt(3, at) for at in range(PROMPTS)]


def test_the_checkpoint_can_be_served(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    assert open_checkpoint(tmp_path / "model").directory == tmp_path / "model"
