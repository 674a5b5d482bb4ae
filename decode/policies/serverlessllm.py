"""Request-level auto-scaling, first come first served (ServerlessLLM; Aegaeon §7's strongest baseline)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from aegis.core.ids import InstanceId, ModelId
from aegis.core.views import BatchView, DecodeView, Renewal, Turn, TurnRules, Work

_RULES = TurnRules(renewal=Renewal.TURN)
_PUBLISHED_RULES = replace(_RULES, max_batch=4, in_order=True, prefetches=False)


@dataclass(frozen=True, slots=True)
class ServerlessLlm:
    """A model runs until its requests are done, then the next one in line.

    A request goes to (1) an instance that runs its model, where it joins the batch; (2) an idle instance, one that
    still has the model first, else the one that has rested longest; (3) an instance where its model is in line; (4)
    the shortest line.
    """

    rules: TurnRules = _RULES

    def place(self, work: Work, lists: DecodeView) -> InstanceId:
        open_at = [share.instance for share in lists.shares(work.model) if share.room_tokens >= work.tokens]
        running = [instance for instance in lists.active_on(work.model) if instance in open_at]
        if running:
            return running[0]
        return idle_instance(work.model, lists) or (open_at[0] if open_at else lists.by_length[0].instance)

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        return [Turn(batch.batch, None) for batch in batches]


@dataclass(frozen=True, slots=True)
class ServerlessLlmAsPublished:
    """As in Aegaeon's artifact: runs of at most four requests, every load blocks, and a new request goes to the
    instance whose last step ended first; instances that never had a step come before all others. An instance that loads
    a model does not step, so the next new requests follow, though others idle."""

    rules: TurnRules = _PUBLISHED_RULES

    def place(self, work: Work, lists: DecodeView) -> InstanceId:
        ending = self._ending(work.model, lists)
        if sum(max(0, self.rules.max_batch - requests) for requests, _ in ending) < 1:
            same = {instance for _, instance in ending}
            others = [length.instance for length in lists.by_length if length.instance not in same]
            if others:
                return min(others, key=lambda i: (lists.placed_models(i).models > 0, lists.last_token_ns(i), i))
        return min(ending)[1]

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        return [Turn(batch.batch, None) for batch in batches]

    def _ending(self, model: ModelId, lists: DecodeView) -> list[tuple[int, InstanceId]]:
        """Instances whose list ends with the model, and how many of its requests are at the end."""
        near = dict.fromkeys([share.instance for share in lists.shares(model)] + [*lists.active_on(model)])
        tails = [(instance, lists.tail(instance)) for instance in near]
        return [(tail.requests, instance) for instance, tail in tails if tail.model == model]


def idle_instance(model: ModelId, lists: DecodeView) -> InstanceId | None:
    """An instance that still has the model, else the one that has rested longest."""
    for instance in lists.active_on(model):
        if not lists.batches(instance):
            return instance
    idle = [length.instance for length in takewhile(lambda length: not length.batches, lists.by_length)]
    return min(idle, key=lambda instance: (lists.last_token_ns(instance), instance), default=None)
