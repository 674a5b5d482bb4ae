from __future__ import annotations

import sys

import msgspec
import pytest
from transformers import AutoConfig

import aegis.engine
from aegis.core.errors import UserError
from aegis.core.ids import ModelId, RequestId
from aegis.engine.engines import Engines
from aegis.engine.vllm import version
from tests.unit.engine.generation import begin, step
from tests.unit.engine.images import Arena, Built, build

SHAPE = {"vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(AutoConfig.for_model("llama", **SHAPE), tmp_path_factory.mktemp("models") / "llama")


def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "_DISTRIBUTIONS", ())
    for name in ("vllm_engine", "vllm_adapter"):
        monkeypatch.delitem(sys.modules, f"aegis.engine.{name}", raising=False)
        monkeypatch.delattr(aegis.engine, name, raising=False)


def _for_vllm(built: Built) -> Built:
    manifest = msgspec.structs.replace(built.manifest, engine="vllm")
    return Built(built.reference, msgspec.structs.replace(built.spec, manifest=manifest), built.image)


def test_a_model_runs_on_the_engine_of_its_image(llama: Built) -> None:
    arena = Arena()
    engines = Engines(arena.region, device="cpu", first="transformers")
    engines.prepare(llama.spec)
    engines.attach(llama.spec, llama.base)
    run = begin(engines, arena, llama, 1, [3, 5, 7, 9, 11, 13], room=8, cuts=[4])
    step(engines, [run], 6)
    engines.stop(RequestId(1))
    assert run.ids == llama.greedy(run.prompt, 7)
    engines.detach(llama.spec.model)
    engines.detach(ModelId("never attached"))
    assert engines.initialisations == 1, "attaching and running a model takes none"


def test_an_engine_that_is_not_installed_costs_its_models_alone(llama: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    _without_vllm(monkeypatch)
    arena = Arena()
    engines = Engines(arena.region, device="cpu", first="transformers")
    stranger = _for_vllm(llama)
    with pytest.raises(UserError, match="vLLM is not installed; where aegis was cloned: pip install"):
        engines.attach(stranger.spec, stranger.base)
    engines.discard(stranger.spec)
    engines.detach(stranger.spec.model)
    engines.attach(llama.spec, llama.base)
    run = begin(engines, arena, llama, 1, [3, 5, 7], room=4)
    assert run.ids == llama.greedy(run.prompt, 1)
    assert engines.initialisations == 1, "one that fails does not count"


def test_an_instance_whose_engine_is_not_installed_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_vllm(monkeypatch)
    with pytest.raises(UserError, match="vLLM is not installed"):
        Engines(Arena().region, device="cpu", first="vllm")
