"""The bound of the cache on disk: who leaves, who stays, and what is said where nothing may leave."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aegis.core.errors import ModelRefused
from aegis.models.cache import locked
from aegis.models.disk_cache import DiskCache, Hold, use

KIB = 1 << 10
MIB = 1 << 20


def image(cache: Path, name: str, used_s: int, nbytes: int = MIB) -> Path:
    entry = cache / "images" / name
    entry.mkdir(parents=True)
    (entry / "image.bin").write_bytes(bytes(nbytes))
    use(entry)
    os.utime(entry.with_name(f".{name}.held"), (used_s, used_s))
    return entry


def checkpoint(cache: Path, name: str, used_s: int) -> Path:
    entry = cache / "checkpoints" / name
    (entry / "files").mkdir(parents=True)
    (entry / "partial").mkdir()
    (entry / "files" / "model.safetensors").write_bytes(bytes(MIB))
    (entry / "partial" / "other.safetensors").write_bytes(bytes(MIB // 2))
    (entry / "files" / "config.json").write_text("{}")
    (entry / "record.json").write_text("{}")
    use(entry)
    os.utime(entry.with_name(f".{name}.held"), (used_s, used_s))
    return entry


def make_room(cache: DiskCache, nbytes: int, keep: Path | None = None) -> None:
    with cache.room(nbytes, keep):
        pass


def there(cache: Path) -> set[str]:
    return {entry.path.name for entry in DiskCache(cache, None).entries()}


def test_those_longest_unused_leave_and_no_more_than_must(tmp_path: Path) -> None:
    for name, used_s in (("b", 20), ("a", 10), ("c", 30)):
        image(tmp_path, name, used_s)
    cache = DiskCache(tmp_path, 3 * MIB)
    cache.trim([])
    assert there(tmp_path) == {"a", "b", "c"}
    make_room(cache, MIB // 2)
    assert there(tmp_path) == {"b", "c"}
    use(tmp_path / "images" / "b")
    make_room(cache, 2 * MIB)
    assert there(tmp_path) == {"b"}, "it was used since"


def test_without_a_bound_nothing_leaves(tmp_path: Path) -> None:
    image(tmp_path, "a", 10)
    make_room(DiskCache(tmp_path, None), 1 << 50)
    assert there(tmp_path) == {"a"}


def test_of_a_checkpoint_its_weights_leave_and_what_is_known_of_it_stays(tmp_path: Path) -> None:
    entry = checkpoint(tmp_path, "a", 10)
    make_room(DiskCache(tmp_path, 2 * MIB), 2 * MIB)
    assert there(tmp_path) == set()
    left = {str(path.relative_to(entry)) for path in entry.rglob("*") if path.is_file()}
    assert left == {"files/config.json", "record.json"}


def test_what_is_held_or_written_or_kept_stays(tmp_path: Path) -> None:
    held, written, kept = image(tmp_path, "held", 1), checkpoint(tmp_path, "written", 2), image(tmp_path, "kept", 3)
    image(tmp_path, "free", 4)
    holding = Hold(held)
    cache = DiskCache(tmp_path, 5 * MIB)
    with locked(written):
        make_room(cache, MIB, kept)
        assert there(tmp_path) == {"held", "written", "kept"}
        with pytest.raises(ModelRefused, match="4 MiB may not leave; raise --cache-size"):
            make_room(cache, 4 * MIB, kept)
    holding.release()
    make_room(cache, 4 * MIB, kept)
    assert there(tmp_path) == {"kept"}


def test_what_can_never_fit_is_refused_and_nobody_leaves_for_it(tmp_path: Path) -> None:
    image(tmp_path, "a", 10)
    with pytest.raises(ModelRefused, match=r"takes 3 MiB on disk.* the cache holds 2 MiB; raise --cache-size"):
        make_room(DiskCache(tmp_path, 2 * MIB), 3 * MIB)
    assert there(tmp_path) == {"a"}


def test_another_process_holds_what_it_needs_until_it_ends(tmp_path: Path) -> None:
    entry = image(tmp_path, "a", 10)
    holds = f"from aegis.models.disk_cache import Hold; from pathlib import Path; h = Hold(Path({str(entry)!r}))"
    command = [sys.executable, "-c", f"{holds}; print('held', flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "held\n"
        with pytest.raises(ModelRefused):
            make_room(DiskCache(tmp_path, MIB), MIB)
        process.kill()
    make_room(DiskCache(tmp_path, MIB), MIB)
    assert there(tmp_path) == set()


def test_what_is_promised_is_nobody_else_s_until_it_is_written_or_its_process_ends(tmp_path: Path) -> None:
    cache, entry = DiskCache(tmp_path, 4 * MIB), tmp_path / "checkpoints" / "a"
    (entry / "files").mkdir(parents=True)
    with cache.room(3 * MIB, entry):
        with pytest.raises(ModelRefused, match="3 MiB may not leave"):
            make_room(cache, 2 * MIB)
        with locked(entry):
            (entry / "files" / "model.safetensors").write_bytes(bytes(2 * MIB))
            make_room(cache, MIB)  # what has come is not counted twice
            with pytest.raises(ModelRefused, match="3 MiB may not leave"):
                make_room(cache, 2 * MIB)
    make_room(cache, 2 * MIB)
    imports = "from aegis.models.disk_cache import DiskCache; from pathlib import Path"
    opened = f"c = DiskCache(Path({str(tmp_path)!r}), {4 * MIB})"
    command = [
        sys.executable,
        "-c",
        f"{imports}\n{opened}\nwith c.room({3 * MIB}): print('promised', flush=True); input()",
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "promised\n"
        with pytest.raises(ModelRefused):
            make_room(cache, 2 * MIB)
        process.kill()
    make_room(cache, 4 * MIB)
    assert not list((tmp_path / "promises").iterdir())


def test_what_leaves_while_it_is_counted_takes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process removes what it makes anew, and renames what has come whole."""
    image(tmp_path, "a", 1)
    fetched, found = checkpoint(tmp_path, "c", 2), Path.stat

    def leaving(path: Path, **options: bool) -> os.stat_result:
        result = found(path, **options)
        if path.name == "model.safetensors":
            shutil.rmtree(fetched)
        return result

    monkeypatch.setattr(Path, "stat", leaving)
    make_room(DiskCache(tmp_path, 4 * MIB), MIB)
    assert there(tmp_path) == {"a"}


def test_what_cannot_be_held_is_used_all_the_same(tmp_path: Path) -> None:
    entry = image(tmp_path, "a", 10)
    entry.with_name(".a.held").unlink()
    entry.with_name(".a.held").mkdir()
    Hold(entry).release()
    assert there(tmp_path) == {"a"}
