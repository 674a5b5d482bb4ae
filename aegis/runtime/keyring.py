"""The keys of a server, read from its configuration and the files it names, and what its HTTP layer is told."""

from __future__ import annotations

from pathlib import Path

from pydantic import SecretStr

from aegis.config import Config, RateLimits
from aegis.core.errors import UserError
from aegis.core.limits import Limits
from proxy.http.callers import Caller, Key, Keyring, digest_of
from proxy.http.settings import Settings

_KEY_CHARACTERS_MAX = 4096


def http_settings(config: Config) -> Settings:
    server = config.server
    return Settings(
        status_needs_key=server.status_needs_key,
        cors_origins=server.cors_origins,
        body_bytes_max=server.body_max,
        reader_timeout_s=server.reader_timeout_s,
        logs_prompts=server.log_prompts,
    )


def read_keyring(config: Config) -> Keyring:
    """Raises UserError, which quotes no key."""
    server, callers = config.server, []
    if key := _key("api_key", server.api_key, server.api_key_file, Caller("default")):
        callers.append(key)
    for name, entry in config.api_keys.items():
        caller = Caller(name, limits_of(entry.limits))
        if key := _key(f"api_keys.{name}", entry.key, entry.file, caller):
            callers.append(key)
    admin = _key("admin_key", server.admin_key, server.admin_key_file, Caller("admin", is_admin=True))
    _refuse_twins([*callers, admin] if admin else callers)
    return Keyring(tuple(callers), admin)


def key_files_of(config: Config) -> list[Path]:
    """Those that `read_keyring` reads."""
    server = config.server
    named = [server.api_key_file, server.admin_key_file, *(entry.file for entry in config.api_keys.values())]
    return [Path(file).expanduser() for file in named if file is not None]


def limits_of(limits: RateLimits) -> Limits:
    return Limits(limits.requests_per_minute, limits.tokens_per_minute, limits.concurrent)


def _key(where: str, secret: SecretStr | None, file: str | None, caller: Caller) -> Key | None:
    if secret is not None:
        key = secret.get_secret_value()
    elif file is not None:
        where, key = f"{where} in {file}", _read(where, Path(file).expanduser())
    else:
        return None
    if not (0 < len(key) <= _KEY_CHARACTERS_MAX and key.isascii() and key.isprintable() and " " not in key):
        raise UserError(f"{where}: a key is one word of printable ASCII characters")
    return Key(digest_of(key), caller)


def _read(where: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UserError(f"{where}: {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{where}: {file} is no text") from None


def _refuse_twins(keys: list[Key]) -> None:
    names: dict[bytes, str] = {}
    for key in keys:
        if key.digest in names:
            raise UserError(f"'{names[key.digest]}' and '{key.caller.name}' have the same key; give each its own")
        names[key.digest] = key.caller.name
