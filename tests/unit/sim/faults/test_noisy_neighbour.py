"""Another process on the node keeps to the protocol of instances."""

from __future__ import annotations

import pytest

from aegis.core.ids import InstanceId, PageRun
from aegis.core.messages import (
    ForgetPeer,
    FromInstance,
    GaveBack,
    GrantPages,
    NeedPages,
    NeedSlabs,
    PeerForgotten,
    TakeBack,
)
from aegis.sim.faults.noisy_neighbour import NoisyNeighbour
from aegis.sim.faults.state import FaultWorldState

NAME = InstanceId("neighbour-0")


@pytest.mark.parametrize("refuses", [False, True])
def test_it_takes_and_gives_or_refuses(refuses: bool) -> None:
    state, said = FaultWorldState(0, jitter_ns=0, failing_share=0.0), list[FromInstance]()
    neighbour = NoisyNeighbour(state, NAME, lambda _, message: said.append(message), refuses=refuses)
    neighbour.begin(8, 2)
    assert said == [NeedPages(8, urgent=False), NeedSlabs(2)]
    neighbour.told(GrantPages((PageRun(0, 8),)))
    assert set(state.pages) == state.dirty == set(range(8))
    neighbour.told(TakeBack(1, 3, 0))
    state.run()
    assert said[-1] == (GaveBack(1, (), refused=True) if refuses else GaveBack(1, (PageRun(5, 8),)))
    neighbour.told(TakeBack(2, 8, 0, gentle=True, keep=4))
    neighbour.told(ForgetPeer(InstanceId("prefill-0"), (7,)))
    state.run()
    assert len(state.pages) == len(state.dirty) == 4
    assert PeerForgotten(InstanceId("prefill-0")) in said


def test_of_one_that_has_ended_nothing_comes() -> None:
    state, said = FaultWorldState(0, jitter_ns=0, failing_share=0.0), list[FromInstance]()
    neighbour = NoisyNeighbour(state, NAME, lambda _, message: said.append(message), refuses=False)
    neighbour.told(GrantPages((PageRun(0, 8),)))
    neighbour.told(TakeBack(1, 3, 0))
    neighbour.alive = False
    neighbour.told(GrantPages((PageRun(8, 9),)))
    state.run()
    assert not said and len(state.pages) == 8
