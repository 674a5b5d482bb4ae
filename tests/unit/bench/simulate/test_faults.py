"""`aegis simulate --faults`, as it is called."""

from __future__ import annotations

import shlex

import pytest

from aegis.cli.commands import app
from aegis.core.errors import UserError
from memory.handed_kv import HandedKv


def call(*arguments: str) -> int:
    code = app(["simulate", *arguments], standalone_mode=False)
    assert isinstance(code, int)
    return code


def test_seeds_that_keep_the_laws_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--faults", "--seeds", "3", "--jobs", "1") == 0
    assert capsys.readouterr().out == "3 seeds, 0 of them broke a law\n"


def test_one_that_breaks_a_law_is_named_with_what_plays_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(HandedKv, "release", lambda *_: None)
    assert call("--fault", "crash", "--seeds", "12", "--jobs", "1", "--last", "2") == 1
    first, second, command = capsys.readouterr().out.splitlines()[:3]
    assert first.startswith("  ") and second.startswith("  ")
    again = shlex.split(command.partition("#")[0])
    assert again[:5] == ["aegis", "simulate", "--faults", "--fault", "crash"]
    assert call(*again[2:], "--jobs", "1", "--last", "2") == 1
    assert capsys.readouterr().out.splitlines()[:3] == [first, second, command]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--fault", "flood"), "there is no 'flood'"),
        (("--faults", "--policy", "qlm"), "--policy is not of --faults"),
        (("--last", "3", "--workload", "poisson"), "--last is of --faults"),
    ],
)
def test_what_is_not_meant_is_refused(arguments: tuple[str, ...], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        call(*arguments)
