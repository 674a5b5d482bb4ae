"""Whether tokens are those that a model chooses when it decodes greedily, seen in one pass over all of them."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

ROUNDING = 3e-5
"""What rounding makes of ties: by so much of the spread of its logits a token may be behind the best one."""


@torch.inference_mode()
def behind(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> float:
    """By how much of their spread the logits of the worst token of the answer are behind the best: 0 if each token is
    the one that the model chooses after those before."""
    logits = model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    most, least = logits.amax(1), logits.amin(1)
    return float(((most - chosen) / (most - least)).max())
