"""`aegis doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aegis import __version__
from aegis.cli.doctor import linked
from aegis.core.errors import UserError
from aegis.device.cuda.gpus import VisibleGpu
from aegis.engine.cpu.library import library
from aegis.models.cache import made


def test_it_says_what_is_here_and_what_would_run(aegis: Any, tmp_path: Path) -> None:
    file = tmp_path / "market.yaml"
    file.write_text("device: cpu\ninstances: {prefill: 2, decode: 3, devices: 2}\nmemory: {device: 256MiB}\n")
    run = aegis("doctor", "--config", str(file))
    told = {line[2:].split("  ")[0].strip(): line for line in run.out.splitlines()}
    assert run.code == 0
    assert __version__ in told["aegis"] and {"torch", "processors", "memory"} <= set(told)
    assert ("compiled" in told["decode steps"].split(":")[0]) == (library() is not None)
    assert "5 instances (2 prefill, 3 decode) on cpu, 2 devices of 256MiB for weights and KV" in told["launch"]


def test_what_cannot_be_launched_is_marked(aegis: Any, tmp_path: Path) -> None:
    file = tmp_path / "market.yaml"
    file.write_text("device: cpu\nmemory: {host: 900TiB}\n")
    run = aegis("doctor", "--config", str(file))
    assert run.code == 1
    assert [line[:8] for line in run.out.splitlines() if line.startswith("!")] == ["! launch"]
    assert "is more than this machine has" in run.out


@pytest.mark.parametrize("place", ["file", "file/in"])
def test_a_cache_that_launch_refuses_is_marked(
    aegis: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("AEGIS_CACHE", str(tmp_path / place))
    with pytest.raises(UserError) as refused:
        made(tmp_path / place)
    run = aegis("doctor")
    assert run.code == 1
    assert [line for line in run.out.splitlines() if refused.value.message in line and line.startswith("! images")]


def test_a_cache_that_is_not_there_yet_is_not_made(aegis: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AEGIS_CACHE", str(tmp_path / "new" / "one"))
    assert f"in {tmp_path / 'new' / 'one'}, " in aegis("doctor").out
    assert not list(tmp_path.iterdir())


def test_links_are_said_as_far_as_they_are_known() -> None:
    assert list(linked(VisibleGpu(0, "H100", 1, pcie=(5, 16), nvlinks=18))) == ["PCIe 5 x16 (63 GB/s)", "18 NVLinks"]
    assert list(linked(VisibleGpu(0, "A10", 1))) == []
