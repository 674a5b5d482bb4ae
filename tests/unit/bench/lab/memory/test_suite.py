"""The measurements of memory run, tiny, and what they return adds up. How fast anything was is not judged."""

from bench.lab.memory import page_mapping, page_transfer, swap_out


def test_mapping() -> None:
    for scattered in (False, True):
        measured = page_mapping.mapping(4, scattered=scattered, repetitions=2)
        assert (measured.batch, measured.scattered) == (4, scattered)
        assert min(measured.map_ns, measured.unmap_ns, measured.calls_ns, measured.plain_ns) > 0


def test_reserving() -> None:
    assert page_mapping.reserving(1 << 40, repetitions=2).nbytes == 1 << 40


def test_first_touches_and_wiping() -> None:
    touch, wiping = page_mapping.first_touch(pages=1), page_mapping.wiping(pages=1, repetitions=1)
    assert min(touch.ahead_ns, touch.bare_ns, touch.recycled_ns, touch.returned_ns) > 0
    assert min(wiping.stream_ns, wiping.memset_ns, wiping.punch_ns) > 0


def test_swaps() -> None:
    measured = swap_out.swaps((16 << 10, 100 << 10, 2 << 20), (3, 7), region_bytes=8 << 20)
    assert [(swap.block_bytes >> 10, swap.blocks, swap.scattered) for swap in measured] == [
        *((kib, blocks, scattered) for kib in (16, 100) for blocks in (3, 7) for scattered in (False, True)),
        *((2048, 3, scattered) for scattered in (False, True)),
    ]


def test_handing() -> None:
    measured = page_transfer.handing(4 << 20, repetitions=2)
    assert measured.nbytes == 4 << 20
    assert measured.total_ns > max(measured.revoke_ns, measured.grant_ns)
