"""The part of a prompt that need not be run because its KV is there: that of the last prefill, or that the node keeps.

The last prefill's KV stays on the device until it has been copied out, and serves other choices of the same request.
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
from memory.common_prefix import alike
from memory.ledger import Ledger
from prefill.eviction import Counters
from prefill.queue import Running


@dataclass(frozen=True, slots=True)
class _Past:
    """KV of a past prefill, on the device until `event`."""

    model: ModelId
    tokens: tuple[int, ...]
    device: Blocks
    event: EventHandle


class PrefixReuse:
    """Prefix reuse of the jobs of one prefill instance."""

    def __init__(self, ledger: Ledger, counters: Counters, send: Callable[[FromInstance], None]) -> None:
        self._ledger = ledger
        self._counters = counters
        self._send = send
        self._past: _Past | None = None

    def leaves(self, job: Job, device: Blocks, event: EventHandle) -> None:
        """The job was run, and its KV is being copied out."""
        self._past = _Past(job.model, _tokens(job), device, event)

    def bring(self, running: Running) -> bool:
        """Whether the job can be run now. Not if KV is on its way: its `arrival` is set then."""
        job, shape = running.job, self._ledger.specs[running.job.model].manifest.kv
        if job.sampling.prompt_logprobs is not None or self._goes_on_from_past(running, shape):
            return True
        if job.kept is None:
            return True
        target = first_blocks(running.device, shape.blocks_for(job.kept.tokens))
        running.arrival = self._ledger.copy_in(shape, job.kept.blocks, target, None)
        return False

    def delays(self, job: Job, ahead: Iterable[Job]) -> bool:
        """Whether the job would rather wait: for KV that is kept of its prompt, or that these are about to make."""
        if job.sampling.prompt_logprobs is not None:
            return False
        size = self._ledger.specs[job.model].manifest.kv.block_tokens
        return job.kept is not None or any([alike(_tokens(job)[:-1], _tokens(other)) >= size for other in ahead])

    def came(self, running: Running) -> bool:
        """Whether the job can be run now, after an event."""
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
        if past is None or past.model != job.model or self._ledger.transfers.passed(past.event):
            return False
        tokens = alike(_tokens(job)[:-1], past.tokens)
        if tokens < job.kept_tokens + shape.block_tokens:
            return False
        count = shape.blocks_for(tokens)
        self._ledger.copy_within(shape, first_blocks(past.device, count), first_blocks(running.device, count))
        self._begin_at(running, tokens)
        return True

    def _begin_at(self, running: Running, tokens: int) -> None:
        """The engine does not learn then that the run is the job's first."""
        job, running.start = running.job, tokens
        self._counters.reused_tokens += tokens
        self._send(Reused(job.request, job.attempt, tokens))
        self._ledger.effects.append(Track(job, job.sent))


def _tokens(job: Job) -> tuple[int, ...]:
    return (*job.prompt, *job.sent)
