"""From the options of `aegis simulate` to what is done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

from msgspec import Struct

from aegis.config.sizes import parse_size
from aegis.config.slo import parse_slo
from aegis.config.values import DEFAULT_POLICY
from aegis.core import wording
from aegis.core.clock import NS_PER_S
from aegis.core.errors import UserError
from aegis.core.model import WeightsName
from aegis.core.role import Roles
from aegis.policies import RECIPES, published, recipe
from aegis.sim.faults.plan import EVERY, Kind, kinds_of
from aegis.sim.faults.seed_runs import BrokenSeed, broken_seeds
from aegis.sim.gpu_costs import measured_noise
from aegis.telemetry import files
from bench.common import result_files
from bench.simulate import plot_files, sweep, table
from bench.simulate.cells.run import Choice as SearchChoice
from bench.simulate.cells.run import run as run_search
from bench.simulate.cells.suites import CELL_SUITES, SEARCHES, CellSuite, gpus
from bench.simulate.figures import figures
from bench.simulate.goodput import SUITES as GOODPUT_SUITES
from bench.simulate.goodput import of_traces
from bench.simulate.goodput_run import run as run_goodput
from bench.simulate.overload.run import Choice as OverloadChoice
from bench.simulate.overload.run import run as run_overload
from bench.simulate.overload.suite import NAME as OVERLOAD
from bench.simulate.overload.suite import overload
from bench.simulate.prism.run import Choice as PrismChoice
from bench.simulate.prism.run import run as run_prism
from bench.simulate.prism.suite import suites as prism_suites
from bench.simulate.setting import Setting, check_asked, tell_uncosted
from bench.simulate.setting import run as run_setting
from bench.simulate.study import Curve, Point, Study, curves
from bench.simulate.suite_run import Choice
from bench.simulate.suite_run import run as run_suite
from bench.simulate.suites import Form, Suite, suite
from bench.simulate.workers import cores, each

_OF_ONE = ("records", "spans", "decisions")
_OF_A_SETTING = (
    "prefill",
    "decode",
    "mixed",
    "gpu",
    "models",
    "seed",
    "as_published",
    "lanes",
    "peer_loads",
    "placement",
    "refuse_late",
    "lazy",
)
_FILES = ("json", "plot", *_OF_ONE)
_OF_A_SUITE = ("trace_dir", "tiny")
_NOT_OF_A_SUITE = (
    "workload",
    "trace",
    "prefill",
    "decode",
    "mixed",
    "roles",
    "gpu",
    "models",
    "slo",
    "give_up",
    "costs",
    "link",
    "switch",
    "lanes",
    "noise",
    "peer_loads",
    "placement",
    "refuse_late",
    "weights",
    "lazy",
    "fetch",
    "cache_size",
    "sweep",
    *_OF_ONE,
)
_OF_A_SEARCH = ("seeds", "only", "again", "screen")
_NOT_OF_A_SEARCH = ("prefill", "decode", "mixed", "roles", "sweep", *_OF_ONE, "as_published", "trace_dir")
_NOT_OF_CELLS = tuple(name for name in _NOT_OF_A_SUITE if name not in _NOT_OF_A_SEARCH)
_DENIABLE = ("lanes",)
_SEARCH_SEEDS = 3
_MEASURED = "measured"
_FAULT_SEEDS_AT_A_TIME = 25
_FAULT_SEEDS = 200
_OF_FAULTS = ("faults", "fault", "seed", "seeds", "jobs", "last")


def run(given: Mapping[str, Any]) -> None:
    """Raises UserError."""
    result_files.check_all(given[name] for name in _FILES if given[name])
    if given["last"]:
        raise UserError("--last is of --faults")
    if given["suite"]:
        _suites(given)
        return
    if unused := [name for name in _OF_A_SUITE if given[name]]:
        raise UserError(f"{_option(unused[0])} is of a --suite")
    _check_not_searched(given)
    study = _study(given)
    if study.sweep is None:
        check_asked(study.base)
    tell_uncosted(study.base)
    if given["plot"]:
        plot_files.check(given["plot"])
    if any(given[name] for name in _OF_ONE):
        result = [_one(study, given)]
    else:
        [result] = curves([study], jobs=given["jobs"] or cores(), title="simulating")
    key = study.sweep.key if study.sweep else None
    table.show(result, key)
    if given["json"]:
        content = {"setting": study.base.conditions(), "sweep": study.sweep, "curves": result}
        result_files.write_json(given["json"], content)
    if given["plot"]:
        figure, [axes] = plot_files.sheet(1)
        plot_files.attainment(axes, result, key)
        plot_files.save(figure, given["plot"])


def _suites(given: Mapping[str, Any]) -> None:
    names = list(dict.fromkeys(given["suite"]))
    if len(names) > 1 and (given["json"] or given["plot"]):
        raise UserError("--json and --plot are of one --suite")
    apart = (*SEARCHES, *GOODPUT_SUITES, OVERLOAD, *prism_suites(None))
    figured = [suite(name) for name in names if name not in apart]
    if figured:
        _check_figured(given, figured)
    for name in names:
        if name in SEARCHES:
            _search(name, given, chosen(given))
        elif name in GOODPUT_SUITES:
            _goodput(name, given)
        elif name == OVERLOAD:
            _overload(given)
        elif name in apart:
            _prism(name, given)
    choice = Choice(
        policies=tuple(dict.fromkeys(given["policy"] or policies(as_published=given["as_published"]))),
        as_published=given["as_published"],
        tiny=given["tiny"],
        seed=given["seed"],
        jobs=given["jobs"] or cores(),
        trace_dir=given["trace_dir"],
    )
    for each_suite in figured:
        name = f"{each_suite.name}-as-published" if choice.as_published else each_suite.name
        json, plot = given["json"] or Path(f"{name}.json"), given["plot"] or Path(f"{name}.png")
        run_suite(each_suite, choice, json=json, plot=plot)


def _goodput(name: str, given: Mapping[str, Any]) -> None:
    """A suite of MuxWise's evaluation. Raises UserError."""
    for option in (*_NOT_OF_A_SUITE, "seeds", "again", "screen", "policy"):
        if _is_given(given, option):
            raise UserError(f"{_option(option)} is not of --suite {name}, which sets it itself")
    if given["plot"]:
        raise UserError(f"--suite {name} draws no plot: leave out --plot")
    suite = GOODPUT_SUITES[name]
    run_goodput(
        of_traces(suite, given["trace_dir"]) if given["trace_dir"] else suite,
        json=given["json"] or Path(f"{name}.json"),
        tiny=given["tiny"],
        seed=given["seed"],
        jobs=given["jobs"] or cores(),
        as_published=given["as_published"],
        only=tuple(given["only"] or ()),
    )


