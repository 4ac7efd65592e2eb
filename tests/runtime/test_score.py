"""``decoder.score``: the log-probabilities of given tokens, as the model alone and as ``generate`` has them."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import specgraph
from specgraph import GenerateOutput, InputError, NumericsError, SpeculativeDecoder
from specgraph.runtime import scoring as score
from tests.decoding import compiled
from tests.models import VOCAB, make_model, ragged_prompts

PROMPTS = ragged_prompts((1, 4, 9, 17, 2), vocab=VOCAB)
STARTS = [len(prompt) for prompt in PROMPTS]
SAMPLING: dict[str, Any] = {
    "temperature": [0.7, 0.0, 1.5, 2.0, 1.0], "top_k": [0, 3, 40, 0, 60], "top_p": [1.0, 1.0, 0.9, 1.0, 0.95],
    "min_p": [0.0, 0.0, 0.0, 0.01, 0.0],
}  # fmt: skip
NEW_TOKENS = 12


@functools.cache
def model(architecture: str = "llama") -> PreTrainedModel:
    return make_model(architecture, dtype=torch.float64)


@functools.cache
def decoder(architecture: str = "llama", kind: str = "ngram", **cache: Any) -> SpeculativeDecoder:
    draft = make_model("llama", seed=1, dtype=torch.float64, num_hidden_layers=1) if kind == "draft_model" else None
    extra = {"cache": {"prefill_chunk": 7, "block_size": 4, "reuse_prefixes": False, **cache}}
    return compiled(model(architecture), kind, 3, draft, **extra)


@functools.cache
def rollout(logprobs: str = "raw", kind: str = "ngram") -> GenerateOutput:
    options = SAMPLING if logprobs == "processed" else {"temperature": 0.8}
    return decoder(kind=kind).generate(
        PROMPTS, max_new_tokens=NEW_TOKENS, eos_token_id=[], seed=5, return_logprobs=logprobs, **options
    )


def sequences(out: GenerateOutput) -> list[Tensor]:
    return [torch.cat([prompt, new]) for prompt, new in zip(PROMPTS, out.new_tokens, strict=True)]


@torch.no_grad()
def forward(ids: Tensor, architecture: str = "llama") -> tuple[Tensor, Tensor]:
    """The log-probability of every token but the first, and whether it is the argmax, by the model alone."""
    logits = model(architecture)(ids.unsqueeze(0)).logits[0, :-1]
    values = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    return values, logits.argmax(-1) == ids[1:]


def assert_equal(found: list[Tensor] | None, expected: list[Tensor] | None) -> None:
    assert found is not None and expected is not None
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_oss", "gpt2"])
def test_scores_are_those_of_the_models_own_forward_pass(architecture: str) -> None:
    given = sequences(rollout())
    scored = decoder(architecture).score(given)
    for ids, values, is_greedy in zip(given, scored.logprobs, scored.is_greedy, strict=True):
        expected, best = forward(ids, architecture)
        assert values.dtype == torch.float32 and values.shape == (len(ids) - 1,)
        assert torch.allclose(values.double(), expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(is_greedy, best)
    assert torch.allclose(scored.sums, torch.stack([forward(ids, architecture)[0].sum() for ids in given]), atol=1e-4)


@pytest.mark.parametrize("kind", ["none", "ngram", "draft_model"])
def test_a_rollout_is_scored_as_it_was_drawn(kind: str) -> None:
    out = rollout(kind=kind)
    assert_equal(decoder(kind=kind).score(sequences(out), start=STARTS).logprobs, out.logprobs)
    assert_equal(decoder(kind="ngram").score(sequences(out), start=STARTS).logprobs, out.logprobs)


def test_a_rollout_of_processed_logits_is_scored_as_it_was_drawn() -> None:
    out = rollout("processed")
    scored = decoder().score(sequences(out), start=STARTS, logprobs="processed", **SAMPLING)
    assert_equal(scored.logprobs, out.logprobs)
    assert scored.is_greedy[1].all()
    assert scored.logprobs[1].tolist() == [0.0] * NEW_TOKENS  # at temperature 0 the token has all of the mass


def test_greedy_tokens_are_called_so() -> None:
    out = decoder().generate(PROMPTS, max_new_tokens=NEW_TOKENS, eos_token_id=[])
    assert all(row.all() for row in decoder().score(sequences(out), start=STARTS).is_greedy)
    drawn = decoder().score(sequences(rollout()), start=STARTS).is_greedy
    assert not all(row.all() for row in drawn)


@pytest.mark.parametrize("options", [{"prefill_chunk": 2}, {"prefill_chunk": 5}, {"prefill_chunk": 512}])
def test_how_sequences_are_cut_changes_nothing(options: dict[str, int]) -> None:
    given = sequences(rollout())
    assert_equal(decoder(**options).score(given).logprobs, decoder().score(given).logprobs)


def test_few_logits_at_a_time_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for four rows of logits, a step runs four rows at most."""
    given = sequences(rollout())
    expected = decoder().score(given).logprobs
    monkeypatch.setattr(score, "MOST_LOGITS", 4 * VOCAB)
    rows: list[int] = []
    run = score.Runner.scored

    def counted(self: Any, step: Any, index: Tensor, window: Tensor, begins: Tensor) -> Any:
        rows.append(len(window) * (window.shape[1] - 1))
        return run(self, step, index, window, begins)

    monkeypatch.setattr(score.Runner, "scored", counted)
    assert_equal(decoder().score(given).logprobs, expected)
    assert max(rows) == 4


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_batch_changes_nothing(count: int) -> None:
    given = sequences(rollout())
    expected = decoder().score(given).logprobs
    parts = [decoder().score(given[at : at + count]).logprobs for at in range(0, len(given), count)]
    assert_equal([row for part in parts for row in part], expected)
    assert_equal(decoder().score(given[::-1]).logprobs[::-1], expected)


