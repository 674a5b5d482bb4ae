"""The text models that a node reads of images."""

from __future__ import annotations

import asyncio
from pathlib import Path

from aegis.core.errors import ModelRefused
from aegis.core.model import ModelSpec
from aegis.models.failures import one_line, refused
from aegis.models.sources import Source
from aegis.models.text.text_model import TextModel


async def read_text(source: Source, spec: ModelSpec) -> TextModel | None:
    """None if the checkpoint had no tokenizer. Raises ModelRefused where it is damaged, and OSError."""
    try:
        return await asyncio.to_thread(TextModel.load_to_decode, Path(spec.directory))
    except (ModelRefused, OSError):
        raise
    except Exception as error:  # `tokenizers` has no type of its own
        why = f"its image {spec.directory} cannot be read; add the model again, which makes it anew"
        raise refused(source.root, f"{why} ({one_line(error)})") from error
