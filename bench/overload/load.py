"""One load on a server, in a process of its own: `python -m bench.overload.load`, a `Load` in, what it `Saw` out.

Requests are sent at their times, whatever becomes of others. At the end clients leave, however far their answers are:
a run takes as long as its load, and what a server does for answers that nobody waits for counts for nothing.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import uvloop
from msgspec import Struct

from aegis.core.clock import NS_PER_MS, NS_PER_S
from aegis.core.errors import UserError
from aegis.core.model import Slo
from bench.common.percentiles import percentile_of
from bench.serve.answer import Answer, RequestFailed
from bench.serve.client import Client, open_session
from bench.serve.models import choose, known_token_ids, served_models
from bench.serve.plan import Planned
from bench.serve.prompts import Draws, Wording
from bench.serve.settings import Settings
from bench.serve.workload import plan_for, read

_SILENCE_S = 600.0
_REFUSED = 429
_BEGUN = b"begun\n"


class Load(Struct, frozen=True, kw_only=True):
    """`workload` with its duration, of which the first `lead_s` do not count: queues are empty then."""

    base_url: str
    workload: str
    seed: int
    seconds: float
    lead_s: float
    ttft_s: float
    tbt_s: float


class Saw(Struct, frozen=True, kw_only=True):
    """What clients saw after the lead, of the requests that were sent since then; tokens are those that came since
    then. `waiting` had no token when the clients left. `cpu_share` is the part of one core that the clients took, and
    `late_ms_max` how much too late one of them was at most."""

    seconds: float
    sent: int
    refused: int
    failed: int
    waiting: int
    tokens_per_s: float
    good_tokens_per_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    late_ms_max: float
    cpu_share: float
    failures: dict[str, int]


@dataclass(slots=True)
class Asked:
    """A request, as its client saw it; times since the start. `answer` None: it was not sent yet."""

    planned: Planned
    late_ns: int = 0
    answer: Answer | None = None
    failure: str = ""
    refused: bool = False
    times_ns: Sequence[int] = field(default=())


@asynccontextmanager
async def offering(load: Load) -> AsyncIterator[Process]:
    """Clients in a process of their own, which have just begun to send, and end with this at the latest."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "bench.overload.load", stdin=PIPE, stdout=PIPE)
    assert process.stdin and process.stdout
    try:
        process.stdin.write(msgspec.json.encode(load))
        process.stdin.close()
        if await process.stdout.readline() != _BEGUN:
            raise UserError(f"the clients of {load.base_url} did not begin; their error is above")
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def seen(process: Process) -> Saw:
    """What they saw, at the end of the load. Raises UserError."""
    assert process.stdout
    told = await process.stdout.read()
    if await process.wait():
        raise UserError("the clients broke; their error is above")
    return msgspec.json.decode(told, type=Saw)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started it
    load = msgspec.json.decode(sys.stdin.buffer.read(), type=Load)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        saw = runner.run(_offer(load))
    sys.stdout.buffer.write(msgspec.json.encode(saw))


async def _offer(load: Load) -> Saw:
    settings = Settings(base_url=load.base_url, workload=load.workload, seed=load.seed)
    async with open_session(None, silence_s=_SILENCE_S) as session:
        cards = choose(await served_models(session, load.base_url), ())
        plan = plan_for(settings, read(settings), cards)
        wording = Wording(
            chat=False,
            draws=Draws(load.seed, max(each.input_tokens for each in plan)),
            token_ids=await known_token_ids(session, load.base_url, sorted({each.model for each in plan})),
            returning=frozenset(card.model for card in cards if card.returns_token_ids),
            ignore_eos=True,
            extra={},
        )
        client = Client(session, f"{load.base_url}/v1/completions")
        sys.stdout.buffer.write(_BEGUN)
        sys.stdout.buffer.flush()
        used_s = _cpu_s()
        asked = await _send(client, wording, plan, round(load.seconds * NS_PER_S))
        return summary(load, asked, (_cpu_s() - used_s) / load.seconds)


async def _send(client: Client, wording: Wording, plan: Sequence[Planned], stop_ns: int) -> list[Asked]:
    asked = [Asked(planned) for planned in plan if planned.at_ns < stop_ns]
    start_ns = time.monotonic_ns()

    def now_ns() -> int:
        return time.monotonic_ns() - start_ns

    async def send(index: int, each: Asked) -> None:
        each.late_ns = now_ns() - each.planned.at_ns
        each.answer = Answer()
        try:
            await client.ask(wording.body(each.planned, index), each.answer, now_ns)
        except RequestFailed as error:
            each.failure, each.refused = str(error), error.status == _REFUSED

    tasks = []
    for index, each in enumerate(asked):
        await asyncio.sleep(max(each.planned.at_ns - now_ns(), 0) / NS_PER_S)
        tasks.append(asyncio.create_task(send(index, each)))
    await asyncio.sleep(max(stop_ns - now_ns(), 0) / NS_PER_S)
    for each in asked:
        if each.answer and each.answer.seen:
            each.times_ns = each.answer.token_times_ns(stop_ns)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return asked


def summary(load: Load, asked: Sequence[Asked], cpu_share: float) -> Saw:
    slo = Slo(round(load.ttft_s * NS_PER_S), round(load.tbt_s * NS_PER_S))
    since_ns, counted_s = round(load.lead_s * NS_PER_S), load.seconds - load.lead_s
    sent = [each for each in asked if each.planned.at_ns >= since_ns]
    ttfts_ms = [(each.times_ns[0] - each.planned.at_ns) / NS_PER_MS for each in sent if each.times_ns]
    failures = Counter(each.failure for each in sent if each.failure and not each.refused)
    tokens = good = 0
    for each in asked:
        if each.failure:
            continue
        for index, came_ns in enumerate(each.times_ns):
            if came_ns >= since_ns:
                tokens += 1
                good += came_ns <= slo.due_ns(each.planned.at_ns, index)
    return Saw(
        seconds=counted_s,
        sent=len(sent),
        refused=sum(each.refused for each in sent),
        failed=failures.total(),
        waiting=sum(not each.times_ns and not each.failure for each in sent),
        tokens_per_s=tokens / counted_s,
        good_tokens_per_s=good / counted_s,
        ttft_ms_p50=percentile_of(ttfts_ms, 50),
        ttft_ms_p99=percentile_of(ttfts_ms, 99),
        late_ms_max=max((each.late_ns / NS_PER_MS for each in sent), default=0.0),
        cpu_share=cpu_share,
        failures=dict(failures),
    )


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
