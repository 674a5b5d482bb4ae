"""Metrics of several proxies are those of one server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Info, disable_created_metrics, generate_latest
from prometheus_client.core import Metric, UnknownMetricFamily
from prometheus_client.registry import Collector

from aegis.core.clock import NS_PER_S
from aegis.core.ids import ModelId, RequestId
from aegis.core.model import Slo
from aegis.core.request import FinishReason
from aegis.telemetry.metrics.requests import Metrics
from aegis.telemetry.metrics.scrape import exposition, in_slices, lasting, scrape, total

SLO = Slo(ttft_ns=NS_PER_S, tbt_ns=NS_PER_S)


class Unknowns(Collector):
    def collect(self) -> Iterator[Metric]:
        yield UnknownMetricFamily("things", "Of no known kind", value=3)


def served(*requests: tuple[str, int]) -> Metrics:
    """Each of a model, with one token at its second."""
    metrics = Metrics()
    for number, (model, at_s) in enumerate(requests):
        request = RequestId(number)
        metrics.arrived(request, ModelId(model), SLO, 0, prompt_tokens=3, max_tokens=1)
        metrics.started(request, 0)
        metrics.token(request, at_s * NS_PER_S)
        metrics.finished(request, FinishReason.LENGTH, at_s * NS_PER_S)
    return metrics


def test_that_of_one_is_what_it_shows_itself() -> None:
    registry = served(("a", 1), ('"b\\\n', 4)).registry
    assert b"".join(exposition(total([scrape(registry)]))) == generate_latest(registry)


def test_kinds_that_only_openmetrics_has_are_others_in_the_text() -> None:
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    Info("server", "What serves", registry=registry).info({"version": "1"})
    Counter("requests", "Requests", registry=registry).inc()
    registry.register(Unknowns())
    text = b"".join(exposition(scrape(registry)))
    assert text == generate_latest(registry)
    kinds = {line.split()[3] for line in text.decode().splitlines() if line.startswith("# TYPE")}
    assert kinds <= {"counter", "gauge", "histogram", "summary", "untyped"}


def test_those_of_two_are_what_one_would_have_shown() -> None:
    parts = served(("a", 1), ("b", 4)), served(("a", 3), ("c", 1))
    whole = served(("a", 1), ("b", 4), ("a", 3), ("c", 1)).registry
    both = b"".join(exposition(total(scrape(part.registry) for part in parts)))
    assert sorted(both.splitlines()) == sorted(generate_latest(whole).splitlines())


def test_what_was_counted_lasts_and_what_was_going_on_does_not() -> None:
    metrics = served(("a", 1), ("a", 4))
    metrics.arrived(RequestId(9), ModelId("a"), SLO, 0, prompt_tokens=3, max_tokens=1)
    lost = {name: value for family in lasting(scrape(metrics.registry)) for name, _, value in family.samples}
    assert "aegis:num_requests_waiting" not in lost
    assert (lost["aegis:prompt_tokens_total"], lost["aegis:slo_attainment_ratio"]) == (9, 0.5)
    assert tuple(scrape(served().registry)) == total([scrape(served().registry)])


async def _turns_between(slice_ns: int) -> list[int]:
    """How many turns of the loop others had had when each part was made."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def parts() -> Iterator[int]:
        for _ in range(4):
            yield turns

    task = asyncio.create_task(others())
    made = await in_slices(parts(), slice_ns=slice_ns)
    task.cancel()
    return list(made)


def test_others_go_on_between_slices() -> None:
    assert asyncio.run(_turns_between(0)) == [0, 1, 2, 3]
    assert asyncio.run(_turns_between(60 * NS_PER_S)) == [0, 0, 0, 0]
