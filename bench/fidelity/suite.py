"""`aegis bench fidelity`: the same requests live and simulated, by costs that were measured on others."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from aegis.admin_client import AdminClient
from aegis.core.errors import UserError
from aegis.core.estimators import Hardware
from aegis.core.ids import ModelId
from aegis.core.role import Role
from aegis.policies import recipe
from aegis.sim.gpu_costs import GpuSpec, with_costs
from aegis.sim.market import SimRequest
from aegis.sim.simulation import Pool, simulate
from aegis.telemetry.files import read_records
from aegis.telemetry.node_report import NodeReport
from aegis.telemetry.records import Record
from aegis.telemetry.spans import SpanKind
from bench.calibration import telemetry
from bench.calibration.serving_estimates import Qualities, serving_lines, serving_quality
from bench.calibration.suite import calibrate
from bench.calibration.telemetry import Telemetry
from bench.common.processes import ended_in_order
from bench.common.result_files import check, make_directory, write, write_json
from bench.common.served import served
from bench.fidelity.errors import Compared, compare
from bench.fidelity.interleaving import Interleaving, write_trace
from bench.serve import suite
from bench.serve.settings import Settings
from bench.workloads import spec

_GIB = 1 << 30
INITIALISATIONS = "aegis:engine_initialisations_total"
_PAUSE_NS = 4_000_000_000  # most answers take less than one second


@dataclass(frozen=True, slots=True, kw_only=True)
class FidelityOptions:
    """The server is that at `url`, or one that is launched with `launch`. The costs are read from a file, or measured
    on `calibrate_on`, of which a piece comes before and after each piece of `workload`."""

    workload: str
    seed: int
    calibrate_on: str
    calibrate_seed: int
    piece_s: float
    costs: Path | None
    url: str | None
    launch: Sequence[str]
    json: Path | None
    keep: Path | None


@dataclass(frozen=True, slots=True)
class _Replayed:
    """The `whole` history of a server with requests as they were `asked`: with those that are compared and, if two
    workloads were interleaved, with those that costs are measured on. `initialisations` of engines, by instance."""

    node: NodeReport
    initialisations: Mapping[str, int]
    asked: Sequence[Record]
    whole: Telemetry
    live: Telemetry
    seen: Telemetry | None
    interleaving: Interleaving | None

    def simulated(self, costs: Path) -> Telemetry:
        """The simulated outcomes of the requests that are compared, with the others in between. Raises UserError."""
        outcome = simulate(pool_of(self.node, costs), _wanted(self.asked))
        whole = Telemetry(outcome.spans, outcome.records)
        return self.interleaving.split(self.asked, whole)[1] if self.interleaving else whole


def run(options: FidelityOptions) -> dict[str, Any]:
    """Prints how far the simulation is off, and writes it. Raises UserError."""
    if options.json:
        check(options.json)
    if options.keep:
        make_directory(options.keep)
    with ended_in_order(), _directory(options.keep) as directory:
        replayed = _replays(options, directory)
        serving = serving_quality(replayed.whole.spans, replayed.node.models)
        print(*serving_lines(serving), initialised(replayed.initialisations), "", sep="\n")
        costs = options.costs or directory / "costs.yaml"
        r2 = _measure(replayed.seen, costs) if replayed.seen else {}
        simulated = replayed.simulated(costs)
        own = _by_its_own_costs(replayed, directory / "own_costs.yaml")
    whole, per_model = compare(replayed.live.records, simulated.records)
    result = _result(options, replayed.live, simulated, whole, per_model)
    result |= {
        "by_its_own_costs": msgspec.to_builtins(own),
        "r2": r2,
        "estimators": {str(model): _scores(each) for model, each in serving.models.items()},
        "estimators_of_all": _scores(serving.all),
        "engine_initialisations": replayed.initialisations,
    }
    print(*_lines(result, whole, per_model, own), sep="\n")
    if options.json:
        write_json(options.json, result)
    return result


def _replays(options: FidelityOptions, directory: Path) -> _Replayed:
    """Raises UserError, of a file of costs before anything is measured."""
    trace, compared = directory / "requests.csv", spec.parse(options.workload, options.seed)
    interleaving = None
    if options.costs is None:
        interleaving = Interleaving(round(options.piece_s * 1e9), _PAUSE_NS)
        compared = interleaving.by_turns(spec.parse(options.calibrate_on, options.calibrate_seed), compared)
    write_trace(compared, trace)
    with nullcontext(options.url) if options.url else served(options.launch) as url:
        node = AdminClient(url).node()
        if options.costs is not None:
            pool_of(node, options.costs)  # minutes before it is needed
        asked, whole = _replay(url, trace, options.seed, directory)
        initialisations = AdminClient(url).counter(INITIALISATIONS, "instance")
    seen, live = interleaving.split(asked, whole) if interleaving else (None, whole)
    return _Replayed(node, initialisations, asked, whole, live, seen, interleaving)


def _measure(seen: Telemetry, costs: Path) -> dict[str, Any]:
    """R² of each model's costs."""
    learned = calibrate(seen, costs)
    print(*learned.table, "", sep="\n")
    return {
        str(model): {"decode": fit.decode_quality.r2, "prefill": fit.prefill_quality.r2}
        for model, fit in learned.fits.items()
    }


def _scores(qualities: Qualities) -> dict[str, Any]:
    """Of estimators that serve, by kind: how often they predicted, R², and errors: typical, worst, of the sum."""
    return {
        str(kind): {
            "seen": each.observations,
            "r2": each.r2,
            "typical": each.typical,
            "worst": each.worst,
            "bias": each.bias,
        }
        for kind, each in qualities.items()
    }


