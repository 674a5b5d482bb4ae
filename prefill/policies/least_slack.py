"""Prefills in order of slack: the job that has to begin first to be on time runs first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aegis.core.decision import Why
from aegis.core.views import PrefillJob, PrefillPlacement, PrefillView, WaitingJobs, Work
from aegis.core.wording import due, duration, first_in_line, when
from prefill.policies.prefill_runs import Schedule
from prefill.reasons import why

_UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True)
class LeastSlackPrefill:
    """Placing. A request joins others of its model in a queue, and of several such queues the one with the least to do:
    that costs no other job a load. If it would be late there, after everything that waits, and on time elsewhere, it
    goes to the instance on which its first token comes soonest: that of the model's last request, whose weights may
    still be there, or the one with the least to do.

    Order. Runs that save all first tokens, if that is possible (`prefill.policies.prefill_runs`). If not, deadlines
    count `grace` times TTFT later, and as many jobs as possible are saved: a job that is a little late still has most
    of its tokens on time, and a job that is put off makes its model load once more. A job that cannot be saved even so
    is not dropped: it runs beside others of its model if that makes no other job late, else after all jobs that can be
    saved. Priorities shift the deadlines that decide the order, and not those that decide which jobs can be saved; a
    sacrificed job is one of those with the least priority.

    No job starves: if the job that has waited the longest, its priority counted in, has been that for its TTFT deadline
    and has not been the next one, it is next now. So a job before which `k` others came, counted likewise, waits for at
    most `k + 1` deadlines, each with two loads and two prefills.
    """

    grace: float = 4.0
    max_group_size: int = _UNLIMITED

    def place(self, work: Work, queues: PrefillView) -> PrefillPlacement:
        model, best = work.model, queues.by_load[0]
        soonest_ns, ttft_ns = best.load_ns + queues.switch_ns(model), queues.ttft_ns(model)
        groups = [(queues.load_ns(group.instance), group.instance, group.group) for group in queues.open_groups(model)]
        if groups:
            load_ns, instance, number = min(groups)
            if load_ns <= ttft_ns or soonest_ns > ttft_ns:
                return PrefillPlacement(instance, number)
        home = queues.home(model)
        if home is not None and queues.load_ns(home) <= soonest_ns:
            return PrefillPlacement(home, None)
        emptiest = queues.by_model_count[0].instance
        return PrefillPlacement(emptiest if queues.load_ns(emptiest) <= soonest_ns else best.instance, None)

    def why_group(self, work: Work, queues: PrefillView, chosen: PrefillPlacement) -> Why:
        model, instance = work.model, chosen.instance
        ttft_ns, switch_ns = queues.ttft_ns(model), queues.switch_ns(model)
        if chosen.group is not None:
            place, cost_ns = "others of its model are in line", 0
        elif queues.home(model) == instance:
            place, cost_ns = "home of its model", 0
        else:
            place, cost_ns = "home of fewer models, or less to do", switch_ns
        begins_ns = queues.load_ns(instance) + cost_ns
        because = f"{place}; begins {when(begins_ns)}, {due('first token', ttft_ns)}"
        lost = next((load for load in queues.by_load if load.instance != instance), None)
        if lost is None:
            return Why(because, ttft_ns - begins_ns, cost_ns)
        lost_ns = lost.load_ns + switch_ns
        because = f"{because}; on {lost.instance} {when(lost_ns)}"
        return Why(because, ttft_ns - begins_ns, cost_ns, lost.instance, ttft_ns - lost_ns, switch_ns)

    def order(self, waiting: WaitingJobs, now_ns: int) -> list[int]:
        jobs = waiting.jobs
        schedule = Schedule(jobs, waiting.load_ns, now_ns)
        if not schedule.save(all_or_none=True):
            jobs = [_later(job, round(self.grace * job.ttft_ns)) for job in jobs]
            schedule = Schedule(jobs, waiting.load_ns, now_ns)
            schedule.save()
        order = schedule.order()
        oldest = _oldest(waiting)
        if _is_starving(oldest, waiting, now_ns):
            order.remove(oldest)
            order.insert(0, oldest)
        return order

    def why_next(self, waiting: WaitingJobs, order: Sequence[int], now_ns: int) -> Why:
        oldest = _oldest(waiting)
        if order[0] == oldest and _is_starving(oldest, waiting, now_ns):
            waited_ns = now_ns - waiting.jobs[oldest].ranked_ns
            return why(
                waiting, order, now_ns, f"has waited the longest, {duration(waited_ns)}, and not been next in time"
            )
        model = waiting.jobs[order[0]].model
        run = next((at for at, job in enumerate(order) if waiting.jobs[job].model != model), len(order))
        return why(waiting, order, now_ns, f"{first_in_line(len(order))}, in a run of {run}")


def _oldest(waiting: WaitingJobs) -> int:
    """The job that has waited the longest."""
    return min(range(len(waiting.jobs)), key=lambda at: (waiting.jobs[at].ranked_ns, at))


def _is_starving(oldest: int, waiting: WaitingJobs, now_ns: int) -> bool:
    job = waiting.jobs[oldest]
    return now_ns >= max(waiting.relieved_ns, job.ranked_ns) + job.ttft_ns


def _later(job: PrefillJob, by_ns: int) -> PrefillJob:
    return job._replace(urgent_ns=job.urgent_ns + by_ns, due_ns=job.due_ns + by_ns)
