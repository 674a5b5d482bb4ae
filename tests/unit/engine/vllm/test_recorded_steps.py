"""Steps that are recorded and replayed: as long as they are the same ones, and only then."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from aegis.engine.vllm.recorded_steps import RecordedSteps

_WIDTH = 8
Made = Callable[[Sequence[Tensor]], Tensor]


class Asked:
    """A step, and how often it was asked for."""

    def __init__(self, make: Made) -> None:
        self.steps = RecordedSteps()
        self.times = self.lengths = 0
        self._make = make

    @torch.inference_mode()
    def __call__(self, *inputs: Tensor) -> Tensor:
        def step() -> Tensor:
            self.times += 1
            return self._make(inputs)

        self.lengths += 1
        return self.steps.run(len(inputs[0]), inputs, (self.lengths,), step)


def _run(model: torch.nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    result: Tensor = model(inputs[0])
    return result


def drawn(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, _WIDTH, generator=torch.Generator().manual_seed(seed))


def test_a_step_runs_twice_and_is_replayed_from_then_on() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(_WIDTH, 16), torch.nn.SiLU(), torch.nn.Linear(16, 3)).eval()
    asked = Asked(lambda inputs: model(inputs[0]))
    for seed in range(6):
        x = drawn(4, seed)
        torch.testing.assert_close(asked(x), model(x), rtol=0, atol=0)
    assert asked.times == 2 and asked.steps.replayed(4)


def test_each_number_of_rows_has_its_own() -> None:
    asked = Asked(lambda inputs: inputs[0].view(-1, 2).sum(1).view(len(inputs[0]), -1) * 2)
    for seed in range(4):
        for rows in (1, 3):
            x = drawn(rows, seed)
            torch.testing.assert_close(asked(x), x.view(-1, 2).sum(1).view(rows, -1) * 2)
    assert asked.times == 4
    assert [asked.steps.replayed(rows) for rows in (1, 2, 3)] == [True, False, True]


def test_what_a_step_changes_is_changed_by_its_replay() -> None:
    """In tensors that stay, as in KV, through views of them."""
    kept = torch.zeros(10, 2, _WIDTH)

    def write(inputs: Sequence[Tensor]) -> Tensor:
        x, slots = inputs
        kept.view(20, _WIDTH).index_copy_(0, slots, x)
        left, right = kept.chunk(2, 1)
        return (left + right).sum(0).mul_(3)

    asked, expected = Asked(write), torch.zeros(20, _WIDTH)
    for seed in range(5):
        x, slots = drawn(2, seed), torch.tensor([seed, 19 - seed])
        expected[slots] = x
        torch.testing.assert_close(asked(x, slots), expected.view(10, 2, _WIDTH).sum(1, keepdim=True).sum(0) * 3)
        torch.testing.assert_close(kept.view(20, _WIDTH), expected)
    assert asked.times == 2


def test_inputs_that_are_one_tensor() -> None:
    asked = Asked(lambda inputs: inputs[0] + 2 * inputs[1] + inputs[2])
    for seed in range(4):
        x, y = drawn(2, seed), drawn(2, seed + 9)
        torch.testing.assert_close(asked(x, y, x), x + 2 * y + x)
    assert asked.steps.replayed(2)


def test_results_of_which_some_are_not_read() -> None:
    """And lists of one, views that see all of what they are of, and what is asked of dtypes."""

    def odd(inputs: Sequence[Tensor]) -> Tensor:
        _, second, _ = inputs[0].split([1, 3, 4], 1)
        (only,) = second.split([3], 1)
        only.exp()
        wide = torch.promote_types(only.dtype, torch.float16)
        return torch.cat([only[:], inputs[0].detach().view_as(inputs[0])], dim=1).to(wide)

    asked = Asked(odd)
    for seed in range(4):
        x = drawn(2, seed)
        torch.testing.assert_close(asked(x), torch.cat([x[:, 1:4], x], 1))
    assert asked.steps.replayed(2)


def test_a_step_that_hangs_on_lengths_runs_as_before() -> None:
    asked = Asked(lambda inputs: inputs[1].narrow(1, 0, inputs[1].shape[1] - 1).sum(1))
    for length in (4, 5, 9, 3):
        x, table = drawn(2, length), torch.ones(2, length)
        torch.testing.assert_close(asked(x, table), torch.full((2,), length - 1.0))
    assert asked.times == 4 and not asked.steps.replayed(2)


def test_recordings_are_compared_where_each_length_differs() -> None:
    """So that a step which is made of one is not taken for one that is not."""
    steps, ran = RecordedSteps(), []
    for lengths in ((5, 1), (5, 2), (6, 1), (6, 2), (7, 3), (8, 4)):
        x = drawn(2, lengths[0])

        def step(x: Tensor = x, length: int = lengths[0]) -> Tensor:
            ran.append(length)
            return x * length

        assert steps.first_lengths(2) == ((5, 1) if 0 < len(ran) < 4 else None)
        torch.testing.assert_close(steps.run(2, [x], lengths, step), x * lengths[0])
    assert ran == [5, 5, 6, 6, 7, 8] and not steps.replayed(2)


@pytest.mark.parametrize(
    "leak",
    [
        lambda x: sum(x.view(-1).tolist()),
        lambda x: float(x.numpy().sum()),
        lambda x: float(np.asarray(x).sum()),
        lambda x: x.nonzero().shape[0],
    ],
    ids=["tolist", "numpy", "array", "nonzero"],
)
def test_a_step_that_lets_python_see_values_runs_as_before(leak: Callable[[Tensor], float]) -> None:
    asked = Asked(lambda inputs: inputs[0] * leak(inputs[0]))
    for value in (1.0, 1.0, 2.0, 0.0):
        x = torch.full((2, _WIDTH), value)
        torch.testing.assert_close(asked(x), x * leak(x))
    assert asked.times == 4


def test_a_conjugate_is_not_what_it_is_of() -> None:
    asked = Asked(lambda inputs: torch.view_as_real((inputs[0] * 1j).conj().resolve_conj()))
    for seed in range(4):
        x = drawn(2, seed)
        torch.testing.assert_close(asked(x), torch.view_as_real((x * 1j).conj().resolve_conj()))
    assert asked.steps.replayed(2)


def test_a_step_that_decides_by_what_it_reads_runs_as_before() -> None:
    asked = Asked(lambda inputs: inputs[0] * (2 if inputs[0].sum() > 0 else 3))
    for value, factor in ((1.0, 2), (2.0, 2), (-1.0, 3)):
        x = torch.full((2, _WIDTH), value)
        torch.testing.assert_close(asked(x), x * factor)
    assert asked.times == 3


def test_a_step_that_makes_its_own_constants_runs_as_before() -> None:
    count = iter(range(10))
    asked = Asked(lambda inputs: inputs[0] + torch.tensor([float(next(count))] * _WIDTH))
    for number in range(4):
        torch.testing.assert_close(asked(torch.zeros(2, _WIDTH)), torch.full((2, _WIDTH), float(number)))
    assert asked.times == 4


def test_a_step_that_reads_another_tensor_each_time_runs_as_before() -> None:
    count = iter(range(10))
    asked = Asked(lambda inputs: inputs[0] + lying[next(count)])
    lying = [torch.full((_WIDTH,), float(number)) for number in range(10)]
    for number in range(4):
        torch.testing.assert_close(asked(torch.zeros(2, _WIDTH)), torch.full((2, _WIDTH), float(number)))
    assert asked.times == 4


@pytest.mark.parametrize(
    "make",
    [lambda inputs: inputs[0], lambda inputs: _CONSTANT, lambda inputs: inputs[0].clone().unsqueeze_(0)],
    ids=["what was given", "a constant", "a shape that is changed"],
)
def test_what_cannot_be_told_apart_is_not_replayed(make: Made) -> None:
    asked = Asked(make)
    for seed in range(3):
        x = drawn(2, seed)
        torch.testing.assert_close(asked(x), make([x]))
    assert asked.times == 3


_CONSTANT = torch.ones(2, _WIDTH)


def test_a_step_that_fails_leaves_nothing_behind() -> None:
    failing = [True]

    def fails(inputs: Sequence[Tensor]) -> Tensor:
        result = inputs[0] + 1
        if failing:
            raise ValueError(failing.pop())
        return result

    asked = Asked(fails)
    with pytest.raises(ValueError, match="True"):
        asked(torch.zeros(2, _WIDTH))
    assert asked.steps.first_lengths(2) is None
    for seed in range(3):
        x = drawn(2, seed)
        torch.testing.assert_close(asked(x), x + 1)
    assert asked.steps.replayed(2)


def test_what_is_dropped_is_gone_at_once() -> None:
    """Without a collection of garbage, which is seldom."""
    model = torch.nn.Linear(_WIDTH, 3).eval()
    asked, kept = Asked(partial(_run, model)), weakref.ref(model.weight)
    for seed in range(3):
        asked(drawn(2, seed))
    assert asked.steps.replayed(2)
    gc.disable()
    try:
        del asked, model
        assert kept() is None
    finally:
        gc.enable()


def test_nothing_that_a_step_made_is_kept() -> None:
    made: list[weakref.ref[Tensor]] = []

    def keeps(inputs: Sequence[Tensor]) -> Tensor:
        between = inputs[0] * 2
        made.append(weakref.ref(between))
        return between + 1

    asked = Asked(keeps)
    for seed in range(2):
        asked(drawn(2, seed))
    gc.collect()
    assert [each() for each in made] == [None, None]


_OPERATIONS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "add": lambda made: made[-1] + made[-2],
    "add in place": lambda made: made[-1].add_(made[-2]),
    "product": lambda made: made[-1] @ _WEIGHT,
    "halves": lambda made: torch.cat(made[-1].chunk(2, 1)[::-1], 1),
    "first column": lambda made: made[-1] * made[-2][:, :1],
    "all of it": lambda made: made[-1][:, 0:],
    "other shape": lambda made: made[-1].view(-1, 2, _WIDTH // 2).transpose(1, 2).reshape(-1, _WIDTH),
    "row of weights": lambda made: made[-1] + _WEIGHT.view(-1)[3 : 3 + _WIDTH],
    "forgotten": lambda made: (made[-1].exp(), made[-2])[1],
    "fresh": lambda made: torch.empty_like(made[-1]).copy_(made[-2]).tanh_(),
}
_WEIGHT = drawn(_WIDTH, 99) / 3


@given(st.lists(st.sampled_from(sorted(_OPERATIONS)), min_size=1, max_size=12), st.integers(1, 3))
def test_any_steps_replay_is_the_step(names: list[str], rows: int) -> None:
    def chain(inputs: Sequence[Tensor]) -> Tensor:
        made = [inputs[0].clone(), inputs[1] * 1]
        for name in names:
            made.append(_OPERATIONS[name](made))
        return made[-1] + made[-2]

    asked = Asked(chain)
    for seed in range(4):
        inputs = drawn(rows, seed), drawn(rows, seed + 50)
        before = [x.clone() for x in inputs]
        torch.testing.assert_close(asked(*inputs), chain(before), rtol=0, atol=0, equal_nan=True)
        assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))
    assert asked.times == 2 and asked.steps.replayed(rows)
