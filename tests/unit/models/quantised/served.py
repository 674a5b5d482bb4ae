"""A checkpoint registered, and what the engine says over its image."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec
from aegis.core.request import Sampling
from aegis.engine.transformers_engine import TransformersEngine
from aegis.models import self_check
from aegis.models.sources import Source
from tests.registering import register
from tests.unit.engine.generation import begin, step
from tests.unit.engine.images import Arena, Built

TOKENS = 12
PROMPTS = ([7, 30, 2], [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 19] * 4)


def registered(path: Path, dtype: str = "float32", **options: Any) -> ModelSpec:
    check = partial(self_check.check, make_engine=TransformersEngine)
    cache = path.parent / "cache"
    spec = register(Source(ModelId("m"), path=str(path)), dtype=dtype, cache_dir=cache, check=check, **options)
    assert spec
    return spec


def nothing_registered(path: Path) -> bool:
    return [entry for entry in (path.parent / "cache").glob("images/*") if entry.suffix != ".lock"] == []


def answers_as(spec: ModelSpec, reference: PreTrainedModel) -> None:
    """Both of the prompts together: tokens are equal, and so are logits within rounding."""
    built = Built(reference, spec, np.fromfile(spec.image_path, dtype=np.uint8))
    arena = Arena()
    engine = TransformersEngine(arena.region)
    engine.attach(spec, built.base)
    asked = Sampling(max_tokens=1 << 20, temperature=0.0, logprobs=20)
    runs = [begin(engine, arena, built, i, prompt, room=TOKENS, sampling=asked) for i, prompt in enumerate(PROMPTS)]
    step(engine, runs, TOKENS - 1)
    for run in runs:
        assert run.ids == built.greedy(run.prompt, TOKENS)
        with torch.inference_mode():
            logits = reference(torch.tensor([run.prompt])).logits[0, -1]
        expected = torch.log_softmax(logits, -1)
        assert run.tokens[0].top and len(run.tokens[0].top) >= 20
        for token, logprob in run.tokens[0].top:
            assert logprob is not None and abs(logprob - float(expected[token])) < 1e-4
