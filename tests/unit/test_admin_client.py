"""What a command says to a server by its address."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from pathlib import Path

import httpx
import pytest

from aegis import admin_client
from aegis.admin_client import ADMIN_KEY, API_KEY, AdminClient, tls_mistake, why_unreached
from aegis.core.errors import UserError
from aegis.telemetry.live_view import SeenUntil

GZIPPED = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 5\r\n\r\nhello"
"""By its head."""


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_an_address_may_be_that_of_the_api(end: str) -> None:
    with pytest.raises(UserError, match=r"^no server at http://127\.0\.0\.1:1 \("):
        AdminClient(f"http://127.0.0.1:1{end}").models()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "unable to get local issuer certificate",
            "(unable to get local issuer certificate); SSL_CERT_FILE=FILE names",
        ),
        ("certificate has expired", "(certificate has expired); renew it"),
        (
            "IP address mismatch, certificate is not valid for '::1'.",
            "(IP address mismatch, certificate is not valid for '::1'); give an address that it names",
        ),
    ],
)
def test_a_certificate_that_is_not_trusted_is_told_with_what_helps(words: str, told: str) -> None:
    error = OSError(f"[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: {words} (_ssl.c:1006)")
    assert told in (tls_mistake("https://u", error) or "")


def test_another_failure_is_no_matter_of_tls() -> None:
    assert tls_mistake("http://u", OSError("All connection attempts failed")) is None
    assert tls_mistake("https://u", OSError("Server disconnected")) is None


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 8000)"), "Connection refused"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (httpx.ConnectError("[Errno 111] Connection refused"), "Connection refused"),
        (httpx.ConnectError("[Errno -2] Name or service not known"), "Name or service not known"),
        (ssl.SSLError(1, "handshake failure"), "handshake failure"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_a_server_that_is_away_is_told_in_the_words_of_the_system(error: Exception, told: str) -> None:
    assert told in why_unreached(error)
    assert "Errno" not in why_unreached(error)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "a b",
        "ftp://a",
        "http://",
        "http://:8000",
        "http://127.0.0.1:101951",
        "http://127.0.0.1:http",
        "http://127.0.0.1:80\n00",
        "http://[::1",
        "http://a..b",
        "http://a b",
        f"http://{'a' * 64}.org",
    ],
)
def test_an_address_that_no_server_can_have_is_refused_before_it_is_asked(url: str) -> None:
    with pytest.raises(UserError, match=r"^--url: '[^']*' is no address of a server; give one like http://127"):
        AdminClient(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost:65535/",
        "https://user:word@example.org.:8000/behind/v1",
        "http://b\u00fccher.example",
        "http://my_host",
        "http://[::1]:8000",
        "http://[fe80::1%eth0]",
    ],
)
def test_other_addresses_are_not(url: str) -> None:
    AdminClient(url)


@pytest.mark.parametrize(
    ("path", "code", "told"),
    [
        (
            "/foo",
            "no_such_route",
            "the server at {url} has nothing at /foo; give its address without a path",
        ),
        ("/foo", "model_not_found", "GET /foo/v1/models: Not Found"),
        ("", "no_such_route", "GET /foo/v1/models: Not Found"),
    ],
)
def test_a_path_that_the_server_does_not_have_is_told(path: str, code: str, told: str) -> None:
    body = json.dumps({"error": {"message": "GET /foo/v1/models: Not Found", "code": code}})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reply = f"HTTP/1.1 404 Not Found\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
        answering = threading.Thread(target=_answer, args=(listener, reply))
        answering.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(UserError) as refused:
            AdminClient(url + path).models()
        answering.join()
    assert refused.value.message == told.format(url=url)


def test_an_answer_that_cannot_be_decoded_is_none_of_a_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(target=_answer, args=(listener, GZIPPED))
        answering.start()
        with pytest.raises(UserError, match=r"^no server at "):
            AdminClient(f"http://127.0.0.1:{listener.getsockname()[1]}").models()
        answering.join()


@pytest.mark.parametrize(("name", "reason"), [("gone", "No such file or directory"), ("text", "it holds no certifi")])
def test_certificates_that_cannot_be_read_are_told_where_they_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    (tmp_path / "text").write_text("no PEM")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / name))
    monkeypatch.setattr(admin_client, "_certificates", admin_client._certificates.__wrapped__)
    with pytest.raises(UserError, match=rf"^SSL_CERT_FILE: {tmp_path}/{name}: {reason}"):
        AdminClient("https://127.0.0.1:1").models()
    with pytest.raises(UserError, match=r"^no server at http://127\.0\.0\.1:1 "):
        AdminClient("http://127.0.0.1:1").models()


def test_what_is_live_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aegis.admin_client._LIVE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        url = f"http://127.0.0.1:{hanging.getsockname()[1]}"
        with pytest.raises(UserError, match=rf"^no server at {url} \(timed out\)"):
            AdminClient(url).live(SeenUntil())


def _answer(listener: socket.socket, reply: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(1 << 16)
        connection.sendall(reply)


@pytest.mark.parametrize("name", [ADMIN_KEY, API_KEY])
@pytest.mark.parametrize("key", ["cl\u00e9", "secret\n", " ", "two words"])
def test_what_is_no_key_is_refused_and_not_quoted(name: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADMIN_KEY, raising=False)
    monkeypatch.setenv(name, key)
    with pytest.raises(UserError, match=f"^{name}: a key is one word of printable ASCII characters$"):
        AdminClient("http://127.0.0.1:1")


def test_a_key_that_is_given_is_refused_like_one_of_the_environment() -> None:
    with pytest.raises(UserError, match=r"^--admin-key: a key is one word of printable ASCII characters$"):
        AdminClient("http://127.0.0.1:1", " ")
