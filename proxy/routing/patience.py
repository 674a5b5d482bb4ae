"""How long requests may wait for their first token.

Either all of them fail after the same time, as in a published setting: when the next one arrives. Or those that may be
refused are refused after `PATIENCE` times the TTFT of their model, as `proxy.routing.admission` says; one that is not
refused then is looked at again after another TTFT. A request that came before its model was up is not refused: it has
waited for the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final

from aegis.core.clock import NS_PER_S
from aegis.core.ids import ModelId, RequestId
from aegis.core.request import Failure, Job
from proxy.routing.admission import Admission
from proxy.routing.sessions import Session

PATIENCE: Final = 2

_ENDED_MOST: Final = 1_000
"""So many entries of requests that have ended, and one more for each that has not, are kept until their time is over:
TTFTs may be hours."""


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A request that is to wait no longer, and why; one that is refused may come again after `retry_s`."""

    request: RequestId
    why: str
    kind: Failure = Failure.GENERATION
    retry_s: int = 0


class Patience:
    """Of one router, whose `sessions` and TTFTs these are."""

    def __init__(
        self,
        sessions: Mapping[RequestId, Session],
        ttft_ns: Mapping[ModelId, int],
        admission: Admission,
        give_up_ns: int | None,
    ) -> None:
        """After `give_up_ns` all fail, if there is such a time."""
        self._sessions = sessions
        self._ttft_ns = ttft_ns
        self._admission = admission
        self._give_up_ns = give_up_ns
        self._waiting: list[tuple[int, RequestId]] = []  # a heap, by when each is looked at

    def watch(self, job: Job, *, refusable: bool) -> None:
        """The request has come."""
        if self._give_up_ns is not None:
            patience_ns = self._give_up_ns
        elif refusable and job.model in self._ttft_ns:
            patience_ns = PATIENCE * self._ttft_ns[job.model]
        else:
            return
        if len(self._waiting) > 2 * len(self._sessions) + _ENDED_MOST:
            self._waiting = [entry for entry in self._waiting if entry[1] in self._sessions]
            heapify(self._waiting)
        heappush(self._waiting, (job.arrival_ns + patience_ns, job.request))

    def over(self, now_ns: int, *, arrival: bool) -> Iterator[GivenUp]:
        """Those whose time is over; each ends before the next one is looked at. `arrival`: another request has come."""
        while self._waiting and self._waiting[0][0] < now_ns and (arrival or self._give_up_ns is None):
            request = heappop(self._waiting)[1]
            session = self._sessions.get(request)
            if session is None or session.sent:
                continue
            job = session.job
            if self._give_up_ns is not None:
                yield GivenUp(request, "it had no token for too long")
                continue
            late_ns = self._admission.given_up_ns(job, session.decode or session.prefill, now_ns)
            if late_ns is None:
                heappush(self._waiting, (now_ns + self._ttft_ns[job.model], request))
            else:
                retry_s = retry_after_s(late_ns)
                yield GivenUp(request, no_time_for(job.served, retry_s), Failure.WOULD_BE_LATE, retry_s)


def retry_after_s(late_ns: int) -> int:
    """When to come again, for who would be late by that much."""
    return max(-(-late_ns // NS_PER_S), 1)


def no_time_for(model: ModelId, retry_s: int) -> str:
    """The words of the refusal."""
    return f"there is no time for requests of model '{model}' now; try again in {retry_s} s"
