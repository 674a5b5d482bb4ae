"""The keys of a server, read from its configuration and the files it names, and what its HTTP layer is told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr

from aegis.config.config import Config, RateLimits
from aegis.config.paths import refusing
from aegis.core.api_keys import Caller, Key, Keyring, digest_of, is_key
from aegis.core.errors import UserError
from aegis.core.limits import Limits

_FILE_BYTES_MAX = 64 << 10


@dataclass(frozen=True, slots=True)
class Secret:
    """A key as it is told: itself, or the file that holds it. `place` is the key of the configuration, `name` what
    messages call it."""

    place: tuple[str, ...]
    name: str
    key: SecretStr | None
    file: str | None
    caller: Caller


def secrets_of(config: Config) -> Iterator[Secret]:
    """The secrets of callers, then the admin's."""
    server = config.server

    def of_server(name: str, caller: Caller) -> Iterator[Secret]:
        key, file = getattr(server, name), getattr(server, f"{name}_file")
        if key is not None or file is not None:
            yield Secret(("server", name if file is None else f"{name}_file"), name, key, file, caller)

    yield from of_server("api_key", Caller("default"))
    for name, entry in config.api_keys.items():
        caller = Caller(name, limits_of(entry.limits))
        yield Secret(("api_keys", name), f"api_keys.{name}", entry.key, entry.file, caller)
    yield from of_server("admin_key", Caller("admin", is_admin=True))


def read_keyring(config: Config) -> Keyring:
    """Raises UserError, which quotes no key."""
    keys = [read_key(secret) for secret in secrets_of(config)]
    refuse_duplicates(keys)
    admin = next((key for key in keys if key.caller.is_admin), None)
    return Keyring(tuple(key for key in keys if key is not admin), admin)


def key_files_of(config: Config) -> list[Path]:
    """The files that `read_keyring` reads. Raises UserError."""
    return [_path(secret.name, secret.file) for secret in secrets_of(config) if secret.file is not None]


def limits_of(limits: RateLimits) -> Limits:
    return Limits(limits.requests_per_minute, limits.tokens_per_minute, limits.concurrent)


def read_key(secret: Secret) -> Key:
    """Raises UserError, which does not quote it."""
    if secret.key is not None:
        where, key = secret.name, secret.key.get_secret_value()
    else:
        assert secret.file is not None
        where, key = f"{secret.name} in {secret.file}", _read(secret.name, _path(secret.name, secret.file))
    if not is_key(key):
        raise UserError(f"{where}: a key is one word of printable ASCII characters")
    return Key(digest_of(key), secret.caller)


def _path(where: str, file: str) -> Path:
    with refusing(where, file):
        return Path(file).expanduser()


def _read(where: str, file: Path) -> str:
    try:
        with file.open("rb") as opened:
            content = opened.read(_FILE_BYTES_MAX + 1)
        if len(content) > _FILE_BYTES_MAX:
            raise UserError(f"{where}: {file} has more than {_FILE_BYTES_MAX >> 10} KiB, which is all that is read")
        return content.decode().strip()
    except OSError as error:
        raise UserError(f"{where}: {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{where}: {file} is no text") from None
    except ValueError as error:  # no file can have such a name
        raise UserError(f"{where}: {str(file)!r} cannot be read: {error}") from None


def refuse_duplicates(keys: Sequence[Key]) -> None:
    """Raises UserError if two are the same, or are of the same name: what is a caller's own would be both's."""
    names: dict[bytes, str] = {}
    for key in keys:
        if key.caller.name in names.values():
            name = key.caller.name
            raise UserError(f"the name '{name}' is that of the server's own key; give api_keys.{name} another one")
        if key.digest in names:
            raise UserError(f"'{names[key.digest]}' and '{key.caller.name}' have the same key; give each its own")
        names[key.digest] = key.caller.name