def test_there_may_be_more_sequences_than_rows_and_pages() -> None:
    given = sequences(rollout())
    few = compiled(model("llama"), max_batch_size=2, cache={"pool_tokens": 40, "block_size": 4, "prefill_chunk": 7})
    assert_equal(few.score(given * 2).logprobs, decoder().score(given).logprobs * 2)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_last_token_may_stand_behind_the_last_position(architecture: str) -> None:
    """Positions of gpt2 are rows of a table, of which there are 128."""
    ids = torch.randint(3, VOCAB, (129,), generator=torch.Generator().manual_seed(2))
    own = decoder(architecture, prefill_chunk=50) if architecture == "llama" else decoder(architecture)
    (values,) = own.score([ids], start=100).logprobs
    with torch.no_grad():
        logits = model(architecture)(ids[:-1].unsqueeze(0)).logits[0]
    expected = logits.log_softmax(-1).gather(-1, ids[1:, None])[99:, 0]
    assert torch.allclose(values.double(), expected, rtol=1e-6, atol=1e-6)


def test_padding_on_either_side_changes_nothing() -> None:
    given = sequences(rollout())
    expected = decoder().score(given, start=2).logprobs
    longest = max(map(len, given))
    for left in (True, False):
        padded = torch.zeros(len(given), longest, dtype=torch.int64)
        mask = torch.zeros_like(padded)
        for row, ids in enumerate(given):
            place = slice(longest - len(ids), None) if left else slice(0, len(ids))
            padded[row, place], mask[row, place] = ids, 1
        assert_equal(decoder().score(padded, mask, start=2).logprobs, expected)


def test_pages_that_scoring_fills_are_shared_with_nobody() -> None:
    """Pages that were filled for scoring hold nothing of a drafter's, so a later call must not find them."""
    own = decoder(kind="draft_model", reuse_prefixes=True)
    out = rollout(kind="draft_model")
    assert_equal(own.score(sequences(out), start=STARTS).logprobs, out.logprobs)
    again = own.generate(PROMPTS, max_new_tokens=NEW_TOKENS, eos_token_id=[], seed=5, temperature=0.8)
    assert again.stats.reused_tokens == 0
    assert_equal(again.new_tokens, out.new_tokens)
    assert again.stats.emitted_per_step == out.stats.emitted_per_step


