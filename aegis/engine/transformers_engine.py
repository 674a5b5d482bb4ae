"""The default backend: architectures from transformers, weights and KV in memory of ours.

`attach` builds a model's modules once, on the meta device, and binds every parameter and buffer as a view of the
model's weight range, for life. A switch between models then touches nothing here: it is a copy into that range, made by
the memory executor. The code knows no particular architecture.

On a GPU, decode steps go through `aegis.engine.gpu.decode`; on a CPU it is not imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, starmap
from threading import Lock
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from aegis.core.errors import ModelRefused
from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec
from aegis.core.request import Token
from aegis.engine.cpu.llama_steps import LlamaSteps, llama_steps
from aegis.engine.lane_threads import Computing, Decoders
from aegis.engine.lora import Adapters
from aegis.engine.modules import bound, built_for
from aegis.engine.paged_attention import Decode, Mixed, Prefill, Step, running
from aegis.engine.parallel.group import Group
from aegis.engine.parallel.sharding import connect
from aegis.engine.passes import PASS_TOKENS, Part, passes, reported_tokens
from aegis.engine.protocol import KvRegion, Sampled, StepRow
from aegis.engine.sampler import Sampler
from aegis.engine.sampling_engine import SamplingEngine
from aegis.engine.tensor_views import KvViews

if TYPE_CHECKING:
    from aegis.engine.gpu.decode import GpuDecoder


@dataclass(frozen=True, slots=True)
class _Attached:
    module: PreTrainedModel
    views: KvViews
    keeps_logits: bool  # forward takes `logits_to_keep`
    extends: bool  # else the KV of a position depends on how many there are
    alone: AbstractContextManager[object]  # held during its steps, if these change what its modules hold
    adapters: Adapters
    compiled: LlamaSteps | None  # its decode steps on a processor, where they need no modules


class TransformersEngine(SamplingEngine):
    """Implements `Engine`. `kv` is the device's KV region; the views of each model's shape are made at `attach`.
    `decoder` runs decode steps in place of the device's usual way. `group` are the ranks that share the models out, if
    any; all of them run the same steps, whatever they sample."""

    def __init__(
        self,
        kv: KvRegion,
        *,
        device: str = "cpu",
        decoder: GpuDecoder | None = None,
        sampler: Sampler | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__(sampler)
        self._kv = kv
        self._device = torch.device(device)
        self._models: dict[ModelId, _Attached] = {}
        self._base_of: dict[ModelId, ModelId] = {}  # by adapter
        self._prepared: dict[tuple[ModelId, str], PreTrainedModel] = {}  # by name and fingerprint
        self._group = group
        self._pass_tokens = PASS_TOKENS[self._device.type]
        self._decoders = Decoders()
        self._computing = Computing(self._device, decoder, self._decoders)

    def prepare(self, spec: ModelSpec) -> None:
        if spec.base is not None:
            return
        self._prepared[spec.model, spec.manifest.fingerprint] = built_for(spec)

    def discard(self, spec: ModelSpec) -> None:
        self._prepared.pop((spec.model, spec.manifest.fingerprint), None)

    def attach(self, spec: ModelSpec, weights_base: int) -> None:
        if spec.base is not None:
            self._attach_adapter(spec, spec.base, weights_base)
            return
        assert spec.model not in self._models and spec.manifest.ranks == (self._group.size if self._group else 1)
        module = self._prepared.pop((spec.model, spec.manifest.fingerprint), None) or built_for(spec)
        bound(module, spec, weights_base, self._device)
        if self._group is not None:
            connect(module, self._group)
        views = KvViews(self._kv, spec.manifest.kv, self._device)
        keeps_logits = "logits_to_keep" in inspect.signature(module.forward).parameters
        extends = _extends(module)  # else rotary frequencies are set in each step
        alone: AbstractContextManager[object] = nullcontext() if extends else Lock()
        on_cpu = self._device.type == "cpu" and self._group is None
        compiled = llama_steps(module, spec, weights_base, views) if on_cpu else None
        adapters = Adapters(module, self._device)
        self._models[spec.model] = _Attached(module, views, keeps_logits, extends, alone, adapters, compiled)
        self._sampler.grammars.add(spec)

    def _attach_adapter(self, spec: ModelSpec, base: ModelId, weights_base: int) -> None:
        if base not in self._models:
            raise ModelRefused(f"{spec.root}: its base {base!r} cannot be run here")
        attached = self._models[base]
        changes = attached.adapters.add(spec, weights_base)
        if attached.compiled is not None:
            attached.compiled.adapters.add(spec.model, changes)
        self._base_of[spec.model] = base

    def detach(self, model: ModelId) -> None:
        base = self._base_of.pop(model, None)
        if base is not None:
            if attached := self._models.get(base):
                attached.adapters.remove(model)
                if attached.compiled is not None:
                    attached.compiled.adapters.remove(model)
            return
        self._models.pop(model, None)
        self._sampler.grammars.remove(model)
        self._decoders.drop(model)

    @property
    def decoder(self) -> GpuDecoder | None:
        """What decode steps of the calling thread go through on a GPU."""
        return self._computing.decoder

    def extends(self, model: ModelId) -> bool:
        return self._models[model].extends

    @torch.inference_mode()
    def step(self, model: ModelId, rows: Sequence[StepRow]) -> list[Sampled | None]:
        attached, first = self._models[model], rows[0]
        with self._computing.on_stream(), attached.alone:
            if first.start == 0 and self._sampler.wants_prompt(first.request):
                assert len(rows) == 1 and first.samples
                return [self._reported(attached, first)]
            if any(len(row.tokens) > 1 for row in rows):
                asked, logits = self._run_passes(attached, rows)
            elif (decoder := self.decoder) is not None and not any(row.adapter for row in rows):
                run = partial(_forward, attached, keep=1)
                asked, logits = _asked(rows, range(len(rows)), decoder.decode(model, attached.views, run, rows))
            elif attached.compiled is not None:
                logits = attached.compiled.decode(rows, self._computing.scratch)
                asked, logits = _asked(rows, range(len(rows)), logits)
            else:
                asked, logits = self._decode_gathered(attached, rows)
            if not asked:
                self._computing.finish()  # nothing else waits for the KV that was written
            return self._sampled(rows, asked, logits)

    def _sampled(self, rows: Sequence[StepRow], asked: Sequence[int], logits: torch.Tensor) -> list[Sampled | None]:
        """`logits [len(asked), vocab]`, of these rows."""
        sampled: list[Sampled | None] = [None] * len(rows)
        if asked:
            for at, token in zip(asked, self._sampler.sample([rows[at].request for at in asked], logits), strict=True):
                sampled[at] = Sampled(token, problem=self._sampler.problem(rows[at].request))
        return sampled

    def _reported(self, attached: _Attached, row: StepRow) -> Sampled:
        """Prefills the row and samples, and reports the logprobs of its prompt."""
        vocabulary = attached.module.config.get_text_config().vocab_size
        most = reported_tokens(vocabulary, self._device.type) if attached.extends else len(row.tokens)
        prompt = list[Token]()
        logits = torch.empty(0)
        for ((_, part),) in passes([row], most):
            ids, positions = self._sent([part.tokens]), self._sent([range(part.start, part.stop)])
            step = Prefill(attached.views, self._computing.scratch, part.start, part.stop, row.blocks)
            logits = _forward(attached, step, ids, positions, keep=0, rows=[part])[0]
            following = row.tokens[part.start + 1 : part.stop + 1]
            prompt += self._sampler.prompt_logprobs(row.request, logits[: len(following)], following)
        token = self._sampler.sample([row.request], logits[-1:])[0]
        return Sampled(token, tuple(prompt), self._sampler.problem(row.request))

    def _run_passes(self, attached: _Attached, rows: Sequence[StepRow]) -> tuple[list[int], torch.Tensor]:
        """The rows that sample, and logits `[those rows, vocab]`."""
        asked, logits = list[int](), list[torch.Tensor]()
        for parts in passes(rows, self._pass_tokens) if attached.extends else [list(starmap(Part, enumerate(rows)))]:
            here, of_pass = self._run_together(attached, [part.row for part in parts])
            asked += [parts[at].at for at in here]
            logits.append(of_pass)
        return asked, torch.cat(logits) if len(logits) > 1 else logits[0]

    def _run_together(self, attached: _Attached, rows: Sequence[StepRow]) -> tuple[list[int], torch.Tensor]:
        """To the model all tokens are one sequence; each row attends by itself. The rows that sample, and logits
        `[those rows, vocab]`."""
        long = [at for at, row in enumerate(rows) if len(row.tokens) > 1]
        order = [*long, *_longest_first([at for at, row in enumerate(rows) if len(row.tokens) == 1], rows)]
        ordered = [rows[at] for at in order]
        scratch = self._computing.scratch
        prompts = [Prefill(attached.views, scratch, row.start, row.stop, row.blocks) for row in ordered[: len(long)]]
        single = ordered[len(long) :]
        step = prompts[0] if len(rows) == 1 else Mixed(prompts, self._beside(attached, single) if single else None)
        ids = self._sent([[token for row in ordered for token in row.tokens]])
        positions = self._sent([[position for row in ordered for position in range(row.start, row.stop)]])
        ends = accumulate(len(row.tokens) for row in ordered)
        asked = {at: end - 1 for at, end in zip(order, ends, strict=True) if rows[at].samples}
        # not a number: torch would copy the weights of the last layer for a product with a slice of so many positions
        keep = torch.tensor(list(asked.values()), dtype=torch.int64, device=self._device)
        pace = self._computing.pace
        between = pace.layer if pace else None
        logits = _forward(attached, step, ids, positions, keep=keep, rows=ordered, between=between)[0]
        return list(asked), logits

    def _beside(self, attached: _Attached, rows: Sequence[StepRow]) -> Step:
        """The attention of rows of one token, longest first, beside others."""
        step = self.decoder.beside(attached.views, rows) if self.decoder else None
        return step or self._gathering(attached, rows)

    def _decode_gathered(self, attached: _Attached, rows: Sequence[StepRow]) -> tuple[list[int], torch.Tensor]:
        """Rows of one token each. Those that sample, and logits `[those rows, vocab]`."""
        order = _longest_first(range(len(rows)), rows)
        ordered = [rows[at] for at in order]
        ids, positions = self._sent([row.tokens for row in ordered]), self._sent([[row.start] for row in ordered])
        step = self._gathering(attached, ordered)
        logits = _forward(attached, step, ids, positions, keep=1, rows=ordered)[:, -1]
        return _asked(rows, order, logits)

    def _gathering(self, attached: _Attached, rows: Sequence[StepRow]) -> Decode:
        return Decode(
            attached.views, self._computing.scratch, [row.start for row in rows], [row.blocks for row in rows]
        )

    def _sent(self, values: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor(values).to(self._device, non_blocking=True)


def _longest_first(among: Sequence[int], rows: Sequence[StepRow]) -> list[int]:
    return sorted(among, key=lambda at: -rows[at].start)


def _asked(rows: Sequence[StepRow], order: Sequence[int], logits: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """The numbers of the rows that sample, with their logits; `logits` are of all rows in the order given."""
    here = [place for place, at in enumerate(order) if rows[at].samples]
    return [order[place] for place in here], logits if len(here) == len(order) else logits[here]


def _forward(
    attached: _Attached,
    step: Step,
    ids: torch.Tensor,
    positions: torch.Tensor,
    *,
    keep: int | torch.Tensor,
    rows: Sequence[StepRow] = (),
    between: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Logits `[batch, kept, vocab]`: of the last `keep` tokens, or of all if it is 0, or of these, which may be none.
    Adapters are those of the `rows`, which are in the order of the tokens. `between` is called once in each layer."""
    kept = {"logits_to_keep": keep} if attached.keeps_logits else {}
    with running(step, between), attached.adapters.adapting(rows):
        result = attached.module(input_ids=ids, position_ids=positions, use_cache=False, **kept)
    if step.attended != len(attached.views.layers):
        raise ModelRefused(f"{type(attached.module).__name__} has layers that attend by other means than paged KV")
    logits: torch.Tensor = result.logits
    if attached.keeps_logits:
        return logits
    return logits[:, -keep:] if isinstance(keep, int) else logits[:, keep]


def _extends(module: PreTrainedModel) -> bool:
    """Whether the KV of a position is the same whatever follows it: rotary frequencies may depend on the length of the
    run, as in transformers' `dynamic_rope_update`."""
    kinds = [getattr(part, "rope_type", "") for part in module.modules()]
    names = [name for kind in kinds for name in (kind.values() if isinstance(kind, dict) else (kind,))]
    return not any("dynamic" in name or name == "longrope" for name in names)
