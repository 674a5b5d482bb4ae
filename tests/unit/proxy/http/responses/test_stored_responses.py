"""Responses in a proxy's own memory: bounded, and for a while."""

from __future__ import annotations

import asyncio

from proxy.http.responses.stored_responses import ResponseMemory, key_of


def test_the_oldest_make_room_and_none_is_kept_too_long() -> None:
    now_s = 0.0
    memory = ResponseMemory(10.0, bytes_max=10, clock=lambda: now_s)

    async def main() -> None:
        nonlocal now_s
        for key in "ab":
            await memory.keep(key, b"1234")
            now_s += 1
        await memory.keep("a", b"12345")
        assert [await memory.find(key) for key in "ab"] == [b"12345", b"1234"]
        now_s += 1
        await memory.keep("c", b"12")
        assert [await memory.find(key) for key in "abc"] == [b"12345", None, b"12"], "b was the oldest"
        now_s = 12.0
        assert [await memory.find(key) for key in "abc"] == [None, None, b"12"]
        now_s = 13.5
        assert not await memory.remove("c")
        await memory.keep("d", b"1234567890")
        assert await memory.find("d") == b"1234567890", "what is over takes no room"
        await memory.keep("e", b"12345678901")
        assert await memory.find("e") is None, "what has no room is not kept"

    asyncio.run(main())


def test_callers_cannot_guess_keys_of_others() -> None:
    assert key_of("a/b", "c") != key_of("a", "b/c")
