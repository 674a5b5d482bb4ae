"""Parts of tensors: together they are the whole, whatever the style."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aegis.core.errors import ModelRefused
from aegis.engine.parallel.group import ThreadGroup
from aegis.engine.parallel.sharding import Cut, cuts
from tests import checkpoints

sizes = st.integers(1, 4)


@given(sizes, sizes, st.sampled_from([-2, -1]))
def test_parts_side_by_side_are_the_whole(size: int, length: int, dim: int) -> None:
    whole = torch.arange(size * size * length * length).view(size * length, size * length)
    parts = [Cut(dim).part(whole, rank, size) for rank in range(size)]
    assert len({part.shape for part in parts}) == 1
    assert torch.equal(torch.cat(parts, dim), whole)


@given(sizes, sizes)
def test_of_two_weights_one_above_the_other_each_is_cut(size: int, length: int) -> None:
    gate, up = torch.arange(2 * size * length * 3).view(2, size * length, 3)
    parts = [Cut(-2, halves=True).part(torch.cat([gate, up]), rank, size).chunk(2) for rank in range(size)]
    assert torch.equal(torch.cat([part[0] for part in parts]), gate)
    assert torch.equal(torch.cat([part[1] for part in parts]), up)


@given(sizes)
def test_what_is_added_once_is_one_ranks(size: int) -> None:
    whole = torch.arange(3)
    assert torch.equal(sum(Cut(None).part(whole, rank, size) for rank in range(size)), whole)


def test_a_style_that_is_not_known_is_refused() -> None:
    model = checkpoints.model("llama")
    model._tp_plan = {"model.layers.*.mlp.up_proj": "sideways"}
    with pytest.raises(ModelRefused, match=r"model.layers.0.mlp.up_proj is to be shared out as 'sideways'"):
        cuts(model, 2)


def test_threads_tell_each_other() -> None:
    def tell(group: ThreadGroup) -> tuple[list[float], list[float]]:
        own = torch.tensor([1.0, 10.0]) * (group.rank + 1)
        return group.add(own).tolist(), group.gather(own).tolist()

    with ThreadPoolExecutor(3) as threads:
        said = list(threads.map(tell, ThreadGroup.of(3)))
    assert said == [([6.0, 60.0], [1.0, 10.0, 2.0, 20.0, 3.0, 30.0])] * 3
