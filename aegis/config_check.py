"""What is wrong with a configuration file, and with the files that it names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from aegis import config_sources
from aegis.config import Config
from aegis.core.errors import UserError
from aegis.models.sources import is_checkpoint
from aegis.runtime.configured import sources_of
from aegis.runtime.keyring import read_keyring
from aegis.yaml_file import lines_of


def mistakes(file: Path) -> list[str]:
    """A line for each. Files that it names are looked at where it has none of its own."""
    if found := config_sources.mistakes(file):
        return found
    config = config_sources.load({"config": file}, {})
    lines = {".".join(map(str, path)): line for path, line in lines_of(file).items()}
    return [f"{file}: {_line(lines, mistake)}{mistake}" for mistake in _of_named_files(config)]


def _line(lines: Mapping[str, int], mistake: str) -> str:
    """Of the key that it begins with."""
    line = lines.get(mistake.partition(": ")[0].partition(" ")[0])
    return f"line {line}: " if line else ""


def _of_named_files(config: Config) -> list[str]:
    found = []
    for look in (lambda: read_keyring(config), lambda: sources_of(config, demo=False)):
        try:
            look()
        except UserError as error:
            found.append(error.message)
    for name, entry in config.models.items():
        if entry.path and not is_checkpoint(Path(entry.path)):
            found.append(
                f"models.{name}.path: {entry.path} holds no config.json; it should be a checkpoint's directory"
            )
    return found
