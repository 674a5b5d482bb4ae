"""Grammars in which a text can be derived in many ways, so that each of its tokens takes longer than the one before it,
stop nobody: they are refused when they are tried out, or their output is given up where they show it later."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.attacks.harness import at_once, under_attack
from tests.live.server import WAIT_S, Server

pytestmark = pytest.mark.alone

MAIN = "/v1/completions"
ATTACKERS = 6


def ambiguous(rules: int) -> str:
    """Each rule is any two of them, or a letter."""
    lines = []
    for at in range(rules):
        pairs = [f"s{(7 * at + n) % rules} s{(3 * at + 5 * n) % rules}" for n in range(min(rules, 12))]
        lines.append(f's{at} ::= {" | ".join(pairs)} | "a"')
    return "\n".join(lines)


def ask(server: Server, grammar: str, caller: int = 1, **others: Any) -> httpx.Response:
    """Callers without a key are told apart by their addresses."""
    body = {"model": "llama", "prompt": [5], "max_tokens": 200, "temperature": 0} | others
    body["structured_outputs"] = {"grammar": grammar}
    transport = httpx.HTTPTransport(local_address=f"127.0.0.{caller}")
    with httpx.Client(transport=transport, timeout=WAIT_S, trust_env=False) as client:
        return client.post(server.url + MAIN, json=body)


@pytest.mark.parametrize("rules", [6, pytest.param(20, marks=pytest.mark.long)])
def test_a_grammar_of_many_derivations_is_refused(server: Server, rules: int) -> None:
    grammar = "root ::= s0\n" + ambiguous(rules)
    with under_attack(server, f"{rules} ambiguous rules"):
        for reply in at_once(lambda n: ask(server, f"{grammar}\n# {n}"), 2):
            error = reply.json()["error"]
            assert (reply.status_code, error["code"]) == (400, "invalid_grammar"), reply.text
            assert "takes too long to follow" in error["message"] and "\n" not in error["message"]


def test_many_choices_of_a_long_chain_have_the_time_of_one(server: Server) -> None:
    """Each of them would take a tenth of a second."""
    text = {"model": "llama", "prompt": "ca", "add_special_tokens": False}
    letter, more = server.post("/tokenize", text).json()["tokens"]
    chain = "\n".join(f'r{at} ::= "a" r{at + 1} | r{at + 1}' for at in range(1000))
    grammar = f'root ::= [^c] [^c]* | "c" r0\n{chain}\nr1000 ::= "a"'
    with under_attack(server, "64 choices of a long chain") as report:
        replies = [ask(server, grammar, 7, logit_bias={letter: 100, more: 90}, n=64) for _ in range(4)]
    assert (replies[0].status_code, replies[0].json()["error"]["code"]) == (400, "slow_grammar"), replies[0].text
    assert (replies[-1].status_code, replies[-1].json()["error"]["code"]) == (429, "slow_grammar"), replies[-1].text
    assert report.gap_s <= 2.0


def test_a_way_that_was_not_tried_ends_with_an_error(server: Server) -> None:
    """Who draws at random hardly ever begins with this letter; who biases tokens does, and goes on with the next."""
    text = {"model": "llama", "prompt": "ca", "add_special_tokens": False}
    letter, more = server.post("/tokenize", text).json()["tokens"]
    bias = {letter: 100, more: 90}
    grammar = 'root ::= [^c] [^c]* | "c" s0\n' + ambiguous(20)
    with under_attack(server, "ambiguous rules behind a letter"):
        replies = at_once(lambda n: ask(server, f"{grammar}\n# {n}", 20, logit_bias=bias), ATTACKERS)
    refusals = [(reply.status_code, reply.json()["error"]["code"]) for reply in replies]
    assert set(refusals) <= {(400, "slow_grammar"), (503, "slow_grammars")}, refusals
