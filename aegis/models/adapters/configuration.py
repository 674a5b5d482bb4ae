"""The configuration of an adapter, `adapter_config.json`, and the model that it says it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Any

from msgspec import Struct

from aegis.core.errors import ModelRefused
from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec
from aegis.models.checkpoint import read_small_json

CONFIGURATION = "adapter_config.json"
RANK_MAX = 512
ALPHA_MAX = 1 << 20

_NEUTRAL: Mapping[str, tuple[object, str]] = {
    "use_dora": (False, "it is a DoRA adapter, which scales the weights of its base anew"),
    "modules_to_save": (None, "it has modules of its own (modules_to_save)"),
    "trainable_token_indices": (None, "it has tokens of its own (trainable_token_indices)"),
    "rank_pattern": ({}, "its layers have different ranks (rank_pattern)"),
    "alpha_pattern": ({}, "its layers have different scales (alpha_pattern)"),
    "target_parameters": (None, "it changes parameters that are no layers (target_parameters)"),
    "layer_replication": (None, "it has layers more often than its base (layer_replication)"),
    "lora_bias": (False, "its low-rank layers have a bias (lora_bias)"),
    "use_qalora": (False, "it is a QALoRA adapter"),
    "alora_invocation_tokens": (None, "it is switched on by tokens (alora_invocation_tokens)"),
    "arrow_config": (None, "it chooses among other adapters (arrow_config)"),
    "monteclora_config": (None, "it draws its weights at random (monteclora_config)"),
}
_OTHER_BASES = ("corda", "loftq", "lora_ga", "olora", "pissa")
"""Ways to begin that change the weights of the base: without the changed ones the adapter is of no use."""


class AdapterConfiguration(Struct, frozen=True):
    rank: int
    scale: float
    base: str  # a path or a hub id, as it was where the adapter was trained; perhaps empty


def is_adapter(path: Path) -> bool:
    """Whether it looks like the directory of an adapter."""
    return (path / CONFIGURATION).is_file() and not (path / "config.json").is_file()


def read_configuration(directory: Path) -> AdapterConfiguration:
    """Raises ModelRefused."""
    tree = read_small_json(directory / CONFIGURATION)
    kind = tree.get("peft_type")
    if kind != "LORA":
        raise ModelRefused(f"it is an adapter of type {kind!r}; only LORA is served")
    if tree.get("task_type") not in ("CAUSAL_LM", None):
        raise ModelRefused(f"its task_type is {tree['task_type']!r}; adapters that generate have CAUSAL_LM")
    for key, (neutral, why) in _NEUTRAL.items():
        if tree.get(key) and tree[key] != neutral:
            raise ModelRefused(f"{why}, which is not served; merge it into its base and serve that")
    if tree.get("bias", "none") != "none":
        raise ModelRefused(f"it has biases (bias: {tree['bias']!r}), which are not served; train it with bias: 'none'")
    begun = tree.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_OTHER_BASES):
        raise ModelRefused(
            f"it was begun from changed weights of its base (init_lora_weights: {begun!r}); convert it to plain LoRA"
        )
    rank, base = _rank(tree), tree.get("base_model_name_or_path")
    return AdapterConfiguration(rank, _scale(tree, rank), base if isinstance(base, str) else "")


def _rank(tree: dict[str, Any]) -> int:
    rank = tree.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 < rank <= RANK_MAX:
        raise ModelRefused(f"{CONFIGURATION}: r is {rank!r}; expected 1 to {RANK_MAX}")
    return rank


def _scale(tree: dict[str, Any], rank: int) -> float:
    alpha = tree.get("lora_alpha")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) <= ALPHA_MAX:
        raise ModelRefused(f"{CONFIGURATION}: lora_alpha is {alpha!r:.40}; expected a number up to {ALPHA_MAX}")
    return alpha / (sqrt(rank) if tree.get("use_rslora") else rank)


def base_of(named: str | None, said: str, models: Mapping[ModelId, ModelSpec]) -> ModelSpec:
    """The served model that the adapter belongs to: the one that its user has `named`, or else the one whose name or
    source its own configuration has `said`. Raises ModelRefused."""
    of_source = [spec for spec in models.values() if said and _is(spec, said) and spec.base is None]
    if named is None and not of_source:
        where = f"its base is {said!r}" if said else f"{CONFIGURATION} names no base"
        raise ModelRefused(
            f"{where}, and no model here has that name or source: name its base, by --base or in its entry"
        )
    if named is None:
        return min(of_source, key=lambda spec: (spec.model != said, spec.model))
    spec = models.get(ModelId(named))
    if spec is None or spec.base is not None:
        raise ModelRefused(f"there is no model named {named!r} that could be its base")
    if of_source and spec not in of_source:
        raise ModelRefused(f"it is an adapter of {said!r}, which is served as {of_source[0].model!r}, not of {named!r}")
    return spec


def _is(spec: ModelSpec, said: str) -> bool:
    return said in (spec.model, spec.root) or (said.startswith(("/", ".")) and _same(Path(said), Path(spec.root)))


def _same(one: Path, other: Path) -> bool:
    return other.is_absolute() and Path(*one.parts) == other


def refuse_base(spec: ModelSpec) -> None:
    """Raises ModelRefused if no adapter of the model can be served."""
    manifest = spec.manifest
    if manifest.pooling is not None:
        raise ModelRefused(f"its base {spec.model!r} pools, and adapters of such models are not served")
    if manifest.engine != "transformers":
        raise ModelRefused(f"its base {spec.model!r} runs on the {manifest.engine} engine; adapters need transformers")
    if manifest.ranks > 1:
        raise ModelRefused(f"its base {spec.model!r} is shared out among ranks; adapters of it are not served")
