"""Kinds of values that the configuration is made of."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, WithJsonSchema

from aegis.config.mqtt_address import parse
from aegis.config.sizes import SIZE_PATTERN, parse_size
from aegis.core.clock import NS_PER_MS
from aegis.core.ids import MODEL_NAME_PATTERN
from aegis.core.model import SLO_NS_MAX, SLO_NS_MIN
from aegis.core.request import PRIORITY_MAX
from aegis.core.role import LaneCount


class OptionText(str):
    """The text of an option or a variable, of which a value of any type is made: they have nothing but texts."""

    __slots__ = ()


_NUMBER = re.compile(r"\s*[-+]?[\d_]*\.?[\d_]+\s*")
"""A text that would be taken for a number; not `1e3`, which is a text for YAML only."""


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError(f"should be a number, not {str(value).lower()}")
    if isinstance(value, str) and not isinstance(value, OptionText) and _NUMBER.fullmatch(value):
        raise ValueError(f"should be a number, not the text {value!r}")
    return value


def _truth(value: object) -> object:
    if not isinstance(value, bool | OptionText):
        raise ValueError(f"should be a valid boolean, not {value!r}")
    return value


def of_a_broker(url: SecretStr) -> SecretStr:
    parse(url.get_secret_value())
    return url


_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://([a-z0-9._~-]+|\[[0-9a-f:.]+\])(:\d+)?")
_DEFAULT_PORTS = re.compile(r"http://.*:80|https://.*:443")


def of_web_pages(origin: str) -> str:
    """The header that it is compared with has neither a path, capitals nor the port that goes without saying."""
    if not _ORIGIN.fullmatch(origin) or _DEFAULT_PORTS.fullmatch(origin):
        raise ValueError(
            f"{origin!r} is no origin that a browser sends; write it like https://chat.example.com or "
            "http://localhost:3000, in small letters, without a path or a default port, or *: all"
        )
    return origin


def of_a_ray_cluster(address: str) -> str:
    host, _, port = address.rpartition(":")
    if address not in ("auto", "local") and (not host or not port.isdecimal() or "/" in host):
        raise ValueError("should be auto, local or the HOST:PORT of a cluster's head")
    return address


Size = Annotated[
    int,
    Field(gt=0),
    BeforeValidator(parse_size),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": f"^({SIZE_PATTERN}|\\d+)$"}]}
    ),
]


def _on_or_off(value: object) -> object:
    """YAML takes both for truth values."""
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


Truth = Annotated[bool, BeforeValidator(_truth)]
Switch = Annotated[Literal["on", "off"], BeforeValidator(_on_or_off)]


def _lanes(value: object) -> object:
    """YAML and Python have numbers of them, options words; one lane is none beside which anything could run."""
    value = _on_or_off(value)
    words = str(value) if isinstance(value, int) else value
    return "off" if words == "1" else words


Lanes = Annotated[LaneCount, BeforeValidator(_lanes)]
Count = Annotated[int, Field(ge=1), BeforeValidator(_number)]
CountOrNone = Annotated[int, Field(ge=0), BeforeValidator(_number)]
Proxies = Annotated[int, Field(ge=1, le=64), BeforeValidator(_number)]
RateLimit = Annotated[int | None, Field(ge=0), BeforeValidator(_number), AfterValidator(lambda limit: limit or None)]
"""0 is no limit, as it is for `aegis models set`."""
Port = Annotated[int, Field(ge=0, le=65535), BeforeValidator(_number)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(_number)]
Deadline = Annotated[
    float,
    Field(ge=SLO_NS_MIN / NS_PER_MS, le=SLO_NS_MAX / NS_PER_MS, allow_inf_nan=False),
    BeforeValidator(_number),
]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(_number)]
Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), BeforeValidator(_number)]
Dtype = Literal["auto", "float32", "bfloat16"]
PolicyName = Literal[
    "aegaeon",
    "least-slack",
    "serverlessllm",
    "qlm",
    "muxserve",
    "prism",
    "s-partition",
    "muxserve++",
    "muxwise",
    "chunked-prefill",
    "dedicated",
    "prefill-first",
    "decode-first",
]
"""The recipes of `aegis.policies` that can be run live: those without an oracle."""
DEFAULT_POLICY: PolicyName = "least-slack"
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
ModelName = Annotated[str, Field(pattern=f"^{MODEL_NAME_PATTERN}$")]
KeyName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}$")]
Priority = Annotated[int, Field(ge=-PRIORITY_MAX, le=PRIORITY_MAX), BeforeValidator(_number)]
PREFIX_PATTERN = r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*"  # of topics: no wildcards, no empty levels


def redis_url(value: SecretStr) -> SecretStr:
    url = value.get_secret_value()
    if url != "off" and not url.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError("should begin with redis://, rediss:// (TLS) or unix://, or be off")
    return value


class Section(BaseModel):
    """A part of the configuration: immutable, and a key it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
