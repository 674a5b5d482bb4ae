"""The classes that checkpoints name, of whatever kind their configuration is."""

from __future__ import annotations

import json
import os
from pathlib import Path

from aegis.core.ids import ModelId
from aegis.models.architectures import architectures_of
from aegis.models.sources import Source


def _source(directory: Path, name: str, config: object) -> Source:
    path = directory / name
    path.mkdir()
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return Source(ModelId(name), str(path))


def test_each_architecture_is_named_once(tmp_path: Path) -> None:
    names = {"a": "LlamaForCausalLM", "b": "BertModel", "c": "LlamaForCausalLM"}
    sources = [_source(tmp_path, name, {"architectures": [of]}) for name, of in names.items()]
    assert architectures_of([*sources, Source(ModelId("d"), hub="org/d")]) == ["BertModel", "LlamaForCausalLM"]


def test_what_is_no_class_or_no_configuration_is_left_out(tmp_path: Path) -> None:
    odd = [{"architectures": ["pipeline", "os", 3, "A.BModel"]}, {"architectures": "XModel"}, [], "{", "[" * 100_000]
    sources = [_source(tmp_path, f"m{at}", config) for at, config in enumerate(odd)]
    assert architectures_of([*sources, Source(ModelId("gone"), str(tmp_path / "gone"))]) == []


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert architectures_of([Source(ModelId("m"), str(tmp_path))]) == []
