"""What a command says to a server by its address."""

from __future__ import annotations

import pytest

from aegis.admin_client import AdminClient, tls_mistake
from aegis.core.errors import UserError


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
