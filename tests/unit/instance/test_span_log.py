"""The spans that an instance writes."""

from __future__ import annotations

from aegis.core.decision import Decision, DecisionKind, Why
from aegis.core.effects import Row, Run, StreamName
from aegis.core.events import Stepped
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.messages import SwitchDone
from aegis.core.request import Job, Sampling, Token
from aegis.device.memory_executor import CopyDone
from aegis.instance.span_log import SpanLog
from aegis.telemetry.decisions import Decisions
from aegis.telemetry.spans import Span, SpanKind, Spans

ME, MODEL = InstanceId("decode-0"), ModelId("m")
JOB = Job(RequestId(1), 1, MODEL, (5, 6, 7), Sampling(max_tokens=9), 0)
NOW_NS = 1_000


class _Clock:
    def now_ns(self) -> int:
        return NOW_NS


class _Processor:
    """Has had so much at each time that it is asked."""

    def __init__(self, *had_ns: int) -> None:
        self._had_ns = iter(had_ns)

    def now_ns(self) -> int:
        return next(self._had_ns)


def told(log: SpanLog) -> tuple[Span, ...]:
    (spans,) = log.drain()
    assert isinstance(spans, Spans)
    return spans.spans


def test_a_prefill_is_a_span_of_its_prompt() -> None:
    log = SpanLog(ME, _Clock())
    log.ran(Run(MODEL, (Row(JOB, 0, 3, (), 0),), 1, 0), Stepped(((Token(1),),), 300))
    assert told(log) == (Span(ME, SpanKind.PREFILL, MODEL, 700, 1_000, 1, 1, 3),)


def test_a_chunk_is_a_span_of_its_own_tokens_and_makes_none_unless_it_is_the_last() -> None:
    log = SpanLog(ME, _Clock())
    log.ran(Run(MODEL, (Row(JOB, 0, 2, (), 0),), 1, 0), Stepped((), 300))
    log.ran(Run(MODEL, (Row(JOB, 2, 3, (), 0),), 1, 0), Stepped(((Token(1),),), 100))
    assert told(log) == (
        Span(ME, SpanKind.PREFILL, MODEL, 700, 1_000, 1, 0, 2),
        Span(ME, SpanKind.PREFILL, MODEL, 900, 1_000, 1, 1, 1, cached=2),
    )


def test_a_decode_run_is_one_span_whatever_its_steps() -> None:
    log = SpanLog(ME, _Clock())
    rows = (Row(JOB, 10, 11, [], 1, 8), Row(JOB, 32, 33, [], 1, 8))
    log.ran(Run(MODEL, rows, 9, 0), Stepped(((Token(1), Token(2)),) * 4, 800))
    assert told(log) == (Span(ME, SpanKind.DECODE, MODEL, 200, 1_000, 2, 4, 42),)


def test_a_run_tells_for_how_long_it_had_a_processor() -> None:
    log = SpanLog(ME, _Clock(), _Processor(40, 290, 300, 370))
    for effect, made in (
        (Run(MODEL, (Row(JOB, 0, 3, (), 0),), 1, 0), ((Token(1),),)),
        (Run(MODEL, (Row(JOB, 10, 11, [], 1, 8),), 1, 0), ((Token(2),),)),
    ):
        log.begins()
        log.ran(effect, Stepped(made, 300))
    assert [span.processor_ns for span in told(log)] == [250, 70]


def test_a_switch_ends_now_and_lasted_as_long_as_its_phases() -> None:
    log = SpanLog(ME, _Clock())
    log.switched(SwitchDone(MODEL, prefetched=False, make_room_ns=10, copy_ns=200, kv_ns=3, nbytes=77))
    assert told(log) == (Span(ME, SpanKind.SWITCH, MODEL, 787, 1_000, nbytes=77, copy_ns=200),)


def test_a_switch_to_a_model_on_its_way_does_not_tell_how_long_a_load_takes() -> None:
    log = SpanLog(ME, _Clock())
    log.switched(SwitchDone(MODEL, prefetched=True, make_room_ns=0, copy_ns=200, kv_ns=3, nbytes=77))
    assert told(log) == (Span(ME, SpanKind.SWITCH, MODEL, 797, 1_000, nbytes=77),)


def test_copies_are_spans_of_their_kind_and_wipes_are_none() -> None:
    log = SpanLog(ME, _Clock())
    log.copied(CopyDone(stream, MODEL, 1, 2, 3) for stream in StreamName)
    kinds = [SpanKind.LOAD, SpanKind.PREFETCH, SpanKind.SWAP_IN, SpanKind.SWAP_OUT]
    assert told(log) == tuple(Span(ME, kind, MODEL, 1, 2, nbytes=3) for kind in kinds)


def test_each_span_is_told_once() -> None:
    log = SpanLog(ME, _Clock())
    assert log.drain() == []
    log.ran(Run(MODEL, (Row(JOB, 0, 3, (), 0),), 1, 0), Stepped(((Token(1),),), 300))
    assert len(told(log)) == 1
    assert log.drain() == []


def test_decisions_are_told_once_too() -> None:
    log = SpanLog(ME, _Clock())
    turn = Decision(1, ME, DecisionKind.TURN, MODEL, (), "it has the turn", Why("nobody else has work"))
    log.decided(turn)
    assert log.drain() == [Decisions((turn,))]
    assert log.drain() == []


def test_what_another_machine_copied_is_told_by_the_launchers_clock() -> None:
    log = SpanLog(ME, _Clock(), ahead_ns=1000)
    log.copied([CopyDone(StreamName.SWAP_IN, MODEL, 1001, 1002, 3)])
    assert told(log) == (Span(ME, SpanKind.SWAP_IN, MODEL, 1, 2, nbytes=3),)
