"""Errors of a server or its URL are one line, which never shows the password."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from pathlib import Path

import pytest
from pydantic import SecretStr

from aegis.config.config import RedisSettings
from aegis.core.errors import UserError
from aegis.metadata.connection import connect, shown
from aegis.metadata.store import open_store
from tests.redis_server import KINDS, RedisServer, redis_server
from tests.unit.metadata.proxies import asked

PASSWORD = "geheim"


def refusal(url: str) -> str:
    """The line with which a start ends."""

    async def main() -> None:
        async with open_store(RedisSettings(url=SecretStr(url))):
            raise AssertionError("it started")

    with pytest.raises(UserError) as caught:
        asyncio.run(main())
    assert PASSWORD not in caught.value.message
    assert "\n" not in caught.value.message
    return caught.value.message


def starts(url: str) -> None:
    async def main() -> None:
        async with open_store(RedisSettings(url=SecretStr(url))) as store:
            (await store.records.open(asked())).close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("url", "told"),
    [
        (f"redis://:{PASSWORD}@h:port/0", "cannot be read"),
        (f"redis://:{PASSWORD}@[h:1/0", "cannot be read"),
        (f"redis://:{PASSWORD}@h:1/main", "number of a database"),
        (f"redis://:{PASSWORD}@h:1/0?colour=red", "colour"),
        (f"redis://h:1/0?db=x&password={PASSWORD}", "db"),
        ("unix://", "socket"),
        (f"unix:///nowhere/at/all?password={PASSWORD}", "no such file"),
    ],
)
def test_a_url_that_names_no_server_is_refused(url: str, told: str) -> None:
    assert told in refusal(url)


def test_a_password_is_not_shown() -> None:
    assert shown(f"rediss://me:{PASSWORD}@host:6379/2?password={PASSWORD}") == "rediss://host:6379/2"


def test_a_client_does_not_connect_before_it_is_used() -> None:
    connect("redis://127.0.0.1:1/0", timeout_s=1)


def test_a_refused_connection_is_told(redis: RedisServer) -> None:
    redis.kill()
    assert f"redis://127.0.0.1:{redis.port}/0: connection refused" in refusal(redis.url)


def test_a_missing_database_is_told(redis: RedisServer) -> None:
    assert "no such database" in refusal(redis.url.replace("/0", "/99"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_password_is_told_and_the_right_one_works(kind: str, tmp_path: Path) -> None:
    with redis_server(kind, tmp_path, "--requirepass", PASSWORD) as server:
        for wrong in ("", f":{PASSWORD}x@", f"me:{PASSWORD}@"):
            assert "password" in refusal(server.url.replace("//", f"//{wrong}"))
        starts(server.url.replace("//", f"//:{PASSWORD}@"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_does_not_answer_is_told(kind: str, tmp_path: Path) -> None:
    with redis_server(kind, tmp_path) as server:
        server.pause()
        assert "does not answer" in refusal(server.url)


@pytest.mark.parametrize("kind", KINDS)
def test_tls_works_with_a_certificate_that_is_trusted(kind: str, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    make += f" -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}"
    subprocess.run(make.split(), check=True, capture_output=True)
    options = ["--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-auth-clients", "no"]
    if not _speaks_tls(kind, tmp_path, options):
        pytest.skip("this server was built without TLS")
    with redis_server(kind, tmp_path, *options, tls=True) as server:
        starts(f"{server.url}?ssl_ca_certs={certificate}")
        assert "not trusted" in refusal(server.url)
        assert "connection" in refusal(server.url.replace("rediss", "redis"))  # is closed, or reset
    with redis_server(kind, tmp_path) as server:
        assert "does not answer" in refusal(server.url.replace("redis", "rediss", 1))  # it waits for the line to end


def _speaks_tls(kind: str, directory: Path, options: list[str]) -> bool:
    try:
        with redis_server(kind, directory, *options, tls=True):
            return True
    except AssertionError:
        assert ssl.HAS_TLSv1_3
        return False
