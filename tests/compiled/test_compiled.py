"""The compiled cores decide as their sources do. `make test-long` runs this."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[2]
COMPILED = os.environ.get("AEGIS_COMPILED", "")
OUTCOMES = """
import decode.core
from aegis.core.model import Slo
from aegis.policies import recipe
from aegis.sim.catalogue import models
from aegis.sim.gpu_costs import gpu
from aegis.sim.market import SimRequest
from aegis.sim.simulation import Pool, simulate
from bench.lab.scheduling.simulator_speed import compiled
from bench.workloads.spec import parse

print(compiled())
specs = tuple(models("mix:30", slo=Slo()))
tight = dict(gpu=gpu("h800"), specs=specs, keep_times=True, keep_spans=True)
for seed, name, more in (
    (0, "aegaeon", {}),
    (1, "aegaeon", dict(devices=6, idle_ns=2_000_000_000)),
    (2, "aegaeon", dict(host_kv_bytes=30 << 30)),
    (3, "serverlessllm", {}),
    (4, "qlm", {}),
    (5, "prefill-first", {}),
    (6, "least-slack", {}),
):
    arrivals = [
        SimRequest(a.at_ns, a.model, a.input_tokens, a.output_tokens, None if i % 5 else a.at_ns + 8_000_000_000)
        for i, a in enumerate(parse("poisson:models=30,rps=0.2,duration=40,lengths=sharegpt", seed))
    ]
    counts = dict(prefills=3, decodes=5) if name == "aegaeon" else dict(mixed=8)
    print(simulate(Pool(recipe=recipe(name), **counts, **tight, **more), arrivals))
"""


def outcomes(tree: Path, directory: Path) -> tuple[str, str]:
    """Whether they were made by compiled code, and what they are."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", OUTCOMES],
        env=os.environ | {"PYTHONPATH": str(tree)},
        cwd=directory,
        check=True,
        capture_output=True,
        text=True,
    )
    compiled, _, made = done.stdout.partition("\n")
    return compiled, made


@pytest.mark.skipif(not COMPILED, reason="set AEGIS_COMPILED to what `make compiled` made")
def test_compiled_cores_and_their_sources_make_the_same_of_the_same_arrivals(tmp_path: Path) -> None:
    compiled, pure = outcomes(SOURCES / COMPILED, tmp_path), outcomes(SOURCES, tmp_path)
    assert (compiled[0], pure[0]) == ("True", "False")
    assert compiled[1] == pure[1] and "finished" in pure[1]
