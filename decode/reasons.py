"""The reasons why a batch has the turn: in the policy's own words, or by the view of the policy."""

from __future__ import annotations

from collections.abc import Sequence

from aegis.core.decision import Contender, Decision, DecisionKind, ExplainsTurns, Plan, Why, why_before
from aegis.core.ids import InstanceId
from aegis.core.request import Job
from aegis.core.views import BatchView, RoundPolicy
from aegis.core.wording import ALONE, among, due, duration, since, takes
from decode.slack import begin_by_ns, until_first_run_ns

_PAUSES = {
    True: ("a step", "its streams have had no token for half of their gap"),
    False: ("a prefill", "its prompt is short: it waits for no longer one, and is not late at the end of the turn"),
}


class TurnReasons:
    """The reasons of one instance's turns."""

    def __init__(self, instance: InstanceId, policy: RoundPolicy) -> None:
        self._instance = instance
        self._why = policy.why_turn if isinstance(policy, ExplainsTurns) else why_turn

    def decision(self, plan: Plan, at: int, jobs: Sequence[Job], now_ns: int) -> Decision:
        """Turn number `at` of the plan is given, to the requests of these jobs."""
        batch, quota_ns = plan.batch(at), plan.turns[at].quota_ns
        assert batch is not None
        requests = tuple([job.request for job in jobs])
        told = since(now_ns - plan.made_ns) + among([job.priority for job in jobs])
        if plan.turns[at].pause:
            run, because = _PAUSES[plan.turns[at].decodes]
            holder = next((each for each in plan.batches if each.turn_ns is not None), None)
            if plan.turns[at].decodes and holder and holder.resident and not holder.there:
                run, because = "steps", f"the weights of {holder.model} are on their way"
            what = f"{batch.model} has {run} in a pause of another turn{told}"
            return Decision(now_ns, self._instance, DecisionKind.TURN, batch.model, requests, what, Why(because))
        verb = "goes on" if batch.turn_ns is not None and now_ns == plan.made_ns else "has the turn"
        length = "until it is done" if quota_ns is None else f"for {duration(quota_ns)}"
        what = f"{batch.model} {verb} {length}{told}"
        return Decision(now_ns, self._instance, DecisionKind.TURN, batch.model, requests, what, self._why(plan, at))


def why_turn(plan: Plan, at: int) -> Why:
    """The reason by the place in the plan, whatever made the plan."""
    batch, now_ns = plan.batch(at), plan.made_ns
    assert batch is not None
    place = f"number {at + 1} of {len(plan.turns)} in the plan" if len(plan.turns) > 1 else ALONE
    return why(plan, at, f"{place} ({wants(batch, now_ns)})")


def why(plan: Plan, at: int, because: str) -> Why:
    """The reason with the numbers of the batch and of the one that comes after it."""
    batch, second, now_ns = plan.batch(at), plan.batch(at + 1), plan.made_ns
    assert batch is not None
    following = _contender(second, now_ns) if second else None
    return why_before(because, _contender(batch, now_ns), following, then="next")


def _contender(batch: BatchView, now_ns: int) -> Contender:
    return Contender(batch.model, wants(batch, now_ns), slack_ns(batch, now_ns), cost_ns(batch))


def wants(batch: BatchView, now_ns: int) -> str:
    """Its deadlines, and the times that they leave room for: `first token due in 1.2 s, prefill 400 ms, weights 450
    ms`."""
    parts = []
    if batch.first_due_ns is not None:
        parts += [due("first token", batch.first_due_ns - now_ns), takes("prefill", batch.prefill_ns)]
    if batch.due_ns is not None:
        parts.append(due("next token", batch.due_ns - now_ns))
    parts.append(takes("step", batch.step_ns))
    if not batch.resident:
        parts.append(takes("weights", batch.switch_ns))
    if not batch.active and batch.change_ns:
        parts.append(takes("change", batch.change_ns))
    return ", ".join(parts)


def cost_ns(batch: BatchView) -> int:
    """The time that passes before the batch's first decode step."""
    return until_first_run_ns(batch) + batch.prefill_ns


def slack_ns(batch: BatchView, now_ns: int) -> int | None:
    """The time until the batch has to begin so that none of its tokens is late; None if it waits for none."""
    waits = batch.first_due_ns is not None or batch.due_ns is not None
    return begin_by_ns(batch) - now_ns if waits else None
