"""Every function that a step graph calls, with arguments: for tests of all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from specgraph.kernels import step
from specgraph.kernels.sampling import sample
from specgraph.kernels.verify import invert_vocabulary
from specgraph.kernels.verify.verify import VERIFY

EOS = 7
Case = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def _ids(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _layout() -> dict[str, Case]:
    table, lengths = _ids([9, 2], [4, -1], [1, 3]), _ids(100, 100, 8)
    tokens, counts = _ids([1, 2, 3], [4, 5, 6], [7, 8, 9]), _ids(2, 3, 0)
    positions, hidden = step.row_positions(_ids(0, 3, 1), tokens), torch.arange(36.0).view(3, 3, 4)
    logits = hidden.masked_fill(hidden == 17, torch.nan)
    emitted = _ids([3, EOS, 4], [EOS, 5, EOS], [-1, -1, -1])
    many_eos = torch.cat([torch.arange(20, 50), _ids(EOS, -1)]).repeat(3, 1)  # torch.isin would sort them
    mask = {"mask_token_id": 5, "count": 2}
    verified = (emitted, tokens, _ids(5, 0, 2), _ids(0, 1, 0), many_eos)
    return {
        "row_positions": (step.row_positions, (_ids(5, 0, 2), tokens), {}),
        "positions_and_next": (step.positions_and_next, (_ids(5, 0, 2), tokens), {}),
        "row_slots": (step.row_slots, (positions, counts, table, lengths), {"block_size": 4}),
        "row_slots, before 0": (
            step.row_slots, (step.row_positions(_ids(-2, -9, -1), tokens), _ids(3, 3, 2), table, lengths),
            {"block_size": 4},
        ),
        "needed_rows": (step.needed_rows, (hidden, _ids(0, 1, 2), 2), {}),
        "take_rows": (step.take_rows, (hidden, _ids(0, 2, -1), 1), {}),
        "draft_tokens": (step.draft_tokens, (tokens,), {}),
        "bad_rows": (step.bad_rows, (logits, tokens, _ids(3, 3, 3), _ids(0, 0, 0)), {}),
        "expand_draft_inputs": (step.expand_draft_inputs, (tokens, counts, hidden, torch.arange(4.0)), mask),
        "expand_draft_inputs, tokens": (step.expand_draft_inputs, (tokens, counts, None, None), mask),
        "rerun": (
            step.rerun,
            (tokens[:, :2], hidden[:, :2], _ids(2, 1, 0), tokens, hidden, _ids(5, 1, 0), counts), {},
        ),
        "next_module_tokens": (step.next_module_tokens, (tokens, counts, _ids([7], [8], [9])), {}),
        "keep_rows_": (
            step.keep_rows_,
            (tokens[:, :1].clone(), hidden[:, :1].clone(), _ids(0, 1, 1), tokens, hidden, _ids(2, 1, 0)), {},
        ),
        "finalize_step": (step.finalize_step, verified, {"vocab_size": 6, "chain": 2}),
        "finalize_step, not shifted": (step.finalize_step, verified, {"vocab_size": 6, "shifted": False}),
        "record_tokens_": (step.record_tokens_, (torch.full((3, 5), 50), None, tokens, positions, counts), {}),
        "record_tokens_, rows": (
            step.record_tokens_, (torch.full((4, 5), 50), _ids(3, -1, 0), tokens, positions, counts), {}
        ),
        "gather_state": (step.gather_state, (_ids(2, -1, 0), [hidden, counts, tokens > 4], [0.5, -1.0, 1.0]), {}),
        "scatter_state_": (
            step.scatter_state_,
            (_ids(3, -1, 0), [torch.zeros(4, 3, 4), torch.full((4,), 50)], [hidden, counts]),
            {},
        ),
        "keep_point_mass_": (step.keep_point_mass_, (counts > 0, counts > 2, counts), {}),
        "select_state": (step.select_state, (hidden, _ids(2, 0)), {}),
        "advance_": (
            step.advance_,
            (tokens, _ids(10, 20, 30), counts, _ids(0, 1, 0), emitted, _ids(2, 3, 0), [_ids([8, 9], [8, -1], [1, 1])],
             lengths, many_eos),
            {},
        ),
    }  # fmt: skip


def _drawing() -> dict[str, Case]:
    generator = torch.Generator().manual_seed(0)
    logits, draft_logits = torch.randn(3, 4, 50, generator=generator), torch.randn(3, 3, 40, generator=generator)
    knobs = (_ids(0, 5, 0), torch.tensor([1.0, 0.9, 1.0]), torch.tensor([0.0, 0.0, 0.05]))
    temperature, seeds, vocabulary = torch.tensor([0.0, 1.0, 0.7]), _ids(1, 2, 3), torch.arange(40) + 5
    drafts, positions = _ids([5, 6, 7], [5, -1, 7], [44, 6, 3]), _ids([4, 5, 6, 7]).expand(3, -1).contiguous()
    rows, forced, back = _ids(4, 4, 0), _ids(0, 2, 0), invert_vocabulary(vocabulary, 50)
    cases: dict[str, Case] = {}
    for rule in sample.RULES:
        verified = (logits, drafts, draft_logits, temperature, seeds, positions, *knobs, rows, forced, back)
        options = {"rule": rule, "logprobs": "raw", "point_mass": rows == 0}
        cases[f"verify, {rule}"] = (VERIFY.form("reference"), verified, options)
        drawn = (draft_logits.clone(), draft_logits[:, :1], _ids(4, 9, 2), _ids(1, 2, 0), temperature, seeds, *knobs)
        options = {
            "row": 1,
            "rule": rule,
            "rows": _ids(2, -1, 0),
            "target_vocab_size": 44,
            "draft_to_target": vocabulary,
        }
        cases[f"propose_, {rule}"] = (step.propose_, drawn, options)
    return cases


def _lookup() -> dict[str, Case]:
    history = _ids([1, 2, 3, 1, 2, 0, 0], [5, 5, 5, 5, 5, 5, 5], [1, 2, 3, 4, 5, 6, 7])
    options = {"num_speculative_tokens": 3, "max_ngram": 3, "min_ngram": 1}
    suffix = {"num_speculative_tokens": 3, "max_match": 8, "min_match": 1, "max_spec_factor": 2.0,
              "max_spec_offset": 0.0, "min_token_prob": 0.1}  # fmt: skip
    read = (history, _ids(2, -1, 0), _ids(5, 7, 5))
    found, drawn = _ids([4, -1, -1], [-1, -1, -1], [1, 2, 3]), (_ids([7], [8], [9]), _ids([7, 7], [8, 8], [9, 9]))
    window, emitted = _ids([1, 9], [2, 9], [3, 9]), _ids([4, 5], [6, -1], [-1, -1])
    accepted = (history.clone(), window, emitted, _ids(3, 0, 2), _ids(2, 1, 0), _ids(2, -1, 0))
    return {
        "ngram_lookup": (step.ngram_lookup, (history, _ids(2, -1, 0), _ids(5, 7, 1)), options),
        "suffix_lookup": (step.suffix_lookup, read, suffix),
        "record_accepted_": (step.record_accepted_, accepted, {}),
        "prefer_found": (step.prefer_found, (found, *drawn), {}),
        "prefer_found, too long": (step.prefer_found, (found, *drawn), {"last": _ids(9, 3, 2), "max_context": 3}),
        "any_found": (step.any_found, (found,), {}),
    }


def _tracing() -> dict[str, Case]:
    window, emitted = _ids([5, 6, 7, -1], [1, 2, 3, 4], [9, -1, -1, -1]), _ids([6, 8, -1, -1], [2, 3, 4, 5], [-1] * 4)
    state, temperature = (_ids(3, 4, 1), _ids(0, 3, 0)), torch.tensor([0.0, 0.5, 1.0])
    drawn, drafts, counts = [_ids([8], [6], [5])] * 2, [_ids([8, 1, 2], [6, 6, -1], [-1, 5, 5])], _ids(2, 4, 0)
    logprobs, own = -torch.arange(24.0).view(3, 4, 2), [-torch.arange(6.0).view(3, 2)]
    ranks = torch.arange(24, dtype=torch.int32).view(3, 4, 2)
    given = (window, *state, emitted, counts, temperature, torch.zeros(3, 2, 11))
    told = (logprobs, ranks, _ids([2, 2], [0, 4], [0, 0]), drawn, own, drafts)
    return {
        "trace_tokens": (step.trace_tokens, given, {}),
        "drawn_ids": (step.drawn_ids, (drawn, counts), {}),
        "drawn_ids, mapped": (step.drawn_ids, (drawn, counts, _ids(5, 8, 7)), {}),
        "trace_columns": (step.trace_columns, told, {"count": 3}),
        "trace_columns, nothing drawn": (step.trace_columns, (*told[:3], [], [], drafts), {"count": 4}),
    }


def step_cases() -> dict[str, Case]:
    """The cases by name, arguments on the CPU."""
    return {**_layout(), **_drawing(), **_lookup(), **_tracing()}


def moved(case: Case, device: str) -> Case:
    """The case with copies of its arguments on ``device``."""
    function, args, options = case

    def move(value: Any) -> Any:
        return value.to(device, copy=True) if isinstance(value, Tensor) else value

    return function, pytree.tree_map(move, args), pytree.tree_map(move, options)


def run_case(case: Case) -> list[Tensor]:
    """What the function returns, and its arguments afterwards: some write in place."""
    function, args, options = case
    result = function(*args, **options)
    return list(tensors((result, args)))


def tensors(tree: Any) -> Iterator[Tensor]:
    """All tensors of nested arguments."""
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
