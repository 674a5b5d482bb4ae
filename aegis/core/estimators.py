"""Latency estimators (Aegaeon Appendix A.2, eq. 4-6), fitted from the engine's own telemetry.

No profiling step stands between registering a model and serving it: until there are observations, the analytic bound
of `Hardware` answers. The bound enters the fits as a few pseudo-observations that never decay, so a single measurement
cannot send an estimate anywhere silly.
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
    """cost ≈ Σ cᵢ·xᵢ by exponentially weighted least squares on relative errors."""

    __slots__ = ("_coefficients", "_matrix", "_prior", "_scale", "_vector")

    def __init__(self, prior: Sequence[tuple[Sequence[float], float]]) -> None:
        """`prior` holds `(features, cost)` pairs; at least as many as there are features, linearly independent."""
        n = len(prior[0][0])
        self._scale = [max(abs(x[i]) for x, _ in prior) or 1.0 for i in range(n)]
        self._matrix = [[0.0] * n for _ in range(n)]
        self._vector = [0.0] * n
        self._coefficients: list[float] | None = None
        for features, cost in prior:
            self._add(features, cost, _PRIOR_WEIGHT)
        self._prior = ([row[:] for row in self._matrix], self._vector[:])

    def observe(self, features: Sequence[float], cost: float) -> None:
        matrix, vector = self._prior
        for i, row in enumerate(self._matrix):
            self._vector[i] = vector[i] + (self._vector[i] - vector[i]) * _DECAY
            for j in range(len(row)):
                row[j] = matrix[i][j] + (row[j] - matrix[i][j]) * _DECAY
        self._add(features, cost, 1.0)
        self._coefficients = None

    def at(self, features: Sequence[float]) -> float:
        if self._coefficients is None:
            self._coefficients = _solve(self._matrix, self._vector)
        total = sum(c * x / s for c, x, s in zip(self._coefficients, features, self._scale, strict=True))
        return max(total, _FLOOR_NS)

    def _add(self, features: Sequence[float], cost: float, weight: float) -> None:
        relative = [x / s / max(cost, _FLOOR_NS) for x, s in zip(features, self._scale, strict=True)]
        for i, a in enumerate(relative):
            self._vector[i] += weight * a
            for j, b in enumerate(relative):
                self._matrix[i][j] += weight * a * b


def _solve(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Gaussian elimination with partial pivoting; the prior keeps the matrix regular."""
    n = len(vector)
    rows = [[*row, vector[i]] for i, row in enumerate(matrix)]
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(i + 1, n):
            factor = rows[r][i] / rows[i][i]
            for k in range(i, n + 1):
                rows[r][k] -= factor * rows[i][k]
    solution = [0.0] * n
    for i in range(n - 1, -1, -1):
        solution[i] = (rows[i][n] - sum(rows[i][k] * solution[k] for k in range(i + 1, n))) / rows[i][i]
    return solution


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
