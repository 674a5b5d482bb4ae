"""The queue of a prefill instance, as its proxies come and go."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from aegis.core.ids import ProxyId, nth_request
from aegis.core.messages import Submit
from aegis.core.request import Job
from prefill.queue import Queue
from tests.sim.driven import make_job
from tests.unit.prefill.jobs import A

LOST, OTHER, JOBS = ProxyId(3), ProxyId(0), 50


class Counted(deque[Job]):
    """Jobs that note how often one of them was looked at."""

    looks = 0

    def __iter__(self) -> Iterator[Job]:
        for job in super().__iter__():
            self.looks += 1
            yield job


def test_a_lost_proxy_s_jobs_are_found_in_a_few_looks_at_each_job() -> None:
    queue = Queue()
    for proxy in (OTHER, LOST):
        for number in range(JOBS):
            queue.submit(Submit(make_job(nth_request(proxy, number), A), 1))
    for group in queue.groups:
        group.jobs = Counted(group.jobs)
    counted = [group.jobs for group in queue.groups]
    queue.changed = False
    queue.drop(LOST)
    assert [len(group.jobs) for group in queue.groups] == [JOBS, 0] and queue.changed
    assert sum([jobs.looks for jobs in counted if isinstance(jobs, Counted)]) <= 3 * 2 * JOBS


def test_who_loses_no_job_is_not_ordered_anew() -> None:
    queue = Queue()
    queue.submit(Submit(make_job(nth_request(OTHER, 1), A), 1))
    queue.changed = False
    queue.drop(LOST)
    assert not queue.changed and queue.waiting == 1


def test_a_lost_proxy_s_jobs_are_suspects_no_more() -> None:
    queue = Queue()
    for proxy in (LOST, OTHER):
        queue.give_back(make_job(nth_request(proxy, 1), A))
    queue.drop(LOST)
    assert queue.suspects == {nth_request(OTHER, 1)}
