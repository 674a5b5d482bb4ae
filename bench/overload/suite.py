"""`aegis bench overload`: the demo market under half to eight times what its instances can do, under each policy.

What they can do is searched for first, with the first policy: the most tokens that come on time in a second, at any
load. 1 × is the load that asks for as many. Then each policy gets the same requests at the same multiples of it, from a
server of its own, which has the machine to itself: an idle one takes a fourteenth of a core. That is done in several
rounds, in each of which all policies have their turn, for a machine may be slower for a while.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
from msgspec import Struct, structs
from rich.console import Console
from rich.table import Table

from aegis.admin_client import AdminClient
from aegis.core.errors import UserError
from bench.common import machine, result_files
from bench.common.processes import cpu_s
from bench.common.served import launched, served
from bench.overload.load import Load, Saw, offering, seen
from bench.overload.probes import Held, Waits, memory_of, waits, watching

MEMORY = "48MiB"
TTFT_S, TBT_S = 2.0, 0.1
FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0)
JUDGED = 4.0  # the multiple that has bars; what lies above is shown
HELD_SHARE = 0.9  # of the peak
ANSWER_MS_MAX = 100.0
MEMORY_TIMES_MAX = 1.25
"""What its processes may have of their own then, beside what they had before the first load."""

OURS = "least-slack"
CONTENDERS = {
    OURS: ("--policy", OURS),
    f"{OURS}, refusing": ("--policy", OURS, "--refuse-late"),
    "serverlessllm": ("--policy", "serverlessllm"),
}

_MODELS = 8
_OUTPUTS = (16, 160)
_TOKENS_MEAN = sum(_OUTPUTS) / 2
_FIRST_RPS = 0.5
_GROWTH = 2.0
_FALLEN = 0.9  # of the best so far: the peak has been passed
_WARM_RPS, _WARM_S = 0.5, 8.0
_TAIL_S = 0.5  # of a load is not watched: then its clients leave
_REST_S = 2.0
_QUIET_S = 60.0
_POLL_S = 0.2
_INSTANCE = "aegis.instance.process"
_UNDER_WAY = ("aegis:num_requests_running", "aegis:num_requests_waiting")
_WAIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """`search_s`: of each load while the best one is searched for, unless `rps` says it: requests of each model a
    second."""

    seconds: float
    search_s: float
    lead_s: float
    seed: int
    rps: float | None
    contenders: Sequence[str]
    factors: Sequence[float]
    launch: Sequence[str]
    rounds: int = 1


class Run(Struct, frozen=True, kw_only=True):
    """A policy under so many times the load. Memory is that of all processes of the server: before, the most of
    either kind meanwhile, and two seconds after it. `server_cpu` is the cores that they took, `instance_cpu` those that
    its instances did: beside them, proxies and clients want their part of the machine. `missed` are bars, and how. Of
    several rounds it is the one with the median of tokens on time, of which `good_of_rounds` has all, with the most
    memory and the longest answers of any."""

    contender: str
    factor: float
    rps: float
    saw: Saw
    health: Waits
    metrics: Waits
    cancels: Waits
    start: Held
    peak: Held
    after: Held
    server_cpu: float
    instance_cpu: float
    missed: dict[str, str] = {}
    good_of_rounds: list[float] = []


class Searched(Struct, frozen=True):
    rps: float
    good_tokens_per_s: float


class Result(Struct, frozen=True, kw_only=True):
    machine: machine.Machine
    seconds: float
    lead_s: float
    seed: int
    searched: list[Searched]
    runs: list[Run]


def run(setting: Setting, file: Path | None) -> Result:
    """Measures, prints a table and what failed. Raises UserError."""
    if file is not None:
        result_files.check(file)
    unknown = [name for name in setting.contenders if name not in CONTENDERS]
    if unknown:
        raise UserError(f"--only: {unknown[0]!r} is none of {', '.join(map(repr, CONTENDERS))}")
    rps, searched = (setting.rps, []) if setting.rps else _search(setting)
    runs = judged(_rounds(setting, rps))
    result = Result(
        machine=machine.describe(),
        seconds=setting.seconds,
        lead_s=setting.lead_s,
        seed=setting.seed,
        searched=searched,
        runs=runs,
    )
    Console(markup=False, highlight=False, width=200).print(_table(result))
    print(*[f"{each.contender} at {each.factor:g} ×: {how}" for each in runs for how in each.missed.values()], sep="\n")
    if file is not None:
        result_files.write_json(file, msgspec.to_builtins(result))
    return result


def held(runs: Sequence[Run], name: str) -> float | None:
    """Tokens on time a second at the multiple that is judged, beside the most that the policy reached at any."""
    own = [each for each in runs if each.contender == name]
    peak = max((each.saw.good_tokens_per_s for each in own), default=0.0)
    judged = next((each for each in own if each.factor == JUDGED), None)
    return judged.saw.good_tokens_per_s / peak if judged and peak else None


def judged(runs: Sequence[Run]) -> list[Run]:
    """With the bars that each missed: they are for `least-slack`, refusing or not, at four times what it can do."""
    first = {each.contender: each for each in reversed(runs)}
    return [
        structs.replace(each, missed=dict(_missed(each, first[each.contender], held(runs, each.contender))))
        if each.contender.startswith(OURS) and each.factor == JUDGED
        else each
        for each in runs
    ]


def _missed(most: Run, first: Run, share: float | None) -> Iterator[tuple[str, str]]:
    """Each bar that was, and how."""
    if share is not None and share < HELD_SHARE:
        yield "goodput", f"goodput is {share:.2f} of the peak, at least {HELD_SHARE:g}"
    for what in ("health", "metrics", "cancels"):
        found: Waits = getattr(most, what)
        if found.longest_ms > ANSWER_MS_MAX:
            longest = f"{found.longest_ms:.0f} ms, p99 {found.p99_ms:.0f} ms"
            yield what, f"{what} took up to {longest}, at most {ANSWER_MS_MAX:g} ms"
    grown = most.peak.own / first.start.own
    if grown > MEMORY_TIMES_MAX:
        yield "memory", f"memory besides weights and KV grew to {grown:.2f} ×, at most {MEMORY_TIMES_MAX:g}"


# --- servers and loads ------------------------------------------------------------------------------------------------


def _options(setting: Setting, name: str) -> list[str]:
    slo = f"ttft={TTFT_S:g},tbt={TBT_S:g}"
    return [*CONTENDERS[name], "--mixed", "2", "--device-memory", MEMORY, "--slo", slo, *setting.launch]


def _load(url: str, rps: float, seconds: float, setting: Setting) -> Load:
    low, high = _OUTPUTS
    return Load(
        base_url=url,
        workload=f"market:models={_MODELS},rps={rps:g},lengths=uniform,input=16-400,output={low}-{high},"
        f"duration={seconds:g}",
        seed=setting.seed,
        seconds=seconds,
        lead_s=min(setting.lead_s, seconds / 2),
        ttft_s=TTFT_S,
        tbt_s=TBT_S,
    )


def _search(setting: Setting) -> tuple[float, list[Searched]]:
    """What the instances can do, of loads that grow until fewer tokens are on time, or eight times as many are asked
    for: under more load batches are larger, and there are more that make many tokens on time. Raises UserError."""
    found: list[Searched] = []
    with served(_options(setting, next(iter(CONTENDERS))), remembers=False) as url:
        _warm(url, setting)
        rps, most = _FIRST_RPS, 0.0
        while rps <= max(FACTORS) * most or not most:
            good = asyncio.run(_offer(url, rps, setting.search_s, setting)).good_tokens_per_s
            found.append(Searched(rps, good))
            print(f"{rps:6.3g} requests/s of each model: {good:6.0f} tokens/s on time", flush=True)
            made = good / (_MODELS * _TOKENS_MEAN)
            if not made and not most:  # nor would there be any under more load
                raise UserError(f"no token was on time at {rps:g} requests/s of each model; give less, by --rps")
            if made < _FALLEN * most:
                break
            most = max(most, made)
            rps = round(rps * _GROWTH, 3)
    return round(most, 3), found


def _rounds(setting: Setting, rps: float) -> list[Run]:
    """The runs of each policy at each multiple."""
    found: dict[tuple[str, float], list[Run]] = {
        (name, factor): [] for name in setting.contenders for factor in setting.factors
    }
    for _, name in itertools.product(range(setting.rounds), setting.contenders):
        with launched(_options(setting, name), remembers=False) as server:
            _warm(server.url, setting)
            for factor in setting.factors:
                done = asyncio.run(_watched(setting, name, factor, rps * factor, server.url, server.launcher))
                print(_line(done), flush=True)
                found[name, factor].append(done)
    return [of_rounds(rounds) for rounds in found.values()]


def of_rounds(rounds: Sequence[Run]) -> Run:
    """The median of an odd number of rounds; of an even one, that below it."""
    good = [each.saw.good_tokens_per_s for each in rounds]
    typical = sorted(rounds, key=lambda each: each.saw.good_tokens_per_s)[(len(rounds) - 1) // 2]
    return structs.replace(
        typical,
        health=_longest([each.health for each in rounds]),
        metrics=_longest([each.metrics for each in rounds]),
        cancels=_longest([each.cancels for each in rounds]),
        start=rounds[0].start,
        peak=Held(max([each.peak.own for each in rounds]), max([each.peak.shared for each in rounds])),
        after=rounds[-1].after,
        good_of_rounds=good,
    )


def _longest(found: Sequence[Waits]) -> Waits:
    return max(found, key=lambda each: each.longest_ms)


def _warm(url: str, setting: Setting) -> None:
    asyncio.run(_offer(url, _WARM_RPS, _WARM_S, setting))


async def _offer(url: str, rps: float, seconds: float, setting: Setting) -> Saw:
    async with offering(_load(url, rps, seconds, setting)) as clients:
        saw = await seen(clients)
    await _quiet(url)
    return saw


async def _watched(setting: Setting, name: str, factor: float, rps: float, url: str, root: int) -> Run:
    models = [each["id"] for each in AdminClient(url).models()]
    start, used_s, computed_s = memory_of(root), cpu_s(root), cpu_s(root, _INSTANCE)
    timeout = aiohttp.ClientTimeout(total=_WAIT_S)
    load = _load(url, rps, setting.seconds, setting)
    async with aiohttp.ClientSession(timeout=timeout) as session, offering(load) as clients:
        async with watching(session, url, root, models) as watched:
            await asyncio.sleep(setting.seconds - _TAIL_S)
        saw = await seen(clients)
    server_cpu = (cpu_s(root) - used_s) / setting.seconds
    instance_cpu = (cpu_s(root, _INSTANCE) - computed_s) / setting.seconds
    await _quiet(url)
    await asyncio.sleep(_REST_S)
    return Run(
        contender=name,
        factor=factor,
        rps=rps,
        saw=saw,
        health=waits(watched.health_s),
        metrics=waits(watched.metrics_s),
        cancels=waits(watched.cancels_s),
        start=start,
        peak=Held(
            max([start.own, *(held.own for held in watched.memory)]),
            max([start.shared, *(held.shared for held in watched.memory)]),
        ),
        after=memory_of(root),
        server_cpu=server_cpu,
        instance_cpu=instance_cpu,
    )


async def _quiet(url: str) -> None:
    """Returns when no request is left. Raises UserError if that takes too long."""
    client, deadline_s = AdminClient(url), time.monotonic() + _QUIET_S
    while any(sum(client.counter(each, "model_name").values()) for each in _UNDER_WAY):
        if time.monotonic() > deadline_s:
            raise UserError(f"requests are left {_QUIET_S:.0f} s after their clients have gone")
        await asyncio.sleep(_POLL_S)


# --- what is shown ----------------------------------------------------------------------------------------------------

_COLUMNS: Mapping[str, Callable[[Run], str]] = {
    "policy": lambda each: each.contender,
    "load": lambda each: f"{each.factor:g} ×",
    "tokens/s": lambda each: f"{each.saw.tokens_per_s:.0f}",
    "on time": lambda each: f"{each.saw.good_tokens_per_s:.0f}",
    "refused": lambda each: f"{each.saw.refused / max(each.saw.sent, 1):.0%}",
    "waiting": lambda each: f"{each.saw.waiting / max(each.saw.sent, 1):.0%}",
    "failed": lambda each: f"{each.saw.failed}",
    "TTFT p50": lambda each: f"{each.saw.ttft_ms_p50:.0f} ms",
    "p99": lambda each: f"{each.saw.ttft_ms_p99:.0f} ms",
    "/health": lambda each: _shown(each.health),
    "/metrics": lambda each: _shown(each.metrics),
    "cancels": lambda each: _shown(each.cancels),
    "own, MiB": lambda each: " ".join(f"{held.own >> 20}" for held in (each.start, each.peak, each.after)),
    "shared, MiB": lambda each: " ".join(f"{held.shared >> 20}" for held in (each.start, each.peak, each.after)),
    "clients": lambda each: f"{each.saw.cpu_share:.0%}",
    "server": lambda each: f"{each.server_cpu:.2f} cores",
    "instances": lambda each: f"{each.instance_cpu:.2f} cores",
}


def _shown(found: Waits) -> str:
    return f"{found.longest_ms:.0f} ({found.p99_ms:.0f})"


def _line(done: Run) -> str:
    return "  ".join(show(done) for show in _COLUMNS.values())


def _table(result: Result) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in _COLUMNS:
        table.add_column(heading, justify="right")
    for each in result.runs:
        table.add_row(*[show(each) for show in _COLUMNS.values()])
    return table
