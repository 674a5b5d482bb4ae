"""Files of results, and where they are to be."""

from pathlib import Path

import pytest

from aegis.core.errors import UserError
from bench.common.result_files import check, make_directory


def test_what_cannot_be_written_is_said_before(tmp_path: Path) -> None:
    check(tmp_path / "a.json")
    with pytest.raises(UserError, match=r"nowhere is no directory"):
        check(tmp_path / "nowhere" / "a.json")
    with pytest.raises(UserError, match=r"it is a directory"):
        check(tmp_path)


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
