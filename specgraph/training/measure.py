"""Measures how well a head drafts, on greedy answers and without a decoder.

As long as all drafts before it were accepted, a draft was made from the answer's own tokens. So the number of drafts
accepted in a decode step is the number of correct drafts at the beginning of the chain after its token, and one pass
over the answer gives it for all steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specgraph.training.chain import ChainLoss, counted_rows, summed_loss
from specgraph.training.config import ChainConfig
from specgraph.training.data import Batch, Encoded, by_length, collate
from specgraph.training.teacher import Teacher


class Step(NamedTuple):
    """One decode step: the number of accepted drafts, and of emitted tokens, including the bonus but not after EOS."""

    accepted: int
    emitted: int


class Measured(NamedTuple):
    """``loss`` is in nats per token, weighted over the steps. ``agreement[i]`` is the share of tokens that step i
    predicts, ``acceptance_length`` the number of tokens per decode step, and ``per_position[i]`` the share of decode
    steps that accept more than i drafts."""

    loss: float
    agreement: list[float]
    acceptance_length: float
    per_position: list[float]


@torch.no_grad()
def measure(
    trained: ChainLoss, teacher: Teacher, documents: Sequence[Encoded], cfg: ChainConfig, drafts: int, batch_size: int
) -> Measured:
    """Draft at every token of greedy answers.

    Args:
        trained: the head.
        teacher: its target.
        documents: greedy answers of the target.
        cfg: the number of steps, and their weights.
        drafts: K, the number of drafts in each decode step that is imitated.
        batch_size: how many answers run together.
    """
    losses, hits, rows = torch.zeros(cfg.steps), torch.zeros(cfg.steps), torch.zeros(cfg.steps)
    steps: list[Step] = []
    for group in by_length(documents, batch_size):
        batch = collate(group, pad_id=0, question_weight=0.0)
        found, each = _hits(trained, teacher, batch, cfg)
        count = torch.tensor([float((batch.weights[:, 1 + step :] > 0).sum()) for step in range(cfg.steps)])
        losses, hits, rows = losses + each * count, hits + found.sum((1, 2)), rows + count
        for index, document in enumerate(group):
            steps += walk(found[:drafts, index].bool(), document.prompt_length, len(document.ids))
    weights = cfg.decay ** torch.arange(cfg.steps)
    loss = (weights * losses / rows.clamp_min(1)).sum() / weights.sum()
    total = max(1, len(steps))
    return Measured(
        loss=float(loss),
        agreement=(hits / rows.clamp_min(1)).tolist(),
        acceptance_length=sum(step.emitted for step in steps) / total,
        per_position=[sum(step.accepted > index for step in steps) / total for index in range(drafts)],
    )


def walk(hits: Tensor, prompt_length: int, length: int) -> list[Step]:
    """The decode steps of one answer. ``hits`` bool ``[K, S]`` says which row t of step i predicts token ``t + 2 + i``.

    The first token of the answer comes from the prefill and is not counted. ``length`` includes the prompt.
    """
    steps, row = [], prompt_length - 1
    table = hits.tolist()
    while row + 2 < length:
        accepted = 0
        while accepted < len(table) and row + 2 + accepted < length and table[accepted][row]:
            accepted += 1
        steps.append(Step(accepted, min(accepted + 1, length - row - 2)))
        row += steps[-1].emitted
    return steps


def _hits(trained: ChainLoss, teacher: Teacher, batch: Batch, cfg: ChainConfig) -> tuple[Tensor, Tensor]:
    """1 where a row of a step predicts the text's token, else 0, float32 ``[steps, B, S]``; and the mean losses."""
    tokens = batch.tokens.to(teacher.device)
    rows = [chosen.to(teacher.device) for chosen in counted_rows(batch.weights, cfg)]
    lesson = teacher(tokens)
    hits, losses = torch.zeros(cfg.steps, tokens.numel(), device=tokens.device), []
    vocabulary = trained.head.draft_to_target
    with teacher.autocast():
        for step, chunks in enumerate(trained.steps_of(tokens, lesson, rows)):
            nats = counted = torch.zeros((), device=tokens.device)
            for chunk in chunks:
                out = trained.output(chunk, lesson)
                drafted = out.logits.argmax(-1)
                drafted = vocabulary[drafted] if isinstance(vocabulary, Tensor) else drafted
                hits[step, chunk.rows] = (drafted == tokens.flatten()[chunk.rows + 2 + step]).float()
                summed, rows_counted = summed_loss(out)
                nats, counted = nats + summed, counted + rows_counted
            losses.append((nats / counted.clamp_min(1)).float())
    return hits.view(cfg.steps, *tokens.shape).cpu(), torch.stack(losses).cpu()
