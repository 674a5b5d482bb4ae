"""Everything that the backend uses of vLLM: model classes, weight loaders, attention. Only `norms` imports it too.

Its engine, scheduler, workers and model runners are not used. What a worker does to its process is done here once, and
two things are undone that belong to a process with one model: linear layers on a CPU do not move their weights into
memory of their own, and rotary embeddings are not shared between models.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any

from aegis.core.errors import ModelRefused, UserError
from aegis.core.model import KvLayer
from aegis.engine.vllm.recorded_steps import RecordedSteps
from aegis.engine.vllm.version import refusal
from aegis.engine.vllm.weights import Use
from aegis.process.error_lines import flattened

if reason := refusal():
    raise UserError(reason, param="engine")

os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_PLUGINS", "")  # code that another package brings would be run

import torch
import vllm.envs
import vllm.ir
import vllm.model_executor.layers.rotary_embedding as rotary
import vllm.model_executor.layers.utils as gemm
from torch.nn.functional import linear, pad
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.utils import get_model_architecture, initialize_model
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import CommonAttentionMetadata

from aegis.engine.vllm import norms

_TRANSFORMERS = "vllm.model_executor.models.transformers"
_REFUSALS = (
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


def on_cpu() -> bool:
    """Whether this vLLM was built for CPUs."""
    return bool(current_platform.is_cpu())


def configure(directory: Path, *, dtype: str, context_tokens: int | None, block_tokens: int) -> VllmConfig:
    """vLLM's configuration for a checkpoint or an image directory. Raises ModelRefused if vLLM has no such
    architecture."""
    try:
        config = EngineArgs(
            model=str(directory),
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=context_tokens,
            block_size=block_tokens,
            model_impl="vllm",
            enforce_eager=True,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=1 << 28,
        ).create_engine_config()
        kind, name = get_model_architecture(config.model_config)
    except _REFUSALS as error:
        raise ModelRefused(f"vLLM cannot serve it: {_line(error)}") from error
    if kind.__module__.startswith(_TRANSFORMERS):  # it alters classes of transformers' for the whole process
        raise ModelRefused(f"vLLM has no {name} of its own and would run transformers'")
    if config.model_config.is_moe and on_cpu():
        raise ModelRefused("on a CPU vLLM packs experts into memory of its own")
    if config.model_config.quantization is not None:
        raise ModelRefused(f"{config.model_config.quantization} weights are in memory of vLLM's own once loaded")
    _initialise(config)
    return config


def load(config: VllmConfig) -> torch.nn.Module:
    """The model, its weights loaded and in the layout of vLLM's layers. Raises ModelRefused."""
    with _building(config):
        model: torch.nn.Module = get_model(vllm_config=config)
    return model


def skeleton(config: VllmConfig) -> torch.nn.Module:
    """The same without any bytes. torch's default dtype is another meanwhile, in all threads. Raises ModelRefused."""
    with _building(config), set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
        model: torch.nn.Module = initialize_model(config)
    layer: Any
    for layer in model.modules():
        if hasattr(layer, "quant_method"):
            layer.cpu_linear = linear
        if isinstance(layer, Attention):
            layer.process_weights_after_loading(config.model_config.dtype)  # sets what is no weight
            if on_cpu():  # nothing compiles here that it would have to be hidden from; on GPUs it was not tried
                layer.use_direct_call = True
    return model.eval()


@contextmanager
def _building(config: VllmConfig) -> Iterator[None]:
    rotary._ROPE_DICT.clear()
    try:
        with set_current_vllm_config(config):
            yield
    except NotImplementedError as error:  # what torch says of the bytes of tensors that have none
        raise ModelRefused(
            "vLLM computes some of its tensors while it builds it, and they would have no bytes: the transformers "
            "engine may serve it"
        ) from error
    except _REFUSALS as error:
        raise ModelRefused(f"vLLM cannot build it: {_line(error)}") from error
    finally:
        rotary._ROPE_DICT.clear()


def kv_layers(config: VllmConfig) -> tuple[KvLayer, ...]:
    """The KV of each layer. Raises ModelRefused if a layer caches something other than paged KV."""
    layers = _attention_layers(config).values()
    return tuple(KvLayer(layer.num_kv_heads, layer.head_size, layer.head_size_v) for layer in layers)


def _attention_layers(config: VllmConfig) -> dict[str, Attention]:
    """In the order of the model. Raises ModelRefused for what keeps state by other means than plain paged KV."""
    layers = dict(config.compilation_config.static_forward_context)
    for name, layer in layers.items():
        if type(layer) is not Attention or layer.kv_sharing_target_layer_name is not None:
            raise ModelRefused(f"{name} is a {type(layer).__name__}; only attention over KV of its own is served")
        sizes = layer.get_attn_backend().get_supported_head_sizes()
        if sizes and layer.head_size not in sizes:
            known = ", ".join(map(str, sizes))
            raise ModelRefused(f"its attention heads have {layer.head_size} dimensions; vLLM has kernels for {known}")
        if layer.head_size_v != layer.head_size:
            raise ModelRefused("its keys and values differ in size")
    return layers


