"""What a command says to a server by its address."""

from __future__ import annotations

import pytest

from aegis.admin_client import AdminClient
from aegis.core.errors import UserError


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_an_address_may_be_that_of_the_api(end: str) -> None:
    with pytest.raises(UserError, match=r"^no server at http://127\.0\.0\.1:1 \("):
        AdminClient(f"http://127.0.0.1:1{end}").models()
