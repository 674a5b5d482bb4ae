"""`aegis lab proxy`, small and without its peer, and the peer's backend. How fast anything was is not judged."""

import asyncio
import sys
from pathlib import Path

import msgspec
import pytest

from aegis.core.errors import UserError
from bench.lab.proxy import route_suite
from bench.lab.proxy.child import running
from bench.lab.proxy.client import Connection
from bench.lab.proxy.model import VECTOR
from bench.lab.proxy.rounds import Plan
from bench.lab.proxy.route_suite import RoutesResult
from bench.lab.proxy.routes import CHAT, EMBEDDINGS, MESSAGES, RESPONSES, Route, routes_named
from bench.lab.proxy.sides import litellm_version
from bench.lab.proxy.suite import Result, run

pytestmark = pytest.mark.long

TINY = Plan(rounds=1, asks=5, seconds=0.2, concurrency=4, idle_streams=20, idle_rounds=2, idle_pairs=1, idle_asks=5)


@pytest.mark.long
def test_a_tiny_run_measures_every_figure_of_aegis(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "proxy.json"
    result = run(path, plan=TINY)
    assert msgspec.json.decode(path.read_bytes(), type=Result) == result
    (measured,) = result.aegis_rounds
    assert measured.whole.direct_ms > 0 and measured.stream.direct_ms > 0
    assert measured.requests.per_s > 0 and measured.tokens.per_s > 0
    assert len(result.idle.grown_bytes) == len(result.idle.without) == len(result.idle.beside) == 2
    assert all(took.direct_ms > 0 and took.added_p50_ms != 0 for took in result.idle.without + result.idle.beside)
    assert (result.litellm, result.litellm_rounds) == (None, ())
    assert all(row.litellm is None and row.ratio is None for row in result.figures)
    printed = capsys.readouterr().out
    assert all(row.name in printed for row in result.figures)
    assert "LiteLLM was not measured" in printed


def test_a_tiny_run_measures_the_routes_that_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, routes = tmp_path / "routes.json", routes_named("messages,responses,embeddings")
    result = route_suite.run(routes, path, plan=TINY)
    assert msgspec.json.decode(path.read_bytes(), type=RoutesResult) == result
    assert [each.route for each in result.aegis_rounds] == ["messages", "responses", "embeddings"]
    assert all(each.whole.direct_ms > 0 and each.whole.added_p50_ms != 0 for each in result.aegis_rounds)
    assert [each.stream is not None for each in result.aegis_rounds] == [True, True, False]
    assert len(result.figures) == 7 + 7 + 3
    printed = capsys.readouterr().out
    assert all(row.name in printed for row in result.figures)


@pytest.mark.parametrize(
    ("route", "stream", "lengths"),
    [
        *((route, stream, [3, 5]) for route in (CHAT, MESSAGES, RESPONSES) for stream in (False, True)),
        (EMBEDDINGS, False, [len(VECTOR)] * 2),
    ],
)
def test_the_backend_of_the_peer_answers_one_request_after_the_other(
    route: Route, stream: bool, lengths: list[int]
) -> None:
    async def ask(port: int) -> list[int]:
        connection = await Connection.open(port, route)
        made = []
        for tokens in (3, 5):
            took = await connection.ask(route.body(tokens=tokens, stream=stream))
            assert 0 < took.first_ns <= took.total_ns
            made.append(connection.length())
        connection.close()
        return made

    with running([sys.executable, "-m", "bench.lab.proxy.upstream"]) as upstream:
        assert asyncio.run(ask(int(upstream.line()))) == lengths


def test_a_route_that_is_not_known_is_refused() -> None:
    with pytest.raises(UserError, match=r"--routes rerank: expected some of chat, messages"):
        routes_named("messages,rerank")


def test_a_python_without_the_peer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no Python that has litellm\[proxy\]"):
        litellm_version(tmp_path / "python")
