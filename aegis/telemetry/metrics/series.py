"""The metrics of requests: names, buckets, labels."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge

from aegis.core.ids import ModelId
from aegis.telemetry.metrics.seconds import Seconds, SecondsByLabel

_MODEL = ("model_name",)
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10, 30)
_REQUEST_S = (0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One model's, looked up once: finding a labelled series takes longer than counting in it."""

    waiting: Gauge
    running: Gauge
    prompt_tokens: Counter
    generation_tokens: Counter
    preemptions: Counter
    first_token: Seconds
    inter_token: Seconds
    per_token: Seconds
    e2e: Seconds
    queue_time: Seconds
    prefill_time: Seconds


class Families:
    """Every metric, registered once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, what: str) -> Gauge:
            return Gauge(f"aegis:{name}", what, _MODEL, registry=registry)

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"aegis:{name}", what, (*_MODEL, *labels), registry=registry)

        def seconds(name: str, what: str, bounds: tuple[float, ...]) -> SecondsByLabel:
            return SecondsByLabel(f"aegis:{name}_seconds", what, *_MODEL, bounds, registry=registry)

        self._waiting = gauge("num_requests_waiting", "Requests queued or preempted")
        self._running = gauge("num_requests_running", "Requests being prefilled, or in the batch that decodes")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that arrived")
        self._generation_tokens = counter("generation_tokens", "Tokens generated")
        self._preemptions = counter("num_preemptions", "Times a request lost its turn to another model's")
        self._first_token = seconds("time_to_first_token", "From arrival to the first token", _TTFT_S)
        self._inter_token = seconds("inter_token_latency", "Between two tokens of a request", _TOKEN_S)
        self._per_token = seconds("request_time_per_output_token", "A request's mean after its first token", _TOKEN_S)
        self._e2e = seconds("e2e_request_latency", "From arrival to the end", _REQUEST_S)
        self._queue_time = seconds("request_queue_time", "From arrival to the first prefill's beginning", _REQUEST_S)
        self._prefill_time = seconds(
            "request_prefill_time", "From the prefill's beginning to the first token", _REQUEST_S
        )
        self.success = counter("request_success", "Requests that finished", "finished_reason")
        self.failure = counter("request_failure", "Requests that did not finish", "reason")
        self.responses = Counter(
            "aegis:http_responses", "Answers to clients, by route and status", ("path", "code"), registry=registry
        )
        self.refused = Counter(
            "aegis:requests_refused",
            "Requests refused for who asked, when or how often",
            ("reason",),
            registry=registry,
        )
        self.replays = counter("request_replays", "Times a request was prefilled again, with the tokens it had")

    def of(self, model: ModelId) -> Series:
        return Series(
            waiting=self._waiting.labels(model),
            running=self._running.labels(model),
            prompt_tokens=self._prompt_tokens.labels(model),
            generation_tokens=self._generation_tokens.labels(model),
            preemptions=self._preemptions.labels(model),
            first_token=self._first_token.of(model),
            inter_token=self._inter_token.of(model),
            per_token=self._per_token.of(model),
            e2e=self._e2e.of(model),
            queue_time=self._queue_time.of(model),
            prefill_time=self._prefill_time.of(model),
        )
