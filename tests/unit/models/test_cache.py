"""Things in the cache are whole or absent, and made by one process at a time."""

import multiprocessing
import os
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from aegis.core.errors import UserError
from aegis.models.cache import default_cache_dir, locked, made, refuse_unmakeable, replacing


def test_the_environment_names_the_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AEGIS_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.delenv("AEGIS_CACHE")
    assert default_cache_dir() == Path.home() / ".cache" / "aegis"
    monkeypatch.setenv("AEGIS_CACHE", "~nobody.at.all/x")
    with pytest.raises(UserError, match=r"^AEGIS_CACHE: ~nobody\.at\.all/x: Could not determine home directory$"):
        default_cache_dir()


def test_a_cache_that_cannot_be_made_is_told_with_the_variable_that_names_another(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    long = ("x" * 300, "cannot be made: File name too long")
    for place, reason in (("file", "is no directory"), ("file/in", "cannot be made: Not a directory"), long):
        for refusing in (made, refuse_unmakeable):
            with pytest.raises(UserError) as told:
                refusing(tmp_path / place)
            advice = "name a writable directory with AEGIS_CACHE"
            assert told.value.message == f"the cache {tmp_path / place} {reason}; {advice}"
    refuse_unmakeable(tmp_path / "new" / "one")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert made(tmp_path / "new" / "one").is_dir()


def test_a_directory_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "thing"
    for content in ("first", "second"):
        with replacing(target) as draft:
            (draft / content).touch()
            assert not (target / content).exists()
        assert [file.name for file in target.iterdir()] == [content]


def test_what_replaces_is_on_the_disk_before_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power failure leaves no files without content in a directory that looks whole."""
    synced: list[str] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    with replacing(tmp_path / "thing") as draft:
        (draft / "in").mkdir()
        (draft / "in" / "small").touch()
        (draft / "large").touch()
    assert {*synced} == {str(draft / name) for name in ("", "in", "in/small", "large")}


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "thing"
    with replacing(target) as draft:
        (draft / "first").touch()
    with pytest.raises(KeyboardInterrupt), replacing(target) as draft:
        (draft / "second").touch()
        raise KeyboardInterrupt
    assert [file.name for file in target.iterdir()] == ["first"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["thing"]


def _hold(target: Path, held: Event, release: Event, log: Path) -> None:
    with locked(target):
        held.set()
        release.wait()
        log.write_text("the other is done")


def test_a_lock_keeps_other_processes_out(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    held, release, log = spawn.Event(), spawn.Event(), tmp_path / "log"
    other = spawn.Process(target=_hold, args=(tmp_path / "thing", held, release, log))
    other.start()
    held.wait()
    release.set()
    with locked(tmp_path / "thing"):
        assert log.read_text() == "the other is done"
    other.join()
