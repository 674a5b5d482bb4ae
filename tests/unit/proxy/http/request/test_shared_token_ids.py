from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from proxy.http.request.shared_token_ids import shared_ids


@given(st.lists(st.integers(0, 3000), max_size=40))
def test_ids_are_the_same_and_shared_by_all_prompts(ids: list[int]) -> None:
    one, other = shared_ids(ids), shared_ids([*map(int, map(str, ids))])
    assert list(one) == ids
    assert all(a is b for a, b in zip(one, other, strict=True))


def test_threads_may_ask_at_a_time() -> None:
    prompts = [list(range(first, first + 5000, 7)) for first in range(0, 40_000, 500)]
    with ThreadPoolExecutor(4) as threads:
        assert [list(found) for found in threads.map(shared_ids, prompts)] == prompts
