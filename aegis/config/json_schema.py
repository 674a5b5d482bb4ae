"""The JSON Schema of the configuration, for editors and for `configs/schema.json`."""

from __future__ import annotations

from typing import Any

from aegis.config.config import Config


def config_schema() -> dict[str, Any]:
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "aegis configuration"}
    return head | Config.model_json_schema() | head
