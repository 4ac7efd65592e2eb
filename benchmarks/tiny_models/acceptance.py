"""Estimates from one forward pass of the draft how many of its drafts are accepted under greedy decoding.

As long as all drafts before it were accepted, a draft was made from the target's own greedy text. So the number of
drafts accepted at a position is the number of consecutive positions, from there on, at which the draft's most probable
token is the target's. No decoder is needed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.tiny_models.config import AcceptanceConfig
from specgraph.training.data import Encoded, collate
from specgraph.training.measure import Step
from specgraph.training.rollout import continue_prompts


@dataclass
class AcceptanceReport:
    """Greedy acceptance over some questions.

    ``agreement`` is the share of tokens of the target's greedy text that the draft predicts, ``acceptance_length`` the
    number of tokens per decode step, and ``per_position[i]`` the share of steps that accept more than ``i`` drafts.
    ``finished`` is the share of texts that reach EOS.
    """

    questions: int
    num_speculative_tokens: int
    tokens: int
    agreement: float
    acceptance_length: float
    standard_error: float
    finished: float
    per_position: list[float] = field(default_factory=list)


def measure_acceptance(
    target: Any, draft: Any, prompts: Sequence[list[int]], cfg: AcceptanceConfig
) -> AcceptanceReport:
    """Decode ``prompts`` greedily with the target, and count how many drafts would have been accepted.

    Both models must be on one device, in evaluation mode. At most ``cfg.max_new_tokens`` are decoded for each prompt.
    """
    prompts = prompts[: cfg.max_questions]
    (texts,) = continue_prompts(target, prompts, cfg.max_new_tokens, [0.0], len(prompts), "greedy answers")
    documents = [Encoded([*prompt, *text], len(prompt)) for prompt, text in zip(prompts, texts, strict=True)]
    agreed = [row for batch in range(0, len(documents), 64) for row in _agreement(draft, documents[batch : batch + 64])]
    steps = [decode_steps(row, cfg.num_speculative_tokens) for row in agreed]
    flat = [step for each in steps for step in each]
    length = sum(step.emitted for step in flat) / max(1, len(flat))
    eos = target.generation_config.eos_token_id
    return AcceptanceReport(
        questions=len(prompts),
        num_speculative_tokens=cfg.num_speculative_tokens,
        tokens=sum(map(len, texts)),
        agreement=sum(map(sum, agreed)) / sum(map(len, agreed)),
        acceptance_length=length,
        standard_error=_ratio_error(steps, length),
        finished=sum(text[-1] == eos for text in texts) / len(texts),
        per_position=[
            sum(step.accepted > i for step in flat) / max(1, len(flat)) for i in range(cfg.num_speculative_tokens)
        ],
    )


def decode_steps(agreed: Sequence[bool], num_speculative_tokens: int) -> list[Step]:
    """The decode steps of one greedy text. ``agreed[i]`` says whether the draft predicts token i of the text.

    The first token comes from the prefill and is not counted.
    """
    steps, at = [], 1
    while at < len(agreed):
        window = agreed[at : at + num_speculative_tokens]
        accepted = window.index(False) if False in window else len(window)
        steps.append(Step(accepted, min(accepted + 1, len(agreed) - at)))
        at += steps[-1].emitted
    return steps


@torch.no_grad()
def _agreement(draft: Any, documents: Sequence[Encoded]) -> list[list[bool]]:
    """Whether the draft's most probable token is the next one, for every token after the prompt."""
    tokens = collate(documents, pad_id=0).tokens.to(draft.device)
    hits = (draft(input_ids=tokens[:, :-1], use_cache=False).logits.argmax(-1) == tokens[:, 1:]).tolist()
    return [row[d.prompt_length - 1 : len(d.ids) - 1] for row, d in zip(hits, documents, strict=True)]


def _ratio_error(steps: Sequence[Sequence[Step]], ratio: float) -> float:
    """The standard error of tokens per step, for questions drawn independently, from the linearised ratio."""
    residuals = (sum(step.emitted for step in each) - ratio * len(each) for each in steps)
    return math.sqrt(sum(r * r for r in residuals)) / max(1, sum(map(len, steps)))
