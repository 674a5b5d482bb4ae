"""`aegis launch --device cuda` without a GPU: memory is the CUDA device's over a model of NVIDIA's driver, in every
process; only what is computed is computed on the CPU, for device memory of the model is memory."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.live.market import MARKET, Reference
from tests.live.server import ROOT, eventually, launched

pytestmark = pytest.mark.long

BINDINGS = """
from aegis.device.cuda.device import CudaDevice
from tests.unit.device.cuda_driver_model import DriverModel
CudaDevice.name = property(lambda self: "cpu")
driver = DriverModel()
globals().update({name: getattr(driver, name) for name in dir(driver) if name.startswith(("cu", "CU"))})
"""
PROMPT = [5, 17, 80, 33, 12, 7]
TOKENS = 24


def test_instances_share_a_gpus_memory_and_lose_none_when_one_is_killed(
    tmp_path: Path, cache: Path, checkpoints_dir: Path, references: dict[str, Reference], tight_memory: str
) -> None:
    bindings = tmp_path / "bindings" / "cuda" / "bindings"
    bindings.mkdir(parents=True)
    (bindings / "__init__.py").touch()
    (bindings / "driver.py").write_text(BINDINGS, encoding="utf-8")
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "bindings"), str(ROOT)])}
    options = ["--models", str(checkpoints_dir), "--dtype", "float32", "--device-memory", tight_memory]
    options += ["--device", "cuda", "--prefill", "1", "--decode", "1", "--debug-memory"]
    with launched(tmp_path / "run", cache, *options, environment=environment) as server:
        server.wait_for_ready()
        for turn in range(2):
            for name in MARKET:
                body = {"model": name, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
                answer = server.post("/v1/completions", body).json()
                assert answer["choices"][0]["text"] == references[name].answer(PROMPT, max_tokens=TOKENS)
            if turn == 0:
                os.kill(server.pid_of("decode-0"), signal.SIGKILL)
                eventually(lambda: server.metrics().total("instance_restarts_total") == 1, "it is started again")
                server.wait_for_ready()
        metrics = server.wait_for_freed_memory()
        assert "aegis:instance_device_wide_waits_total{" in server.get("/metrics").text
        assert metrics.total("instance_device_wide_waits_total") == 0
        assert metrics.total("model_switches_total") >= len(MARKET)
