"""The mistakes in a configuration file, and in the files that it names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aegis.config import sources
from aegis.config.config import Config
from aegis.config.keyring import read_key, refuse_duplicates, secrets_of
from aegis.config.mqtt_address import check_ca_file
from aegis.config.paths import refusing
from aegis.config.yaml_file import Lines
from aegis.core.api_keys import Key
from aegis.core.errors import UserError
from aegis.models.remote.address import parse
from aegis.models.sources import is_checkpoint, read_sources

_Place = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Findings:
    """The mistakes, a line each, in the order of the file's lines. `warnings` do not keep a server from being
    launched."""

    mistakes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def look_at(file: Path) -> Findings:
    """Files that the configuration names are checked only if it has no mistake of its own."""
    read = sources.look_at(file)
    if isinstance(read, list):
        return Findings(tuple(read))
    config, lines = read

    def located(found: Iterator[tuple[_Place, str]]) -> tuple[str, ...]:
        placed = sorted(((_line(lines, place), message) for place, message in found), key=lambda each: each[0])
        return tuple(f"{file}: line {line}: {message}" if line else f"{file}: {message}" for line, message in placed)

    return Findings(located(_mistakes(config)), located(_warnings(config)))


def _line(lines: Lines, place: _Place) -> int:
    """The line of the key, else of the nearest one around it."""
    return next((lines[place[:depth]] for depth in range(len(place), 0, -1) if place[:depth] in lines), 0)


def _mistakes(config: Config) -> Iterator[tuple[_Place, str]]:
    """The mistakes that keep a server from being launched."""
    keys: list[Key] = []
    for secret in secrets_of(config):
        try:
            key = read_key(secret)
            refuse_duplicates([*keys, key])
            keys.append(key)
        except UserError as error:
            yield secret.place, error.message
    yield from _certificate_mistakes(config)
    try:
        if config.mqtt.url and config.mqtt.ca_file:
            check_ca_file(config.mqtt.ca_file, "mqtt.ca_file")
    except UserError as error:
        yield ("mqtt", "ca_file"), error.message
    for name, entry in config.models.items():
        try:
            if entry.url:
                parse(entry.url)
        except UserError as error:
            yield ("models", name, "url"), f"models.{name}.url: {error.message}"
        try:
            if entry.path:
                _is_checkpoint(name, entry.path)
        except UserError as error:
            yield ("models", name, "path"), error.message
    named = set[str](config.models)
    for at, source in enumerate(config.sources):
        try:
            models = [each.model for each in read_sources([source])]
        except UserError as error:
            yield ("sources", at), error.message
            continue
        for model in models:
            if model in named:
                yield ("sources", at), f"two models are named '{model}'; rename one"
        named.update(models)


def _certificate_mistakes(config: Config) -> Iterator[tuple[_Place, str]]:
    """What is wrong with the certificate, in the words of `aegis launch`."""
    if not (certificate := config.server.ssl_certfile):
        return
    from proxy.http.settings import TlsFiles  # a quarter of a second, which files without one need not pay
    from proxy.live.certificate import Certificate

    try:
        Certificate(TlsFiles(certificate, config.server.ssl_keyfile or ""))
    except UserError as error:
        yield ("server", error.param), error.message


def _is_checkpoint(name: str, path: str) -> bool:
    """Raises UserError where `aegis launch` does."""
    with refusing(f"models.{name}.path", path):
        return is_checkpoint(Path(path).resolve())


def _warnings(config: Config) -> Iterator[tuple[_Place, str]]:
    """Models that would be refused now, while the others are served."""
    for name, entry in config.models.items():
        try:
            known = not entry.path or _is_checkpoint(name, entry.path)
        except UserError:  # which is a mistake
            continue
        if not known:
            located = (
                f"models.{name}.path: {entry.path} is no checkpoint: a directory with a config.json, or a .gguf file"
            )
            yield ("models", name, "path"), located
