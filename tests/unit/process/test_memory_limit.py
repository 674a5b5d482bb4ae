"""The memory of a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from aegis.process.memory_limit import memory_limit

MIB = 1 << 20


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return tmp_path / "own"


def limited(group: Path, name: str, told: str) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / name).write_text(f"{told}\n")


def test_without_a_limit_it_is_the_machine_s(tmp_path: Path, own: Path) -> None:
    machine = memory_limit(tmp_path, own)
    assert machine.nbytes > 64 * MIB and not machine.contained
    own.write_text("0::/a\n")
    limited(tmp_path / "a", "memory.max", "max")
    assert memory_limit(tmp_path, own) == machine


def test_the_least_limit_above_counts(tmp_path: Path, own: Path) -> None:
    own.write_text("0::/a/b\n")
    limited(tmp_path / "a/b", "memory.max", "max")
    limited(tmp_path / "a", "memory.max", str(32 * MIB))
    limited(tmp_path.parent, "memory.max", str(MIB))  # no group
    assert memory_limit(tmp_path, own) == (32 * MIB, True)
    limited(tmp_path / "a/b", "memory.max", str(16 * MIB))
    assert memory_limit(tmp_path, own) == (16 * MIB, True)


def test_a_path_seen_from_outside_only_is_the_container_s_own(tmp_path: Path, own: Path) -> None:
    own.write_text("4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n")
    limited(tmp_path / "memory", "memory.limit_in_bytes", str(32 * MIB))
    assert memory_limit(tmp_path, own) == (32 * MIB, True)


def test_no_limit_of_the_first_version_is_a_large_number(tmp_path: Path, own: Path) -> None:
    own.write_text("4:cpu,memory:/a\n")
    limited(tmp_path / "memory/a", "memory.limit_in_bytes", str((1 << 63) - 4096))
    assert not memory_limit(tmp_path, own).contained
