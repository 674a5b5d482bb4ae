"""Commands of the first rank reach the others, and all ranks perform them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from aegis.core.effects import AbandonLoad, CopyBlocks, LoadWeights, MapKv, StreamName
from aegis.core.events import LoadFailed, Progress
from aegis.core.ids import ModelId, PageRun, RequestId, SlabId
from aegis.core.model import KvLayer, KvShape
from aegis.core.request import EventHandle, Sampling, Token
from aegis.device.memory_executor import MemoryEffect
from aegis.engine.parallel.group import RanksLost
from aegis.engine.protocol import Sampled, StepRow
from aegis.instance.first_rank import FirstRankEngine, FirstRankMemory
from aegis.instance.rank_wire import Command, FollowerLinks, LeaderLink, Step, Touch, unpacked

MODEL = ModelId("m")
PATIENCE_NS = 5_000_000_000
SHAPE = KvShape((KvLayer(heads=1, key_dim=2, value_dim=2),), "float32", 4)
COMMANDS: list[Command] = [
    MapKv(SlabId(3), (PageRun(1, 2),)),
    LoadWeights(StreamName.PREFETCH, MODEL, EventHandle(1, 2), (PageRun(0, 4),)),
    CopyBlocks(StreamName.SWAP_IN, SHAPE, ((0, 1, 2),), EventHandle(5, 6), EventHandle(2, 1), ahead=True),
    Touch((PageRun(0, 1),)),
    Step(MODEL, [(1,), (2, 3)], [3, 4], [True, False], None),
]

LOAD = LoadWeights(StreamName.WEIGHTS, MODEL, EventHandle(1, 1))
DONE = Progress(StreamName.WEIGHTS, 1)
DAMAGED = LoadFailed(MODEL, "damaged")


class Ranks:
    def __init__(self, directory: Path) -> None:
        self.followers = FollowerLinks(f"{directory}/i-1", 3)
        self.leads = [LeaderLink(f"{directory}/i-1", rank) for rank in (1, 2)]

    def heard(self) -> list[Command | None]:
        return [lead.receive(PATIENCE_NS) for lead in self.leads]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    for lead in made.leads:
        lead.close()
    made.followers.close()


class Counting:
    """An engine that says number after number, or fails."""

    def __init__(self) -> None:
        self.fails = False
        self.steps = 0

    def start(self, *_: Any) -> None: ...

    def stop(self, *_: Any) -> None: ...

    def step(self, *_: Any) -> list[Sampled]:
        if self.fails:
            raise RuntimeError
        self.steps += 1
        return [Sampled(Token(self.steps))]


class Own:
    """A mover of the first rank, with what its streams have completed."""

    kv = None
    in_flight = False

    def __init__(self) -> None:
        self.events: list[Progress | LoadFailed] = []
        self.performed: list[MemoryEffect] = []

    def perform(self, effect: MemoryEffect) -> None:
        self.performed.append(effect)

    def progress(self) -> list[Progress | LoadFailed]:
        events, self.events = self.events, []
        return events


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_every_follower_hears_a_command_as_it_was_said(ranks: Ranks, command: Command) -> None:
    ranks.followers.send(command)
    assert ranks.heard() == [command, command]


def test_blocks_are_said_again_only_where_they_are_others(ranks: Ranks) -> None:
    engine = FirstRankEngine(Counting(), ranks.followers)  # type: ignore[arg-type]
    here, there = np.array([4, 5]), np.array([9])
    said = []
    for position, table in enumerate((here, here, there), 1):
        assert engine.step(MODEL, [StepRow(RequestId(1), (7,), position, table)])
        first, second = ranks.heard()
        assert first == second
        said.append(first)
    blocks = [step.blocks for step in said if isinstance(step, Step)]
    assert [table and unpacked(table[0]).tolist() for table in blocks] == [[4, 5], None, [9]]


def test_followers_know_whether_a_prompt_is_reported_on(ranks: Ranks) -> None:
    engine = FirstRankEngine(Counting(), ranks.followers)  # type: ignore[arg-type]
    for number, parameters in enumerate((None, 0)):
        engine.start(MODEL, RequestId(number), (1, 2), (), Sampling(max_tokens=1, prompt_logprobs=parameters))
        engine.step(MODEL, [StepRow(RequestId(number), (1, 2), 0, np.array([0]))])
        (heard, _) = ranks.heard()
        assert isinstance(heard, Step) and heard.reports is (parameters is not None)


def test_a_step_that_fails_parts_the_ranks(ranks: Ranks) -> None:
    own = Counting()
    engine = FirstRankEngine(own, ranks.followers)  # type: ignore[arg-type]
    own.fails = True
    with pytest.raises(RuntimeError):
        engine.step(MODEL, [StepRow(RequestId(1), (7,), 1, np.array([0]))])
    with pytest.raises(RanksLost):
        ranks.followers.send(COMMANDS[0])


def test_a_copy_is_done_when_all_ranks_have_done_it(ranks: Ranks) -> None:
    own = Own()
    memory_executor = FirstRankMemory(own, ranks.followers)  # type: ignore[arg-type]
    own.events = [DONE]
    assert memory_executor.progress() == [] and memory_executor.in_flight
    for lead in ranks.leads:
        lead.report([DONE])
    assert _told(memory_executor, until=DONE) == [DONE]
    assert not memory_executor.in_flight


def test_a_load_that_fails_on_two_ranks_fails_once(ranks: Ranks) -> None:
    own = Own()
    memory_executor = FirstRankMemory(own, ranks.followers)  # type: ignore[arg-type]
    memory_executor.perform(LOAD)
    own.events = [DONE]
    for lead in ranks.leads:
        lead.report([DAMAGED, DONE])
    assert _told(memory_executor, until=DONE) == [DAMAGED, DONE]


def test_what_was_abandoned_does_not_fail_and_the_next_load_of_the_model_may(ranks: Ranks) -> None:
    own = Own()
    memory_executor = FirstRankMemory(own, ranks.followers)  # type: ignore[arg-type]
    memory_executor.perform(LOAD)
    memory_executor.perform(AbandonLoad(LOAD.event))
    memory_executor.perform(structs.replace(LOAD, event=EventHandle(1, 2)))
    later = Progress(StreamName.WEIGHTS, 2)
    own.events = [later]
    ranks.leads[0].report([DAMAGED, DONE, DAMAGED, later])
    ranks.leads[1].report([DONE, later])
    assert _told(memory_executor, until=later).count(DAMAGED) == 1


def _told(memory_executor: FirstRankMemory, until: Progress) -> list[Progress | LoadFailed]:
    told = list[Progress | LoadFailed]()
    while until not in told:
        told += memory_executor.progress()
    return told
