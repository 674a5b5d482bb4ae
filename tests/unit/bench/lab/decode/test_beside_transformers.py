from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from aegis.core.errors import UserError
from aegis.engine.vllm import version
from bench.lab.commands import run_decode as command
from bench.lab.decode.beside_transformers import Plan, Result, run


def test_a_tiny_run_measures_every_case(tmp_path: Path) -> None:
    path = tmp_path / "decode.json"
    plan = Plan(checkpoints=("tiny",), contexts=(8,), batches=(1, 2), tokens=3, runs=1)
    result = run(path, plan)
    assert msgspec.json.decode(path.read_bytes(), type=Result) == result
    assert [(case.dtype, case.batch) for case in result.cases] == [(d, b) for d in plan.dtypes for b in plan.batches]
    assert all(case.aegis_tokens_per_s > 0 and case.transformers_tokens_per_s > 0 for case in result.cases)


@pytest.mark.parametrize(
    ("engines", "peer", "said"),
    [
        (["transformers"], "llama.cpp", "--peer llama.cpp: expected transformers or vllm"),
        (["vllm", "tgi"], "vllm", "--engine tgi: expected transformers or vllm, or both"),
        (["vllm"], "transformers", "add --peer vllm"),
        (["transformers"], "vllm", "vLLM is not installed"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    engines: list[str], peer: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version, "_DISTRIBUTIONS", ())
    with pytest.raises(UserError, match=said):
        command(json_path=None, engines=engines, peer=peer, threads=1)
