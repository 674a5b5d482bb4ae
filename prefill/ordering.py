"""The order of jobs on a prefill instance, if a policy decides it, and what the policy has to know for that."""

from __future__ import annotations

from aegis.core.decision import Why
from aegis.core.estimators import Hardware, Latency
from aegis.core.ids import ModelId
from aegis.core.messages import SwitchDone
from aegis.core.model import ModelSpec
from aegis.core.request import Job
from aegis.core.views import JOIN_GAIN, PrefillJob, PrefillOrder, WaitingJobs
from memory.ledger import Ledger
from prefill.queue import Queue, Running
from prefill.reasons import why_group, why_ordered


class Ordering:
    """Keeps a queue in a policy's order; without one, as it is."""

    def __init__(
        self,
        policy: PrefillOrder | None,
        hardware: Hardware,
        ledger: Ledger,
        queue: Queue,
        step_tokens: int | None = None,
    ) -> None:
        self.step_tokens = step_tokens  # of prompts, in one step at most
        self._policy = policy
        self._hardware = hardware
        self._ledger = ledger
        self._queue = queue
        self._latency: dict[ModelId, Latency] = {}
        self._loading_ns: dict[ModelId, int] = {}  # since when
        self._relieved_ns = 0
        self._made: tuple[WaitingJobs, list[int], int] | None = None  # the last order, and when

    def arrange(self, now_ns: int) -> None:
        """Orders the jobs anew if jobs have come or gone and it matters now: for the next job, or for the next model to
        load."""
        if self._policy is None or not self._queue.changed or (self._queue.running and self._ledger.weights.loading()):
            return
        self._queue.changed = False
        jobs = [job for group in self._queue.groups for job in group.jobs]
        if jobs:
            waiting = WaitingJobs([self._view(job) for job in jobs], self._load_ns(jobs, now_ns), self._relieved_ns)
            order = self._policy.order(waiting, now_ns)
            self._made = waiting, order, now_ns
            self._queue.reorder([jobs[at] for at in order])

    def why(self, job: Job, now_ns: int) -> tuple[Why, int]:
        """The reason why the job, which still waits, is next, and when it became the next."""
        if self._policy is None or self._made is None:
            return why_group(self._queue, job), now_ns
        waiting, order, made_ns = self._made
        return why_ordered(self._policy, waiting, order, made_ns), made_ns

    # --- pieces -----------------------------------------------------------------------------------------------------

    @property
    def cuts(self) -> bool:
        """Whether prompts are cut, and may run together."""
        return self._policy is not None

    def piece_stop(self, job: Job, start: int) -> int:
        """Where the next piece of the job ends: it takes no longer than its model's gap target, for who arrives
        meanwhile waits for its end, and goes in one step."""
        stop, spec = job.prefill_tokens, self._ledger.specs[job.model]
        if self._policy is None or job.is_whole:
            return stop
        size = spec.manifest.kv.block_tokens
        in_time = self._latency[job.model].prefill_stop(start, stop, spec.slo.gap_ns, multiple=size, least_tokens=size)
        return in_time if self.step_tokens is None else min(in_time, start + self.step_tokens)

    def step_ns(self, job: Job, now_ns: int) -> int:
        """How long a step may take that the job shares with others: as long as a piece, and no longer than until the
        job's deadline, unless it is late whoever joins it."""
        slo = self._ledger.specs[job.model].slo
        left_ns = slo.due_ns(job.arrival_ns, len(job.sent)) - now_ns
        return min(slo.gap_ns, left_ns) if left_ns >= self.alone_ns(job) else slo.gap_ns

    def alone_ns(self, job: Job) -> int:
        """What its prefill takes in steps of its own."""
        return self._latency[job.model].prefill_ns(job.prefill_tokens, job.kept_tokens)

    def joined_ns(self, job: Job) -> int | None:
        """What the job adds to a step that others are in; None if it does not gain by that."""
        latency, stop = self._latency[job.model], job.prefill_tokens
        return latency.joined_ns(stop) if latency.joins(stop, 0, JOIN_GAIN) else None

    def rank_ns(self, job: Job) -> int:
        """Its place where jobs overtake others: when it came, and how long it takes. No job overtakes it that comes
        later by that time, so that none starves."""
        if self._policy is None:
            return 0
        return self._ranked_ns(job) + self.alone_ns(job)

    def overtakes(self, paused: Running) -> Job | None:
        """The job that comes before the next piece of another one: it has the least rank of those that fit in a piece
        themselves and whose models are there."""
        best = None
        for group in self._queue.groups:
            if not self._ledger.weights.is_resident(group.model):
                continue
            for job in group.jobs:
                rank_ns = self.rank_ns(job)
                if rank_ns < (best[0] if best else paused.rank_ns) and self._is_one_piece(job):
                    best = rank_ns, job
        return best[1] if best else None

    def _is_one_piece(self, job: Job) -> bool:
        return self.piece_stop(job, job.kept_tokens) == job.prefill_tokens

    # --- what it learns ---------------------------------------------------------------------------------------------

    def add(self, spec: ModelSpec) -> None:
        if self._policy:
            self._latency[spec.model] = Latency(spec.manifest, self._hardware)

    def drop(self, model: ModelId) -> None:
        self._latency.pop(model, None)

    def begins(self, job: Job, now_ns: int) -> None:
        """The job has left the queue."""
        if self._policy is None:
            return
        self._queue.changed = True
        ranked_ns = self._ranked_ns(job)
        if all(ranked_ns <= self._ranked_ns(other) for group in self._queue.groups for other in group.jobs):
            self._relieved_ns = now_ns

    def ran(self, model: ModelId, duration_ns: int, pieces: list[tuple[int, int]]) -> None:
        """A step of prompts, of each positions `[start, stop)`."""
        if self._policy:
            self._latency[model].saw_step(pieces, duration_ns)

    def switched(self, done: SwitchDone) -> None:
        """A load beside a prefill is not measured, because its end is noticed only after the prefill."""
        if self._policy and not done.prefetched:
            self._latency[done.model].saw_switch(done.copy_ns)

    def loads(self, now_ns: int) -> None:
        """Notes since when each model that loads has been loading."""
        if self._policy:
            self._loading_ns = {m: self._loading_ns.get(m, now_ns) for m, _ in self._ledger.weights.loading()}

    # ----------------------------------------------------------------------------------------------------------------

    def _ranked_ns(self, job: Job) -> int:
        return job.ranked_ns(self._ledger.specs[job.model].slo)

    def _view(self, job: Job) -> PrefillJob:
        slo, index = self._ledger.specs[job.model].slo, len(job.sent)
        urgent_ns, due_ns = job.urgent_ns(slo, index), slo.due_ns(job.arrival_ns, index)
        switch_ns = self._latency[job.model].switch_ns()
        return PrefillJob(job.model, job.ranked_ns(slo), urgent_ns, due_ns, slo.ttft_ns, self.alone_ns(job), switch_ns)

    def _load_ns(self, jobs: list[Job], now_ns: int) -> dict[ModelId, int]:
        load_ns, weights = {}, self._ledger.weights
        for model in dict.fromkeys([job.model for job in jobs]):
            if not weights.is_resident(model):
                elapsed_ns = now_ns - self._loading_ns.get(model, now_ns)
                load_ns[model] = max(self._latency[model].switch_ns() - elapsed_ns, 1)
        return load_ns
