"""The decoder through its public calls: invariance, inputs, outputs, interrupts."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import specgraph
from specgraph import NumericsError, SpeculativeDecoder
from specgraph.compiler import selfcheck
from specgraph.runtime.execution.engine import Engine
from tests.decoding import CONFIG, compiled, reference_greedy
from tests.models import make_model, ragged_prompts, shared_model
from tests.once import once

PROMPTS = ragged_prompts((3, 17, 8, 1))
SEEDS = [11, 12, 13, 14]
LOSSLESS = ("strict", "probabilistic", "block")


def double(architecture: str = "llama", seed: int = 0) -> Any:
    return shared_model(architecture, seed=seed, dtype=torch.float64)


def noisy_copy(scale: float = 0.03) -> Any:
    """A draft that agrees with the target often, but not always."""
    draft = make_model("llama", dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return draft


@once
def by_rule(rule: str) -> SpeculativeDecoder:
    return compiled(double(), draft=noisy_copy(), verify={"rule": rule})


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return compiled(double(), draft=noisy_copy())


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def test_strict_does_not_change_with_drafter_k_batch_order_or_size(decoder: SpeculativeDecoder) -> None:
    options: dict[str, Any] = {"max_new_tokens": 14, "temperature": 1.0, "top_p": 0.95}
    expected = compiled(double(), "none").generate(PROMPTS, seed=SEEDS, **options).new_tokens
    assert decoder.generate(PROMPTS, seed=SEEDS, **options).stats.acceptance_length > 1.5
    for made in (decoder, compiled(double(), k=7), compiled(double(), k=2, draft=noisy_copy(0.1))):
        assert same(made.generate(PROMPTS, seed=SEEDS, **options).new_tokens, expected)
        for order in ([3, 1, 0, 2], [2]):
            out = made.generate([PROMPTS[i] for i in order], seed=[SEEDS[i] for i in order], **options).new_tokens
            assert same(out, [expected[i] for i in order])


@pytest.mark.parametrize("chunk", [1, 16, 17])
def test_prefill_chunks_do_not_change_the_tokens(chunk: int) -> None:
    expected = reference_greedy(double(), PROMPTS, 12)
    made = compiled(double(), draft=noisy_copy(), cache={"prefill_chunk": chunk, "block_size": 4})
    assert same(made.generate(PROMPTS, max_new_tokens=12).new_tokens, expected)


def test_padding_left_right_and_lists_are_the_same_prompts(decoder: SpeculativeDecoder) -> None:
    width = max(p.numel() for p in PROMPTS)
    expected = decoder.generate(PROMPTS, max_new_tokens=9)
    for left in (True, False):
        ids, mask = torch.zeros(4, width, dtype=torch.int64), torch.zeros(4, width, dtype=torch.int64)
        for row, prompt in enumerate(PROMPTS):
            place = slice(width - prompt.numel(), width) if left else slice(0, prompt.numel())
            ids[row, place], mask[row, place] = prompt, 1
        for given in (mask, mask.bool(), None):
            out = decoder.generate(ids, given, max_new_tokens=9)
            assert same(out.new_tokens, expected.new_tokens)
        begin = ids if left else ids[:, :1]
        assert torch.equal(out.sequences[:, : begin.shape[1]], begin)


def test_sequences_are_laid_out_as_transformers_does(decoder: SpeculativeDecoder) -> None:
    model, ids = double(), torch.stack([PROMPTS[0], PROMPTS[2][:3]])
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    ids = ids * mask
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False)
    out = decoder.generate(ids, mask, max_new_tokens=9)
    assert torch.equal(out.sequences, expected)


def test_stream_emits_what_generate_returns(decoder: SpeculativeDecoder) -> None:
    options: dict[str, Any] = {"max_new_tokens": 15, "temperature": 0.8, "seed": 4, "return_logprobs": True}
    expected = decoder.generate(PROMPTS, **options)
    assert expected.logprobs is not None
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    values: list[list[float]] = [[] for _ in PROMPTS]
    finished = [False] * len(PROMPTS)
    stream = decoder.stream(PROMPTS, **options)
    for chunk in stream:
        assert chunk.logprobs is not None
        for row in range(len(PROMPTS)):
            assert not (finished[row] and chunk.tokens[row])
            tokens[row] += chunk.tokens[row]
            values[row] += chunk.logprobs[row]
        finished = chunk.finished
    assert all(finished)
    assert stream.stats.emitted_per_step == expected.stats.emitted_per_step
    assert tokens == [t.tolist() for t in expected.new_tokens]
    assert values == [v.tolist() for v in expected.logprobs]


def test_eos_ends_a_sequence_inside_an_accepted_prefix(decoder: SpeculativeDecoder) -> None:
    free = decoder.generate(PROMPTS, max_new_tokens=24, eos_token_id=[])
    for stop in {int(t[7]) for t in free.new_tokens} | {int(free.new_tokens[1][1])}:
        out = decoder.generate(PROMPTS, max_new_tokens=24, eos_token_id=[stop, 100])
        for cut, whole in zip(out.new_tokens, free.new_tokens, strict=True):
            ends = [i for i, t in enumerate(whole.tolist()) if t in (stop, 100)]
            assert cut.tolist() == whole.tolist()[: ends[0] + 1 if ends else None]
        counted = sum(map(sum, out.stats.emitted_per_step)) + len(PROMPTS)
        assert counted == sum(t.numel() for t in out.new_tokens)


def test_eos_in_the_prompt_ends_nothing(decoder: SpeculativeDecoder) -> None:
    prompt = torch.tensor([7, 2, 9, 2])
    assert decoder.generate([prompt], max_new_tokens=5, eos_token_id=[]).new_tokens[0].numel() == 5
    assert decoder.generate([prompt], max_new_tokens=5, eos_token_id=2).new_tokens[0].numel() >= 1


def test_nothing_is_emitted_past_max_length() -> None:
    prompts = ragged_prompts((3, 20, 19, 18))
    expected = reference_greedy(double(), prompts[:1], 17)
    for k in (1, 7):
        out = compiled(double(), k=k, draft=noisy_copy(), max_length=20).generate(prompts, max_new_tokens=20)
        assert [t.numel() for t in out.new_tokens] == [17, 0, 1, 2]
        assert same(out.new_tokens[:1], expected)
    assert out.sequences.shape == (4, 20)
    assert compiled(double()).generate(prompts, max_new_tokens=0).new_tokens[0].numel() == 0


def test_rows_past_a_table_of_learned_positions_are_harmless() -> None:
    model, draft = (make_model("gpt2", n_positions=n, max_position_embeddings=n) for n in (24, 12))
    prompts = ragged_prompts((3, 20, 8))
    free: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": []}
    expected = [m.tolist() for m in compiled(model, "none").generate(prompts, **free).new_tokens]
    assert [len(e) for e in expected] == [21, 4, 16]
    for given in (None, draft):
        out = compiled(model, k=7, draft=given).generate(prompts, **free)
        assert [t.tolist() for t in out.new_tokens] == expected


@pytest.mark.parametrize("rule", LOSSLESS)
def test_greedy_is_the_same_under_every_lossless_rule(rule: str) -> None:
    out = by_rule(rule).generate(PROMPTS, max_new_tokens=20)
    assert same(out.new_tokens, reference_greedy(double(), PROMPTS, 20))


@pytest.mark.parametrize("rule", LOSSLESS)
def test_same_seed_same_tokens_other_seed_other_tokens(rule: str) -> None:
    def run(seed: int | None) -> list[Tensor]:
        return by_rule(rule).generate(PROMPTS, max_new_tokens=9, temperature=1.0, seed=seed).new_tokens

    assert same(run(1), run(1))
    assert not same(run(1), run(2))
    assert not same(run(None), run(None))


def test_logprobs_are_those_of_the_targets_own_logits(decoder: SpeculativeDecoder) -> None:
    out = decoder.generate(PROMPTS, max_new_tokens=12, temperature=0.7, seed=3, return_logprobs=True)
    low = decoder.generate(PROMPTS, max_new_tokens=12, temperature=0.7, seed=3, return_logprobs="processed")
    assert out.logprobs is not None and low.logprobs is not None
    for prompt, new, values, processed in zip(PROMPTS, out.new_tokens, out.logprobs, low.logprobs, strict=True):
        with torch.no_grad():
            logits = double()(torch.cat([prompt, new]).unsqueeze(0)).logits[0, prompt.numel() - 1 : -1]
        for scale, got in ((1.0, values), (0.7, processed)):
            want = (logits / scale).log_softmax(-1).gather(1, new.unsqueeze(1))[:, 0].float()
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_sampling_options_per_sequence_equal_separate_calls(decoder: SpeculativeDecoder) -> None:
    options: dict[str, list[Any]] = {"temperature": [0.0, 1.0, 0.5, 2.0], "top_k": [0, 5, 0, 20],
                                     "top_p": [1.0, 0.9, 0.5, 1.0], "seed": SEEDS,
                                     "min_p": [0.0, 0.0, 0.1, 0.05]}  # fmt: skip
    together = decoder.generate(PROMPTS, max_new_tokens=15, **options).new_tokens
    for row, prompt in enumerate(PROMPTS):
        own = {name: [values[row]] for name, values in options.items()}
        assert same(decoder.generate([prompt], max_new_tokens=15, **own).new_tokens, [together[row]])


def test_one_seed_of_any_type_gives_every_sequence_noise_of_its_own(decoder: SpeculativeDecoder) -> None:
    prompts, options = [PROMPTS[1]] * 3, {"max_new_tokens": 12, "temperature": 1.0}
    expected = decoder.generate(prompts, seed=5, **options).new_tokens
    assert not torch.equal(expected[0], expected[1])
    for seed in (5.0, torch.tensor(5), numpy.int64(5)):
        assert same(decoder.generate(prompts, seed=seed, **options).new_tokens, expected)


def test_a_pad_id_inside_a_prompt_belongs_to_it(decoder: SpeculativeDecoder) -> None:
    ids = torch.tensor([[0, 5, 0, 7, 8, 0]])
    expected = decoder.generate([torch.tensor([5, 0, 7, 8])], max_new_tokens=6).new_tokens
    assert same(decoder.generate(ids, max_new_tokens=6).new_tokens, expected)


def test_a_callers_modes_do_not_change_the_tokens(decoder: SpeculativeDecoder) -> None:
    expected = decoder.generate(PROMPTS, max_new_tokens=10)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(decoder.generate(PROMPTS, max_new_tokens=10).new_tokens, expected.new_tokens)
    with torch.inference_mode():
        stream = decoder.stream(PROMPTS, max_new_tokens=10)
        next(stream)
    assert all(next(reversed(list(stream))).finished)


def test_a_callers_default_device_does_not_change_the_tokens(decoder: SpeculativeDecoder) -> None:
    padded = torch.full((2, 4), 5)
    options: dict[str, Any] = {"max_new_tokens": 8, "return_logprobs": True}
    expected = [decoder.generate(given, **options) for given in (PROMPTS, padded)]
    torch.set_default_device("meta")
    try:
        found = [decoder.generate(given, **options) for given in (PROMPTS, padded)]
        decoder.generate(PROMPTS, temperature=1.0, max_new_tokens=2)
        assert all(list(decoder.stream(PROMPTS, max_new_tokens=4))[-1].finished)
        again = specgraph.compile_speculative(double(), {"max_length": 64})
    finally:
        torch.set_default_device(None)  # "cpu" would be a mode, which slows every call of torch
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.sequences, b.sequences) and a.logprobs and b.logprobs and same(a.logprobs, b.logprobs)
        assert a.stats.acceptance_length_stderr >= 0
    assert same(again.generate(PROMPTS, max_new_tokens=8).new_tokens, expected[0].new_tokens)


def test_a_draft_that_knows_fewer_positions_than_the_target_is_checked_and_used() -> None:
    model, draft = make_model("llama"), make_model("llama", seed=1, max_position_embeddings=32)
    made = specgraph.compile_speculative(model, draft=draft)
    prompts = ragged_prompts((3, 60))
    expected = compiled(model, "none").generate(prompts, max_new_tokens=20).new_tokens
    assert same(made.generate(prompts, max_new_tokens=20).new_tokens, expected)


def test_a_decoder_goes_with_its_last_reference() -> None:
    made = compiled(double())
    made.generate(PROMPTS, max_new_tokens=2)
    gone = weakref.ref(made)
    del made
    assert gone() is None


def test_interrupted_generation_leaves_the_decoder_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    made = compiled(double())
    expected = made.generate(PROMPTS, max_new_tokens=10).new_tokens
    calls = itertools.count()
    original = Engine._read

    def interrupted(*args: Any) -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(Engine, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.generate(PROMPTS, max_new_tokens=10)
    assert same(made.generate(PROMPTS, max_new_tokens=10).new_tokens, expected)
    stream = made.stream(PROMPTS, max_new_tokens=10)
    next(stream)
    stream.close()
    assert same(made.generate(PROMPTS, max_new_tokens=10).new_tokens, expected)


def test_streams_side_by_side_do_not_disturb_each_other(decoder: SpeculativeDecoder) -> None:
    expected = [decoder.generate([p], max_new_tokens=12).new_tokens[0].tolist() for p in PROMPTS]
    streams = [decoder.stream([p], max_new_tokens=12) for p in PROMPTS]
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    for chunks in itertools.zip_longest(*streams):
        for row, chunk in enumerate(chunks):
            tokens[row] += chunk.tokens[0] if chunk else []
    assert tokens == expected


def test_two_decoders_share_a_model_and_leave_it_as_it_was() -> None:
    model = make_model("gpt_oss")
    expected = model.generate(PROMPTS[1].unsqueeze(0), max_new_tokens=10, do_sample=False)
    first, second = compiled(model, "none"), compiled(model, k=2, verify={"rule": "block"})
    a = first.generate(PROMPTS, max_new_tokens=10).new_tokens
    b = second.generate(PROMPTS, max_new_tokens=10).new_tokens
    assert same(a, b) and same(first.generate(PROMPTS, max_new_tokens=10).new_tokens, a)
    assert torch.equal(model.generate(PROMPTS[1].unsqueeze(0), max_new_tokens=10, do_sample=False), expected)


def test_generation_config_gives_the_defaults() -> None:
    model = make_model("llama", dtype=torch.float64)
    config = model.generation_config
    config.max_new_tokens, config.do_sample, config.temperature, config.top_k = 13, True, 0.7, 12
    config.eos_token_id, config.pad_token_id = [], 0
    made = compiled(model)
    out = made.generate(PROMPTS, seed=SEEDS)
    assert all(t.numel() == 13 for t in out.new_tokens)
    explicit = compiled(double()).generate(PROMPTS, seed=SEEDS, max_new_tokens=13, temperature=0.7, top_k=12,
                                           eos_token_id=[])  # fmt: skip
    assert same(out.new_tokens, explicit.new_tokens)


@pytest.mark.parametrize("rule", [*LOSSLESS, "typical", "synthetic"])
def test_visible_and_fused_verification_emit_the_same(rule: str) -> None:
    order = ["expose_features", "insert_kv_cache", "insert_draft", "insert_verify"]
    made = compiled(double(), draft=noisy_copy(), verify={"rule": rule}, pipeline={"order": order})
    for options in (
        {"temperature": 0.0, "seed": 7},
        {"temperature": 1.0, "top_k": 30, "seed": 8, "return_logprobs": True},
    ):
        a, b = (d.generate(PROMPTS, max_new_tokens=16, **options) for d in (made, by_rule(rule)))
        assert same(a.new_tokens, b.new_tokens)
        assert a.logprobs is None or (b.logprobs is not None and same(a.logprobs, b.logprobs))


def test_check_numerics_passes_on_the_pipeline_and_names_the_pass_that_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**CONFIG, "check_numerics": True}
    specgraph.compile_speculative(shared_model("gemma2"), {**config, "verify": {"rule": "block"}}, draft=noisy_copy())
    from specgraph.passes.share_weights import ShareWeights

    original = ShareWeights.apply

    def breaking(self: ShareWeights, program: specgraph.Program) -> Any:
        result = original(self, program)
        for node in program.modules["lm_head"].graph.nodes:
            if node.op == "output":
                with program.modules["lm_head"].graph.inserting_before(node):
                    doubled = program.modules["lm_head"].graph.call_function(torch.mul, (node.args[0], 1.0001))
                node.args = (doubled,)
        program.modules["lm_head"].recompile()
        return result

    monkeypatch.setattr(ShareWeights, "apply", breaking)
    with pytest.raises(NumericsError, match=r"share_weights changed logits.* elements differ"):
        specgraph.compile_speculative(shared_model("gemma2"), config)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "seed": 3}, {"repetition_penalty": 1.2}])
def test_variants_of_the_step_are_made_where_numerics_are_checked(options: dict[str, Any]) -> None:
    """They leave options out on purpose, so their outputs are not compared with those of the whole step."""
    made, checked = (
        specgraph.compile_speculative(shared_model("gemma2"), {**CONFIG, "check_numerics": check})
        for check in (False, True)
    )
    a, b = (decoder.generate(PROMPTS, max_new_tokens=4, **options).new_tokens for decoder in (made, checked))
    assert all(map(torch.equal, a, b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_self_check_refuses_what_decodes_differently_with_a_cache(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama", sliding_window=None).to(dtype)
    attention = model.model.layers[1].self_attn
    original = attention.forward

    rotary = model.model.rotary_emb

    def counting(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Takes positions from the number of the row, and not from ``position_ids``."""
        kwargs["position_embeddings"] = rotary(hidden_states, torch.arange(hidden_states.shape[1]).unsqueeze(0))
        return original(hidden_states, *args, **kwargs)

    monkeypatch.setattr(attention, "forward", counting)
    with pytest.raises(
        specgraph.UnsupportedModelError, match=r"hs\[2\], the output of layer 1 differs first, at token 1"
    ):
        specgraph.compile_speculative(model)


def test_self_check_refuses_positions_from_somewhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    original = model.model.forward

    def counting(*args: Any, position_ids: Tensor | None = None, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    monkeypatch.setattr(model.model, "forward", counting)
    with pytest.raises(specgraph.UnsupportedModelError, match=r"hs\[1\].* takes positions from elsewhere"):
        specgraph.compile_speculative(model)


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss", "gpt2", "mixtral"])
def test_self_check_passes_and_is_reported(architecture: str) -> None:
    made = specgraph.compile_speculative(shared_model(architecture))
    assert "agrees with its own forward" in made.report()


def test_self_check_of_half_precision_is_decided_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(selfcheck.TOLERANCE, torch.bfloat16, 1e-7)
    model = make_model("gemma3_text", num_hidden_layers=1, layer_types=["sliding_attention"]).to(torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = specgraph.compile_speculative(model)
    assert "random tokens in float32" in made.report()
    after = model.state_dict()
    assert all(after[name].dtype == old.dtype and torch.equal(after[name], old) for name, old in before.items())
