"""The measurements of memory and their suite run, tiny, and what they return adds up. How fast is not judged."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from aegis.core.errors import UserError
from bench.common.figures import Figure
from bench.lab.memory import page_mapping, page_transfer, swap_out
from bench.lab.memory.churn import own_bytes, resident_bytes
from bench.lab.memory.parts import PARTS, Swaps
from bench.lab.memory.slab_replay import WasteMeter
from bench.lab.memory.suite import run
from bench.lab.memory.swap_in import arrivals


@pytest.mark.long
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


def test_a_swap_in_of_several_requests() -> None:
    measured = arrivals(requests=6, blocks=3)
    assert (measured.requests, measured.nbytes) == (6, 6 * 3 * (256 << 10))
    assert 1 <= measured.arrived_at_first_step <= 6
    assert 0 < measured.first_arrival_ns <= measured.last_arrival_ns


def test_waste_is_weighted_by_bytes_and_fixed_pools_are_as_large_as_their_peaks() -> None:
    meter = WasteMeter()
    meter.add({"a": (100, 90), "b": (100, 10)})
    meter.add({"a": (100, 30)})
    waste = meter.result()
    assert waste.shared == pytest.approx(1 - 130 / 300)
    assert waste.fixed == pytest.approx(1 - 130 / 200)
    assert (waste.held_bytes, waste.held_max_bytes) == (150, 200)


def test_figures_are_told_beside_what_they_have_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = Swaps(swap_out.swaps((16 << 10,), (3, 64), region_bytes=4 << 20)), arrivals(requests=4, blocks=2)
    path = tmp_path / "results" / "memory.json"
    result = run(path, known={"swaps": replace(PARTS["swaps"], measure=lambda: small)})
    written = msgspec.json.decode(path.read_bytes())
    assert msgspec.convert(written["figures"], tuple[Figure, ...]) == result.figures
    assert [part["name"] for part in written["parts"]] == ["swaps"]
    judged = [figure for figure in result.figures if figure.ok is not None]
    assert len(judged) == 3
    assert judged[0].value == min(swap.out_ratio for swap in small[0].swaps if swap.blocks == 64)
    out = capsys.readouterr().out
    assert all(figure.wanted in out for figure in judged)


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(UserError, match="no part 'speed'"):
        run(only=["speed"])


def test_a_process_that_ends_while_memory_is_added_up_has_none() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert own_bytes(child.pid) == 0
    assert own_bytes(os.getpid()) > 0 and resident_bytes() > 0