def uses(model: torch.nn.Module) -> dict[str, Use]:
    """The uses of the weights that vLLM packs on a CPU, by name. Embeddings multiply if there is no other last
    layer."""
    if not on_cpu():
        return {}
    layers = {
        name: layer for name, layer in model.named_modules(remove_duplicate=False) if hasattr(layer, "cpu_linear")
    }
    headless = not any(isinstance(layer, ParallelLMHead) for layer in layers.values())
    found: dict[str, Use] = {}
    for name, layer in layers.items():
        looked_up = isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)
        if not looked_up or headless:
            found[f"{name}.weight"] = Use.BOTH if looked_up else Use.MULTIPLIED
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Row r runs tokens `[starts[r], starts[r + 1])` of `ids` at the end of its `lengths[r]`; `slots` say where each
    token's KV goes, `blocks [rows, most blocks]` where all of it is. All are in host memory. `longest` is at least the
    greatest length, `most_new` the most tokens of a row."""

    ids: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor
    blocks: torch.Tensor
    longest: int
    most_new: int


class Attending:
    """Runs one model's forward passes over its KV."""

    def __init__(self, config: VllmConfig, model: Any, device: torch.device) -> None:
        self._config = config
        self._model = model
        self._device = device
        self._names: dict[Any, list[str]] = {}  # by their builder of metadata: layers alike share one
        layers = _attention_layers(config)
        alike: dict[Any, list[str]] = {}
        for name, layer in layers.items():
            alike.setdefault(layer.get_kv_cache_spec(config), []).append(name)
        with set_current_vllm_config(config):
            for spec, names in alike.items():
                builder = layers[names[0]].get_attn_backend().get_builder_cls()
                self._names[builder(spec, names, config, device)] = names
        self._layers = layers
        whole = any(isinstance(part, TorchCompileWithNoGuardsWrapper) for part in model.modules())
        self._recorded = RecordedSteps() if whole and on_cpu() else None  # on GPUs it was not tried

    def bind(self, caches: Sequence[torch.Tensor]) -> None:
        """One `[units, heads, block_tokens, key_dim + value_dim]` per layer."""
        for layer, cache in zip(self._layers.values(), caches, strict=True):
            layer.bind_kv_cache(cache)

    def hidden(self, batch: Batch) -> torch.Tensor:
        """Last hidden states `[tokens, hidden]`."""
        return self._hidden(batch, self._metadata(batch))

    def next_logits(self, batch: Batch) -> torch.Tensor:
        """`[rows, vocab]`, of rows of one token each."""
        if self._recorded is None:
            return self.logits(self.hidden(batch))
        if (first := self._recorded.first_lengths(len(batch.ids))) is not None:
            batch = _apart(batch, first)
        metadata = self._metadata(batch)
        seen = (value for data in metadata.values() for value in vars(data).values())
        inputs = [batch.ids, batch.positions, *(value for value in seen if isinstance(value, torch.Tensor))]
        step = partial(self._logits_of, batch, metadata)
        return self._recorded.run(len(batch.ids), inputs, _lengths(batch), step)

    def _logits_of(self, batch: Batch, metadata: dict[Any, Any]) -> torch.Tensor:
        return self.logits(self._hidden(batch, metadata))

    def _metadata(self, batch: Batch) -> dict[Any, Any]:
        """What the attention layers have to know of the batch, by the builder that made it."""
        common = CommonAttentionMetadata(
            query_start_loc=self._sent(batch.starts),
            query_start_loc_cpu=batch.starts,
            seq_lens=self._sent(batch.lengths),
            num_reqs=len(batch.lengths),
            num_actual_tokens=len(batch.ids),
            max_query_len=batch.most_new,
            max_seq_len=batch.longest,
            block_table_tensor=self._sent(batch.blocks),
            slot_mapping=self._sent(batch.slots),
            causal=True,
        )
        return {builder: builder.build(0, common) for builder in self._names}

    def _hidden(self, batch: Batch, metadata: dict[Any, Any]) -> torch.Tensor:
        built = {name: metadata[builder] for builder, names in self._names.items() for name in names}
        slots = {name: data.slot_mapping for name, data in built.items()}
        with set_forward_context(built, self._config, num_tokens=len(batch.ids), slot_mapping=slots):
            states: torch.Tensor = self._model(self._sent(batch.ids), self._sent(batch.positions))
        return states

    def _sent(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self._device, non_blocking=True)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """`[tokens, vocab]`."""
        logits: torch.Tensor = self._model.compute_logits(states)
        return logits


def _lengths(batch: Batch) -> tuple[int, int]:
    """All that is known of lengths beside what tensors hold."""
    return batch.longest, batch.blocks.shape[1]


def _apart(batch: Batch, first: Sequence[int]) -> Batch:
    """The same batch, padded so that its lengths are not those of the `first`."""
    longest, width = map(eq, _lengths(batch), first)
    return replace(batch, longest=batch.longest + longest, blocks=pad(batch.blocks, (0, int(width))))


def _initialise(config: VllmConfig) -> None:
    """Prepares the process as vLLM's worker does. Its group of processes is this one alone."""
    if not torch.distributed.is_initialized():
        with tempfile.TemporaryDirectory() as directory, set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"file://{directory}/store", 0, "gloo" if on_cpu() else "nccl")
            ensure_model_parallel_initialized(1, 1)
    if on_cpu():
        norms.prefer(config)
    vllm.envs.enable_envs_cache()  # each linear layer asks for one at each call
    config.kernel_config.ir_op_priority.set_default()
    vllm.ir.set_default_torch_wrap(config.compilation_config.ir_enable_torch_wrap)


def _plain(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = linear


def _nothing(*_: object, **__: object) -> None:
    """Stands for waiting and for giving memory back, which a CPU does not need."""


registry._run_in_subprocess = lambda inspect: inspect()  # a process for each architecture costs ten seconds
if on_cpu():
    gemm.dispatch_cpu_unquantized_gemm = _plain
    for name in ("empty_cache", "synchronize"):  # as its own runner does
        setattr(torch.accelerator, name, _nothing)
    norms.register()


def _line(error: BaseException) -> str:
    """Without what its validation puts before and behind the reason."""
    told = flattened(error).rpartition("Value error, ")[2]
    for behind in (" [type=", " Supported architectures:"):
        told = told.partition(behind)[0]
    return told.rstrip(".")[:300] or type(error).__name__
