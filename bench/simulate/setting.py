"""One simulation: what it is of, and how it is run."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
from msgspec.structs import replace as replace_fields

from aegis.core.clock import NS_PER_S
from aegis.core.errors import UserError
from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec, Slo, WeightsName
from aegis.core.role import Roles
from aegis.policies import Policy, Recipe, Site, placement, recipe
from aegis.sim.catalogue import catalogue
from aegis.sim.gpu_costs import GpuSpec, costed, gpu, with_costs
from aegis.sim.market import SimRequest
from aegis.sim.rival_engines import with_engine
from aegis.sim.simulation import FETCH_BYTES_PER_S, Outcome, Pool, simulate
from bench.common.numbers import size
from bench.workloads import prefix_traces, spec, traces
from bench.workloads.arrival import Arrival
from bench.workloads.load import at_load
from proxy.routing.placement_views import PlacementPolicy

_Made = TypeVar("_Made")
_DEFAULT_SLO = Slo()
_SPARE_TOKENS = 32
_KEPT_WORKLOADS = 32  # of some megabytes each
_NAMES_SHOWN = 3
_SELDOM = (
    "options",
    "turns",
    "groups",
    "engine",
    "prompts",
    "cache_tokens",
    "trace_s",
    "trace_speed",
    "named_shapes",
    "noise",
    "peer_loads",
    "load",
    "placement",
    "refuse_late",
    "placement_rules",
    "slos",
    "trace_models",
    "rules",
    "weights",
    "lazy",
    "fetch_bytes_per_s",
    "cache_bytes",
)
"""Only written where they are set, so that older results can be told to be of the same setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything that a simulation's outcome depends on; texts are as on the command line.

    Where `roles` are fixed there are `prefill` and `decode` instances, else `mixed` ones. Without `roles` it is as the
    policy is made for, and `counted` says whether prefill and decode instances were named. A request without a token
    after `give_up_ns` fails when the next one arrives; None: as the policy has it, which only as published gives up.
    `link_bytes_per_s`, in and out, and `switch_ns` are the GPU's unless said, `max_batch` sequences in a batch and
    `budget_tokens` of a step the policy's. `lanes`: policies may divide GPUs; None: those that are made for it.
    `placement`: models move by load, as that policy has it, or not at all if it is `none`; None: they do where that is
    part of the policy. `placement_rules` are fields of its rules by their names. `slos` are those of single models.
    `refuse_late`: requests that could not be served in time are refused.
    `peer_loads`: the GPUs of a node carry parts of each other's loads.
    `options` are fields of the policy by their names, `rules` those of its rules, `turns` those of its
    `WeightedRoundRobin` and `groups` those of its `GroupedFcfs`; `engine` is a rival's (`aegis.sim.rival_engines`).
    `prompts` is a trace whose prompts replace the drawn ones. What is reused of them is what a cache of `cache_tokens`
    still has; None: a cache without bounds. 0 also reuses nothing of drawn prompts. Of a trace that passes
    `trace_speed` times as fast its first `trace_s` seconds, and of its models `trace_models`, evenly from those that
    are asked for the most to those that seldom are. `named_shapes` are pairs of a text and a shape: of models with the
    text in their names. `noise` is the standard deviation of runs, as a share of what they take; None: none. With a
    `load`, there are so many times as many requests (`bench.workloads.load`). Models that do not say otherwise have
    these `weights` and, if `lazy`, are fetched with their first request, `fetch_bytes_per_s` for all of them together,
    to a cache of `cache_bytes`."""

    policy: str
    workload: str | None = None
    trace: str | None = None
    seed: int = 0
    as_published: bool = False
    gpu: str = "h800"
    costs: str | None = None
    models: str = "mix"
    slo: Slo = _DEFAULT_SLO
    prefill: int = 6
    decode: int = 10
    mixed: int = 16
    roles: Roles | None = None
    counted: bool = False
    link_bytes_per_s: int | None = None
    switch_ns: int | None = None
    slab_bytes: int = 1 << 30
    give_up_ns: int | None = None
    lanes: bool | None = None
    peer_loads: bool = False
    max_batch: int | None = None
    budget_tokens: int | None = None
    options: tuple[tuple[str, Any], ...] = ()
    turns: tuple[tuple[str, Any], ...] = ()
    groups: tuple[tuple[str, Any], ...] = ()
    engine: str | None = None
    prompts: str | None = None
    cache_tokens: int | None = None
    trace_s: float | None = None
    trace_speed: float | None = None
    named_shapes: tuple[tuple[str, str], ...] = ()
    noise: float | None = None
    load: float | None = None
    placement: str | None = None
    refuse_late: bool = False
    placement_rules: tuple[tuple[str, Any], ...] = ()
    slos: tuple[tuple[ModelId, Slo], ...] = ()
    trace_models: int | None = None
    rules: tuple[tuple[str, Any], ...] = ()
    weights: WeightsName | None = None
    lazy: bool = False
    fetch_bytes_per_s: int | None = None
    cache_bytes: int | None = None

    def conditions(self) -> dict[str, Any]:
        """All but the policy, as it is written into results."""
        written = msgspec.json.decode(msgspec.json.encode(self))  # tuples as the lists that a file has
        del written["policy"]
        for name in _SELDOM:
            if not written[name]:
                del written[name]
        return dict(written)


def run(setting: Setting, *, keep_times: bool = False, sample_ns: int = 0, explains: bool = False) -> Outcome:
    """Raises UserError, one line, where something of the setting does not fit."""
    pool = replace(pool_of(setting), keep_times=keep_times, keep_spans=True, sample_ns=sample_ns, explains=explains)
    return simulate(pool, _wanted(_arrivals_of(setting), pool.named()))


def pool_of(setting: Setting) -> Pool:
    """Its instances and models, which are the same at any load. Raises UserError, also where a GPU cannot hold one of
    the models."""
    known, asked = _recipe(setting), _arrivals_of(replace(setting, load=None))
    if setting.placement is not None:
        known = replace(known, placement=placement(setting.placement))
    if setting.placement_rules and known.placement:
        known = replace(known, placement=partial(_ruled_placement, known.placement, dict(setting.placement_rules)))
    mixed = known.roles_of(setting.roles, counted=setting.counted) is Roles.AUTO
    found = catalogue(
        setting.models,
        asked={arrival.model for arrival in asked},
        slo=setting.slo,
        instead=setting.named_shapes,
        weights=setting.weights or "dense",
        lazy=setting.lazy,
    )
    specs = found.specs
    if setting.slos:
        own = dict(setting.slos)
        specs = tuple(replace_fields(each, slo=own.get(each.model, each.slo)) for each in specs)
    pool = Pool(
        gpu=with_engine(_gpu(setting), setting.engine, specs),
        specs=specs,
        prefills=0 if mixed else setting.prefill,
        decodes=0 if mixed else setting.decode,
        mixed=setting.mixed if mixed else 0,
        recipe=known,
        slab_bytes=setting.slab_bytes,
        lanes=known.lanes if setting.lanes is None else setting.lanes,
        noise=setting.noise or 0.0,
        noise_seed=setting.seed,
        peer_loads=setting.peer_loads,
        rates=_rates(asked, found.adapters) if known.rated else {},
        refuses_late=setting.refuse_late,
        adapters=found.adapters,
        fetched=found.fetched,
        fetch_bytes_per_s=setting.fetch_bytes_per_s or FETCH_BYTES_PER_S,
        cache_bytes=setting.cache_bytes or 0,
    )
    _check_fits(pool)
    _check_cached(setting, pool)
    _uncosted(setting, pool.specs)
    return pool


def check_asked(setting: Setting) -> None:
    """Raises UserError if there is no request: its figures would be of nothing."""
    if not _arrivals_of(setting):
        raise UserError(
            f"workload {setting.workload!r}: no request with seed {setting.seed}; raise models, rps or duration"
        )


def tell_uncosted(setting: Setting) -> None:
    """One line to stderr where costs that were given are not those of all models. Raises UserError."""
    missing = _uncosted(setting, pool_of(setting).specs)
    if missing:
        said = f"--costs {setting.costs} has no costs of {_some(missing)}; those of --gpu {setting.gpu} stand in"
        print(f"aegis: {said}", file=sys.stderr)


def models_of(setting: Setting) -> int:
    """The number of models in its workload or trace. Raises UserError."""
    return len({arrival.model for arrival in _arrivals_of(setting)})


def _uncosted(setting: Setting, specs: Sequence[ModelSpec]) -> list[ModelId]:
    """The models that its file of costs does not name. UserError: it names none, being of another market."""
    if setting.costs is None:
        return []
    known = costed(Path(setting.costs))
    missing = [each.model for each in specs if each.model not in known and each.root not in known]
    if len(missing) == len(specs):
        raise UserError(
            f"--costs {setting.costs}: has costs of {_some(sorted(known))}, but of no model here: {_some(missing)}"
        )
    return missing


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"


def _check_fits(pool: Pool) -> None:
    budget = pool.budget()
    for model in pool.specs:
        weights = model.manifest.image_bytes
        if not budget.holds(weights, model.manifest.kv):
            raise UserError(
                f"{model.model} ({model.root}) has {size(weights)} of weights, and {pool.gpu.name} holds "
                f"{size(pool.gpu.memory_bytes)}, KV included; give a group like {pool.gpu.name}x4, or a larger GPU"
            )


def _check_cached(setting: Setting, pool: Pool) -> None:
    """A lazy model that can never be fetched is a mistake, as it is where it is served."""
    for option, given in (("--fetch", setting.fetch_bytes_per_s), ("--cache-size", setting.cache_bytes)):
        if given is not None and not pool.fetched:
            raise UserError(f"{option} is of lazy models: give --lazy, or lazy: true in the file of --models")
    if not pool.cache_bytes or not pool.fetched:
        return
    held = sum(spec.manifest.image_bytes for spec in pool.specs if spec.model not in pool.fetched)
    largest = max(pool.fetched, key=lambda model: (pool.fetched[model], model))
    if held + 2 * pool.fetched[largest] > pool.cache_bytes:
        beside = f" beside {size(held)} of models that are not lazy" if held else ""
        raise UserError(
            f"--cache-size {size(pool.cache_bytes)}: {largest} takes {size(2 * pool.fetched[largest])} in it, fetched "
            f"and as an image{beside}"
        )


def _gpu(setting: Setting) -> GpuSpec:
    known = with_costs(gpu(setting.gpu), Path(setting.costs)) if setting.costs else gpu(setting.gpu)
    if (rate := setting.link_bytes_per_s) is not None:
        known = replace(known, in_bytes_per_s=rate, out_bytes_per_s=rate)
    return known if setting.switch_ns is None else replace(known, switch_ns=setting.switch_ns)


def _recipe(setting: Setting) -> Recipe:
    known = recipe(setting.policy, as_published=setting.as_published)
    ruled = {"max_batch": setting.max_batch, "budget_tokens": setting.budget_tokens}
    said = {name: value for name, value in ruled.items() if value is not None} | dict(setting.rules)
    if said or setting.options:
        known = replace(known, policy=partial(_ruled, known.policy, said, dict(setting.options)))
    if setting.turns or setting.groups:
        sited = partial(_sited, dict(setting.turns), dict(setting.groups))
        known = replace(known, policy=partial(_at, sited, known.policy), prefill=partial(_at, sited, known.prefill))
    return known if setting.give_up_ns is None else replace(known, give_up_ns=setting.give_up_ns)


def _ruled(
    policy: Callable[[Site], Policy], rules: Mapping[str, Any], options: Mapping[str, Any], site: Site
) -> Policy:
    """The policy with other rules and options."""
    made: Any = policy(site)
    return cast(Policy, replace(made, rules=replace(made.rules, **rules), **options))


def _ruled_placement(make: Callable[[Site], PlacementPolicy], rules: Mapping[str, Any], site: Site) -> PlacementPolicy:
    """The policy of placement with other rules."""
    made: Any = make(site)
    return cast(PlacementPolicy, replace(made, rules=replace(made.rules, **rules)))


def _rates(asked: Sequence[Arrival], adapters: Mapping[ModelId, ModelId]) -> dict[ModelId, float]:
    """The tokens per second that each model is asked for on average: what its operator knows beforehand."""
    span_s, tokens = max(asked[-1].at_ns - asked[0].at_ns, NS_PER_S) / NS_PER_S if asked else 1.0, dict[ModelId, int]()
    for each in asked:
        model = adapters.get(each.model, each.model)
        tokens[model] = tokens.get(model, 0) + each.input_tokens + each.output_tokens
    return {model: total / span_s for model, total in sorted(tokens.items())}


def _sited(turns: Mapping[str, Any], groups: Mapping[str, Any], site: Site) -> Site:
    return replace(site, turns=replace(site.turns, **turns), groups=replace(site.groups, **groups))


def _at(sited: Callable[[Site], Site], make: Callable[[Site], _Made], site: Site) -> _Made:
    return make(sited(site))


def _arrivals_of(setting: Setting) -> list[Arrival]:
    if setting.trace is not None:
        arrivals = _recorded(setting.trace, setting.trace_s, setting.trace_speed or 1.0)
        if setting.trace_models:
            whole = _recorded(setting.trace, None, 1.0)
            arrivals = _of_some(arrivals, whole, setting.trace_models)
    else:
        assert setting.workload is not None
        arrivals = _drawn(setting.workload, setting.seed)
    if setting.load is not None:
        arrivals = at_load(arrivals, setting.load)
    if setting.prompts is not None:
        return prefix_traces.replayed(arrivals, Path(setting.prompts), setting.cache_tokens)
    if setting.cache_tokens == 0:
        return [replace(arrival, reused_tokens=0) for arrival in arrivals]
    return arrivals


@lru_cache(_KEPT_WORKLOADS)
def _drawn(workload: str, seed: int) -> list[Arrival]:
    """Policies of a sweep are given the same arrivals one after the other."""
    return spec.parse(workload, seed)


@lru_cache(_KEPT_WORKLOADS)
def _recorded(trace: str, until_s: float | None, speed: float) -> list[Arrival]:
    arrivals = traces.read(Path(trace))
    if speed != 1:
        arrivals = [replace(arrival, at_ns=round(arrival.at_ns / speed)) for arrival in arrivals]
    return arrivals if until_s is None else [each for each in arrivals if each.at_ns < until_s * NS_PER_S]


def _of_some(arrivals: list[Arrival], whole: list[Arrival], count: int) -> list[Arrival]:
    """The arrivals of so many of the models of the `whole` trace. Raises UserError."""
    asked = Counter([each.model for each in whole])
    ranked = sorted(asked, key=lambda model: (-asked[model], model))
    if count > len(ranked):
        raise UserError(f"the trace asks for {len(ranked)} models, and not for {count}")
    kept = {ranked[number * len(ranked) // count] for number in range(count)}
    return [each for each in arrivals if each.model in kept]


def _wanted(arrivals: Iterable[Arrival], specs: Mapping[ModelId, ModelSpec]) -> Iterator[SimRequest]:
    """As the model can take them: what is longer than its context is made shorter, input and output alike, as in
    Aegaeon's artifact."""
    for arrival in arrivals:
        context = specs[arrival.model].manifest.context_tokens
        tokens_in, tokens_out = arrival.input_tokens, arrival.output_tokens
        if tokens_in + tokens_out > context:
            share = context / (tokens_in + tokens_out + _SPARE_TOKENS)
            tokens_in, tokens_out = max(int(tokens_in * share), 1), max(int(tokens_out * share), 1)
        yield SimRequest(
            arrival.at_ns,
            arrival.model,
            tokens_in,
            tokens_out,
            priority=arrival.priority,
            reused_tokens=min(arrival.reused_tokens, tokens_in),
        )
