"""Decisions as lines."""

from aegis.core.decision import Decision, DecisionKind, Why
from aegis.core.effects import CopyBlocks, EndRun, LoadWeights, Send, StreamName, Untrack
from aegis.core.ids import InstanceId, ModelId, PageRun, RequestId
from aegis.core.messages import GrantPages, NeedPages, ReleaseKv, Shutdown, Tokens
from aegis.core.request import EventHandle
from aegis.sim.faults.fake_models import make_shape
from aegis.telemetry.decisions import DecisionLog

DECODE = InstanceId("decode-0")


def test_what_an_instance_asks_for() -> None:
    log, event = DecisionLog(), EventHandle(3, 7)
    copy = CopyBlocks(StreamName.SWAP_IN, make_shape(128), ((4, 8, 2), (9, 10, 1)), EventHandle(1, 2), event)
    load = LoadWeights(StreamName.PREFETCH, ModelId("m0"), event)
    log.did(DECODE, [load, copy, Send(NeedPages(5, urgent=True)), EndRun()], 12)
    assert log.lines == [
        "12 decode-0 load m0 on prefetch, 3:7",
        "12 decode-0 copy on swap_in 4>8x2 9>10x1 after 1:2, 3:7",
        "12 decode-0 needs 5 pages urgently",
        "12 decode-0 end run",
    ]


def test_what_was_decided_and_why() -> None:
    log, why = DecisionLog(), Why("it would be late first")
    turn = Decision(5, DECODE, DecisionKind.TURN, ModelId("m0"), (RequestId(1),), "m0 has the turn", why)
    log.did(DECODE, [turn], 5)
    log.explained(turn)
    assert log.lines == [
        "5 decode-0 m0 has the turn: it would be late first",
        "5 market for decode-0: m0 has the turn: it would be late first",
    ]


def test_what_an_instance_is_told() -> None:
    log = DecisionLog()
    log.sent(DECODE, GrantPages((PageRun(0, 4), PageRun(6, 7))), 1)
    log.sent(DECODE, GrantPages((), refused=True, excessive=True), 2)
    log.sent(DECODE, ReleaseKv(RequestId(9), 2), 3)
    assert log.lines == [
        "1 market tells decode-0: pages 0-4 6-7",
        "2 market tells decode-0: pages refused as excessive",
        "3 market tells decode-0: release KV of 9.2",
    ]


def test_what_follows_from_other_lines_has_none() -> None:
    log = DecisionLog()
    log.did(DECODE, [Untrack(RequestId(1)), Send(Tokens(RequestId(1), 1, 0, ()))], 1)
    log.sent(DECODE, Shutdown(), 1)
    assert log.lines == []
