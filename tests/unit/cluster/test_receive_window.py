"""Whatever the link does, each chunk is taken once, no more are asked for than may be, and the transfer ends."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.cluster.receive_window import (
    TRIES,
    ChunkArrived,
    ConnectionBroken,
    Done,
    Effect,
    Failed,
    Reconnect,
    RegionUnknown,
    RequestChunk,
    TimedOut,
    Window,
)


def test_asks_for_a_few_and_for_one_more_as_each_arrives() -> None:
    window = Window(4, width=2)
    assert window.start() == [RequestChunk(0), RequestChunk(1)]
    assert window.on(ChunkArrived(1, True)) == [RequestChunk(2)]
    assert window.on(ChunkArrived(0, True)) == [RequestChunk(3)]
    assert window.on(ChunkArrived(3, True)) == []
    assert window.on(ChunkArrived(2, True)) == [Done()]


def test_nothing_is_there_at_once() -> None:
    assert Window(0, width=2).start() == [Done()]


def test_what_came_once_is_not_wanted_again() -> None:
    window = Window(2, width=2)
    window.start()
    assert window.wanted(0)
    window.on(ChunkArrived(0, True))
    assert not window.wanted(0)
    assert window.on(ChunkArrived(0, True)) == []
    assert window.on(ChunkArrived(1, True)) == [Done()]


def test_damage_is_asked_for_again_and_then_a_failure() -> None:
    window = Window(2, width=1)
    window.start()
    for _ in range(TRIES - 1):
        assert window.on(ChunkArrived(0, False)) == [RequestChunk(0)]
    assert window.on(ChunkArrived(0, False)) == [Failed("damaged")]
    assert window.on(ChunkArrived(0, True)) == []
    assert not window.wanted(0)


def test_a_new_connection_is_asked_for_what_the_old_one_owed() -> None:
    window = Window(3, width=2)
    window.start()
    window.on(ChunkArrived(0, True))
    assert window.on(ConnectionBroken()) == [Reconnect(), RequestChunk(1), RequestChunk(2)]
    assert window.on(ChunkArrived(1, True)) == []
    assert window.on(ChunkArrived(2, True)) == [Done()]


def test_connections_that_bring_nothing_are_a_failure() -> None:
    window = Window(9, width=2)
    window.start()
    for chunk in range(2 * TRIES):
        assert Reconnect() in window.on(ConnectionBroken())
        window.on(ChunkArrived(chunk, True))
    for _ in range(TRIES - 1):
        assert Reconnect() in window.on(ConnectionBroken())
    assert window.on(ConnectionBroken()) == [Failed("lost")]


@pytest.mark.parametrize(("event", "why"), [(TimedOut(), "silent"), (RegionUnknown(), "unknown")])
def test_ends_where_nothing_will_come(event: TimedOut | RegionUnknown, why: str) -> None:
    window = Window(2, width=2)
    window.start()
    assert [tuple(effect) for effect in window.on(event)] == [(why,)]
    assert window.on(ChunkArrived(0, True)) == []


@given(chunks=st.integers(0, 40), width=st.integers(1, 9), seed=st.integers(0, 2**32))
def test_laws_hold_over_a_bad_wire(chunks: int, width: int, seed: int) -> None:
    """Answers are reordered, repeated, damaged and lost with their connections; every connection brings something."""
    random, window = Random(seed), Window(chunks, width)
    wire: list[int] = []
    taken: list[int] = []
    ended: list[Effect] = []
    damaged = dict.fromkeys(range(chunks), 0)
    brought = True

    def do(effects: list[Effect]) -> None:
        nonlocal brought
        for effect in effects:
            assert not ended, "W2: something follows the end"
            match effect:
                case RequestChunk(chunk):
                    assert chunk not in taken, "W3: asked for what is there"
                    wire.append(chunk)
                case Reconnect():
                    wire.clear()
                    brought = False
                case Done() | Failed():
                    ended.append(effect)
        assert len(set(wire) - set(taken)) <= width, "W1: too many asked for"

    do(window.start())
    while not ended:
        assert wire, "it waits for ever"
        if brought and random.random() < 0.1:
            do(window.on(ConnectionBroken()))
            continue
        chunk = wire.pop(random.randrange(len(wire)))
        sound = damaged[chunk] == TRIES - 1 or random.random() < 0.8
        if window.wanted(chunk):
            damaged[chunk] += not sound
            taken += [chunk] * sound
            brought = brought or sound
        if random.random() < 0.1:
            wire.append(chunk)
        do(window.on(ChunkArrived(chunk, sound)))
    assert ended == [Done()]
    assert sorted(taken) == list(range(chunks)), "W2: done too early"
