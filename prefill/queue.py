"""The queue of a prefill instance: groups of one model each, and the job that runs (Aegaeon §4.2)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from aegis.core.block_runs import Blocks
from aegis.core.ids import ModelId, RequestId
from aegis.core.messages import Submit
from aegis.core.request import Job


@dataclass(slots=True)
class Group:
    """Jobs of one model that run in a row."""

    group: int
    model: ModelId
    jobs: deque[Job] = field(default_factory=deque)


@dataclass(slots=True)
class Running:
    """A prefill under way, and what was reserved for it."""

    job: Job
    device: Blocks
    host: Blocks  # empty when the first token is sure to be the last
    cancelled: bool = False


class Queue:
    """A group stays in front until its last job has run: a request that joins it meanwhile still finds it there."""

    __slots__ = ("groups", "running")

    def __init__(self) -> None:
        self.groups: deque[Group] = deque()
        self.running: Running | None = None

    def submit(self, event: Submit) -> None:
        for group in self.groups:
            if group.group == event.group:
                assert group.model == event.job.model
                group.jobs.append(event.job)
                return
        self.groups.append(Group(event.group, event.job.model, deque([event.job])))

    def cancel(self, request: RequestId, attempt: int) -> None:
        """A job that runs ends with its step."""
        running = self.running
        if running and (running.job.request, running.job.attempt) == (request, attempt):
            running.cancelled = True
            return
        for group in self.groups:
            for job in group.jobs:
                if (job.request, job.attempt) == (request, attempt):
                    group.jobs.remove(job)
                    return

    def front(self) -> Group | None:
        """The first group with a job; those before it are done."""
        while self.groups and not self.groups[0].jobs:
            self.groups.popleft()
        return self.groups[0] if self.groups else None

    def needed(self) -> list[ModelId]:
        """Models with waiting jobs, those needed first first."""
        return list(dict.fromkeys([group.model for group in self.groups if group.jobs]))

    def drain(self, model: ModelId) -> list[Job]:
        """Takes out all waiting jobs of a model."""
        taken: list[Job] = []
        for group in self.groups:
            if group.model == model:
                taken += group.jobs
                group.jobs.clear()
        return taken

    @property
    def waiting(self) -> int:
        return sum(len(group.jobs) for group in self.groups)
