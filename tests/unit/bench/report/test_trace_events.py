"""The trace: what Perfetto's documentation asks of one (Chrome JSON format), and nothing lost."""

import gzip
import json
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest

from aegis.core.errors import UserError
from aegis.telemetry import files
from bench.report.command import timeline
from bench.report.run import Run, read_run
from bench.report.trace_events import encode
from tests.unit.bench.report.made import outcome, record, simulated, span, turn

KEY = "secret"


def events(run: Run) -> list[dict[str, Any]]:
    return json.loads(encode(run))["traceEvents"]  # type: ignore[no-any-return]


def test_events_are_in_order_and_have_what_each_kind_needs() -> None:
    told = events(simulated())
    assert [event["ts"] for event in told] == sorted(event["ts"] for event in told)
    needs = {
        "X": {"dur", "args"},
        "C": {"args"},
        "M": {"args"},
        "s": {"id"},
        "t": {"id"},
        "f": {"id", "bp"},
        "i": {"s", "args"},
    }
    for event in told:
        assert {"name", "ph", "ts", "pid", "tid"} | needs[event["ph"]] <= set(event)
    assert {event["ph"] for event in told} == set(needs)


def test_every_span_is_a_slice_with_its_times_to_the_nanosecond() -> None:
    run = simulated()
    slices = sorted((event["ts"], event["dur"]) for event in events(run) if event["ph"] == "X")
    spans = [((each.start_ns - run.start_ns) / 1000, (each.stop_ns - each.start_ns) / 1000) for each in run.spans]
    assert slices == sorted(spans)


def test_what_is_evicted_or_refused_is_an_instant_with_its_reason() -> None:
    run = Run("one", [span("decode", 0, 10)], decisions=[turn(2), turn(3, model="b", kind="evict")])
    (told,) = [event for event in events(run) if event["ph"] == "i"]
    assert (told["name"], told["ts"]) == ("evict b", 3000)
    assert told["args"] == {"why": turn(3, model="b").line}
    nowhere = Run("one", [span("decode", 0, 10)], decisions=[turn(4, on="-", kind="refuse")])
    assert [event["name"] for event in events(nowhere) if event["ph"] == "i"] == ["refuse a"]


def test_slices_of_a_thread_follow_each_other() -> None:
    run = Run("one", [span("switch", 0, 10), span("decode", 8, 20), span("decode", 18, 19), span("decode", 30, 40)])
    for told in (events(run), events(simulated())):
        ended: dict[tuple[int, int], float] = defaultdict(float)
        for event in told:
            if event["ph"] == "X":
                thread = event["pid"], event["tid"]
                assert event["ts"] >= ended[thread] - 1e-6
                ended[thread] = event["ts"] + event["dur"]


def test_each_thread_has_a_number_of_its_own_and_a_name() -> None:
    told = events(simulated())
    process = defaultdict(set)
    for event in told:
        process[event["tid"]].add(event["pid"])
    assert all(len(pids) == 1 for pids in process.values())
    named = {event["tid"] for event in told if event["name"] == "thread_name"}
    assert {event["tid"] for event in told if event["ph"] == "X"} <= named
    names = [event["args"]["name"] for event in told if event["name"] == "process_name"]
    assert names == ["requests", "prefill-0", "decode-0", "decode-1"]


def test_what_runs_on_a_second_lane_is_beside_the_first_and_says_what_share_it_has() -> None:
    beside = [span("decode", 0, 10, share=400), span("prefill", 1, 9, lane=1, share=600)]
    told = events(Run("one", [*beside, span("decode", 10, 12), span("decode", 3, 4, on="decode-1")]))
    slices = [event for event in told if event["ph"] == "X"]
    threads = {event["tid"]: event["args"]["name"] for event in told if event["name"] == "thread_name"}
    assert [(threads[each["tid"]], each["ts"], each["dur"], each["args"].get("share")) for each in slices] == [
        ("compute", 0, 10_000, 0.4),
        ("compute, second lane", 1000, 8000, 0.6),
        ("compute", 3000, 1000, None),
        ("compute", 10_000, 2000, None),
    ]
    assert list(threads.values()).count("compute, second lane") == 1, "one instance divides its device"


