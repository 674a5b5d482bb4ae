"""Architectures that nobody tried work unchanged, or are refused with their reason while the others are served."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live import zoo
from tests.live.market import Reference
from tests.live.server import Server
from tests.live.streams import run_all

pytestmark = pytest.mark.long

PROMPT_LENGTHS = (3, 40, 120)
MAX_TOKENS = 40


def test_architectures_that_nobody_tried_answer_as_in_transformers(zoo_server: Server, zoo_dir: Path) -> None:
    bodies, expected = [], []
    for model in zoo.SERVED:
        reference = Reference(zoo_dir / model)
        for length in PROMPT_LENGTHS:
            prompt, answer = reference.clear_case("zoo", model, length, length=length, max_tokens=MAX_TOKENS)
            bodies.append({"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0})
            expected.append(answer)
    for body, stream, answer in zip(bodies, run_all(zoo_server.url, bodies), expected, strict=True):
        assert stream.tokens == answer.tokens, body
    zoo_server.wait_for_freed_memory()


def test_what_cannot_be_served_is_refused_with_its_reason(zoo_server: Server) -> None:
    said = zoo_server.output().splitlines()
    for model, reason in zoo.REFUSED.items():
        (line,) = [line for line in said if line.startswith(f"refused {model}: ")]
        assert reason in line
        assert zoo_server.get(f"/v1/models/{model}").status_code == 404
    assert {model["id"] for model in zoo_server.get("/v1/models").json()["data"]} == set(zoo.SERVED)
