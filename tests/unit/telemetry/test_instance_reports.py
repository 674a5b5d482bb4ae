"""The moments at which an instance reports its state."""

from aegis.core.ids import RequestId
from aegis.core.messages import Cancel
from aegis.sim.faults.fake_models import make_spec
from aegis.telemetry.instance_reports import REPORT_NS, Reporter
from decode.core import DecodeCore
from tests.sim import driven
from tests.sim.driven import Driven, adopt, make_job

SPEC = make_spec(0, image_pages=2, block_bytes=1 << 19)


def reported() -> tuple[Driven[DecodeCore], Reporter]:
    """An idle instance that has reported at 0."""
    decode = driven.decode(SPEC, pages=10)
    reporter = Reporter(decode.core)
    assert reporter.due(0) and reporter.report(0)
    return decode, reporter


def test_a_report_is_due_when_something_was_told() -> None:
    _, reporter = reported()
    assert reporter.due_ns is None and not reporter.due(10 * REPORT_NS)
    reporter.note_event()
    assert reporter.due_ns == REPORT_NS
    assert not reporter.due(REPORT_NS - 1) and reporter.due(REPORT_NS)


def test_it_is_due_at_once_when_work_comes_and_when_it_ends() -> None:
    decode, reporter = reported()
    decode.on(adopt(make_job(1, SPEC), SPEC))
    reporter.note_event()
    assert reporter.due(1)
    report = reporter.report(1)
    assert report and report.queued == 1 and not reporter.due(REPORT_NS)
    decode.on(Cancel(RequestId(1), 1))
    reporter.note_event()
    assert reporter.due(2)


def test_nothing_is_said_twice() -> None:
    _, reporter = reported()
    reporter.note_event()
    assert reporter.report(REPORT_NS) is None
    assert reporter.due_ns is None


def test_counters_of_the_engine_are_added() -> None:
    reporter = Reporter(driven.decode(SPEC, pages=10).core)
    report = reporter.report(0, engine_initialisations=1)
    assert report and report.counters["engine_initialisations_total"] == 1 and report.counters["switches_total"] == 0
