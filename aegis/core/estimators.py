"""Latency estimators (Aegaeon Appendix A.2, eq. 4-6), fitted from the engine's own telemetry.

No profiling step stands between registering a model and serving it: until there are observations, the analytic bound of
`Hardware` answers. The bound enters the fits as a few pseudo-observations that never decay, so measurements of a few
lengths cannot send the estimates of others anywhere silly.

Estimates are read far more often than they change: reading takes a few multiplications, and holders of sums of
estimates are told when they moved.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from aegis.core.model import Manifest
from aegis.core.step_terms import decode_terms, prefill_terms

_DECAY: Final = 0.98  # an observation's weight halves after 34 newer ones
_PRIOR_WEIGHT: Final = 0.05
_DOUBTED: Final = 1 / 100  # so much of that weight counts where a prior may contradict what was observed
_MEAN_MAX: Final = 4.0  # times its fit, a mean is at most
_FEW: Final = 12  # observations do not tell costs that vary from one that was an outlier; twice as many do
_FLOOR_NS: Final = 1_000
_FRESH_SHARE: Final = 1 / 4  # of the weight of all observations: so much that is new is worth a fit
_TOLERANCE: Final = 0.01  # an estimate that moves by less stays as it was
_DEPENDENT: Final = 1e-12  # of a feature's square is left: the others explain it

Features = tuple[float, float, float]
"""The quantities in which a cost is linear. An unused one is 0 everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The figures of a device, before anything was measured on it."""

    copy_bytes_per_s: float = 8e9  # host to device
    memory_bytes_per_s: float = 8e9  # weights streamed by a decode step
    flops_per_s: float = 2e11
    overhead_ns: int = 1_000_000  # of a step, whatever its size


class Prior:
    """The assumed cost before any observation. All fits of that cost share one, which never changes."""

    __slots__ = ("bound", "coefficients", "points", "scale", "squares")

    def __init__(self, pairs: Sequence[tuple[Features, float]]) -> None:
        """`(features, cost)`; at least as many as there are features, linearly independent."""
        self.points = [features for features, _ in pairs]
        x, y, z = (1 / (max(map(abs, column)) or 1.0) for column in zip(*self.points, strict=True))
        self.scale: Features = (x, y, z)  # features of about 1 keep the equations well conditioned
        self.squares = _Squares()
        for features, cost in pairs:
            self.squares.add(*self.relative(features, cost), 1.0)
        self.bound = self.squares.solve(_Squares(), 0.0, 1.0)
        self.coefficients = self.unscaled(self.bound)

    def relative(self, features: Features, cost: float) -> Features:
        x, y, z = features
        a, b, c = self.scale
        if cost < _FLOOR_NS:
            cost = float(_FLOOR_NS)
        return x * a / cost, y * b / cost, z * c / cost

    def unscaled(self, coefficients: Features) -> Features:
        x, y, z = coefficients
        a, b, c = self.scale
        return x * a, y * b, z * c


class LinearFit:
    """The mean cost ≈ Σ cᵢ·xᵢ, by exponentially weighted least squares on relative errors.

    The prior gives the shape where there are no observations. Its level follows them: a device ten times slower than
    its bound is so at every length.
    """

    __slots__ = ("_data", "_fresh", "_level", "_prior", "_total", "_varies", "coefficients")

    def __init__(self, prior: Prior, *, varies: bool = True) -> None:
        """`varies`: what it errs by is chance. It is not where the costs have another shape than Σ cᵢ·xᵢ."""
        self._prior, self._varies = prior, varies
        self._data = _Squares()
        self._level = (0.0, 0.0)  # what the bound says of the observations: Σ of the squares, Σ
        self._fresh, self._total = 0, 0.0
        self.coefficients = prior.coefficients

    def observe(self, features: Features, cost: float) -> bool:
        """Whether estimates moved."""
        x, y, z = self._prior.relative(features, cost)
        self._data.add(x, y, z, _DECAY)
        a, b, c = self._prior.bound
        bound = a * x + b * y + c * z
        squares, linear = self._level
        self._level = (_DECAY * squares + bound * bound, _DECAY * linear + bound)
        self._total = _DECAY * self._total + 1
        self._fresh += 1
        return self._fresh >= _FRESH_SHARE * self._total and self._refit()

    def at(self, features: Features) -> float:
        return max(_dot(self.coefficients, features), float(_FLOOR_NS))

    def _mean(self, fitted: Features) -> Features:
        """What is planned with sums of costs needs their mean, and a fit of relative errors is less than that where
        costs vary: if their logarithms are normal with a standard deviation of σ, the mean of fit ÷ cost is e^-σ², and
        that of the costs is e^2σ² times the fit."""
        a, b, c = fitted
        relative = (a * self._data.x + b * self._data.y + c * self._data.z) / self._total
        known = min(max(self._total / _FEW - 1, 0.0), 1.0)
        if not self._varies or relative >= 1.0 or not known:
            return fitted
        more = min(relative ** (-2 * known), _MEAN_MAX)
        return a * more, b * more, c * more

    def _refit(self) -> bool:
        self._fresh = 0
        prior, (squares, linear) = self._prior, self._level
        a, b, c = self.coefficients
        solved = self._data.solve(prior.squares, _PRIOR_WEIGHT, linear / squares)
        p, q, r = fitted = prior.unscaled(self._mean(solved))
        for x, y, z in prior.points:
            before = a * x + b * y + c * z
            if abs(p * x + q * y + r * z - before) > _TOLERANCE * abs(before):
                self.coefficients = fitted
                return True
        return False


class _Squares:
    """The normal equations of a least-squares fit of `Σ cᵢ·xᵢ` to 1. Written out: they are on every step's path, and
    sums in a fixed order are the same to the last bit everywhere."""

    __slots__ = ("x", "xx", "xy", "xz", "y", "yy", "yz", "z", "zz")

    def __init__(self) -> None:
        self.xx = self.xy = self.xz = self.yy = self.yz = self.zz = 0.0
        self.x = self.y = self.z = 0.0

    def add(self, x: float, y: float, z: float, keep: float) -> None:
        """`keep` is what stays of the weight of all before."""
        self.xx = keep * self.xx + x * x
        self.xy = keep * self.xy + x * y
        self.xz = keep * self.xz + x * z
        self.yy = keep * self.yy + y * y
        self.yz = keep * self.yz + y * z
        self.zz = keep * self.zz + z * z
        self.x = keep * self.x + x
        self.y = keep * self.y + y
        self.z = keep * self.z + z

    def solve(self, other: _Squares, weight: float, level: float) -> Features:
        """Solves it together with `other`, which counts `weight` times and all of whose costs are `level` times as
        high.

        No coefficient is negative, as nothing takes less than no time: without that, noise in steps of a few lengths
        could make a step of some other length cost nothing. Where one would be, its feature is left out, and `other`
        counts little, since the two may contradict each other.
        """
        solved = self._with(other, weight, level)._solved()
        if min(solved) >= 0.0:
            return solved
        both = self._with(other, weight * _DOUBTED, level)
        while (least := min(solved)) < 0.0:
            both._leave_out(solved.index(least))
            solved = both._solved()
        return solved

    def _with(self, other: _Squares, weight: float, level: float) -> _Squares:
        both, linear, square = _Squares(), weight / level, weight / (level * level)
        both.xx, both.xy = self.xx + square * other.xx, self.xy + square * other.xy
        both.xz, both.yy = self.xz + square * other.xz, self.yy + square * other.yy
        both.yz, both.zz = self.yz + square * other.yz, self.zz + square * other.zz
        both.x, both.y, both.z = self.x + linear * other.x, self.y + linear * other.y, self.z + linear * other.z
        return both

    def _solved(self) -> Features:
        """LDLᵀ. A feature that is 0 everywhere, or that others explain to the last bit, gets the coefficient 0."""
        p = 1 / self.xx if self.xx > 0.0 else 0.0
        y_of_x, z_of_x = self.xy * p, self.xz * p
        yz = self.yz - y_of_x * self.xz
        pivot = self.yy - y_of_x * self.xy
        q = 1 / pivot if pivot > _DEPENDENT * self.yy else 0.0
        z_of_y = yz * q
        pivot = self.zz - z_of_x * self.xz - z_of_y * yz
        r = 1 / pivot if pivot > _DEPENDENT * self.zz else 0.0
        y = self.y - y_of_x * self.x
        c = (self.z - z_of_x * self.x - z_of_y * y) * r
        b = y * q - z_of_y * c
        return self.x * p - y_of_x * b - z_of_x * c, b, c

    def _leave_out(self, feature: int) -> None:
        if feature == 0:
            self.xx = self.xy = self.xz = self.x = 0.0
        elif feature == 1:
            self.yy = self.xy = self.yz = self.y = 0.0
        else:
            self.zz = self.xz = self.yz = self.z = 0.0


def _dot(a: Features, b: Features) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


class Latency:
    """Estimates for one model on one kind of device, in nanoseconds."""

    __slots__ = ("_bytes", "_decode", "_linear", "_prefill", "_quadratic", "_step", "_switch")

    def __init__(self, manifest: Manifest, hardware: Hardware) -> None:
        h, m = manifest.hidden_size, manifest.intermediate_size
        self._linear, self._quadratic = 4.0 * h * h + 2.0 * h * m, 3.0 * h
        self._bytes = float(manifest.image_bytes)
        switch, prefill, step, decode = _priors(
            self._linear, self._quadratic, self._bytes, manifest.parameters, manifest.kv.token_bytes, hardware
        )
        self._switch, self._decode = LinearFit(switch), LinearFit(decode)
        self._prefill = LinearFit(prefill, varies=False)  # short prompts take a reading of the weights, or parts of it
        self._step = LinearFit(step, varies=False)

    def switch_ns(self) -> int:
        """Eq. 4: model bytes over link bandwidth, the factor β being what is fitted."""
        return max(round(self._switch.coefficients[0] * self._bytes), _FLOOR_NS)

    def prefill_ns(self, stop: int, start: int = 0) -> int:
        """Eq. 5 for positions `[start, stop)` of a batch of one, the KV of those before being there."""
        tokens, squares = prefill_terms(stop, start)
        return self.prefills_ns(1, tokens, squares)

    def prefills_ns(self, jobs: int, tokens: int, squares: int) -> int:
        """The same for `jobs` one after the other: of `tokens` in all, their squares adding up to `squares`."""
        a, b, c = self._prefill.coefficients
        return max(round(a * self._linear * tokens + b * self._quadratic * squares + c * jobs), _FLOOR_NS * jobs)

    def fixed_ns(self) -> int:
        """Eq. 5 for a step that several prompts share: what it takes whatever its rows are, which each of them would
        take alone. Before anything is known it is believed to be the reading of all weights, so that sharing is tried
        where it may be worth it; steps that are shared tell."""
        return max(round(self._step.coefficients[2]), 0)

    def joined_ns(self, stop: int, start: int = 0) -> int:
        """What positions `[start, stop)` of a prompt add to a step that others are in."""
        a, b, _ = self._step.coefficients
        tokens, squares = prefill_terms(stop, start)
        return max(round(a * self._linear * tokens + b * self._quadratic * squares), _FLOOR_NS)

    def joins(self, stop: int, start: int, gain: float) -> bool:
        """Whether these positions take less time in a step with others than alone, by at least this share of it."""
        fixed_ns = self.fixed_ns()
        return fixed_ns > 0 and fixed_ns >= gain * (fixed_ns + self.joined_ns(stop, start))

    def beside_ns(self, context_tokens: int, rows: int) -> int:
        """Eq. 6 for rows that decode in a step with prompts: all but what a step of their own would take besides."""
        _, b, c = self._decode.coefficients
        return max(round(b * self._quadratic * context_tokens + c * rows), 0)

    def prefill_stop(self, start: int, stop: int, within_ns: int, *, multiple: int, least_tokens: int) -> int:
        """Where a piece of positions `[start, stop)` ends that takes no longer than `within_ns`: at `stop` if there is
        time for all of it, else at a multiple of so many positions, but not before `start + least_tokens`."""
        if self.prefill_ns(stop, start) <= within_ns:
            return stop
        cuts = range(-(-(start + least_tokens) // multiple) * multiple, stop, multiple)
        in_time = bisect_right(cuts, within_ns, key=lambda cut: self.prefill_ns(cut, start))
        return cuts[max(in_time - 1, 0)] if cuts else stop

    def decode_ns(self, context_tokens: int, rows: int = 1) -> int:
        """Eq. 6 and a term per row: one step of a batch over `context_tokens` cached tokens in all."""
        a, b, c = self._decode.coefficients
        return max(round(a * self._linear + b * self._quadratic * context_tokens + c * rows), _FLOOR_NS)

    def saw_switch(self, duration_ns: int) -> bool:
        """Whether `switch_ns` is another now; `saw_prefill` and `saw_decode` likewise."""
        return self._switch.observe((self._bytes, 0.0, 0.0), duration_ns)

    def saw_prefill(self, stop: int, duration_ns: int, start: int = 0) -> bool:
        """`saw_step` is for instances, which run steps: nobody else asks what prompts take together."""
        return self._prefill.observe(_prefill_features(self._linear, self._quadratic, stop, start), duration_ns)

    def saw_step(self, pieces: Sequence[tuple[int, int]], duration_ns: int) -> None:
        """A step of prompts, of each positions `[start, stop)`. Of one prompt it is a prefill, too."""
        if len(pieces) == 1:
            self.saw_prefill(pieces[0][1], duration_ns, pieces[0][0])
        tokens, squares = 0, 0
        for start, stop in pieces:
            own, own_squares = prefill_terms(stop, start)
            tokens, squares = tokens + own, squares + own_squares
        self._step.observe((self._linear * tokens, self._quadratic * squares, 1.0), duration_ns)

    def saw_decode(self, context_tokens: int, duration_ns: int, rows: int = 1) -> bool:
        return self._decode.observe(_decode_features(self._linear, self._quadratic, context_tokens, rows), duration_ns)


def _prefill_features(linear: float, quadratic: float, stop: int, start: int = 0) -> Features:
    tokens, squares = prefill_terms(stop, start)
    return (linear * tokens, quadratic * squares, 1.0)


def _decode_features(linear: float, quadratic: float, context_tokens: int, rows: int) -> Features:
    steps, read, computed = decode_terms(context_tokens, rows)
    return (linear * steps, quadratic * read, float(computed))


@lru_cache(maxsize=1024)
def _priors(
    linear: float, quadratic: float, nbytes: float, parameters: int, token_bytes: int, hardware: Hardware
) -> tuple[Prior, Prior, Prior, Prior]:
    """The priors of a switch, a prefill, a step that prompts share and a decode step."""
    switch = Prior([((nbytes, 0.0, 0.0), 1e9 * nbytes / hardware.copy_bytes_per_s)])
    per_token_ns = 2e9 * parameters / hardware.flops_per_s
    prompts = [(_prefill_features(linear, quadratic, t), t) for t in (1, 64, 512, 2048)]
    prefill = Prior([(features, hardware.overhead_ns + t * per_token_ns) for features, t in prompts])
    step_ns = 1e9 * nbytes / hardware.memory_bytes_per_s + hardware.overhead_ns
    shared = [(_prefill_features(linear, quadratic, t), t) for t in (64, 256, 1024)]  # few, so that little teaches much
    step = Prior([(features, step_ns + t * per_token_ns) for features, t in shared])
    kv_ns = 1e9 * token_bytes / hardware.memory_bytes_per_s
    points = ((1, 1), (1024, 1), (8192, 1), (8192, 64))  # rows cost nothing until steps show it
    decode = Prior([(_decode_features(linear, quadratic, t, rows), step_ns + t * kv_ns) for t, rows in points])
    return switch, prefill, step, decode
