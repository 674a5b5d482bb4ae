"""Requests that schemathesis draws from the OpenAPI document: half of them as it says, half of them not."""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import hypothesis
import schemathesis
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.event_laws import check_messages, check_responses, events_of

# Now: where hypothesis has raised the recursion limit Python 3.11 cannot parse what is imported.
for _, _module, _ in pkgutil.walk_packages(schemathesis.__path__, "schemathesis."):
    if _module.split(".")[1] in ("generation", "python", "specs", "transport"):
        importlib.import_module(_module)

CASES = int(os.environ.get("AEGIS_FUZZ_CASES", "100"))
"""Requests in all."""

_LAWS = {"/v1/messages": check_messages, "/v1/responses": check_responses}
"""Of the events of streams."""

EVENTS_MAX = 1 << 16
"""Of a stream; by itself schemathesis reads some of the first ones only."""

ENDLESS = "/models/sse"
_WEIGHTS = {
    "/v1/completions": 8,
    "/v1/chat/completions": 8,
    "/v1/messages": 8,
    "/v1/messages/count_tokens": 2,
    "/v1/responses": 8,
    "/tokenize": 3,
    "/detokenize": 2,
    "/models/update": 2,
}
_CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


def operations(document: dict[str, Any]) -> list[tuple[str, str, int]]:
    """Path, method and how many requests of it."""
    of = [(path, method) for path, methods in document["paths"].items() if path != ENDLESS for method in methods]
    whole = sum(_WEIGHTS.get(path, 1) for path, _ in of)
    return [(path, method, -(-CASES * _WEIGHTS.get(path, 1) // whole)) for path, method in of]


def fuzz(
    document: dict[str, Any], path: str, method: str, cases: int, model: str, send: Callable[[Case], Any]
) -> dict[int, int]:
    """The number of answers with each status. Fails at an answer that is an error of the server, or that the document
    does not describe, and at a stream that breaks a law of its events. Most requests name `model`, because they would
    all be refused without it."""
    schema = schemathesis.openapi.from_dict(deepcopy(document))
    schema.config.max_stream_events = EVENTS_MAX
    operation = schema[path][method.upper()]
    told = document["paths"][path][method]
    modes = list(GenerationMode) if told.get("parameters") or "requestBody" in told else [GenerationMode.POSITIVE]
    counts: dict[int, int] = {}

    @hypothesis.settings(
        max_examples=cases,
        deadline=None,
        derandomize=CASES <= 500,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(st.data())
    def answers(data: st.DataObject) -> None:
        mode = data.draw(st.sampled_from(modes))
        case = data.draw(operation.as_strategy(generation_mode=mode))
        if isinstance(case.body, dict) and "model" in case.body and data.draw(st.integers(0, 9)):
            case.body["model"] = model
        response = send(case)
        counts[response.status_code] = counts.get(response.status_code, 0) + 1
        case.validate_response(response, checks=_CHECKS)
        if path in _LAWS and response.headers["content-type"][0].startswith("text/event-stream"):
            _LAWS[path](events_of(response.text))

    answers()
    return counts
