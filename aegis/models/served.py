"""What can be served, as declared: forms of checkpoints and architectures, by engine. It is in docs/checkpoints.md.

`tests/unit/models/test_served.py` registers a checkpoint of each, so a line here that is not so fails there.
"""

from __future__ import annotations

from msgspec import Struct

from aegis.models.gguf.architectures import ARCHITECTURES as GGUF_ARCHITECTURES


class Outcome(Struct, frozen=True):
    """The outcome of a registration: as what a model is served, or words of the line that refuses it."""

    served: bool
    told: str


def serves(told: str = "") -> Outcome:
    return Outcome(True, told)


def refuses(told: str) -> Outcome:
    return Outcome(False, told)


class Form(Struct, frozen=True):
    """A form in which a model's weights come; `weights` is the option that it is registered with."""

    name: str
    known_by: str
    transformers: Outcome
    vllm: Outcome
    weights: str = "dense"


ADAPTER = "LoRA adapter"
"""Registered where its base is known: `tests/unit/models/adapters`."""

_KEPT = serves("its integers where layers can have them, as below")
_NUMBERS = serves("numbers, as below")
_OWN_MEMORY = refuses("weights in memory of its own once loaded")
_DENSE = serves("its own type, or `--dtype`")
_POOLS = serves("the same: by the transformers engine")
_LABELS = refuses("classifiers are not served")
_PICKLED = refuses("can run any code: convert them to safetensors")

FORMS = (
    Form("safetensors", "`model.safetensors`, or an index of several", _DENSE, _DENSE),
    Form(
        "safetensors, `--weights int8`",
        "the option, or `weights:` of the model",
        serves("8 bits a linear weight"),
        refuses("runs no weights that were made int8 here"),
        weights="int8",
    ),
    Form(
        "safetensors, `--weights int4`",
        "the same",
        serves("4 bits a linear weight"),
        refuses("runs no weights that were made int4 here"),
        weights="int4",
    ),
    Form(
        "GGUF",
        "a `.gguf` file",
        serves("its integers of Q4_0 and Q8_0, else numbers"),
        refuses("does not run GGUF files"),
    ),
    Form(
        "GGUF, `--weights int4`",
        "a `.gguf` file and the option",
        serves("4 bits a linear weight, of those numbers"),
        refuses("does not run GGUF files"),
        weights="int4",
    ),
    Form("GPTQ", "`quant_method` `gptq` of `config.json`", _KEPT, _OWN_MEMORY),
    Form("AWQ", "`awq`", _KEPT, _OWN_MEMORY),
    Form("compressed-tensors", "`compressed-tensors`", _KEPT, _OWN_MEMORY),
    Form("FP8", "`fp8`", _NUMBERS, _OWN_MEMORY),
    Form("bitsandbytes", "`bitsandbytes`", _NUMBERS, _OWN_MEMORY),
    Form("embedder", "`modules.json`, or no head", serves("vectors of texts"), _POOLS),
    Form("reranker", "`…ForSequenceClassification` with one label", serves("scores of pairs"), _POOLS),
    Form("classifier of several labels", "the same with more", _LABELS, _LABELS),
    Form(
        ADAPTER,
        "`adapter_config.json`",
        serves("the steps of its [base](adapters.md), with pairs of matrices beside them"),
        refuses("there is no config.json, so it is not a checkpoint"),
    ),
    Form("pickled weights", "`*.bin`, `*.pt`, `*.ckpt`, …", _PICKLED, _PICKLED),
)


class Architecture(Struct, frozen=True):
    """By transformers' `model_type`. `int8` is its outcome with `--weights int8`, `vllm` that on a CPU with vLLM."""

    model_type: str
    vllm: Outcome
    transformers: Outcome = serves("yes")
    int8: Outcome | None = None  # as without

    @property
    def gguf(self) -> str:
        """The architecture's name in GGUF files; empty if those are not read."""
        if self.model_type == "mixtral":
            return "llama, with experts"
        names = [name for name, known in GGUF_ARCHITECTURES.items() if known.model_type == self.model_type]
        return ", ".join(names)


_YES = serves("yes")
_NO_CLASS = refuses("would run transformers'")
_UNKNOWN = refuses("vLLM cannot serve it")
_COMPUTED = refuses("computes some of its tensors while it builds it")
_EXPERTS = refuses("packs experts into memory of its own")

ARCHITECTURES = (
    Architecture("afmoe", _EXPERTS),
    Architecture("apertus", _COMPUTED),
    Architecture("bloom", _COMPUTED, refuses("attention of its own")),
    Architecture("cohere", _YES),
    Architecture("cohere2", _YES),
    Architecture("deepseek_v2", _EXPERTS),
    Architecture("deepseek_v3", _EXPERTS),
    Architecture("doge", _UNKNOWN, refuses("masks its attention in a way of its own")),
    Architecture("ernie4_5", _YES),
    Architecture("gemma", _YES),
    Architecture("gemma2", _YES),
    Architecture("gemma3_text", _YES),
    Architecture("glm4", _YES),
    Architecture("gpt2", _YES, int8=refuses("no layer of it can be quantised")),
    Architecture("gpt_bigcode", _NO_CLASS),
    Architecture("gpt_neox", _NO_CLASS),
    Architecture("gpt_oss", _EXPERTS),
    Architecture("granite", _YES),
    Architecture("helium", _UNKNOWN),
    Architecture("llama", _YES),
    Architecture("mamba", refuses("state-space"), refuses("state-space")),
    Architecture("minimax", refuses("linear_attention layers"), refuses("linear_attention layers")),
    Architecture("mistral", _YES),
    Architecture("mixtral", _EXPERTS),
    Architecture("nemotron", _YES),
    Architecture("olmo2", _NO_CLASS),
    Architecture("opt", _YES),
    Architecture("persimmon", _UNKNOWN),
    Architecture("phi3", _YES),
    Architecture("qwen2", _YES),
    Architecture("qwen3", _YES),
    Architecture("qwen3_moe", _EXPERTS),
    Architecture("rwkv", refuses("recurrent state"), refuses("recurrent state")),
    Architecture("seed_oss", _NO_CLASS),
    Architecture("smollm3", _NO_CLASS),
    Architecture("stablelm", _YES),
    Architecture("starcoder2", _NO_CLASS),
)