def _prism(name: str, given: Mapping[str, Any]) -> None:
    """A suite of Prism's evaluation. Raises UserError."""
    for option in (*_NOT_OF_A_SUITE, "seeds", "again", "screen", "policy"):
        if _is_given(given, option):
            raise UserError(f"{_option(option)} is not of --suite {name}, which sets it itself")
    choice = PrismChoice(
        tiny=given["tiny"],
        seed=given["seed"],
        jobs=given["jobs"] or cores(),
        only=tuple(given["only"] or ()),
        as_published=given["as_published"],
    )
    json, plot = given["json"] or Path(f"{name}.json"), given["plot"] or Path(f"{name}.png")
    run_prism(prism_suites(given["trace_dir"])[name], choice, json=json, plot=plot)


def _overload(given: Mapping[str, Any]) -> None:
    """Raises UserError."""
    for option in (*_NOT_OF_A_SUITE, "seeds", "screen", "as_published"):
        if _is_given(given, option):
            raise UserError(f"{_option(option)} is not of --suite {OVERLOAD}, which sets it itself")
    choice = OverloadChoice(
        seed=given["seed"],
        policies=tuple(recipe(policy).name for policy in given["policy"] or ()),
        only=tuple(given["only"] or ()),
        again=given["again"],
        jobs=given["jobs"] or cores(),
    )
    json, plot = given["json"] or Path(f"{OVERLOAD}.json"), given["plot"] or Path(f"{OVERLOAD}.png")
    run_overload(overload(given["trace_dir"], tiny=given["tiny"]), choice, json=json, plot=plot)


def _check_figured(given: Mapping[str, Any], suites: Iterable[Suite]) -> None:
    if unused := [name for name in _NOT_OF_A_SUITE if _is_given(given, name)]:
        raise UserError(f"{_option(unused[0])} is not of a --suite, which sets it itself")
    _check_not_searched(given)
    for each_suite in suites:
        compares = each_suite.form is Form.CURVES
        if given["trace_dir"] and not compares:
            raise UserError(f"--trace-dir is not of --suite {each_suite.name}, whose requests are drawn")
        if given["policy"] and (each_suite.policies or all(panel.policy for panel in each_suite.panels)):
            raise UserError(f"--policy is not of --suite {each_suite.name}, which sets it itself")
        if given["policy"] and not compares and len(set(given["policy"])) > 1:
            raise UserError(f"--suite {each_suite.name} is of one --policy")


