"""The settings of the HTTP layer, and the way in which its routes reach them, the market and the records."""

from __future__ import annotations

from asyncio import Lock
from typing import cast

from fastapi import Request
from msgspec import Struct

from aegis.core.model import Pace
from aegis.engine.grammar.trials import GrammarTrials
from proxy.http.call_records import Records
from proxy.http.market import Market, ServerQueries
from proxy.http.request.text_workers import TextWorkers
from proxy.http.scrapes import Scrapes
from proxy.http.security.large_bodies import LargeBodies
from proxy.http.streaming.keep_alive import KeepAlive


class TlsFiles(Struct, frozen=True):
    """Both PEM."""

    certificate: str  # with those that vouch for it behind it
    key: str = ""  # in the same file if not given


class Settings(Struct, frozen=True, kw_only=True):
    """What the HTTP side is set to; all proxies of a server have the same, but for `proxy`."""

    proxy: str = "proxy-0"  # its name, which every reply has
    host: str = ""  # the address that the server was told to listen on
    status_needs_key: bool = False
    cors_origins: tuple[str, ...] = ()
    body_bytes_max: int = 4 << 20
    keep_alive_s: float = 5.0  # the longest silence of an event stream
    reader_timeout_s: float = 60.0  # for which a client may take nothing of one
    logs_prompts: bool = False
    responses_ttl_s: float = 3600.0  # for which they are kept; 0: not at all
    pace: Pace = "made"  # of streams that do not say
    tls: TlsFiles | None = None


def market_of(request: Request) -> Market:
    return cast(Market, request.app.state.market)


def queries_of(request: Request) -> ServerQueries:
    return market_of(request).queries


def records_of(request: Request) -> Records:
    return cast(Records, request.app.state.records)


def trials_of(request: Request) -> GrammarTrials:
    return cast(GrammarTrials, request.app.state.trials)


def large_bodies_of(request: Request) -> LargeBodies:
    return cast(LargeBodies, request.app.state.large_bodies)


def texts_of(request: Request) -> TextWorkers:
    return cast(TextWorkers, request.app.state.texts)


def keep_alive_of(request: Request) -> KeepAlive:
    return cast(KeepAlive, request.app.state.keep_alive)


def answer_turns_of(request: Request) -> Lock:
    """Whole answers are put together one after the other: each may take much memory."""
    return cast(Lock, request.app.state.answer_turns)


def scrapes_of(request: Request) -> Scrapes:
    return cast(Scrapes, request.app.state.scrapes)


def settings_of(request: Request) -> Settings:
    return cast(Settings, request.app.state.settings)
