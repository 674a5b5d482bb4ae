"""All that can be said about one run of `aegis bench serve`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from aegis.admin_client import DEFAULT_URL
from bench.serve.datasets import Dataset
from bench.serve.results import Measures


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Requests are those of `workload`, of `trace`, or else of `dataset` at `request_rate`; to `models`, or to all that
    are served where none is named."""

    base_url: str = DEFAULT_URL
    endpoint: str = "/v1/completions"
    api_key: str | None = field(default=None, repr=False)
    models: Sequence[str] = ()
    map: str | None = None
    workload: str | None = None
    trace: Path | None = None
    sec_multiplier: float = 1.0
    dataset: Dataset = field(default_factory=Dataset)
    num_prompts: int | None = None
    request_rate: float = inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    seed: int = 0
    ignore_eos: bool | None = None
    prompt_as: str = "tokens"
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    silence_s: float = 600.0
    label: str | None = None
    measures: Measures = field(default_factory=Measures)
    directory: Path | None = None  # made for the files, if it is not there
    files: Sequence[Path] = ()
    records: Path | None = None

    @property
    def timed(self) -> bool:
        """Whether the requests come with their times, models and lengths."""
        return self.workload is not None or self.trace is not None

    @property
    def chat(self) -> bool:
        return self.endpoint.endswith("/chat/completions")

    @property
    def whole_answers(self) -> bool:
        """Whether models are to go on to the last token: with times given, the lengths are part of the workload."""
        return self.timed if self.ignore_eos is None else self.ignore_eos
