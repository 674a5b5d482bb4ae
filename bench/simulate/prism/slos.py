"""Deadlines as Prism sets them (§7.1): what a model reaches on a device of its own, times a factor."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import lru_cache

from aegis.core.clock import NS_PER_MS
from aegis.core.ids import ModelId
from aegis.core.model import Slo
from aegis.telemetry.records import Record
from bench.common.percentiles import percentile
from bench.simulate.setting import Setting, models_of, run

_PERCENT = 95
_LEAST_NS = NS_PER_MS


def scaled(setting: Setting, ttft_scale: float, tpot_scale: float) -> Setting:
    """The setting with deadlines of its own for each model. Raises UserError."""
    base = _alone(replace(setting, policy="dedicated", load=None, placement=None, placement_rules=(), options=()))
    slos = tuple((model, Slo(round(ttft * ttft_scale), round(tpot * tpot_scale))) for model, ttft, tpot in base)
    return replace(setting, slos=slos)


@lru_cache(16)
def _alone(setting: Setting) -> tuple[tuple[ModelId, int, int], ...]:
    """Of each model the time within which 95 % of its first tokens come, and the pace that 95 % of its answers keep."""
    waits, paces = defaultdict[ModelId, list[int]](list), defaultdict[ModelId, list[int]](list)
    for record in run(replace(setting, mixed=models_of(setting))).records:
        if record.first_ns is not None:
            waits[record.model].append(record.first_ns - record.arrival_ns)
        if (pace_ns := tpot_ns(record)) is not None:
            paces[record.model].append(pace_ns)
    every = [pace for some in paces.values() for pace in some]
    return tuple((model, _high(waits[model]), _high(paces[model] or every)) for model in sorted(waits))


def _high(values: list[int]) -> int:
    return max(percentile(sorted(values), _PERCENT) or 0, _LEAST_NS)


def tpot_ns(record: Record) -> int | None:
    """The mean time between its tokens; None: it has no two."""
    if record.ended != "finished" or record.output_tokens < 2 or record.first_ns is None or record.last_ns is None:
        return None
    return (record.last_ns - record.first_ns) // (record.output_tokens - 1)
