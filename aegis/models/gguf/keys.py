"""Values of a GGUF file's metadata, each of the type that is needed."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import TypeVar

from aegis.core.errors import ModelRefused
from aegis.models.gguf.header import GgufFile, Value

INTEGER_MAX = 1 << 31

Default = TypeVar("Default")


@dataclass(frozen=True, slots=True)
class Keys:
    """Those of an architecture begin with its name. Each method raises ModelRefused where a value is of another type,
    or is missing and there is no default."""

    file: GgufFile
    architecture: str
    read: set[str] = field(default_factory=set)

    @staticmethod
    def of(file: GgufFile) -> Keys:
        return Keys(file, _text(file, "general.architecture"))

    def named(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def unread(self) -> list[str]:
        """The keys of the architecture that nothing has asked for."""
        return sorted(key for key in self.file.metadata if key.startswith(self.named("")) and key not in self.read)

    def value(self, key: str, default: Value | None = None) -> Value | None:
        self.read.add(self.named(key))
        return self.file.metadata.get(self.named(key), default)

    def has(self, key: str) -> bool:
        """Zero is as good as none."""
        return self.value(key) not in (None, 0)

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number that is 1 at least."""
        found = self.value(key, default)
        if found is None:
            raise ModelRefused(f"{self.named(key)} is missing")
        if type(found) is not int or not 1 <= found < INTEGER_MAX:
            raise ModelRefused(f"{self.named(key)} should be one whole number from 1 on")
        return found

    def expert_size(self) -> int | None:
        """The rows of an expert; None where there are none."""
        return self.count("expert_feed_forward_length") if self.has("expert_feed_forward_length") else None

    def number(self, key: str, default: float | None = None) -> float:
        found = self.value(key, default)
        if found is None:
            raise ModelRefused(f"{self.named(key)} is missing")
        if isinstance(found, bool) or not isinstance(found, int | float) or not isfinite(found):
            raise ModelRefused(f"{self.named(key)} should be a number")
        return float(found)

    def text(self, key: str, default: str) -> str:
        self.read.add(self.named(key))
        return _text(self.file, self.named(key), default)

    def token(self, key: str) -> int | None:
        """The id of a special token; None where there is none."""
        found = self.file.metadata.get(f"tokenizer.ggml.{key}")
        return found if type(found) is int and 0 <= found < INTEGER_MAX else None


def _text(file: GgufFile, key: str, default: str | None = None) -> str:
    found = file.metadata.get(key, default)
    if found is None:
        raise ModelRefused(f"{key} is missing")
    if not isinstance(found, str):
        raise ModelRefused(f"{key} should be a text")
    return found
