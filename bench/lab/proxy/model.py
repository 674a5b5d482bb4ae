"""The models that the benchmark's backends pretend to run, and what is asked of them."""

from __future__ import annotations

import math
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from aegis.core.ids import ModelId
from aegis.core.model import KvLayer, KvShape, Manifest, ModelSpec, Pooling
from aegis.device.image_directory import CHAT_TEMPLATE, TOKENIZER

AT_ONCE = ModelId("at-once")
AT_ONCE_MESSAGES = ModelId("at-once-messages")
"""The same; LiteLLM has a name for each provider."""

VECTORS = ModelId("vectors")
SILENT = ModelId("silent")
WORD = "x"
"""The text of an answer, a token each time."""

TOKEN = ord(WORD)
VECTOR = [round(math.sin(n), 6) for n in range(384)]
"""What `VECTORS` makes of any text."""

QUESTION = "Tell me a short story about a lamp, a boat and the wind."
_CONTEXT_TOKENS = 8192
_VOCABULARY = 256
_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def write_text(directory: Path, vocabulary: int = _VOCABULARY) -> None:
    """A tokenizer whose token b is the byte b, and whose others have names that no text has; and a chat template: what
    a proxy reads of a model."""
    names = {_name(token) if token < _VOCABULARY else f"<{token}>": token for token in range(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=names, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / TOKENIZER))
    (directory / CHAT_TEMPLATE).write_text(_TEMPLATE, encoding="utf-8")


def spec(model: ModelId, directory: Path) -> ModelSpec:
    """The spec of a small model whose text model is in the directory; it has no weights."""
    manifest = Manifest(
        fingerprint=model,
        architecture="LlamaForCausalLM",
        dtype="float32",
        image_bytes=1 << 20,
        tensors=(),
        kv=KvShape((KvLayer(1, 8, 8),), "float32", 4),
        context_tokens=_CONTEXT_TOKENS,
        vocab_size=_VOCABULARY,
        eos_token_ids=(),
        hidden_size=8,
        intermediate_size=8,
        parameters=1 << 18,
        pooling=Pooling(len(VECTOR), ("mean",)) if model == VECTORS else None,
    )
    return ModelSpec(model, manifest, str(directory), "", str(directory))


def _name(byte: int) -> str:
    """The form in which byte-level tokenizers write a byte: as itself if it is printable, else beyond Latin-1."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in seen:
        return chr(byte)
    return chr(0x100 + byte - sum(b < byte for b in seen))
