"""`aegis bench rivals`: token-level switching beside request-level switching and dedicated instances, live.

The same requests are sent to a server under each policy, one after the other, on the same memory. What is written is
what `aegis bench report` reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Struct

from aegis.admin_client import AdminClient
from aegis.config.slo import parse_slo
from aegis.telemetry import files
from bench.calibration import telemetry
from bench.common import result_files
from bench.common.machine import describe
from bench.common.served import served
from bench.serve import suite
from bench.serve.results import Measures
from bench.serve.settings import Settings


@dataclass(frozen=True, slots=True)
class Scene:
    """`workload` lacks its duration."""

    name: str
    workload: str
    slo: str


SCENES = (
    Scene("long-outputs", "poisson:models=8,rps=0.5,lengths=uniform,input=16-200,output=150-400", "ttft=2,tbt=0.1"),
    Scene("market", "market:models=8,rps=0.4,lengths=uniform,input=16-400,output=16-160", "ttft=2,tbt=0.1"),
    Scene("strict-slo", "poisson:models=8,rps=0.5,lengths=uniform,input=16-200,output=16-120", "ttft=0.3,tbt=0.03"),
)
"""The scenes in which each way is at its best, according to the literature: high rates and long outputs, a market,
strict deadlines."""

MEMORY = ("--device-memory", "32MiB")
"""Three of the eight models and some KV."""

CONTENDERS = {
    "token-level": ("--policy", "aegaeon", "--prefill", "1", "--decode", "1"),
    "least-slack": ("--policy", "least-slack", "--mixed", "2"),
    "request-level": ("--policy", "serverlessllm", "--mixed", "2"),
    "dedicated": ("--policy", "dedicated", "--mixed", "8"),
}
"""The options with which each is launched. Aegaeon's policy has its own setting: of two instances one prefills, the
other decodes."""


class Run(Struct, frozen=True):
    """One contender in one scene; `good_tokens_per_s` came on time."""

    scene: str
    slo: str
    contender: str
    launched: str
    attainment: float
    good_tokens_per_s: float
    failed: int

    def __str__(self) -> str:
        told = f"tokens on time {self.attainment:6.1%}, {self.good_tokens_per_s:6.0f} a second"
        return f"{self.scene:14} {self.contender:14} {told}; failed {self.failed:4}"


def run(directory: Path, *, seconds: int, seed: int, launch: Sequence[str], json: Path | None) -> None:
    """Prints each run as `aegis bench serve` does, then attainment and goodput of all. Raises UserError."""
    result_files.make_directory(directory)
    if json:
        result_files.check(json)
    runs = []
    for scene in SCENES:
        for contender, options in CONTENDERS.items():
            name = f"{scene.name}.{contender}"
            with served([*MEMORY, "--slo", scene.slo, *options, *launch]) as url:
                result = _measured(url, scene, directory, name, seconds=seconds, seed=seed)
            runs.append(_run(scene, contender, result))
    print(*runs, sep="\n")
    if json:
        result_files.write_json(json, {"machine": describe(), "seconds": seconds, "seed": seed, "runs": runs})


def _measured(url: str, scene: Scene, directory: Path, name: str, *, seconds: int, seed: int) -> dict[str, Any]:
    client = AdminClient(url)
    start = telemetry.position(client)
    settings = Settings(
        base_url=url,
        workload=f"{scene.workload},duration={seconds}",
        seed=seed,
        label=name,
        measures=Measures(slo=parse_slo(scene.slo)),
        files=(directory / f"{name}.json",),
    )
    result = suite.run(settings)
    seen = telemetry.settled(client, start)
    files.write(directory / f"{name}.spans.jsonl.gz", seen.spans)
    files.write(directory / f"{name}.records.jsonl.gz", seen.records)
    return result


def _run(scene: Scene, contender: str, result: dict[str, Any]) -> Run:
    return Run(
        scene=scene.name,
        slo=scene.slo,
        contender=contender,
        launched=" ".join(CONTENDERS[contender]),
        attainment=result["slo_attainment"],
        good_tokens_per_s=result["slo_tokens_met"] / result["duration"],
        failed=result["failed"],
    )
