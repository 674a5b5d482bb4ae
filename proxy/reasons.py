"""Why a request goes where it goes: in the policy's own words, or by what the policy saw."""

from __future__ import annotations

from aegis.core.decision import Decision, DecisionKind, ExplainsGroups, ExplainsPlaces, Why
from aegis.core.ids import InstanceId, RequestId
from aegis.core.views import DecodePolicy, DecodeView, PrefillPlacement, PrefillPolicy, PrefillView, Work
from aegis.core.wording import duration


def group_decision(
    policy: PrefillPolicy,
    request: RequestId,
    work: Work,
    queues: PrefillView,
    chosen: PrefillPlacement,
    now_ns: int,
) -> Decision:
    """The request is about to be put there."""
    why = policy.why_group(work, queues, chosen) if isinstance(policy, ExplainsGroups) else _why_group(queues, chosen)
    return _decision(request, work, chosen.instance, "prefilled", why, now_ns)


def place_decision(
    policy: DecodePolicy, request: RequestId, work: Work, lists: DecodeView, chosen: InstanceId, now_ns: int
) -> Decision:
    """The request is about to be put there."""
    why = (
        policy.why_place(work, lists, chosen) if isinstance(policy, ExplainsPlaces) else _why_place(work, lists, chosen)
    )
    return _decision(request, work, chosen, "served" if work.owner is None else "decoded", why, now_ns)


def _decision(request: RequestId, work: Work, chosen: InstanceId, how: str, why: Why, now_ns: int) -> Decision:
    what = f"request {request} of {work.model} is to be {how} on {chosen}"
    return Decision(now_ns, chosen, DecisionKind.PLACE, work.model, (request,), what, why)


def _why_group(queues: PrefillView, chosen: PrefillPlacement) -> Why:
    because = f"{duration(queues.load_ns(chosen.instance))} of work are in line"
    lost = next((load for load in queues.by_load if load.instance != chosen.instance), None)
    return Why(f"{because}, at {lost.instance} {duration(lost.load_ns)}", lost=lost.instance) if lost else Why(because)


def _why_place(work: Work, lists: DecodeView, chosen: InstanceId) -> Why:
    there = sum([share.requests for share in lists.shares(work.model) if share.instance == chosen])
    runs = chosen in lists.active_on(work.model)
    state = "runs there" if runs else "does not run there"
    because = f"its model {state} and has {there} requests, in a list of {_batches(lists, chosen)}"
    lost = next((length for length in lists.by_length if length.instance != chosen), None)
    if lost is None:
        return Why(because)
    return Why(f"{because}; that of {lost.instance} has {_batches(lists, lost.instance)}", lost=lost.instance)


def _batches(lists: DecodeView, instance: InstanceId) -> str:
    batches = lists.batches(instance)
    return f"{batches} batch{'' if batches == 1 else 'es'}"
