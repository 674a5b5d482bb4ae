"""The waste in the host's KV slabs (Aegaeon §7.3, Figure 16)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from msgspec import Struct

from aegis.core.clock import NS_PER_S
from aegis.core.model import KvShape
from aegis.sim.sampling import HostUse
from bench.simulate.setting import Setting, pool_of, run

_EVERY_NS = NS_PER_S
_ALL = "all"


class Waste(Struct, frozen=True):
    """Means over the run. `of_held`: unused, of what was held; `of_peak`: of the most that was held at a time."""

    of_held: float
    of_peak: float
    peak_bytes: int


class Fragmentation(Struct, frozen=True):
    """The waste by shape of the models, and of all together as `all`."""

    shapes: dict[str, Waste]


def measure(setting: Setting) -> Fragmentation:
    """Raises UserError."""
    outcome = run(setting, sample_ns=_EVERY_NS)
    names = {spec.manifest.kv: spec.root for spec in pool_of(setting).specs}
    return fragmentation(outcome.samples, names)


def fragmentation(samples: Iterable[HostUse], names: Mapping[KvShape, str]) -> Fragmentation:
    """`names` of the shapes."""
    held: defaultdict[str, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
    taken: defaultdict[str, int] = defaultdict(int)
    for use in samples:
        for name in (names[use.shape], _ALL):
            held[name][use.at_ns] += use.held_bytes
            taken[name] += use.taken_bytes
    return Fragmentation({name: _waste(held[name], taken[name]) for name in sorted(held)})


def _waste(held: Mapping[int, int], taken: int) -> Waste:
    total, peak = sum(held.values()), max(held.values())
    unused = total - taken
    return Waste(
        of_held=round(unused / max(total, 1), 6),
        of_peak=round(unused / max(peak * len(held), 1), 6),
        peak_bytes=peak,
    )
