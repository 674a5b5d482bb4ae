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
    from aegis.config.config import config_schema

    print(json.dumps(config_schema(), indent=2))
    return 0


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A YAML file with settings.", show_default=False)],
) -> int:
    """List the mistakes of a configuration file, one a line: its line, its key, what was expected.

    It is read as `aegis launch` reads it, but without options and variables; keys, certificates and models that it
    names are looked for, too. Exits with 2 if there is a mistake. A checkpoint that is not there is a warning: the
    others are served without it.

    \b
    Example:
      aegis config check aegis.yaml
    """
    from aegis.cli.config_check import look_at

    found = look_at(file)
    for mistake in found.mistakes:
        print(mistake)
    for warning in found.warnings:
        print(f"warning: {warning}")
    if not found.mistakes:
        print(f"{file}: no mistakes")
    return 2 if found.mistakes else 0
