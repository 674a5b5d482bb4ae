"""Request-level auto-scaling, shortest job first, by an oracle that knows every output length (ServerlessLLM+)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aegis.core.ids import InstanceId, RequestId
from aegis.core.views import BatchView, DecodeView, Renewal, Turn, TurnRules, Work
from decode.policies.serverlessllm import ServerlessLlm

_RULES = TurnRules(renewal=Renewal.TURN)
_PUBLISHED_RULES = TurnRules(renewal=Renewal.TURN, max_batch=4, prefetches=False, keeps_kv=False)

Left = Callable[[RequestId], int]
"""The tokens that a request has still to make."""


@dataclass(frozen=True, slots=True)
class ServerlessLlmOracleSjf:
    """As `ServerlessLlm`, but when a model's run is over, the batch that takes the least time comes next, and a batch
    of the loaded model before all others. Nothing is preempted."""

    left: Left
    rules: TurnRules = _RULES

    def place(self, work: Work, lists: DecodeView) -> InstanceId:
        return ServerlessLlm(self.rules).place(work, lists)

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        order = sorted(batches, key=lambda batch: (not batch.active, self._time_ns(batch), batch.batch))
        return [Turn(batch.batch, None) for batch in order]

    def _time_ns(self, batch: BatchView) -> int:
        steps = max(self.left(request) for request in batch.requests)
        return batch.switch_ns + batch.prefill_ns + steps * batch.step_ns


@dataclass(frozen=True, slots=True)
class ServerlessLlmOracleSjfAsPublished:
    """As in Aegaeon's artifact: batches of at most four are sorted anew whenever a request arrives, those with a
    prefill to do by its time, the others by the time that their first request still decodes. Prefills are short, so a
    request that decodes is preempted, loses its KV, and has a prefill to do.

    In the artifact every arrival anywhere sorts every instance's list. Here an instance learns only of its own
    arrivals; a quota stands for the others.
    """

    left: Left
    resort_ns: int = 100_000_000
    rules: TurnRules = _PUBLISHED_RULES

    def place(self, work: Work, lists: DecodeView) -> InstanceId:
        for share in lists.shares(work.model):
            if share.requests < share.batches * self.rules.max_batch:
                return share.instance
        return lists.by_length[0].instance

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        order = sorted(batches, key=lambda batch: (self._key_ns(batch), batch.batch))
        return [Turn(batch.batch, self.resort_ns) for batch in order]

    def _key_ns(self, batch: BatchView) -> int:
        return batch.prefill_ns or self.left(batch.requests[0]) * batch.step_ns
