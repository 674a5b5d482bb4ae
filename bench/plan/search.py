"""The fewest GPUs that serve a workload, beside an instance for each model: `aegis plan`.

The searches are those of the suite `gpus`; of several seeds the one that needs most decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

from msgspec import Struct

from aegis.core.ids import ModelId
from aegis.telemetry.records import Record
from bench.report.usage import INWARDS, instances, link
from bench.simulate.cells.search import Probe, Search, SearchResult, end_of, found
from bench.simulate.cells.suites import gpus, untuned
from bench.simulate.contenders import OURS, Contender
from bench.simulate.figures import Figures, figures
from bench.simulate.setting import Setting, models_of, pool_of, run
from bench.simulate.sweep import Crossing
from bench.simulate.workers import each

DEDICATED = "dedicated"
_MOST = 64


class Use(Struct, frozen=True):
    """Of a simulation: `link_busy` is the share of the time in which a GPU's link brings weights or KV in, on average;
    `kv_bytes` what the KV of all requests between their first and last token has at the most. Lazy models took so many
    `fetches` of `fetched_bytes` in all, and others `unfetched` for which there was no room."""

    figures: Figures
    link_busy: float
    kv_bytes: int
    fetches: int = 0
    fetched_bytes: int = 0
    unfetched: int = 0


class Need(Struct, frozen=True):
    """`gpus`: the most that a seed needs. `enough` is what becomes of that seed with so many, or with the most that may
    be; `fewer` with one less, which is None where there is none. `use` is of `enough`."""

    contender: str
    policy: str
    gpus: Crossing
    found: list[SearchResult]
    enough: Probe
    fewer: Probe | None
    use: Use


class Plan(Struct, frozen=True):
    """`needs` begins with the answer. Weights are of all models and of the largest one, `gpu_bytes` a GPU's."""

    setting: dict[str, Any]
    gpu: str
    gpu_bytes: int
    models: int
    weight_bytes: int
    largest_bytes: int
    needs: list[Need]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """The first of `policies` gives the answer; dedicated instances are compared with it. `most` is the largest number
    of GPUs: 64 or two for each model by default."""

    setting: Setting
    policies: tuple[str, ...] = (OURS,)
    seeds: tuple[int, ...] = (0,)
    most: int | None = None
    jobs: int = 1


def plan(settings: PlanSettings) -> Plan:
    """Raises UserError."""
    setting = replace(settings.setting, policy=settings.policies[0], seed=settings.seeds[0])
    pool = pool_of(setting)
    policies = tuple(dict.fromkeys((*settings.policies, DEDICATED)))
    contenders = [each for each in untuned(gpus(setting, "plan")).contenders if each.policy in policies]
    searches = [_search(settings, each, seed) for each in contenders for seed in settings.seeds]
    answers = each(found, searches, jobs=settings.jobs, title="searching")
    deciding = []
    for at, contender in enumerate(contenders):
        own = slice(at * len(settings.seeds), (at + 1) * len(settings.seeds))
        most = deciding_of(answers[own])
        search = searches[own][answers[own].index(most)]
        deciding.append((contender, answers[own], most, search.placed(round(end_of(most.at)))))
    uses = each(_use, [placed for *_, placed in deciding], jobs=settings.jobs, title="the answers")
    needs = [_need(who, all_, most, use) for (who, all_, most, _), use in zip(deciding, uses, strict=True)]
    weights = [spec.manifest.image_bytes for spec in pool.specs]
    return Plan(
        setting=setting.conditions(),
        gpu=pool.gpu.name,
        gpu_bytes=pool.gpu.memory_bytes,
        models=len(weights),
        weight_bytes=sum(weights),
        largest_bytes=max(weights),
        needs=sorted(needs, key=lambda need: (policies.index(need.policy), need.gpus.at is None, end_of(need.gpus))),
    )


def deciding_of(found: Iterable[SearchResult]) -> SearchResult:
    """The seed that needs most: what the largest number is not enough for needs more than what it is enough for."""
    return max(found, key=lambda result: (end_of(result.at), result.at.at is None))


def _search(settings: PlanSettings, contender: Contender, seed: int) -> Search:
    """Dedicated instances are as many as models, or fewer where some are hardly called."""
    setting = replace(settings.setting, policy=contender.policy, seed=seed)
    models = models_of(setting)
    most = settings.most or max(_MOST, 2 * models)
    limit, start = (min(models, most),) * 2 if contender.policy == DEDICATED else (most, max(models // 4, 1))
    suite = gpus(setting, "plan")
    search = suite.search(suite.cells[0], contender, seed, None)
    return replace(search, limit=limit, start=min(start, limit), width=max(start // 2, 1) if limit == most else 1)


def _need(contender: Contender, all_: Sequence[SearchResult], most: SearchResult, use: Use) -> Need:
    probes = {probe.at: probe for probe in most.probes}
    at = round(end_of(most.at))
    return Need(contender.name, contender.policy, most.at, list(all_), probes[at], probes.get(at - 1), use)


def _use(setting: Setting) -> Use:
    outcome, pool = run(setting, keep_times=True), pool_of(setting)
    spans = instances(outcome.spans)
    busy = sum(link(own, INWARDS, outcome.ended_ns).busy for own in spans.values())
    token_bytes = {name: spec.manifest.kv.token_bytes for name, spec in pool.named().items()}
    fetches = [each for each in outcome.fetches if each.nbytes]
    return Use(
        figures(outcome),
        round(busy / len(pool.instances()), 6),
        most_kv_bytes(outcome.records, token_bytes),
        len(fetches),
        sum(each.nbytes for each in fetches),
        sum(each.refused for each in outcome.fetches),
    )


def most_kv_bytes(records: Iterable[Record], token_bytes: Mapping[ModelId, int]) -> int:
    """The most bytes of KV at a time, as if each request had its whole KV from its first token to its last."""
    changes = []
    for record in records:
        if record.first_ns is not None and record.last_ns is not None:
            nbytes = (record.input_tokens + record.output_tokens) * token_bytes[record.model]
            changes += [(record.first_ns, nbytes), (record.last_ns, -nbytes)]
    at_once = (sum(nbytes for _, nbytes in of) for _, of in groupby(sorted(changes), key=lambda change: change[0]))
    return max(accumulate(at_once), default=0)
