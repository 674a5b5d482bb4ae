"""Models whose KV depends on how long a sequence becomes are found by their configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from aegis.models.prefix_reuse import may_reuse


@pytest.mark.parametrize(
    ("config", "may"),
    [
        ({}, True),
        ({"rope_scaling": None, "sliding_window": 64}, True),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, True),
        ({"rope_scaling": {"type": "yarn"}}, True),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, False),
        ({"rope_scaling": {"type": "longrope"}}, False),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, False),
    ],
)
def test_lengths_that_change_kv_forbid_it(tmp_path: Path, config: dict[str, Any], may: bool) -> None:
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    assert may_reuse(str(tmp_path)) is may
