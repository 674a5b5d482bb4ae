"""What became of each request of a live run, in the form in which a simulation tells it."""

from __future__ import annotations

from aegis.core.ids import RequestId
from aegis.core.model import Slo
from aegis.telemetry.records import Record
from bench.serve.plan import Outcome


def record_of(outcome: Outcome, slo: Slo) -> Record:
    """Times are since the start of the run, the arrival is when it was to be sent."""
    times_ns = outcome.token_times_ns
    return Record(
        request=RequestId(outcome.request),
        model=outcome.planned.model,
        arrival_ns=outcome.planned.at_ns,
        input_tokens=outcome.input_tokens,
        output_tokens=outcome.owed_tokens,
        ended="failed" if outcome.failure else "finished",
        on_time=outcome.on_time(slo),
        first_ns=times_ns[0] if times_ns else None,
        last_ns=times_ns[-1] if times_ns else None,
        token_times_ns=times_ns,
    )
