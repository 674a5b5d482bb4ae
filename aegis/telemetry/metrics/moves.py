"""Moves of models between instances as metrics."""

from __future__ import annotations

from typing import Literal

from prometheus_client import CollectorRegistry, Counter

Cause = Literal["operator", "placement"]
"""Who wanted a model to move: whoever runs the server, or its placement by load."""

_MOVE = ("model_name", "cause")


class MoveMetrics:
    """Moves that began, and either are done or have failed: `aegis:model_moves_{begun,done,failed}_total`. And the
    requests and the KV that went along: `aegis:moved_requests_total{how}`, `aegis:moved_kv_tokens_total`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"aegis:{name}", what, (*_MOVE, *labels), registry=registry)

        self._begun = counter("model_moves_begun", "Moves of models that began")
        self._done = counter("model_moves_done", "Moves after which all requests are where the model is to be")
        self._failed = counter("model_moves_failed", "Moves that were given up, or not over in the time they had")
        self._requests = counter("moved_requests", "Requests that moved with their model, by how they go on", "how")
        self._tokens = counter("moved_kv_tokens", "Tokens whose KV moved with their request")

    def begun(self, model: str, cause: Cause) -> None:
        self._begun.labels(model, cause).inc()

    def ended(self, model: str, cause: Cause, *, done: bool) -> None:
        (self._done if done else self._failed).labels(model, cause).inc()

    def moved(self, model: str, cause: Cause, *, with_kv: int, prefilled: int, kv_tokens: int) -> None:
        """So many requests have."""
        self._requests.labels(model, cause, "kv").inc(with_kv)
        self._requests.labels(model, cause, "prefilled").inc(prefilled)
        self._tokens.labels(model, cause).inc(kv_tokens)
