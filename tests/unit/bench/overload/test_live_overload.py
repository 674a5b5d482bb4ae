"""What live overload is judged by: what clients saw, and which bars that misses."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import nullcontext
from dataclasses import dataclass

import aiohttp
import pytest
from msgspec import structs

from aegis.core.clock import NS_PER_S
from aegis.core.errors import UserError
from aegis.core.ids import ModelId
from bench.overload import suite
from bench.overload.load import Asked, Load, Saw, summary
from bench.overload.probes import Held, Waits, memory_of, waits, watching
from bench.overload.suite import Run, Setting, held, judged, of_rounds
from bench.serve.answer import Answer
from bench.serve.plan import Planned

LOAD = Load(base_url="", workload="", seed=0, seconds=12, lead_s=2, ttft_s=2, tbt_s=0.1)
SAW = Saw(
    seconds=10,
    sent=1,
    refused=0,
    failed=0,
    waiting=0,
    tokens_per_s=1,
    good_tokens_per_s=1,
    ttft_ms_p50=1,
    ttft_ms_p99=1,
    late_ms_max=0,
    cpu_share=0.1,
    failures={},
)
QUICK = Waits(times=9, p50_ms=1, p99_ms=2, longest_ms=3)


def asked(at_s: float, *times_s: float, failure: str = "", refused: bool = False) -> Asked:
    planned = Planned(round(at_s * NS_PER_S), ModelId("a"), 1, 9)
    return Asked(planned, 0, Answer(), failure, refused, [round(each * NS_PER_S) for each in times_s])


def test_tokens_on_time_are_those_that_came_when_they_were_due_after_the_lead() -> None:
    saw = summary(LOAD, [asked(1, 1.5, 2.5, 3.05), asked(3, 4.9, 5.2), asked(9)], 0.25)
    assert (saw.sent, saw.waiting, saw.cpu_share) == (2, 1, 0.25)
    assert saw.tokens_per_s == pytest.approx(4 / 10)
    assert saw.good_tokens_per_s == pytest.approx(3 / 10), "the last one was due at 5.1 s"
    assert saw.ttft_ms_p50 == saw.ttft_ms_p99 == pytest.approx(1900)


def test_who_was_refused_has_not_failed_and_tokens_of_who_failed_do_not_count() -> None:
    saw = summary(LOAD, [asked(4, failure="HTTP 429: x", refused=True), asked(5, 5.1, failure="broken")], 0)
    assert (saw.sent, saw.refused, saw.failed, saw.waiting) == (2, 1, 1, 0)
    assert (saw.tokens_per_s, saw.failures) == (0, {"broken": 1})


def run(contender: str, factor: float, good: float, **changes: object) -> Run:
    made = Run(
        contender=contender,
        factor=factor,
        rps=factor,
        saw=structs.replace(SAW, good_tokens_per_s=good),
        health=QUICK,
        metrics=QUICK,
        cancels=QUICK,
        start=Held(100, 10),
        peak=Held(110, 99),
        after=Held(110, 99),
        server_cpu=1.5,
        instance_cpu=1.2,
    )
    return structs.replace(made, **changes)


def test_what_is_held_is_beside_the_peak_of_the_same_policy() -> None:
    runs = [
        run("least-slack", 1, 50),
        run("least-slack", 2, 80),
        run("least-slack", 4, 60),
        run("least-slack", 8, 10),
        run("serverlessllm", 1, 99),
    ]
    assert held(runs, "least-slack") == 0.75
    assert held(runs, "none") is None


SLOW = Waits(times=9, p50_ms=1, p99_ms=50, longest_ms=101)


@dataclass(frozen=True, slots=True)
class Case:
    changes: dict[str, object]
    bar: str
    good: float = 100


@pytest.mark.parametrize(
    "case",
    [
        Case({}, "goodput", good=89),
        Case({"health": SLOW}, "health"),
        Case({"metrics": SLOW}, "metrics"),
        Case({"cancels": SLOW}, "cancels"),
        Case({"peak": Held(126, 10)}, "memory"),
    ],
)
def test_each_bar_that_is_missed_is_said(case: Case) -> None:
    """Of ours, at four times what it can do."""
    slow = [
        run("least-slack", 1, 100, health=SLOW),
        run("least-slack", 8, 1, health=SLOW),
        run("serverlessllm", 4, 1, health=SLOW),
    ]
    assert not any(each.missed for each in judged([*slow, run("least-slack", 4, 91)]))
    *others, most = judged([*slow, run("least-slack", 4, case.good, **case.changes)])
    assert list(most.missed) == [case.bar] and not any(each.missed for each in others)


def test_of_rounds_the_median_counts_with_the_worst_of_any() -> None:
    rounds = [
        run("least-slack", 4, 70, after=Held(7, 7)),
        run("least-slack", 4, 90, start=Held(130, 10), peak=Held(150, 20), health=SLOW),
        run("least-slack", 4, 80, start=Held(140, 10), peak=Held(140, 120), after=Held(9, 9)),
    ]
    found = of_rounds(rounds)
    assert (found.saw.good_tokens_per_s, found.good_of_rounds) == (80, [70, 90, 80])
    assert (found.start, found.peak, found.after) == (Held(100, 10), Held(150, 120), Held(9, 9))
    assert (found.health, found.metrics) == (SLOW, QUICK)


def test_waits_are_those_that_were_seen() -> None:
    assert waits([0.002, 0.001, 0.004]) == Waits(times=3, p50_ms=2, p99_ms=4, longest_ms=4)
    assert waits([]) == Waits(times=0, p50_ms=0, p99_ms=0, longest_ms=0)


def test_memory_of_a_process_that_is_gone_is_none() -> None:
    assert memory_of(os.getpid()).own > 1 << 20
    assert memory_of(2**22 + 1) == Held(0, 0)


def test_a_machine_that_makes_no_token_on_time_is_not_searched_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    offered: list[float] = []

    async def offer(url: str, rps: float, seconds: float, setting: Setting) -> Saw:
        offered.append(rps)
        assert len(offered) < 9
        return structs.replace(SAW, good_tokens_per_s=0)

    monkeypatch.setattr(suite, "served", lambda options, remembers: nullcontext("http://127.0.0.1:9"))
    monkeypatch.setattr(suite, "_offer", offer)
    setting = Setting(
        seconds=3, search_s=3, lead_s=1, seed=0, rps=None, contenders=["least-slack"], factors=(1.0,), launch=()
    )
    with pytest.raises(UserError, match=r"no token was on time at 0.5 requests/s of each model; give less, by --rps"):
        suite.run(setting, None)


def test_a_server_that_does_not_answer_while_it_is_watched_is_named() -> None:
    async def watch(url: str) -> None:
        async with aiohttp.ClientSession() as session, watching(session, url, os.getpid(), ["m"]):
            await asyncio.sleep(0.2)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens there
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match=rf"{url} does not answer under load \(Cannot connect"):
            asyncio.run(watch(url))