def initialised(initialisations: Mapping[str, int]) -> str:
    """What became of engines over the run, in one line."""
    told = ", ".join(f"{instance} {times}" for instance, times in sorted(initialisations.items()))
    return f"engine initialisations since the server started: {told}"


def _by_its_own_costs(replayed: _Replayed, costs: Path) -> Compared | None:
    """The error of the simulation with the costs of this very run: the rest that costs do not explain. None if the run
    was too short to learn them."""
    try:
        calibrate(replayed.live, costs)
        simulated = replayed.simulated(costs)
    except UserError:
        return None
    return compare(replayed.live.records, simulated.records)[0]


def pool_of(node: NodeReport, costs: Path) -> Pool:
    """A simulation of that server. Raises UserError if a model's costs were not measured."""
    unmeasured = GpuSpec(
        name="measured",
        memory_bytes=node.device_bytes,
        in_bytes_per_s=8 * _GIB,
        out_bytes_per_s=8 * _GIB,
        host_bytes_per_s=0,
        gpus_per_node=node.devices,
        memory_bytes_per_s=8 * _GIB,
        flops_per_s=2 * 10**11,
    )
    gpu = with_costs(unmeasured, costs)
    missing = sorted({spec.model for spec in node.models} - gpu.fits.keys())
    if missing:
        raise UserError(f"{costs}: has no costs of {', '.join(missing)}; calibrate with more requests to each model")
    roles = list(node.instances.values())
    return Pool(
        recipe=recipe(node.policy),
        gpu=gpu,
        specs=node.models,
        prefills=roles.count(Role.PREFILL),
        decodes=roles.count(Role.DECODE),
        mixed=roles.count(Role.MIXED),
        devices=node.devices,
        hardware=Hardware(),
        slab_bytes=node.slab_bytes,
        host_kv_bytes=node.host_kv_bytes,
        keep_spans=True,
    )


def _replay(url: str, trace: Path, seed: int, directory: Path) -> tuple[list[Record], Telemetry]:
    """The requests as they were sent, and what the server did and what became of them; all are kept."""
    client, requests = AdminClient(url), directory / "requests.jsonl"
    start = telemetry.position(client)
    result = suite.run(Settings(base_url=url, api_key=client.key, trace=trace, seed=seed, records=requests))
    if not result["completed"]:
        raise UserError(f"{url} has answered none of the requests, so there is nothing to compare")
    seen = telemetry.settled(client, start)
    for kind, entries in (("spans", seen.spans), ("records", seen.records)):
        write(directory / f"{kind}.jsonl", msgspec.json.Encoder().encode_lines(entries))
    return read_records(requests), seen


def _wanted(asked: Sequence[Record]) -> Iterator[SimRequest]:
    ordered = sorted(asked, key=lambda record: (record.arrival_ns, record.request))
    return (SimRequest(each.arrival_ns, each.model, each.input_tokens, each.output_tokens) for each in ordered)


@contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    if keep:
        yield keep
    else:
        with tempfile.TemporaryDirectory(prefix="aegis-") as directory:
            yield Path(directory)


def _result(
    options: FidelityOptions,
    live: Telemetry,
    simulated: Telemetry,
    whole: Compared,
    per_model: Mapping[ModelId, Compared],
) -> dict[str, Any]:
    return {
        "workload": options.workload,
        "seed": options.seed,
        "calibrated_on": str(
            options.costs or f"{options.calibrate_on}, seed {options.calibrate_seed}, by turns of {options.piece_s:g} s"
        ),
        "live_switches": _count(live, SpanKind.SWITCH),
        "simulated_switches": _count(simulated, SpanKind.SWITCH),
        "live_decode_runs": _count(live, SpanKind.DECODE),
        "simulated_decode_runs": _count(simulated, SpanKind.DECODE),
        "all": msgspec.to_builtins(whole),
        "per_model": {str(model): msgspec.to_builtins(compared) for model, compared in per_model.items()},
    }


def _count(found: Telemetry, kind: SpanKind) -> int:
    return sum(span.kind is kind for span in found.spans)


def _lines(
    result: Mapping[str, Any],
    whole: Compared,
    per_model: Mapping[ModelId, Compared],
    own: Compared | None,
) -> Iterator[str]:
    lines = [*per_model.items(), ("all", whole), *([("all, by its own costs", own)] if own else [])]
    width = max(len(name) for name, _ in lines)
    yield (
        f"{'model':{width}} {'requests':>8} {'E2E live':>9} {'sim':>9} {'error':>7} {'each':>6} "
        f"{'TTFT p99':>9} {'sim':>9} {'error':>7} {'on time':>8} {'sim':>8}"
    )
    for name, c in lines:
        e2e = f"{c.live_e2e_mean_ms:9.1f} {c.sim_e2e_mean_ms:9.1f} {c.e2e_mean_error:+7.1%} {c.each_e2e_error:6.1%}"
        ttft = f"{c.live_ttft_p99_ms:9.1f} {c.sim_ttft_p99_ms:9.1f} {c.ttft_p99_error:+7.1%}"
        on_time = f"{c.live_on_time:8.2%} {c.sim_on_time:8.2%}"
        yield f"{name:{width}} {c.requests:8} {e2e} {ttft} {on_time}"
    yield f"switches: {result['live_switches']} live, {result['simulated_switches']} simulated; times in ms"
