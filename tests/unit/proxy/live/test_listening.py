"""A port is shared by the proxies of one server, and by nobody else."""

from __future__ import annotations

import pytest

from aegis.core.errors import UserError
from proxy.live.listening import listen, share

HOST = "127.0.0.1"


@pytest.mark.parametrize("shared", [False, True])
def test_a_port_is_taken_once(shared: bool) -> None:
    with listen(HOST, 0, shared=shared) as first:
        port = first.getsockname()[1]
        for other in (False, True):
            with pytest.raises(UserError, match="choose another --port"):
                listen(HOST, port, shared=other)


@pytest.mark.parametrize("host", ["999.1.1.1", "nope.invalid", "1.2.3.4", "::zz", "a" * 70, "a..b"])
@pytest.mark.parametrize("shared", [False, True])
def test_an_address_that_is_none_of_this_machine_is_a_matter_of_the_host(host: str, shared: bool) -> None:
    with pytest.raises(UserError, match=r"^cannot listen on .*; choose another --host$"):
        listen(host, 0, shared=shared)


def test_further_proxies_listen_on_a_shared_one() -> None:
    with listen(HOST, 0, shared=True) as first, share(HOST, first.getsockname()[1]) as second:
        assert first.getsockname() == second.getsockname()


def test_nobody_joins_one_that_is_not_shared() -> None:
    with listen(HOST, 0, shared=False) as first, pytest.raises(UserError, match=HOST):
        share(HOST, first.getsockname()[1])
