"""Latency estimators (Aegaeon Appendix A.2, eq. 4-6), fitted from the engine's own telemetry.

No profiling step stands between registering a model and serving it: until there are observations, the analytic bound
of `Hardware` answers. The bound enters the fits as a few pseudo-observations that never decay, so measurements of a few
lengths cannot send the estimates of others anywhere silly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aegis.core.model import Manifest

_DECAY = 0.98  # an observation's weight halves after 34 newer ones
_PRIOR_WEIGHT = 0.05
_FLOOR_NS = 1_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What a device can do, before anything was measured on it."""

    copy_bytes_per_s: float = 8e9  # host to device
    memory_bytes_per_s: float = 8e9  # weights streamed by a decode step
    flops_per_s: float = 2e11
    overhead_ns: int = 1_000_000  # of a step, whatever its size


class LinearFit:
    """cost ≈ Σ cᵢ·xᵢ by exponentially weighted least squares on relative errors.

    The prior gives the shape where there are no observations. Its level follows them: a device ten times slower than
    its bound is so at every length.
    """

    __slots__ = ("_bound", "_coefficients", "_data", "_level", "_prior", "_scale")

    def __init__(self, prior: Sequence[tuple[Sequence[float], float]]) -> None:
        """`prior` holds `(features, cost)` pairs; at least as many as there are features, linearly independent."""
        n = len(prior[0][0])
        self._scale = [max(abs(x[i]) for x, _ in prior) or 1.0 for i in range(n)]
        self._prior, self._data, self._level = _Squares(n), _Squares(n), _Squares(1)
        for features, cost in prior:
            self._prior.add(self._scaled(features), cost)
        self._bound = self._prior.solve()
        self._coefficients: list[float] | None = self._bound

    def observe(self, features: Sequence[float], cost: float) -> None:
        x = self._scaled(features)
        self._data.fade()
        self._data.add(x, cost)
        self._level.fade()
        self._level.add([_dot(self._bound, x)], cost)
        self._coefficients = None

    def at(self, features: Sequence[float]) -> float:
        if self._coefficients is None:
            (level,) = self._level.solve()
            self._coefficients = self._data.plus(self._prior, _PRIOR_WEIGHT, level).solve()
        return max(_dot(self._coefficients, self._scaled(features)), _FLOOR_NS)

    def _scaled(self, features: Sequence[float]) -> list[float]:
        return [x / s for x, s in zip(features, self._scale, strict=True)]


class _Squares:
    """The normal equations of a least-squares fit of `Σ cᵢ·xᵢ / cost` to 1."""

    __slots__ = ("matrix", "vector")

    def __init__(self, n: int) -> None:
        self.matrix = [[0.0] * n for _ in range(n)]
        self.vector = [0.0] * n

    def add(self, x: Sequence[float], cost: float) -> None:
        relative = [v / max(cost, _FLOOR_NS) for v in x]
        for i, a in enumerate(relative):
            self.vector[i] += a
            for j, b in enumerate(relative):
                self.matrix[i][j] += a * b

    def fade(self) -> None:
        self.vector = [_DECAY * v for v in self.vector]
        self.matrix = [[_DECAY * v for v in row] for row in self.matrix]

    def plus(self, other: _Squares, weight: float, level: float) -> _Squares:
        """Together with `other`, all of whose costs are taken `level` times as high."""
        total, n = _Squares(len(self.vector)), range(len(self.vector))
        total.vector = [self.vector[i] + weight * other.vector[i] / level for i in n]
        total.matrix = [[self.matrix[i][j] + weight * other.matrix[i][j] / level**2 for j in n] for i in n]
        return total

    def solve(self) -> list[float]:
        """Gaussian elimination with partial pivoting; the prior keeps the matrix regular."""
        n = len(self.vector)
        rows = [[*row, v] for row, v in zip(self.matrix, self.vector, strict=True)]
        for i in range(n):
            pivot = max(range(i, n), key=lambda r: abs(rows[r][i]))
            rows[i], rows[pivot] = rows[pivot], rows[i]
            for r in range(i + 1, n):
                factor = rows[r][i] / rows[i][i]
                rows[r] = [v - factor * u for v, u in zip(rows[r], rows[i], strict=True)]
        solution = [0.0] * n
        for i in range(n - 1, -1, -1):
            solution[i] = (rows[i][n] - _dot(rows[i][i + 1 : n], solution[i + 1 :])) / rows[i][i]
        return solution


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


class Latency:
    """Estimates for one model on one kind of device, in nanoseconds."""

    __slots__ = ("_bytes", "_decode", "_h", "_m", "_prefill", "_switch")

    def __init__(self, manifest: Manifest, hardware: Hardware) -> None:
        self._bytes, self._h, self._m = manifest.image_bytes, manifest.hidden_size, manifest.intermediate_size
        self._switch = LinearFit([((float(self._bytes),), 1e9 * self._bytes / hardware.copy_bytes_per_s)])
        per_token_ns = 2e9 * manifest.parameters / hardware.flops_per_s
        self._prefill = LinearFit(
            [(self._prefill_features(t), hardware.overhead_ns + t * per_token_ns) for t in (1, 64, 512, 2048)]
        )
        step_ns = 1e9 * self._bytes / hardware.memory_bytes_per_s + hardware.overhead_ns
        kv_ns = 1e9 * manifest.kv.token_bytes / hardware.memory_bytes_per_s
        self._decode = LinearFit([(self._decode_features(t), step_ns + t * kv_ns) for t in (1, 1024, 8192)])

    def switch_ns(self) -> int:
        """Eq. 4: model bytes over link bandwidth, the factor β being what is fitted."""
        return round(self._switch.at((float(self._bytes),)))

    def prefill_ns(self, tokens: int) -> int:
        """Eq. 5 for a batch of one."""
        return round(self._prefill.at(self._prefill_features(tokens)))

    def decode_ns(self, context_tokens: int) -> int:
        """Eq. 6: one step over `context_tokens` cached tokens in all."""
        return round(self._decode.at(self._decode_features(context_tokens)))

    def saw_switch(self, duration_ns: int) -> None:
        self._switch.observe((float(self._bytes),), duration_ns)

    def saw_prefill(self, tokens: int, duration_ns: int) -> None:
        self._prefill.observe(self._prefill_features(tokens), duration_ns)

    def saw_decode(self, context_tokens: int, duration_ns: int) -> None:
        self._decode.observe(self._decode_features(context_tokens), duration_ns)

    def _prefill_features(self, t: int) -> tuple[float, float, float]:
        h, m = self._h, self._m
        return (4.0 * t * h * h + 2.0 * t * h * m, 3.0 * h * t * t, 1.0)

    def _decode_features(self, t: int) -> tuple[float, float]:
        h, m = self._h, self._m
        return (4.0 * h * h + 2.0 * h * m, 3.0 * h * t)
