"""The measurements of memory run, tiny, and what they return adds up. How fast anything was is not judged."""

from bench import handing, pages, swaps


def test_mapping() -> None:
    for scattered in (False, True):
        measured = pages.mapping(4, scattered=scattered, repetitions=2)
        assert (measured.batch, measured.scattered) == (4, scattered)
        assert min(measured.map_ns, measured.unmap_ns, measured.calls_ns, measured.plain_ns) > 0


def test_reserving() -> None:
    assert pages.reserving(1 << 40, repetitions=2).nbytes == 1 << 40


def test_first_touches_and_wiping() -> None:
    touch, wiping = pages.first_touch(pages=1), pages.wiping(pages=1, repetitions=1)
    assert min(touch.ahead_ns, touch.bare_ns, touch.recycled_ns, touch.returned_ns) > 0
    assert min(wiping.stream_ns, wiping.memset_ns, wiping.punch_ns) > 0


def test_swaps() -> None:
    measured = swaps.swaps((16 << 10, 100 << 10, 2 << 20), (3, 7), region_bytes=8 << 20)
    assert [(swap.block_bytes >> 10, swap.blocks, swap.scattered) for swap in measured] == [
        *((kib, blocks, scattered) for kib in (16, 100) for blocks in (3, 7) for scattered in (False, True)),
        *((2048, 3, scattered) for scattered in (False, True)),
    ]


def test_handing() -> None:
    measured = handing.handing(4 << 20, repetitions=2)
    assert measured.nbytes == 4 << 20
    assert measured.total_ns > max(measured.revoke_ns, measured.grant_ns)
