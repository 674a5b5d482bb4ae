"""`aegis config`: the configuration file, without launching anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def schema() -> int:
    """Print the JSON Schema of the configuration file.

    Editors complete and check files by it: docs/configuration.md.

    \b
    Example:
      aegis config schema > aegis.schema.json
    """
    from aegis.config_schema import config_schema

    print(json.dumps(config_schema(), indent=2))
    return 0


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A YAML file with settings.", show_default=False)],
) -> int:
    """Say what is wrong with a configuration file, a line for each mistake: its line, its key, what was expected.

    It is read as `aegis launch` reads it, but without options and variables; keys and models that it names are looked
    for, too. Exits 2 where there is a mistake.

    \b
    Example:
      aegis config check aegis.yaml
    """
    from aegis.config_check import mistakes

    found = mistakes(file)
    for mistake in found:
        print(mistake)
    if not found:
        print(f"{file}: no mistakes")
    return 2 if found else 0
