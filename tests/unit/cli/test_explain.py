"""`aegis explain`, on a file and on a server."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import msgspec
import pytest

from aegis.admin_client import ADMIN_KEY
from aegis.cli.explain import explain
from aegis.core.decision import Decision, DecisionKind, Why
from aegis.core.errors import UserError
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.telemetry import files

KEY = "secret"


def turn(at_s: float, model: str, lost: str | None = None, *, on: str = "mixed-0", request: int = 1) -> Decision:
    why = Why(f"must begin in {at_s} s", lost=lost)
    names = InstanceId(on), DecisionKind.TURN, ModelId(model), (RequestId(request),)
    return Decision(round(at_s * 1e9), *names, f"{model} has the turn", why)


DECISIONS = [turn(1, "a", "b"), turn(2, "b", request=2), turn(3, "c", on="mixed-1")]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    written = tmp_path / "decisions.jsonl.gz"
    files.write(written, DECISIONS)
    return written


def test_a_line_has_the_time_the_place_and_the_reason(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(file, last=1) == 0
    assert capsys.readouterr().out == "      3.0000 mixed-1    c has the turn: must begin in 3 s\n"


@pytest.mark.parametrize(
    ("wanted", "models"),
    [
        ({}, "abc"),
        ({"last": 2}, "bc"),
        ({"instance": "mixed-0"}, "ab"),
        ({"model": "b"}, "ab"),
        ({"request": 2}, "b"),
    ],
)
def test_what_is_asked_for_is_told(
    file: Path, capsys: pytest.CaptureFixture[str], wanted: dict[str, object], models: str
) -> None:
    explain(file, json=True, **{"last": 20} | wanted)  # type: ignore[arg-type]
    told = msgspec.json.Decoder(Decision).decode_lines(capsys.readouterr().out)
    assert "".join(each.model for each in told) == models
    assert all(each in DECISIONS for each in told)


@pytest.mark.parametrize(
    ("wanted", "lines"), [({}, 20), ({"request": 1}, 30), ({"request": 1, "last": 5}, 5), ({"model": "a"}, 20)]
)
def test_of_a_request_all_is_told_and_else_the_last_twenty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wanted: dict[str, object], lines: int
) -> None:
    files.write(tmp_path / "decisions.jsonl.gz", [turn(at_s, "a") for at_s in range(30)])
    explain(tmp_path / "decisions.jsonl.gz", **wanted)  # type: ignore[arg-type]
    told = capsys.readouterr().out.splitlines()
    assert len(told) == lines and told[-1].split()[0] == "29.0000"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"model": "x"}, "no decision is about model x; there are some about a, b, c"),
        ({"request": 999}, "no decision is about request 999; there are some about 1, 2"),
        ({"instance": "nosuch"}, "no decision is about instance nosuch; there are some about mixed-0, mixed-1"),
        ({"model": "b", "instance": "mixed-1"}, "no decision is about instance mixed-1 and model b"),
    ],
)
def test_what_there_is_nothing_about_is_refused_with_what_there_is(
    file: Path, wanted: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError) as refusal:
        explain(file, last=20, **wanted)  # type: ignore[arg-type]
    assert refusal.value.message == message


def test_that_there_is_no_decision_at_all_is_said_beside_what_programs_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files.write(tmp_path / "none.jsonl", [])
    assert explain(tmp_path / "none.jsonl") == 0
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("aegis: no decision is remembered") and err.count("\n") == 1
    with pytest.raises(UserError, match="no decision is remembered"):
        explain(tmp_path / "none.jsonl", model="a")


TOLD = {"since=0": ([DECISIONS[1], DECISIONS[0]], 2), "since=2": ([DECISIONS[2]], 3)}


class Server(BaseHTTPRequestHandler):
    """Has two decisions, in the order in which they came in, then a third one, and then nothing for anybody."""

    def do_GET(self) -> None:
        path, _, since = self.path.partition("?")
        ours = self.headers["Authorization"] == f"Bearer {KEY}" and path == "/debug/decisions" and since in TOLD
        told, following = TOLD[since] if ours else ((), 0)
        self.send_response(200 if ours else 401)
        self.send_header("Content-Type", "application/jsonl")
        self.send_header("Aegis-Next", str(following))
        self.end_headers()
        self.wfile.write(msgspec.json.Encoder().encode_lines(told) if ours else b'{"error": {"message": "no"}}')

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_server_is_asked_with_the_admin_key(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADMIN_KEY, KEY)
    explain(None, url=url, last=2)
    assert models_in(capsys) == "ab", "in order of time"
    monkeypatch.setenv(ADMIN_KEY, "another")
    with pytest.raises(UserError, match="no"):
        explain(None, url=url)


def test_it_goes_on_with_what_is_new(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADMIN_KEY, KEY)
    with pytest.raises(UserError, match="no"):
        explain(None, url=url, last=1, follow=True)
    assert models_in(capsys) == "bc"


def models_in(capsys: pytest.CaptureFixture[str]) -> str:
    return "".join(line.split()[2] for line in capsys.readouterr().out.splitlines())