def _check_not_searched(given: Mapping[str, Any]) -> None:
    if unused := [name for name in _OF_A_SEARCH if given[name]]:
        of = SEARCHES if unused[0] == "seeds" else (*SEARCHES, OVERLOAD)
        if unused[0] == "only":
            of = (*SEARCHES, *GOODPUT_SUITES, *prism_suites(None), OVERLOAD)
        raise UserError(f"{_option(unused[0])} is of --suite {', '.join(of[:-1])} and {of[-1]}")


def policies(*, as_published: bool) -> tuple[str, ...]:
    """All, or those that have a published setting of Aegaeon's evaluation."""
    return tuple(
        name for name, known in RECIPES.items() if not as_published or (published(name) and not known.one_model)
    )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _study(given: Mapping[str, Any]) -> Study:
    workload, trace = given["workload"], given["trace"]
    if (workload is None) == (trace is None):
        raise UserError("give one of --workload, --trace and --suite")
    if trace and given["sweep"]:
        raise UserError("--sweep changes a key of --workload; a trace has none")
    policies = tuple(dict.fromkeys(given["policy"] or (DEFAULT_POLICY,)))
    base = Setting(
        policy=policies[0],
        workload=workload,
        trace=str(trace) if trace else None,
        **chosen(given),
    )
    _check_mixed(given, base, policies)
    return Study(base=base, policies=policies, sweep=sweep.parse(given["sweep"]) if given["sweep"] else None)


def _check_mixed(given: Mapping[str, Any], base: Setting, policies: Sequence[str]) -> None:
    """A policy that has no mixed instances would be given as many of its own kinds as if nothing had been said. Where
    both are given, there are policies of both kinds, or some count would be ignored."""
    if given["mixed"] is None:
        return
    apart = [name for name in policies if recipe(name).roles_of(base.roles, counted=False) is Roles.FIXED]
    counts = [name for name in ("prefill", "decode") if given[name] is not None]
    if counts and len(apart) in (0, len(policies)):
        ours, theirs = f"--mixed {base.mixed}", f"{_option(counts[0])} {given[counts[0]]}"
        unused, used = (ours, theirs) if apart else (theirs, ours)
        either = "leave out either --mixed, or --prefill and --decode"
        raise UserError(f"{unused} has no effect on {policies[0]} with {used}; {either}")
    if apart and not counts and base.mixed != base.prefill + base.decode:
        kinds = "has instances that prefill and others that decode"
        raise UserError(f"--mixed {base.mixed}: {apart[0]} {kinds}; give --prefill and --decode too")


def chosen(given: Mapping[str, Any]) -> dict[str, Any]:
    """The given values of a setting; the rest keeps its default. Raises UserError."""
    said = {name: given[name] for name in _OF_A_SETTING if given.get(name) is not None}
    if given.get("slo"):
        said["slo"] = parse_slo(given["slo"])
    if given.get("give_up"):
        said["give_up_ns"] = round(given["give_up"] * NS_PER_S)
    if given.get("costs"):
        said["costs"] = str(given["costs"])
    if given.get("link"):
        said["link_bytes_per_s"] = round(given["link"] * 1e9)
    if given.get("switch") is not None:
        said["switch_ns"] = round(given["switch"] * NS_PER_S)
    said |= _stored(given)
    if given.get("noise") is not None:
        said["noise"] = _noise(given["noise"], given.get("costs"))
    if given.get("roles"):
        said["roles"] = _roles(given["roles"])
    if given.get("mixed") is None and {"prefill", "decode"} & set(said):
        said["mixed"] = said.get("prefill", 6) + said.get("decode", 10)
        said["counted"] = True
    return said


def _stored(given: Mapping[str, Any]) -> dict[str, Any]:
    """How weights are stored, and how they come. Raises UserError."""
    said: dict[str, Any] = {}
    if weights := given.get("weights"):
        if weights not in get_args(WeightsName):
            raise UserError(f"--weights {weights}: should be one of {', '.join(get_args(WeightsName))}")
        said["weights"] = weights
    if given.get("fetch"):
        said["fetch_bytes_per_s"] = round(given["fetch"] * 1e9)
    if given.get("cache_size"):
        try:
            said["cache_bytes"] = parse_size(given["cache_size"])
        except ValueError as error:
            raise UserError(f"--cache-size: {error}") from None
    return said


