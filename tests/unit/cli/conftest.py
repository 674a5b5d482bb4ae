"""Commands as they are typed, in this process."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from aegis.cli.main import main


class Run:
    """The result of one command."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["aegis", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        self.code = exit_.value.code
        self.out, self.err = capsys.readouterr()


@pytest.fixture
def aegis(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda *arguments: Run(capsys, monkeypatch, *arguments)
