"""Keys from the configuration and the files it names; no message quotes one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aegis.config.config import Config
from aegis.config.keyring import read_keyring
from aegis.config.sources import load
from aegis.core.api_keys import Caller
from aegis.core.errors import UserError
from aegis.core.limits import Limits
from proxy.live.serving import http_settings


def config(**changes: Any) -> Config:
    return Config.model_validate(changes)


def test_keys_are_found_by_what_is_sent(tmp_path: Path) -> None:
    (tmp_path / "bob").write_text("sk-bob\n")
    text = "server: {api_key: sk-one, admin_key: boss}\n"
    text += "api_keys:\n  alice: {key: sk-alice, limits: {requests_per_minute: 5}}\n  bob: {file: bob}\n"
    (tmp_path / "c.yaml").write_text(text)
    keys = read_keyring(load({"config": tmp_path / "c.yaml"}, {}))
    assert keys.find("sk-one") == Caller("default")
    assert keys.find("sk-alice") == Caller("alice", Limits(requests_per_minute=5))
    assert keys.find("sk-bob") == Caller("bob")
    assert keys.find("boss") == Caller("admin", is_admin=True)
    assert keys.find("") is keys.find("sk-alice ") is None
    assert "sk-" not in repr(keys) and "boss" not in repr(keys)


def test_they_come_from_the_environment_and_from_options_too(tmp_path: Path) -> None:
    (tmp_path / "admin").write_text("boss")
    keys = read_keyring(load({"admin_key_file": str(tmp_path / "admin")}, {"AEGIS_API_KEY": "sk-env"}))
    assert keys.find("sk-env") and keys.find("boss") == Caller("admin", is_admin=True)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"server": {"api_key": "s3cret one"}}, "api_key: a key is one word"),
        ({"server": {"api_key_file": "/nowhere/at/all"}}, "api_key: /nowhere/at/all cannot be read"),
        ({"server": {"api_key_file": "~nobody.at.all/x"}}, "^api_key: ~nobody.at.all/x: "),
        ({"server": {"api_key_file": "/dev/zero"}}, "^api_key: /dev/zero has more than 64 KiB, which"),
        ({"server": {"admin_key_file": "/dev/zero"}}, "^admin_key: /dev/zero has more than 64 KiB"),
        ({"api_keys": {"a": {"file": "a\0b"}}}, r"^api_keys.a: 'a\\x00b' cannot be read: "),
        ({"server": {"api_key": "s3cret", "admin_key": "s3cret"}}, "'default' and 'admin' have the same key"),
        ({"api_keys": {"a": {"key": "s3cret"}, "b": {"key": "s3cret"}}}, "'a' and 'b' have the same key"),
        ({"api_keys": {"admin": {"key": "s3cret"}}, "server": {"admin_key": "other"}}, "'admin' is that of the server"),
        ({"api_keys": {"default": {"key": "s3cret"}}, "server": {"api_key": "other"}}, "'default' is that of the"),
    ],
)
def test_what_is_no_key_is_refused_and_not_quoted(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        read_keyring(config(**changes))
    assert "s3cret" not in caught.value.message


def test_a_key_of_a_wrong_type_is_not_quoted(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("server:\n  api_key: 12345\n")
    with pytest.raises(UserError, match=r"line 2: server\.api_key: should be a valid string") as caught:
        load({"config": tmp_path / "c.yaml"}, {})
    assert "12345" not in caught.value.message


def test_the_http_layer_is_told_the_rest() -> None:
    settings = http_settings(config(server={"body_max": "1MiB", "cors_origins": ["*"], "log_prompts": True}))
    assert (settings.body_bytes_max, settings.cors_origins, settings.logs_prompts) == (1 << 20, ("*",), True)