def _noise(text: str, costs: Path | None) -> float:
    if text == _MEASURED:
        measured = measured_noise(costs) if costs else None
        if measured is None:
            raise UserError(
                f"--noise {_MEASURED}: needs --costs of a file that `aegis calibrate` has written `noise` into"
            )
        return measured
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UserError(f"--noise {text}: should be a share from 0 to 1, like 0.05, or {_MEASURED}")
    return share


def _roles(text: str) -> Roles:
    if text not in set(Roles):
        raise UserError(f"--roles: should be 'auto' or 'fixed', not {text!r}")
    return Roles(text)


def _one(study: Study, given: Mapping[str, Any]) -> Curve:
    """A single simulation, all of it written down."""
    settings = study.settings()
    if len(settings) != 1:
        raise UserError("--records, --spans and --decisions are of one simulation: give one --policy and no --sweep")
    [(at, setting)] = settings
    outcome = run_setting(setting, keep_times=True, explains=given["decisions"] is not None)
    lines: tuple[Sequence[Struct], ...] = (outcome.records, outcome.spans, outcome.decisions)
    for name, told in zip(_OF_ONE, lines, strict=True):
        if given[name]:
            files.write(given[name], told)
    return Curve(setting.policy, (Point(at, figures(outcome)),))


# --- suites that search ---------------------------------------------------------------------------------------------


def _search(name: str, given: Mapping[str, Any], said: Mapping[str, Any]) -> None:
    """A suite of cells, or `gpus`. `said`: what was said of a setting. Raises UserError."""
    unused = _NOT_OF_A_SEARCH if name == "gpus" else _NOT_OF_A_SEARCH + _NOT_OF_CELLS
    for option in unused:
        if _is_given(given, option):
            raise UserError(f"{_option(option)} is not of --suite {name}, which sets it itself")
    suite = _gpus(given, said) if name == "gpus" else CELL_SUITES[name](tiny=given["tiny"])
    seeds = 1 if given["trace"] else given["seeds"] or _SEARCH_SEEDS
    choice = SearchChoice(
        seeds=tuple(range(given["seed"], given["seed"] + seeds)),
        policies=tuple(recipe(policy).name for policy in given["policy"] or ()),
        only=tuple(given["only"] or ()),
        again=given["again"],
        screen=given["screen"],
        jobs=given["jobs"] or cores(),
    )
    run_search(suite, choice, json=given["json"] or Path(f"{name}.json"), plot=given["plot"] or Path(f"{name}.png"))


def _is_given(given: Mapping[str, Any], option: str) -> bool:
    """0 is, and of what may also be denied False."""
    return given[option] is not None and (given[option] is not False or option in _DENIABLE)


def _gpus(given: Mapping[str, Any], said: Mapping[str, Any]) -> CellSuite:
    workload, trace = given["workload"], given["trace"]
    if (workload is None) == (trace is None):
        raise UserError("--suite gpus needs one of --trace and --workload")
    setting = Setting(policy="", workload=workload, trace=str(trace) if trace else None, **said)
    return gpus(setting, workload or trace.name, tiny=given["tiny"])


# --- faults -----------------------------------------------------------------------------------------------------------


def run_faults(given: Mapping[str, Any]) -> int:
    """Seeds of faulty markets through the cores that decide, each of which has to keep every law. The exit status: 1
    where one did not. Raises UserError."""
    for name in given:
        if name not in _OF_FAULTS and _is_given(given, name):
            raise UserError(f"{_option(name)} is not of --faults, whose markets are drawn from their seeds")
    kinds = kinds_of(given["fault"]) if given["fault"] else EVERY
    first, count = given["seed"], given["seeds"] or _FAULT_SEEDS
    chunks = [
        range(at, min(at + _FAULT_SEEDS_AT_A_TIME, first + count))
        for at in range(first, first + count, _FAULT_SEEDS_AT_A_TIME)
    ]
    work = partial(broken_seeds, kinds=kinds, events=given["last"] or 0)
    found = [one for some in each(work, chunks, jobs=given["jobs"] or cores(), title="playing") for one in some]
    for one in found:
        print(_broken_law(one, kinds))
    print(f"{wording.count(count, 'seed')}, {len(found)} of them broke a law")
    return int(bool(found))


def _broken_law(one: BrokenSeed, kinds: frozenset[Kind]) -> str:
    only = "" if kinds == EVERY else "".join(f" --fault {kind}" for kind in sorted(kinds))
    events = "".join(f"  {event}\n" for event in one.events)
    command = f"aegis simulate --faults{only} --seed {one.seed} --seeds 1"
    return f"{events}{command}   # {one.setup}; {one.faults}; {one.problem}"
