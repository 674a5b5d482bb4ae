"""Clients connect over TLS, and a renewed certificate needs no restart."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from aegis.core.errors import UserError
from proxy.http.settings import TlsFiles
from proxy.live import certificate as module
from proxy.live.certificate import Certificate
from tests.certificates import make_certificate
from tests.unit.proxy.http.live import serving
from tests.unit.proxy.http.scripted import market


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    made = TlsFiles(str(tmp_path / "certificate.pem"), str(tmp_path / "key.pem"))
    make_certificate(Path(made.certificate), Path(made.key))
    return made


def shown(context: ssl.SSLContext) -> bytes | None:
    """The certificate that a client of a server with this context sees."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    client, server = trusting.wrap_bio(incoming, outgoing), context.wrap_bio(outgoing, incoming, server_side=True)
    for _ in range(3):
        for side in (client, server):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return client.getpeercert(binary_form=True)


def test_a_client_that_trusts_it_is_answered_and_another_one_refuses(files: TlsFiles) -> None:
    trusted = ssl.create_default_context(cafile=files.certificate)
    with serving(market(), tls=files) as url:
        assert url.startswith("https://")
        answer = httpx.get(f"{url}/health", verify=trusted, trust_env=False)
        assert answer.status_code == httpx.codes.OK
        with httpx.stream("GET", f"{url}/v1/models", verify=trusted, trust_env=False) as streamed:
            assert b"data" in streamed.read()
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{url}/health", trust_env=False)
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(f"{url.replace('https', 'http')}/health", trust_env=False)


@contextmanager
def looking_often() -> Iterator[None]:
    before, module.LOOK_S = module.LOOK_S, 0.005
    try:
        yield
    finally:
        module.LOOK_S = before


def test_a_renewed_one_is_shown_from_then_on(files: TlsFiles, caplog: pytest.LogCaptureFixture) -> None:
    certificate = Certificate(files)
    first = shown(certificate.context)

    async def renew() -> None:
        watching = asyncio.create_task(certificate.watch())
        new, key = Path(f"{files.certificate}.new"), Path(f"{files.key}.new")
        make_certificate(new, key)
        with caplog.at_level(logging.INFO):
            new.replace(files.certificate)  # for a moment it does not fit the key
            while "stays as it was" not in caplog.text:
                await asyncio.sleep(0.005)
            assert shown(certificate.context) == first
            key.replace(files.key)
            while "certificate renewed" not in caplog.text:
                await asyncio.sleep(0.005)
        watching.cancel()

    with looking_often():
        asyncio.run(asyncio.wait_for(renew(), 30))
    assert shown(certificate.context) not in (first, None)


def test_what_cannot_be_used_is_a_line(tmp_path: Path, files: TlsFiles) -> None:
    other, locked, rubbish = tmp_path / "other.pem", tmp_path / "locked.pem", tmp_path / "rubbish.pem"
    make_certificate(tmp_path / "unused.pem", other)
    make_certificate(tmp_path / "locked-certificate.pem", locked, password="secret")
    rubbish.write_text("no certificate")
    for wrong, line in (
        (TlsFiles("/nowhere"), "--ssl-certfile: there is no file /nowhere"),
        (TlsFiles(files.certificate, "/nowhere"), "--ssl-keyfile: there is no file /nowhere"),
        (TlsFiles(files.certificate, str(other)), "cannot be used with its key: key values mismatch; both have to be"),
        (TlsFiles(str(tmp_path / "locked-certificate.pem"), str(locked)), "the key without a password"),
        (TlsFiles(files.certificate), f"{files.certificate}: it holds no private key; name the file of its key with"),
        (TlsFiles(str(rubbish)), "cannot be used with its key: one of them is no pem; both have to be"),
    ):
        with pytest.raises(UserError) as raised:
            Certificate(wrong)
        assert line in raised.value.message and "\n" not in raised.value.message


def test_the_one_of_the_two_that_may_not_be_read_is_named(files: TlsFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def refused(path: Path, *args: Any, **kwargs: Any) -> Any:
        if str(path) == files.key:
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(UserError) as raised:
        Certificate(files)
    assert raised.value.message == f"--ssl-keyfile: {files.key} cannot be read: Permission denied"


def test_the_key_may_be_in_the_file_of_the_certificate(tmp_path: Path, files: TlsFiles) -> None:
    both = tmp_path / "both.pem"
    both.write_text("".join(Path(file).read_text() for file in (files.certificate, files.key)))
    assert shown(Certificate(TlsFiles(str(both))).context) is not None
