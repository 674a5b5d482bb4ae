"""Files of results, and where they are to be."""

import errno
import os
from pathlib import Path

import pytest

from aegis.core.errors import UserError
from bench.common import result_files
from bench.common.result_files import check, check_all, make_directory, write
from bench.simulate import plot_files


def test_what_cannot_be_written_is_said_before(tmp_path: Path) -> None:
    check(tmp_path / "a.json")
    with pytest.raises(UserError, match=r"nowhere is no directory"):
        check(tmp_path / "nowhere" / "a.json")
    with pytest.raises(UserError, match=r"it is a directory"):
        check(tmp_path)


def test_names_and_places_that_no_file_can_have_are_said_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"cannot write .*: File name too long"):
        check(tmp_path / ("a" * 300))
    with pytest.raises(UserError, match=r"nowhere is no directory"):
        plot_files.check(tmp_path / "nowhere" / "a.png")
    monkeypatch.setattr(result_files.os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(UserError, match=r"cannot write .*a\.json: that is not allowed"):
        check(tmp_path / "a.json")


def test_options_of_a_command_name_files_of_their_own(tmp_path: Path) -> None:
    check_all([tmp_path / "a.json", tmp_path / "b.json"])
    check_all([Path("/dev/null"), Path("/dev/null")])
    (tmp_path / "link.json").symlink_to(tmp_path / "a.json")
    for other in ("a.json", "link.json"):
        with pytest.raises(UserError, match=rf"cannot write .*{other}: two options name it"):
            check_all([tmp_path / "a.json", tmp_path / other])


def test_a_device_that_is_full_leaves_what_there_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, plainly = tmp_path / "a.json", Path.write_bytes
    write(file, b"before")

    def half(self: Path, content: bytes) -> int:
        plainly(self, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(UserError, match=r"cannot write .*a\.json: No space left on device"):
        write(file, b"afterwards")
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"] and file.read_bytes() == b"before"


def test_links_and_devices_stay_what_they_are(tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "a.json")
    write(link, b"{}")
    assert link.is_symlink() and (tmp_path / "a.json").read_bytes() == b"{}"
    check(Path(os.devnull))
    write(Path(os.devnull), b"{}")
    assert Path(os.devnull).is_char_device()


def test_a_directory_is_made_unless_it_is_there(tmp_path: Path) -> None:
    for _ in range(2):
        make_directory(tmp_path / "runs")
        check(tmp_path / "runs" / "a.json")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot make the directory"):
        make_directory(tmp_path / "file")
    with pytest.raises(UserError, match="cannot make the directory"):
        make_directory(tmp_path / "no" / "parents")
    make_directory(tmp_path / "with" / "parents", parents=True)
    check(tmp_path / "with" / "parents" / "a.json")
