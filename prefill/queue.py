"""The queue of a prefill instance: groups of one model each, and the job that runs (Aegaeon §4.2).

Groups run as they were made, unless a policy puts their jobs in another order: then a group is the jobs of one model
that run in a row.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from aegis.core.block_runs import Blocks
from aegis.core.ids import ModelId, ProxyId, RequestId, proxy_of
from aegis.core.messages import Submit
from aegis.core.request import EventHandle, Job


@dataclass(slots=True)
class Group:
    """Jobs of one model that run in a row. The proxy numbers those it made."""

    proxy: ProxyId
    group: int
    model: ModelId
    jobs: deque[Job] = field(default_factory=deque)


@dataclass(slots=True)
class Running:
    """A prefill under way, and the memory that is reserved for it."""

    job: Job
    device: Blocks
    host: Blocks  # empty when the first token is sure to be the last
    cancelled: bool = False
    start: int = 0  # positions before it need not be prefilled, or have been
    stop: int = 0  # of the piece under way
    learnt: int | None = None  # whose time is not known begins here: an engine may leave pieces to the last one
    rank_ns: int = 0  # arrival, shifted by priority, and length: a job in pieces is overtaken by those with less
    prefill_ns: int = 0  # the time of its pieces
    arrival: EventHandle | None = None  # of that, until it is there
    checked: bool = False  # the node has said whether it was still kept: the run can begin


class Queue:
    """A group stays in front until its last job has run: a request that joins it meanwhile still finds it there.
    `changed`: a job has come or gone since it was last set to False. `beside` are jobs that run in the step of the
    running one. `paused` is a job of which pieces have run, while another one overtakes it. `suspects` are jobs of a
    step that failed, until they have run again, whole."""

    __slots__ = ("beside", "changed", "groups", "paused", "running", "suspects")

    def __init__(self) -> None:
        self.changed = False
        self.groups: deque[Group] = deque()
        self.running: Running | None = None
        self.beside: list[Running] = []
        self.paused: Running | None = None
        self.suspects: set[RequestId] = set()

    def submit(self, event: Submit) -> None:
        self.changed = True
        proxy = proxy_of(event.job.request)
        for group in self.groups:
            if group.group == event.group and group.proxy == proxy:
                assert group.model == event.job.model
                group.jobs.append(event.job)
                return
        self.groups.append(Group(proxy, event.group, event.job.model, deque([event.job])))

    def cancel(self, request: RequestId, attempt: int) -> None:
        """A running job ends with its step."""
        for running in self.begun():
            if (running.job.request, running.job.attempt) == (request, attempt):
                running.cancelled = True
                return
        for group in self.groups:
            for job in group.jobs:
                if (job.request, job.attempt) == (request, attempt):
                    self.changed = True
                    group.jobs.remove(job)
                    self.suspects.discard(request)
                    return

    def drop(self, proxy: ProxyId) -> None:
        """Cancels all requests of a proxy. One by one, each would be looked for among all that wait."""
        for running in self.begun():
            running.cancelled = running.cancelled or proxy_of(running.job.request) == proxy
        for group in self.groups:
            leaving = [job.request for job in group.jobs if proxy_of(job.request) == proxy]
            if leaving:
                self.changed = True
                self.suspects.difference_update(leaving)
                group.jobs = deque([job for job in group.jobs if proxy_of(job.request) != proxy])

    def begun(self) -> list[Running]:
        """Jobs of which something may have run."""
        return [running for running in (self.running, *self.beside, self.paused) if running]

    def ended(self) -> list[Running]:
        """The jobs of the step that has ended, which leave."""
        assert self.running is not None
        stepped, self.running, self.beside = [self.running, *self.beside], None, []
        return stepped

    def take(self, job: Job) -> None:
        """The waiting job begins."""
        for group in self.groups:
            if job in group.jobs:
                group.jobs.remove(job)
                return

    def give_back(self, job: Job) -> None:
        """The job of a step that failed waits again, first of all."""
        self.changed = True
        self.suspects.add(job.request)
        if not self.groups or self.groups[0].model != job.model:
            self.groups.appendleft(Group(proxy_of(job.request), 0, job.model))
        self.groups[0].jobs.appendleft(job)

    def reorder(self, jobs: list[Job]) -> None:
        """These are all the waiting jobs, in their new order."""
        self.groups.clear()
        for job in jobs:
            if not self.groups or self.groups[-1].model != job.model:
                self.groups.append(Group(proxy_of(job.request), 0, job.model))
            self.groups[-1].jobs.append(job)

    def front(self) -> Group | None:
        """The first group with a job; the groups before it are done."""
        while self.groups and not self.groups[0].jobs:
            self.groups.popleft()
        return self.groups[0] if self.groups else None

    def following(self) -> Group | None:
        """The first group with a job, while one runs: those before it are not done."""
        return next((group for group in self.groups if group.jobs), None)

    def needed(self) -> list[ModelId]:
        """Models with waiting jobs, in the order in which they are needed."""
        return list(dict.fromkeys([group.model for group in self.groups if group.jobs]))

    def wanted(self) -> set[ModelId]:
        """The models with waiting jobs, and the adapters of these."""
        return {model for group in self.groups for job in group.jobs for model in (job.model, job.served)}

    def drain(self, model: ModelId) -> list[Job]:
        """Takes out all waiting jobs of a model, or of an adapter."""
        taken: list[Job] = []
        for group in self.groups:
            leaving = [job for job in group.jobs if model in (job.model, job.adapter)]
            for job in leaving:
                group.jobs.remove(job)
            taken += leaving
        self.changed = self.changed or bool(taken)
        self.suspects.difference_update([job.request for job in taken])
        return taken

    @property
    def waiting(self) -> int:
        return sum(len(group.jobs) for group in self.groups)
