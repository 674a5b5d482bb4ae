"""The reasons of placements: in the policy's own words, or by the view of the policy. And the reasons of refusals."""

from __future__ import annotations

from aegis.core.decision import Decision, DecisionKind, ExplainsGroups, ExplainsPlaces, Why
from aegis.core.ids import InstanceId
from aegis.core.model import Slo
from aegis.core.request import Job
from aegis.core.views import DecodePolicy, DecodeView, PrefillPlacement, PrefillPolicy, PrefillView, Work
from aegis.core.wording import count, duration, given_up, percent, request_of, when
from proxy.routing.sessions import Session

NOWHERE = InstanceId("-")
"""The place of a request that never had one."""


class PlaceReasons:
    """The reasons of the policies of one proxy."""

    def __init__(self, prefill_policy: PrefillPolicy, decode_policy: DecodePolicy) -> None:
        self._why_group = prefill_policy.why_group if isinstance(prefill_policy, ExplainsGroups) else _why_group
        self._why_place = decode_policy.why_place if isinstance(decode_policy, ExplainsPlaces) else _why_place

    def group(self, job: Job, work: Work, queues: PrefillView, chosen: PrefillPlacement, now_ns: int) -> Decision:
        """The request is about to be put there, to be prefilled."""
        return _decision(job, work, chosen.instance, "prefilled", self._why_group(work, queues, chosen), now_ns)

    def place(self, job: Job, work: Work, lists: DecodeView, chosen: InstanceId, now_ns: int) -> Decision:
        """The request is about to be put there, to be decoded; to be prefilled before, where nobody has its KV."""
        return _decision(job, work, chosen, _how(work), self._why_place(work, lists, chosen), now_ns)

    def place_at_home(self, job: Job, work: Work, lists: DecodeView, chosen: InstanceId, now_ns: int) -> Decision:
        """The same, where it is set to which instances requests of the model go."""
        why = Why(f"its model was placed there; {percent(lists.load_ppm(chosen))} of the instance's time is wanted")
        return _decision(job, work, chosen, _how(work), why, now_ns)


def refusal(session: Session, slo: Slo | None, because: str, now_ns: int) -> Decision:
    """The request fails; its next token would be due by `slo`, or at once if its model is gone."""
    job, sent, where = session.job, len(session.sent), session.decode or session.prefill
    due_ns = slo.due_ns(job.arrival_ns, sent) if slo else now_ns
    why = Why(f"{because}; its next token is due {when(due_ns - now_ns)}", slack_ns=due_ns - now_ns)
    refused = f"{request_of(job.request, job.model, job.priority)} is refused"
    what = given_up(job.request, job.model, sent, job.priority) if sent or where else refused
    return Decision(now_ns, where or NOWHERE, DecisionKind.REFUSE, job.model, (job.request,), what, why)


def _decision(job: Job, work: Work, chosen: InstanceId, how: str, why: Why, now_ns: int) -> Decision:
    what = f"{request_of(job.request, work.model, job.priority)} is to be {how} on {chosen}"
    return Decision(now_ns, chosen, DecisionKind.PLACE, work.model, (job.request,), what, why)


def _how(work: Work) -> str:
    return "served" if work.owner is None else "decoded"


def _why_group(_: Work, queues: PrefillView, chosen: PrefillPlacement) -> Why:
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
    return count(lists.batches(instance), "batch", "batches")
