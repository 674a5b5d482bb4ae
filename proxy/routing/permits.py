"""Permits to begin a request: the accounts of all limits of a server, whichever of its proxies asks.

The amount of a minute may be used at once and comes back evenly (the generic cell rate algorithm, ITU-T I.371): the
only state of a rate is the time at which everything used so far is paid for. A request has its permit before its prompt
is tokenized, because tokenizing is work already. The prompt's tokens are paid for when they are known, those of the
answer when it has ended, because nobody knows their number before. So the requests under way may exceed a limit; the
excess is paid for before another request may begin.

Laws: (P1) a request that is refused uses nothing; (P2) in any time t no more requests begin than a minute's amount and
t's; (P3) no more run at once than may; (P4) what a lost proxy's requests held is free.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from aegis.core.clock import NS_PER_S
from aegis.core.ids import ProxyId
from aegis.core.limits import Scope

WINDOW_NS = 60 * NS_PER_S
_ONE_ENDS_NS = NS_PER_S  # the end of a running request is not known


class TooMany(Struct, frozen=True):
    """A refusal: which limit it is, when there is something of it again, and the kind of its scope."""

    what: str
    wait_ns: int
    kind: str


class _Meter(Struct):
    """`…_paid_ns` is when all that was used is paid for."""

    requests_paid_ns: int = 0
    tokens_paid_ns: int = 0
    running: int = 0


class Permits:
    """Times never go back from one call to the next."""

    def __init__(self) -> None:
        self._meters: dict[tuple[str, str], _Meter] = {}
        self._held: dict[ProxyId, dict[int, tuple[Scope, ...]]] = {}

    def ask(self, proxy: ProxyId, number: int, scopes: Sequence[Scope], now_ns: int) -> TooMany | None:
        """Asks for a permit for a request that `use` and `close` will name by the same number. None: it may begin."""
        refusals = [refusal for scope in scopes if (refusal := self._refusal(scope, now_ns))]
        if refusals:
            return max(refusals, key=lambda refusal: refusal.wait_ns)
        held = self._held.setdefault(proxy, {})
        assert number not in held
        held[number] = tuple(scopes)
        for scope in scopes:
            meter = self._meters.setdefault((scope.kind, scope.name), _Meter())
            meter.running += 1
            if rate := scope.limits.requests_per_minute:
                meter.requests_paid_ns = max(meter.requests_paid_ns, now_ns) + WINDOW_NS // rate
        return None

    def use(self, proxy: ProxyId, number: int, tokens: int, now_ns: int) -> None:
        """The request, if it has a permit, has a prompt of so many tokens."""
        for scope in self._held.get(proxy, {}).get(number, ()):
            _use(self._meters[(scope.kind, scope.name)], scope, tokens, now_ns)

    def close(self, proxy: ProxyId, number: int, tokens: int, now_ns: int) -> None:
        """The request, if it had a permit, has ended, with an answer of so many tokens."""
        for scope in self._held.get(proxy, {}).pop(number, ()):
            meter = self._meters[(scope.kind, scope.name)]
            meter.running -= 1
            _use(meter, scope, tokens, now_ns)
            if not meter.running and max(meter.requests_paid_ns, meter.tokens_paid_ns) <= now_ns:
                del self._meters[(scope.kind, scope.name)]

    def lost(self, proxy: ProxyId, now_ns: int) -> None:
        """All its requests have ended."""
        for number in list(self._held.get(proxy, ())):
            self.close(proxy, number, 0, now_ns)
        self._held.pop(proxy, None)

    def running(self, kind: str, name: str) -> int:
        """Requests that have a permit."""
        meter = self._meters.get((kind, name))
        return meter.running if meter else 0

    def _refusal(self, scope: Scope, now_ns: int) -> TooMany | None:
        meter, limits = self._meters.get((scope.kind, scope.name), _Meter()), scope.limits
        whose = f"{scope.kind} '{scope.name}'"
        if limits.concurrent is not None and meter.running >= limits.concurrent:
            return TooMany(
                f"{whose} has {meter.running} of {limits.concurrent} requests at once", _ONE_ENDS_NS, scope.kind
            )
        if rate := limits.requests_per_minute:
            wait_ns = max(meter.requests_paid_ns, now_ns) + WINDOW_NS // rate - WINDOW_NS - now_ns
            if wait_ns > 0:
                return TooMany(f"{whose} has used its {rate} requests per minute", wait_ns, scope.kind)
        if rate := limits.tokens_per_minute:
            wait_ns = meter.tokens_paid_ns - WINDOW_NS - now_ns + 1
            if wait_ns > 0:
                return TooMany(f"{whose} has used its {rate} tokens per minute", wait_ns, scope.kind)
        return None


def _use(meter: _Meter, scope: Scope, tokens: int, now_ns: int) -> None:
    if rate := scope.limits.tokens_per_minute:
        meter.tokens_paid_ns = max(meter.tokens_paid_ns, now_ns) + tokens * WINDOW_NS // rate
