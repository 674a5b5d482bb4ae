"""The part of a prompt that need not be run because its KV is there: that of the last prefill, or that the node keeps.

The last prefill's KV stays on the device until it has been copied out, or longer while a waiting job could go on from
it, as other choices of the same request do.
Kept KV is copied in, and then the node is asked whether it was there all the time; if it was not, the whole prompt is
run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from aegis.core.block_runs import Blocks, first_blocks
from aegis.core.effects import Track
from aegis.core.ids import ModelId
from aegis.core.messages import CheckPrefix, FromInstance, PrefixChecked, Reused
from aegis.core.model import KvShape
from aegis.core.request import EventHandle, Job
from memory.common_prefix import common_tokens
from memory.ledger import Ledger
from prefill.counters import Counters
from prefill.queue import Running


@dataclass(slots=True)
class _Past:
    """KV of a past prefill, on the device until `event`, or as long as it is `held`."""

    model: ModelId
    shape: KvShape
    tokens: tuple[int, ...]
    device: Blocks
    event: EventHandle
    held: bool


class PrefixReuse:
    """Prefix reuse of the jobs of one prefill instance."""

    def __init__(self, ledger: Ledger, counters: Counters, send: Callable[[FromInstance], None]) -> None:
        self._ledger = ledger
        self._counters = counters
        self._send = send
        self._past: _Past | None = None

    def leaves(self, job: Job, device: Blocks, event: EventHandle) -> None:
        """The job was run, and its KV is being copied out. `settle` or `let_go` follow."""
        self.let_go()
        shape = self._ledger.specs[job.model].manifest.kv
        self._past = _Past(job.served, shape, _tokens(job), device, event, held=True)

    def settle(self, waiting: Iterable[Job]) -> None:
        """Lets go of the last KV if none of the jobs that wait could go on from it. Asked with each event, so that no
        job behind the first of these is looked at."""
        past = self._past
        if past and past.held and not any(self._is_of_use(past, job) for job in waiting):
            self.let_go()

    def let_go(self) -> None:
        """The last KV leaves the device, now or when it has been copied out: there is need of its room."""
        past = self._past
        if past and past.held:
            past.held = False
            self._ledger.device.free_after(past.shape, past.device, past.event)

    def bring(self, running: Running) -> bool:
        """Whether the job can be run now. If KV is on its way for it, it cannot, and its `arrival` is set."""
        job, shape = running.job, self._ledger.specs[running.job.model].manifest.kv
        if job.is_whole or self._goes_on_from_past(running, shape):
            return True
        if job.kept is None:
            return True
        target = first_blocks(running.device, shape.blocks_for(job.kept.tokens))
        running.arrival = self._ledger.copy_in(shape, job.kept.blocks, target, None)
        return False

    def delays(self, job: Job, ahead: Iterable[Job]) -> bool:
        """Whether the job would rather wait: for KV that is kept of its prompt, or that these are about to make."""
        if job.is_whole:
            return False
        size = self._ledger.specs[job.model].manifest.kv.block_tokens
        alikes = [other for other in ahead if other.served == job.served]
        return job.kept is not None or any(
            [common_tokens(_tokens(job)[:-1], _tokens(other)) >= size for other in alikes]
        )

    def may_run_now(self, running: Running) -> bool:
        """Whether the job can be run now, once the node has answered. As soon as its kept KV has been copied, the node
        is asked whether it was still kept."""
        if running.checked:
            running.checked = False
            return True
        if running.arrival and self._ledger.transfers.passed(running.arrival):
            job = running.job
            assert job.kept
            running.arrival = None
            self._send(CheckPrefix(job.request, job.attempt, job.kept.entry))
        return False

    def checked(self, running: Running, event: PrefixChecked) -> None:
        """The job goes on from there, or begins anew."""
        running.checked = True
        if event.intact:
            self._begin_at(running, running.job.kept_tokens)

    def _goes_on_from_past(self, running: Running, shape: KvShape) -> bool:
        past, job = self._past, running.job
        if past is None or past.model != job.served:
            return False
        if not past.held and self._ledger.transfers.passed(past.event):
            return False
        tokens = common_tokens(_tokens(job)[:-1], past.tokens)
        if tokens < job.kept_tokens + shape.block_tokens:
            return False
        count = shape.blocks_for(tokens)
        self._ledger.copy_within(shape, first_blocks(past.device, count), first_blocks(running.device, count))
        self._begin_at(running, tokens)
        return True

    def _is_of_use(self, past: _Past, job: Job) -> bool:
        if job.served != past.model or job.is_whole:
            return False
        return common_tokens(_tokens(job)[:-1], past.tokens) >= job.kept_tokens + past.shape.block_tokens

    def _begin_at(self, running: Running, tokens: int) -> None:
        """The engine does not learn then that the run is the job's first."""
        job, running.start = running.job, tokens
        self._counters.reused_tokens += tokens
        self._send(Reused(job.request, job.attempt, tokens))
        self._ledger.effects.append(Track(job, job.sent))


def _tokens(job: Job) -> tuple[int, ...]:
    return (*job.prompt, *job.sent)