def test_the_batch_of_an_instance_is_that_of_both_lanes() -> None:
    beside = [span("decode", 0, 10, requests=4, share=700), span("decode", 5, 6, requests=2, lane=1, share=300)]
    run = Run("one", [*beside, span("decode", 10, 12, requests=3)])
    counted = [(each["ts"] / 1000, each["args"]["requests"]) for each in events(run) if each["name"] == "batch"]
    assert counted == [(0, 4), (5, 6), (6, 4), (10, 3), (12, 0)]


def test_a_flow_leads_each_request_through_slices_of_its_model() -> None:
    run = simulated()
    told = events(run)
    slices = {(each["pid"], each["tid"], each["ts"], each["cat"]): each for each in told if each["ph"] == "X"}
    model = {each.request: each.model for each in run.records}
    flows = defaultdict(list)
    for event in told:
        if event["ph"] in "stf":
            kind = "prefill" if event["ph"] == "s" else "decode"
            found = slices[event["pid"], event["tid"], event["ts"], kind]
            assert found["args"]["model"] == model[event["id"]]
            flows[event["id"]].append(event["ph"])
    assert set(flows) == {each.request for each in run.records if each.first_ns != each.last_ns}
    assert {"".join(phases) for phases in flows.values()} == {"sf", "stf"}


def test_counters_end_at_nothing() -> None:
    run = simulated()
    last = {(event["pid"], event["name"]): event["args"]["requests"] for event in events(run) if event["ph"] == "C"}
    assert set(last.values()) == {0} and len(last) == 3
    highest = max(event["args"]["requests"] for event in events(run) if event["name"] == "batch")
    assert highest == max(each.requests for each in run.spans if each.kind == "decode")


def test_slices_say_why() -> None:
    run = Run("one", [span("switch", 1, 3), span("decode", 3, 4), span("load", 1, 3)], decisions=[turn(1)])
    told = {event["cat"]: event["args"].get("why") for event in events(run) if event["ph"] == "X"}
    assert told == {"switch": turn(1).line, "decode": turn(1).line, "load": None}


def test_the_command_writes_gzip_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spans, out = tmp_path / "spans.jsonl.gz", tmp_path / "trace.json.gz"
    files.write(spans, outcome().spans)
    assert timeline(spans, None, None, None, None, out) == 0
    assert gzip.decompress(out.read_bytes()) == encode(Run("", outcome().spans))
    assert str(out) in capsys.readouterr().out


class Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        ours = self.headers["Authorization"] == f"Bearer {KEY}"
        what = self.path.removeprefix("/debug/").partition("?")[0]
        lines = {"spans": [span("decode", 1, 2)], "records": [record(1, 0, 1, 2)], "decisions": [turn(1)]}[what]
        content = msgspec.json.Encoder().encode_lines(lines) if ours else b'{"error": {"message": "no such key"}}'
        self.send_response(200 if ours else 401)
        self.send_header("Content-Type", "application/jsonl" if ours else "application/json")
        self.send_header("Aegis-Next", "1")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def test_a_server_is_asked_with_the_key() -> None:
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            run = read_run(None, None, url, KEY)
            with pytest.raises(
                UserError, match=r"no such key \(commands take keys from AEGIS_ADMIN_KEY and AEGIS_API_KEY\)"
            ):
                read_run(None, None, url, "other")
        finally:
            server.shutdown()
            thread.join()
    assert (run.spans, run.records, run.decisions) == ([span("decode", 1, 2)], [record(1, 0, 1, 2)], [turn(1)])


def test_what_cannot_be_asked_for_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UserError, match="give a file of spans, or the --url"):
        read_run(None, None, None, None)
    with pytest.raises(UserError, match="a server is asked for its own"):
        read_run(None, tmp_path, "http://127.0.0.1:1", None)
    with pytest.raises(UserError, match="holds no spans"):
        read_run(tmp_path / "empty.jsonl", None, None, None)
