"""`aegis launch --device cuda`: a prefill and a decode instance share a GPU's pool and answer as transformers does."""

from __future__ import annotations

from pathlib import Path

from tests.live import market
from tests.live.market import Reference
from tests.live.server import launched

PROMPT = [5, 17, 80, 33, 12, 7]
TOKENS = 24


def test_two_instances_on_one_gpu_serve_a_market(tmp_path: Path) -> None:
    checkpoints = tmp_path / "market"
    checkpoints.mkdir()
    market.write(checkpoints)
    options = ["--models", str(checkpoints), "--device", "cuda", "--dtype", "float32", "--device-memory", "1GiB"]
    with launched(tmp_path / "run", tmp_path / "cache", *options, "--prefill", "1", "--decode", "1") as server:
        server.wait_for_ready()
        for name in market.MARKET:
            body = {"model": name, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
            answer = server.post("/v1/completions", body).json()
            expected = Reference(checkpoints / name).answer(PROMPT, max_tokens=TOKENS)
            assert answer["choices"][0]["text"] == expected
        server.wait_for_freed_memory()
