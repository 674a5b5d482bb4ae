import json

import pytest

from aegis.control.commands import CommandLog, Unanswerable, read
from aegis.control.messages import Order, Pin, Reply, encode

ORDER = Order(id="1", client="me", command=Pin("llama"))
NESTED = b'{"x":' + b"[" * 2_000 + b"]" * 2_000 + b"}"
DONE = Reply(id="1", instance="mixed-0", done=True, message="pinned")


def test_an_order_is_read_as_it_was_written() -> None:
    assert read(encode(ORDER), "mixed-0") == ORDER


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"command": {"do": "explode"}}, "no such order"),
        ({"command": {"do": "pin"}}, "no such order"),
        ({"command": {"do": "pin", "model": "../../etc"}}, "no such order"),
        ({"command": {"do": "set_limit", "nbytes": -1}}, "no such order"),
        ({"protocol": 99}, "speaks 99"),
    ],
)
def test_what_cannot_be_done_is_refused_to_whom_it_concerns(change: dict[str, object], why: str) -> None:
    client, reply = read(json.dumps(json.loads(encode(ORDER)) | change).encode(), "mixed-0")  # type: ignore[misc]
    assert client == "me"
    assert not reply.done
    assert reply.id == "1"
    assert why in reply.message


@pytest.mark.parametrize("payload", [b"", b"\xff", b"[]", b'{"id": "1"}', b'{"id": "1", "client": "a/#"}', NESTED])
def test_what_names_nobody_is_not_answered(payload: bytes) -> None:
    with pytest.raises(Unanswerable):
        read(payload, "mixed-0")


def test_an_order_is_done_once() -> None:
    book = CommandLog()
    assert book.begin("mixed-0", ORDER) is True
    assert book.begin("mixed-0", ORDER) is False
    book.end("mixed-0", ORDER, DONE)
    assert book.begin("mixed-0", ORDER) == DONE
    assert book.begin("mixed-1", ORDER) is True


def test_the_oldest_that_are_done_are_forgotten() -> None:
    book = CommandLog(remembered=1)
    orders = [Order(id=str(n), client="me", command=Pin("llama")) for n in range(3)]
    for order in orders:
        assert book.begin("mixed-0", order) is True
        book.end("mixed-0", order, DONE)
    assert book.begin("mixed-0", orders[2]) == DONE
    assert book.begin("mixed-0", orders[0]) is True
