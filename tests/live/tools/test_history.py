"""The history of a server, and the costs that are learned from it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import msgspec
import pytest

from aegis.admin_client import AdminClient
from aegis.core.decision import Decision
from aegis.core.role import Role
from aegis.telemetry.node_report import NodeReport
from aegis.telemetry.records import Record
from aegis.telemetry.spans import Span, SpanKind
from bench.fidelity.suite import INITIALISATIONS, initialised
from tests.live.market import MARKET
from tests.live.server import ROOT, Server, eventually

COMMAND_S = 180


def spans_since(server: Server, number: int) -> list[Span]:
    return msgspec.json.Decoder(Span).decode_lines(server.get(f"/debug/spans?since={number}").content)


def next_number(server: Server, what: str) -> int:
    return int(server.get(f"/debug/{what}?since=999999999999").headers["aegis-next"])


def test_a_request_is_found_in_spans_and_records(server: Server) -> None:
    span, record = next_number(server, "spans"), next_number(server, "records")
    body = {"model": "llama", "prompt": [5, 6, 7, 8, 9], "max_tokens": 4, "ignore_eos": True}
    assert server.post("/v1/completions", body).status_code == httpx.codes.OK

    def decoded() -> list[Span]:
        return [each for each in spans_since(server, span) if each.kind is SpanKind.DECODE]

    def kinds() -> set[SpanKind]:
        return {each.kind for each in spans_since(server, span)}

    eventually(lambda: sum(each.steps * each.requests for each in decoded()) == 3, "the decode steps are told of")
    eventually(lambda: kinds() >= {SpanKind.PREFILL, SpanKind.SWAP_OUT, SpanKind.SWAP_IN}, "the copies are told of")
    found = spans_since(server, span)
    (prefill,) = [each for each in found if each.kind is SpanKind.PREFILL]
    (done,) = msgspec.json.Decoder(Record).decode_lines(server.get(f"/debug/records?since={record}").content)
    assert (prefill.instance, prefill.model, prefill.tokens) == ("prefill-0", "llama", 5)
    assert (done.model, done.input_tokens, done.output_tokens, done.ended) == ("llama", 5, 4, "finished")
    assert done.first_ns is not None and done.last_ns is not None
    assert done.arrival_ns < prefill.start_ns < prefill.stop_ns < done.first_ns
    assert max(each.stop_ns for each in decoded()) >= prefill.stop_ns
    copies = {each.kind: each.nbytes for each in found if each.kind in (SpanKind.SWAP_OUT, SpanKind.SWAP_IN)}
    assert copies[SpanKind.SWAP_OUT] == copies[SpanKind.SWAP_IN] > 0


def test_a_request_is_found_in_the_reasons(server: Server) -> None:
    since = next_number(server, "decisions")
    body = {"model": "llama", "prompt": [5, 6, 7, 8, 9], "max_tokens": 4, "ignore_eos": True}
    assert server.post("/v1/completions", body).status_code == httpx.codes.OK

    def told() -> list[Decision]:
        found = msgspec.json.Decoder(Decision).decode_lines(server.get(f"/debug/decisions?since={since}").content)
        return [each for each in found if each.requests]  # weights of others may have had to go

    eventually(lambda: len(told()) == 4, "two places, a prefill and a turn are told of")
    decisions = sorted(told(), key=lambda each: each.at_ns)
    assert [each.kind for each in decisions] == ["place", "prefill", "place", "turn"]
    assert [each.instance for each in decisions] == ["prefill-0", "prefill-0", "decode-0", "decode-0"]
    (request,) = {each.requests for each in decisions}
    command = [sys.executable, "-m", "aegis.cli.main", "explain", "--url", server.url, "--request", str(request[0])]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=COMMAND_S).stdout
    assert [line.split(maxsplit=2)[2] for line in shown.splitlines()] == [each.line for each in decisions]


def test_the_node_is_as_it_was_launched(server: Server) -> None:
    node = msgspec.json.decode(server.get("/debug/node").content, type=NodeReport)
    assert node.policy == "least-slack"
    assert node.instances == {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}
    assert {model.model for model in node.models} == set(MARKET)


def test_initialisations_are_told_by_instance(server: Server) -> None:
    seen = AdminClient(server.url).counter(INITIALISATIONS, "instance")
    assert seen == {"prefill-0": 1, "decode-0": 1}
    assert initialised(seen).endswith(": decode-0 1, prefill-0 1")
    assert AdminClient(server.url).counter("aegis:never_heard_of", "instance") == {}


@pytest.mark.long
def test_costs_are_learnt_and_the_same_requests_simulated(server: Server, tmp_path: Path) -> None:
    """The costs are far from the truth, because the runs are few and tiny. The test only checks that there are some."""
    lengths = "lengths=uniform,input=4-60,output=2-6"
    options = ["--calibrate-on", f"poisson:models=8,rps=8,duration=4,{lengths}", "--piece", "2"]
    options += ["--workload", f"poisson:models=8,rps=2,duration=2,{lengths}"]
    options += ["--json", str(tmp_path / "out.json"), "--keep", str(tmp_path)]
    command = [sys.executable, "-m", "aegis.cli.main", "bench", "fidelity", "--url", server.url, *options]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=COMMAND_S, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    asked, records, spans = (
        (tmp_path / name).read_text().splitlines() for name in ("requests.csv", "records.jsonl", "spans.jsonl")
    )
    compared = result["all"]["requests"]
    assert len(records) == len(asked) - 1 and spans, "all but the header"
    assert 0 < compared == sum(each["requests"] for each in result["per_model"].values()) < len(records) / 2
    assert result["live_switches"] > 0 and result["simulated_switches"] > 0
    assert set(result["per_model"]) <= set(MARKET)
    assert set(result["r2"]) <= set(MARKET) and set(result["estimators"]) <= set(MARKET)
    for scores in (*result["estimators"].values(), result["estimators_of_all"]):
        assert scores.keys() <= {"prefill", "decode", "switch"}
        assert all(
            set(each) == {"seen", "r2", "typical", "worst", "bias"} and each["seen"] > 0 for each in scores.values()
        )
    assert result["estimators_of_all"].keys() >= {"prefill", "decode"}
    assert result["engine_initialisations"] == {"prefill-0": 1, "decode-0": 1}
