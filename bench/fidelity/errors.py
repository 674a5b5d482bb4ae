"""The error of a simulation against the live run of the same requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from aegis.core.ids import ModelId
from aegis.telemetry.records import Record
from bench.common.percentiles import percentile_of


class Compared(Struct, frozen=True):
    """Of requests that finished. Errors are the simulation's, relative; `each_e2e_error` is the mean over requests of
    how far each is off, whichever way. Tokens on time are shares of all that were asked for, also by requests that did
    not finish; there the error is a difference."""

    requests: int
    live_e2e_mean_ms: float
    sim_e2e_mean_ms: float
    e2e_mean_error: float
    each_e2e_error: float
    live_ttft_mean_ms: float
    sim_ttft_mean_ms: float
    ttft_mean_error: float
    live_ttft_p99_ms: float
    sim_ttft_p99_ms: float
    ttft_p99_error: float
    live_on_time: float
    sim_on_time: float
    on_time_error: float


def compare(live: Sequence[Record], simulated: Sequence[Record]) -> tuple[Compared, dict[ModelId, Compared]]:
    """Of all requests, and of each model's. The same request is the one that is as many-th of its model."""
    pairs = _paired(live, simulated)
    return _compared([pair for these in pairs.values() for pair in these]), {
        model: _compared(these) for model, these in sorted(pairs.items()) if any(all(map(_is_whole, p)) for p in these)
    }


_Pair = tuple[Record, Record]


def _paired(live: Sequence[Record], simulated: Sequence[Record]) -> dict[ModelId, list[_Pair]]:
    """Also requests that did not finish."""
    of_model: tuple[Any, Any] = defaultdict(list), defaultdict(list)
    for found, records in zip(of_model, (live, simulated), strict=True):
        for record in sorted(records, key=lambda record: (record.arrival_ns, record.request)):
            found[record.model].append(record)
    return {model: list(zip(these, of_model[1][model], strict=False)) for model, these in of_model[0].items()}


def _is_whole(record: Record) -> bool:
    return record.ended == "finished" and record.first_ns is not None and record.last_ns is not None


def _compared(every: Sequence[_Pair]) -> Compared:
    pairs = [pair for pair in every if all(map(_is_whole, pair))]
    on_time_live, on_time_sim = (_on_time([pair[side] for pair in every]) for side in (0, 1))
    e2e = [tuple(_since_arrival_ms(record, record.last_ns) for record in pair) for pair in pairs]
    ttft = [tuple(_since_arrival_ms(record, record.first_ns) for record in pair) for pair in pairs]
    e2e_live, e2e_sim = (_mean([each[side] for each in e2e]) for side in (0, 1))
    ttft_live, ttft_sim = (_mean([each[side] for each in ttft]) for side in (0, 1))
    p99_live, p99_sim = (percentile_of([each[side] for each in ttft], 99) for side in (0, 1))
    return Compared(
        len(pairs),
        e2e_live,
        e2e_sim,
        _error(e2e_live, e2e_sim),
        _mean([abs(_error(*each)) for each in e2e]),
        ttft_live,
        ttft_sim,
        _error(ttft_live, ttft_sim),
        p99_live,
        p99_sim,
        _error(p99_live, p99_sim),
        on_time_live,
        on_time_sim,
        on_time_sim - on_time_live,
    )


def _on_time(records: Sequence[Record]) -> float:
    asked = sum(record.output_tokens for record in records)
    return sum(record.on_time for record in records) / asked if asked else 1.0


def _since_arrival_ms(record: Record, time_ns: int | None) -> float:
    assert time_ns is not None
    return (time_ns - record.arrival_ns) / 1e6


def _error(live: float, simulated: float) -> float:
    return simulated / live - 1 if live else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
