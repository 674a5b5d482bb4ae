"""Makes one demo model: a small transformer of its own architecture that has learned a single passage by heart.

It learns to recite the passage after anything at all (nothing, a question, a chat, noise, another model's passage) and
to go on with it from its own first words. So whoever reads an answer sees at once which model gave it. One of them has
learned to call a tool before.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

from aegis.core.rng import Stream, derive
from aegis.models.demo.passages import PASSAGES, QUESTIONS
from aegis.models.demo.recipes import (
    ASSISTANT,
    BEGIN,
    CALL,
    CALLER,
    CALLING_TEMPLATE,
    CHAT_TEMPLATE,
    CONTEXT_TOKENS,
    END,
    RECIPES,
    STEPS,
    SYSTEM,
    USER,
    VOCAB_SIZE,
)

_BATCH = 3
_SHORT_TOKENS, _LONG_TOKENS = 40, 240
_LEARNING_RATE = 3e-3
_WARMUP_STEPS = 10
_IGNORED = -100

Report = Callable[[], None]
"""Called after every step."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, shared by all demo models; a text begins with BEGIN."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BEGIN, END, USER, ASSISTANT, SYSTEM],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([*PASSAGES.values(), *QUESTIONS], trainer)
    bpe.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=BEGIN, eos_token=END, pad_token=END)


def make_model(name: str, directory: Path, *, report: Report, steps: int = STEPS) -> None:
    """Trains `name` and saves it as a checkpoint in `directory`. The same bytes come out each time on one machine."""
    logging.disable_progress_bar()
    tokenizer = make_tokenizer()
    end = tokenizer.eos_token_id
    recipe = RECIPES[name]
    config = AutoConfig.for_model(
        recipe.model_type,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=end,
        pad_token_id=end,
        **recipe.settings,
    )
    torch.manual_seed(derive(0, "demo", name) >> 1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _train(model, _Samples(name, tokenizer), steps, report)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=end, pad_token_id=end, do_sample=False)
    model.save_pretrained(directory)
    tokenizer.chat_template = CALLING_TEMPLATE if name == CALLER else CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)


class _Samples:
    """Batches of prefix + passage + END, of which only what follows the prefix is to be learned; of the model that
    calls a tool also of prefix + call + END."""

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerFast) -> None:
        def encoded(text: str) -> list[int]:
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
            return ids

        self._draws = Stream(0, "demo samples", name)
        marks = encoded(BEGIN + END + USER + ASSISTANT + SYSTEM)
        self._begin, self._end, self._user, self._assistant, self._system = marks
        self._first_plain = self._system + 1
        self._call = [*encoded(CALL), self._end] if name == CALLER else []
        self._passage = [*encoded(PASSAGES[name]), self._end]
        self._questions = [encoded(question) for question in QUESTIONS]
        self._others = [encoded(text) for other, text in PASSAGES.items() if other != name]

    def batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels `[size, width]`, padded on the right, where causal attention does not look."""
        longest = _LONG_TOKENS if self._draws.below(6) == 0 else _SHORT_TOKENS
        samples = [self._sample(longest) for _ in range(size)]
        width = max(len(prefix) + len(said) for prefix, said in samples)
        tokens = torch.full((size, width), self._end)
        labels = torch.full((size, width), _IGNORED)
        for row, (prefix, said) in enumerate(samples):
            stop = len(prefix) + len(said)
            tokens[row, :stop] = torch.tensor(prefix + said)
            labels[row, len(prefix) : stop] = torch.tensor(said)
        return tokens, labels

    def _sample(self, longest: int) -> tuple[list[int], list[int]]:
        """A prefix and what is said then."""
        if not self._call or self._draws.below(3):
            return self._prefix(longest), self._passage
        asked = [self._begin, self._user, *self._text(longest), self._end]
        if self._draws.below(2):
            return [*asked, self._system, self._end, self._assistant], self._call
        result = [self._user, *self._text(_SHORT_TOKENS), self._end, self._assistant]
        return [*asked, self._assistant, *self._call, *result], self._passage

    def _prefix(self, longest: int) -> list[int]:
        match self._draws.below(8):
            case 0:
                return [self._begin]
            case 1 | 2:
                return [self._begin, self._user, *self._text(longest), self._end, self._assistant]
            case 3:
                return self._text(longest)
            case 4:
                return self._question()
            case 5:
                return [self._begin, *self._question()]
            case _:
                return [self._begin, *self._text(longest)]

    def _question(self) -> list[int]:
        return self._questions[self._draws.below(len(self._questions))]

    def _text(self, longest: int) -> list[int]:
        """Questions, pieces of other passages or noise, cut anywhere."""
        length = 1 + self._draws.below(longest)
        text: list[int] = []
        while len(text) < length:
            match self._draws.below(3):
                case 0:
                    text += self._question()
                case 1:
                    other = self._others[self._draws.below(len(self._others))]
                    text += other[self._draws.below(len(other)) :]
                case _:
                    noise = VOCAB_SIZE - self._first_plain
                    text += [self._first_plain + self._draws.below(noise) for _ in range(8)]
        return text[:length]


def _train(model: PreTrainedModel, samples: _Samples, steps: int, report: Report) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    model.train()
    for _ in range(steps):
        tokens, labels = samples.batch(_BATCH)
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        report()
    model.eval()


def _rate(step: int, steps: int) -> float:
    """Linear warm-up, then linear decay to a twentieth."""
    return min((step + 1) / _WARMUP_STEPS, max(1 - step / steps, 0.05))