@pytest.fixture
def rows_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each step runs, without padding."""
    counts: list[int] = []
    enqueue = score.Scoring._enqueue

    def counted(self: score.Scoring, chunk: Any) -> None:
        counts.append(chunk.num_tokens)
        enqueue(self, chunk)

    monkeypatch.setattr(score.Scoring, "_enqueue", counted)
    return counts


def test_a_context_in_front_of_several_answers_runs_once(rows_run: list[int]) -> None:
    """The context has five whole pages of four tokens, and a token more."""
    draw = torch.Generator().manual_seed(3)
    context = torch.randint(3, VOCAB, (21,), generator=draw)
    given = [torch.cat([context, torch.randint(3, VOCAB, (count,), generator=draw)]) for count in (5, 5, 1, 9)]
    num_rows = sum(len(ids) - 1 for ids in given)
    expected = decoder().score(given, start=21).logprobs
    assert sum(rows_run) == num_rows
    rows_run.clear()
    own = decoder(reuse_prefixes=True)
    assert_equal(own.score(given, start=21).logprobs, expected)
    assert sum(rows_run) == num_rows - 3 * 20
    rows_run.clear()
    assert_equal([row[20:] for row in own.score(given).logprobs], expected)
    assert sum(rows_run) == num_rows  # every token is scored, so every row is run


def test_contexts_are_shared_where_there_are_few_rows(rows_run: list[int]) -> None:
    """Each context runs as a whole once or twice (other contexts may take its pages), else from its last page on."""
    draw = torch.Generator().manual_seed(4)
    contexts = [torch.randint(3, VOCAB, (count,), generator=draw) for count in (30, 18, 9)]
    given = [torch.cat([context, torch.tensor([answer])]) for context in contexts for answer in range(3, 9)]
    starts = [len(ids) - 1 for ids in given]
    expected = decoder().score(given, start=starts).logprobs
    rows_run.clear()
    own = compiled(model("llama"), max_batch_size=2, cache={"block_size": 4, "prefill_chunk": 7})
    assert_equal(own.score(given, start=starts).logprobs, expected)
    assert sum(rows_run) <= 2 * sum(map(len, contexts)) + 6 * 3 * 4


def test_scoring_does_not_disturb_a_session() -> None:
    out, tokens = rollout(), dict[int, list[int]]()
    with decoder().session() as session:
        for prompt in PROMPTS:
            tokens[session.submit(prompt, max_new_tokens=NEW_TOKENS, eos_token_id=[])] = []
        for number, event in enumerate(session):
            tokens[event.id] += event.tokens
            if number in (1, 9):
                assert_equal(decoder().score(sequences(out), start=STARTS).logprobs, out.logprobs)
    expected = decoder().generate(PROMPTS, max_new_tokens=NEW_TOKENS, eos_token_id=[]).new_tokens
    assert list(tokens.values()) == [row.tolist() for row in expected]


def test_a_nan_is_an_error_and_the_decoder_can_be_used_again() -> None:
    broken = make_model("llama", dtype=torch.float64)
    own = compiled(broken)
    weight = broken.get_input_embeddings().weight
    kept = weight.detach()[7].clone()
    with torch.no_grad():
        weight[7] = float("nan")
    given = [torch.tensor([3, 4, 5]), torch.tensor([3, 7, 5, 6])]
    with pytest.raises(NumericsError, match=r"The target's logits are NaN in sequence 1\."):
        own.score(given)
    with torch.no_grad():
        weight[7] = kept
    assert_equal(own.score(given).logprobs, decoder().score(given).logprobs)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ([torch.tensor([3, 4]), torch.tensor([5])], {},
         "Sequence 1 has a single token, and nothing before it says how probable that is; give at least two tokens, "
         "for example the BOS id first."),
        ([torch.tensor([3, 4, 5])], {"start": 3},
         "start is 3 for sequence 0, which has 3 tokens; the first token to score is one of 1 to 2, because it needs a "
         "token before it."),
        ([torch.tensor([3, 4, 5])], {"start": 0}, "start is 0 for sequence 0, which has 3 tokens; the first token"),
        ([torch.tensor([3, 4, 5])], {"start": 1.5}, "start must be an integer, got 1.5."),
        ([torch.tensor([3, 4, 5])], {"start": [1, 1]}, "start has 2 values for 1 sequences."),
        ([torch.tensor([3, 4, 5])], {"logprobs": True}, "logprobs is 'raw' or 'processed', not True."),
        ([torch.tensor([3, VOCAB])], {}, f"Prompt 0 holds the id {VOCAB}; ids are 0 to {VOCAB - 1}."),
        ([torch.ones(130, dtype=torch.int64)], {}, "Prompt 0 has 130 tokens, but max_length is 129"),
        ([], {}, "input_ids is empty; give at least one prompt."),
        ([torch.tensor([3, 4]), torch.empty(0, dtype=torch.int64)], {}, "Prompt 1 is empty; give it at least"),
    ],
)  # fmt: skip
def test_what_cannot_be_scored_is_refused(given: list[Tensor], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        decoder().score(given, **options)
    assert str(caught.value).startswith(message)


def test_a_sequence_that_no_pool_holds_is_refused() -> None:
    small = compiled(model("llama"), cache={"pool_tokens": 16, "block_size": 4, "prefill_chunk": 7})
    with pytest.raises(InputError, match="A sequence of 20 tokens does not fit into the 4 pages of the KV"):
        small.score([torch.ones(20, dtype=torch.int64)])


def test_penalties_of_the_model_are_not_left_out_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    own, given = decoder(), [torch.tensor([3, 4, 5])]
    expected = own.score(given).logprobs
    monkeypatch.setattr(model("llama").generation_config, "repetition_penalty", 1.5)
    assert_equal(own.score(given).logprobs, expected)  # raw logits know of no penalty
    with pytest.raises(InputError, match="score has no repetition_penalty, which the model's generation_config"):
        own.score(given, logprobs="processed")


@pytest.mark.parametrize("left", [True, False])
def test_what_generate_returned_is_scored_as_it_is(left: bool) -> None:
    """Its padding counts for nothing, and its new tokens are those that are scored."""
    width = max(map(len, PROMPTS))
    pads = [torch.full((width - len(prompt),), 7) for prompt in PROMPTS]
    rows = [torch.cat([pad, p] if left else [p, pad]) for pad, p in zip(pads, PROMPTS, strict=True)]
    mask = torch.stack([torch.arange(width) >= len(pad) for pad in pads])
    out = decoder().generate(
        torch.stack(rows), mask if left else mask.flip(1), max_new_tokens=[12, 3, 12, 1, 7], eos_token_id=[], seed=5,
        temperature=0.8, return_logprobs=True,
    )  # fmt: skip
    scored = decoder().score(out)
    assert_equal(scored.logprobs, out.logprobs)
    assert scored.starts == STARTS
    later = decoder().score(pickle.loads(pickle.dumps(out)), start=[len(prompt) + 1 for prompt in PROMPTS[:3]] + [2, 3])
    assert_equal(later.logprobs[:1], [out.logprobs[0][1:]])
    with pytest.raises(InputError, match="what generate returned needs no"):
        decoder().score(out, mask)


def test_what_score_does_not_read_is_refused() -> None:
    given = [torch.tensor([3, 4, 5])]
    with pytest.raises(
        InputError, match="temperature, top_k would change nothing, since logprobs='raw' are the target's"
    ):
        decoder().score(given, temperature=0.5, top_k=3)
    with pytest.raises(
        InputError, match="score does not take repetition_penalty; it takes start, logprobs, temperature"
    ):
        decoder().score(given, repetition_penalty=1.1)


def test_the_output_class_is_public() -> None:
    assert isinstance(decoder().score([torch.tensor([3, 4])]), specgraph.ScoreOutput)
