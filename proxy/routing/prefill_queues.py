"""The queues of the prefill instances as far as the proxy knows them: the view from which placement decides.

The proxy dispatches every request and hears of every first token and every end, so it keeps this copy itself, and no
message is spent on asking. Everything that a policy may ask for is kept in order as requests come and go, so that a
decision takes hardly longer with a thousand instances than with ten.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from aegis.core.estimators import Latency
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.views import Load, OpenGroup, PrefillCandidate, PrefillPlacement, Work
from proxy.routing.sorted_lists import renew, renew_in_place


@dataclass(slots=True)
class _Queue:
    """The queue of one instance. Its groups are linked: any may leave, however many there are."""

    instance: InstanceId
    listed: Load  # as it stands in order
    candidate: PrefillCandidate  # likewise
    load_ns: int = 0
    foreign_ns: int = 0  # of it, what other proxies have put there
    active: ModelId | None = None
    made: int = 0
    models: int = 0  # models whose last request was placed here
    back: _Group | None = None
    front: _Group | None = None
    groups: dict[int, _Group] = field(default_factory=dict)
    jobs: dict[RequestId, tuple[_Group, int]] = field(default_factory=dict)  # and how many tokens


@dataclass(slots=True)
class _Backlog:
    """The waiting jobs of one model in one queue, as the sums that their time is made of: if an estimate changes, a sum
    gets another price, however many jobs are in it."""

    queue: _Queue
    model: ModelId
    jobs: int = 0
    tokens: int = 0
    squares: int = 0
    switches: int = 0
    price_ns: int = 0  # its part of the queue's load


@dataclass(slots=True)
class _Group:
    number: int
    backlog: _Backlog
    before: _Group | None
    after: _Group | None = None
    switches: bool = False  # its model has to be brought in for it
    size: int = 0
    waiting: int = 0
    shown: OpenGroup | None = None


class PrefillQueues:
    """The queues of all prefill instances: a `PrefillView`.

    Laws: (1) an instance's load is what its backlogs cost at the present estimates, and what other proxies say theirs
    do; (2) a group is open while a job of it waits and it has had fewer than `max_group_size`.
    """

    __slots__ = (
        "_active",
        "_backlogs",
        "_by_model_count",
        "_home",
        "_latency",
        "_max_group_size",
        "_moved",
        "_open",
        "_order",
        "_queues",
        "_recounted",
        "_ttft_ns",
    )

    def __init__(
        self, max_group_size: int, latency: Mapping[ModelId, Latency], ttft_ns: Mapping[ModelId, int] | None = None
    ) -> None:
        """`latency` and `ttft_ns` have every model that waits. When estimates move, `reprice` is to be called."""
        self._by_model_count: list[PrefillCandidate] = []
        self._recounted: dict[InstanceId, _Queue] = {}  # which have another place among those by now
        self._home: dict[ModelId, InstanceId] = {}
        self._ttft_ns = {} if ttft_ns is None else ttft_ns  # one that is empty now may fill
        self._order: list[Load] = []
        self._moved: dict[InstanceId, _Queue] = {}  # whose loads have another place in the order by now
        self._max_group_size = max_group_size
        self._latency = latency
        self._queues: dict[InstanceId, _Queue] = {}
        self._backlogs: defaultdict[ModelId, dict[InstanceId, _Backlog]] = defaultdict(dict)
        self._open: defaultdict[ModelId, list[OpenGroup]] = defaultdict(list)
        self._active: defaultdict[ModelId, list[InstanceId]] = defaultdict(list)

    def __contains__(self, instance: object) -> bool:
        return instance in self._queues

    def __len__(self) -> int:
        return len(self._queues)

    @property
    def by_load(self) -> Sequence[Load]:
        """Put in order only now: many a load changes more than once before somebody asks."""
        for queue in self._moved.values():
            listed, queue.listed = queue.listed, Load(queue.load_ns, queue.instance)
            renew(self._order, listed, queue.listed)
        self._moved.clear()
        return self._order

    @property
    def by_model_count(self) -> Sequence[PrefillCandidate]:
        for queue in self._recounted.values():
            candidate, queue.candidate = queue.candidate, PrefillCandidate(queue.models, queue.instance)
            renew(self._by_model_count, candidate, queue.candidate)
        self._recounted.clear()
        return self._by_model_count

    def load_ns(self, instance: InstanceId) -> int:
        return self._queues[instance].load_ns

    def expected_ns(self, chosen: PrefillPlacement, work: Work) -> int:
        """The time until a request that was put there now would be prefilled, groups going one after the other."""
        queue, latency = self._queues[chosen.instance], self._latency[work.model]
        own_ns = latency.prefill_ns(work.tokens)
        if chosen.group is None:
            last = queue.back.backlog.model if queue.back else queue.active
            return queue.load_ns + own_ns + (0 if last == work.model else latency.switch_ns())
        before_ns, group = queue.foreign_ns, queue.front
        while group:
            backlog = group.backlog
            before_ns += backlog.price_ns * group.waiting // max(backlog.jobs, 1)
            if group.number == chosen.group:
                break
            group = group.after
        return before_ns + own_ns

    def own_ns(self, instance: InstanceId) -> int:
        """The time of the jobs that this proxy has placed there."""
        queue = self._queues[instance]
        return queue.load_ns - queue.foreign_ns

    def instances(self) -> Iterable[InstanceId]:
        return self._queues

    def open_groups(self, model: ModelId) -> Sequence[OpenGroup]:
        return self._open.get(model, ())

    def active_on(self, model: ModelId) -> Sequence[InstanceId]:
        return self._active.get(model, ())

    def home(self, model: ModelId) -> InstanceId | None:
        return self._home.get(model)

    def switch_ns(self, model: ModelId) -> int:
        return self._latency[model].switch_ns()

    def ttft_ns(self, model: ModelId) -> int:
        return self._ttft_ns[model]

    # --- what changes them --------------------------------------------------------------------------------------------

    def up(self, instance: InstanceId) -> None:
        queue = self._queues[instance] = _Queue(instance, Load(0, instance), PrefillCandidate(0, instance))
        insort(self._order, queue.listed)
        insort(self._by_model_count, queue.candidate)

    def down(self, instance: InstanceId) -> None:
        """The instance is gone, with all that waits there."""
        for request in list(self._queues[instance].jobs):
            self.remove(instance, request)
        self.switched(instance, None)
        for model in [model for model, home in self._home.items() if home == instance]:
            self._settle(model, None)
        self._moved.pop(instance, None)
        self._recounted.pop(instance, None)
        queue = self._queues.pop(instance)
        renew(self._order, queue.listed, None)
        renew(self._by_model_count, queue.candidate, None)

    def add(self, placement: PrefillPlacement, request: RequestId, work: Work) -> int:
        """Returns the group joined."""
        queue, number = self._queues[placement.instance], placement.group
        group = self._append(queue, work.model) if number is None else queue.groups[number]
        assert group.backlog.model == work.model and request not in queue.jobs
        queue.jobs[request] = (group, work.tokens)
        group.size += 1
        group.waiting += 1
        self._show(group)
        self._count(group.backlog, 1, work.tokens)
        self._settle(work.model, placement.instance)
        return group.number

    def group_of(self, instance: InstanceId, request: RequestId) -> PrefillPlacement:
        """In the group of a request that was placed there, while it is open, and else in one of its own."""
        group, _ = self._queues[instance].jobs.get(request, (None, 0))
        return PrefillPlacement(instance, group.number if group and group.shown else None)

    def remove(self, instance: InstanceId, request: RequestId) -> None:
        """The request was prefilled or cancelled, or was not there. A group with nobody waiting has left the queue."""
        queue = self._queues[instance]
        group, tokens = queue.jobs.pop(request, (None, 0))
        if group is None:
            return
        group.waiting -= 1
        if not group.waiting:
            self._unlink(queue, group)
        self._count(group.backlog, -1, tokens)

    def switched(self, instance: InstanceId, model: ModelId | None) -> None:
        """The instance runs `model` now."""
        queue = self._queues[instance]
        if queue.active is not None:
            renew(self._active[queue.active], instance, None)
        if model is not None:
            renew(self._active[model], None, instance)
        queue.active = model
        self._follow(queue, queue.front)

    def forget(self, model: ModelId) -> None:
        """The model is gone, and all its requests: one of that name that comes later is another one."""
        self._settle(model, None)
        for instance in list(self.active_on(model)):
            self.switched(instance, None)
        for kept in (self._active, self._open, self._backlogs):
            kept.pop(model, None)

    def set_foreign(self, instance: InstanceId, load_ns: int) -> None:
        """The time of the jobs that other proxies have placed there."""
        queue = self._queues[instance]
        queue.load_ns += load_ns - queue.foreign_ns
        queue.foreign_ns = load_ns
        self._moved[instance] = queue

    def reprice(self, model: ModelId) -> None:
        """The model's estimates have changed: what waits of it is estimated anew."""
        for backlog in self._backlogs[model].values():
            self._price(backlog, self._latency[model])

    def _settle(self, model: ModelId, home: InstanceId | None) -> None:
        before = self._home.get(model)
        if home == before:
            return
        if before is not None:
            del self._home[model]
            self._count_models(self._queues[before], -1)
        if home is not None:
            self._home[model] = home
            self._count_models(self._queues[home], 1)

    def _count_models(self, queue: _Queue, models: int) -> None:
        queue.models += models
        self._recounted[queue.instance] = queue

    # --- groups -------------------------------------------------------------------------------------------------------

    def _append(self, queue: _Queue, model: ModelId) -> _Group:
        """Appends a group of the model to the queue. It has no price until there is a job in it."""
        backlogs = self._backlogs[model]
        backlog = backlogs.get(queue.instance)
        if backlog is None:
            backlog = backlogs[queue.instance] = _Backlog(queue, model)
        queue.made += 1
        back = queue.back
        group = queue.groups[queue.made] = _Group(queue.made, backlog, back)
        if back:
            back.after = group
        else:
            queue.front = group
        queue.back = group
        group.switches = model != (back.backlog.model if back else queue.active)
        backlog.switches += group.switches
        return group

    def _unlink(self, queue: _Queue, group: _Group) -> None:
        del queue.groups[group.number]
        before, after = group.before, group.after
        if before:
            before.after = after
        else:
            queue.front = after
        if after:
            after.before = before
        else:
            queue.back = before
        self._show(group)
        group.backlog.switches -= group.switches
        self._follow(queue, after)

    def _follow(self, queue: _Queue, group: _Group | None) -> None:
        """The jobs before the group have changed: its model has to be loaded if another one runs before it."""
        if group is None:
            return
        before = group.before.backlog.model if group.before else queue.active
        switches = group.backlog.model != before
        if switches != group.switches:
            group.switches = switches
            group.backlog.switches += 1 if switches else -1
            self._price(group.backlog, self._latency[group.backlog.model])

    def _show(self, group: _Group) -> None:
        """A group with room is listed as an open one."""
        shown, model = group.shown, group.backlog.model
        is_open = group.waiting > 0 and group.size < self._max_group_size
        group.shown = OpenGroup(group.backlog.queue.instance, group.number, group.size) if is_open else None
        if shown or is_open:
            renew_in_place(self._open[model], shown, group.shown)

    # --- loads --------------------------------------------------------------------------------------------------------

    def _count(self, backlog: _Backlog, jobs: int, tokens: int) -> None:
        """`jobs` of so many tokens each came, or went."""
        backlog.jobs += jobs
        backlog.tokens += jobs * tokens
        backlog.squares += jobs * tokens * tokens
        self._price(backlog, self._latency[backlog.model])
        if not backlog.jobs:
            del self._backlogs[backlog.model][backlog.queue.instance]

    def _price(self, backlog: _Backlog, latency: Latency) -> None:
        price_ns = latency.prefills_ns(backlog.jobs, backlog.tokens, backlog.squares) if backlog.jobs else 0
        if backlog.switches:
            price_ns += backlog.switches * latency.switch_ns()
        queue = backlog.queue
        queue.load_ns += price_ns - backlog.price_ns
        backlog.price_ns = price_ns
        self._moved[queue.instance] = queue
