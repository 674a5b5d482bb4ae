"""What the HTTP layer can be told, and how its routes reach it, the market and the records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from fastapi import Request

from proxy.http.boundary import Desk, Market
from proxy.http.records import Records


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    proxy: str = "proxy-0"  # who answers, as every reply says
    admin_key: str | None = None  # without one, only local clients may add and remove models
    body_bytes_max: int = 4 << 20
    keep_alive_s: float = 5.0  # the longest silence of an event stream


def market_of(request: Request) -> Market:
    return cast(Market, request.app.state.market)


def desk_of(request: Request) -> Desk:
    return market_of(request).desk


def records_of(request: Request) -> Records:
    return cast(Records, request.app.state.records)


def settings_of(request: Request) -> Settings:
    return cast(Settings, request.app.state.settings)
