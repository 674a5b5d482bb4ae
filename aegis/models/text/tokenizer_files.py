"""Writes the tokenizer of a checkpoint, whatever its form, in the one form that is served: a `tokenizer.json`."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from aegis.core.errors import ModelRefused
from aegis.device.image_directory import TOKENIZER
from aegis.models.failures import disk_full, one_line
from aegis.models.text.detokenizer import write_detokenizer
from aegis.models.text.tokenizer_bounds import refuse_growing

_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt")
_SAMPLES = ("The quick brown fox, 1234.", " naïve — 東京\n\tx += 1")


def write_tokenizer(checkpoint: Path, into: Path) -> str | None:
    """Returns why there is none, None if there is. Without one a model is served by token ids. Raises ModelRefused
    where texts would grow without measure, or its tokenizer.json cannot be read."""
    if not any(found for pattern in _VOCABULARIES for found in checkpoint.glob(pattern)):
        return "the checkpoint has no tokenizer"
    try:
        if (checkpoint / TOKENIZER).is_file():
            refuse_growing(checkpoint / TOKENIZER)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False, local_files_only=True)
        tokenizer.save_pretrained(into)
        if (into / TOKENIZER).is_file():
            refuse_growing(into / TOKENIZER)  # which transformers may have made of other files
            written = Tokenizer.from_file(str(into / TOKENIZER))
            written.no_padding()
            written.no_truncation()
            if all(written.encode(sample).ids == tokenizer(sample)["input_ids"] for sample in _SAMPLES):
                write_detokenizer(into)
                return None
            (into / TOKENIZER).unlink()
        return "its tokenizer cannot be converted to tokenizer.json"
    except Exception as error:  # which the library of tokenizers raises, too
        (into / TOKENIZER).unlink(missing_ok=True)
        if isinstance(error, ModelRefused | MemoryError) or disk_full(error):
            raise
        if (checkpoint / TOKENIZER).is_file():
            why = f"its {TOKENIZER} cannot be read: {one_line(error)}; without that file it is served by token ids"
            raise ModelRefused(why) from None
        return f"its tokenizer cannot be read: {one_line(error)}"
