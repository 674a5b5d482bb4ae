import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from aegis.engine.transformers_engine import TransformersEngine
from bench.lab.gpu import suite
from bench.lab.gpu.random_models import make, small
from bench.lab.gpu.suite import why_no_gpu
from tests.unit.engine.generation import begin, step
from tests.unit.engine.images import Arena, Built


@pytest.mark.skipif(why_no_gpu() is None, reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_fails() -> None:
    done = subprocess.run([sys.executable, "-m", "bench.lab.gpu.suite"], capture_output=True, text=True)
    assert done.returncode == suite.NO_GPU
    assert done.stderr.startswith("no usable GPU: ")
    assert done.stdout == ""


def test_models_made_from_a_configuration_alone_can_be_served(tmp_path: Path) -> None:
    config = small(2)
    config.update({"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "head_dim": 4})
    model = make("random", config, tmp_path, torch.float32)
    image = np.zeros(model.spec.manifest.image_bytes, dtype=np.uint8)
    model.fill(image.ctypes.data, 1, torch.device("cpu"))
    arena = Arena()
    engine = TransformersEngine(arena.region)
    engine.attach(model.spec, image.ctypes.data)
    run = begin(engine, arena, Built(None, model.spec, image), 1, [3, 4, 5], room=20)
    step(engine, [run], 10)
    assert len(set(run.ids)) > 1
