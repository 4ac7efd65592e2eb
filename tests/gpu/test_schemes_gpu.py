"""Small models in every packed format, in bf16 through kernels and CUDA graphs: no bit depends on drafts or company.

The formats for which there is an order of their own on a GPU come once with sizes that allow it, and once without.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import specgraph
from specgraph.config.schemes import SCHEMES
from tests.gpu.test_architectures_gpu import compare
from tests.gpu.test_session_gpu import PROMPTS, by_itself, random_session
from tests.models import make_model
from tests.schemes.files import changed, static
from tests.schemes.integers import files
from tests.schemes.models import packed_experts, packed_layers, sizes

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "moe_intermediate_size": 128}
"""Sizes that 128 divides."""
CASES = [
    *(("llama", scheme, {}) for scheme in SCHEMES),
    *(("llama", scheme, WIDE) for scheme in ("int4", "fp8", "mxfp4")),
    *(("qwen3_moe", scheme, {}) for scheme in SCHEMES),
    *(("qwen3_moe", scheme, WIDE) for scheme in ("int4", "fp8", "mxfp4")),
    *((name, scheme, {}) for name in ("gpt_oss", "deepseek_v3", "qwen3_next") for scheme in ("int4", "fp8", "mxfp4")),
]


def small(architecture: str, scheme: str, wide: dict[str, Any], **more: Any) -> PreTrainedModel:
    """A model on the GPU that is packed by ``quantise``."""
    overrides = wide or sizes(architecture, scheme)
    model = make_model(architecture, seed=3, dtype=torch.bfloat16, **overrides, **more)
    in_groups = scheme in ("int4", "int4_zeros")
    return specgraph.quantise(model, scheme, **({"group_size": 128 if wide else 8} if in_groups else {})).cuda()


def formats(model: PreTrainedModel) -> set[str]:
    return {module.format for module in (*packed_layers(model).values(), *packed_experts(model).values())}


def assert_equal_bits(model: PreTrainedModel) -> None:
    assert formats(model)
    found, length = compare(model)
    assert not found, "\n".join(found)
    assert length > 1.2  # or no step would emit several tokens


@pytest.mark.parametrize(("architecture", "scheme", "wide"), CASES, ids=lambda x: "wide" if x is WIDE else None)
def test_speculation_changes_no_bit(architecture: str, scheme: str, wide: dict[str, Any]) -> None:
    assert_equal_bits(small(architecture, scheme, wide))


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("llama", kind) for kind in ("awq", "symmetric", "act-order", "act-order of inputs")] + [("qwen3_moe", "gptq")],
)
def test_speculation_changes_no_bit_of_awq_and_gptq(architecture: str, kind: str, tmp_path: Path) -> None:
    assert_equal_bits(specgraph.load(files(tmp_path, kind, architecture)[0], device="cuda", dtype=torch.bfloat16))


@pytest.mark.parametrize("scheme", ["fp8_token", "int8_token"])
@pytest.mark.parametrize("equal", [False, True])
def test_speculation_changes_no_bit_with_static_scales(scheme: str, equal: bool, tmp_path: Path) -> None:
    """Layers of one input are merged if their scales are equal."""
    packed = specgraph.quantise(make_model("llama", seed=3), scheme)
    folder = changed(packed, tmp_path, functools.partial(static, equal=equal))
    model = specgraph.load(folder, device="cuda", dtype=torch.bfloat16)
    assert formats(model) == {scheme.replace("token", "static")}
    assert_equal_bits(model)


@pytest.mark.parametrize("scheme", ["int4", "fp8", "mxfp4"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "gpt_oss", "qwen3_next"])
def test_no_bit_differs_in_sessions(architecture: str, scheme: str) -> None:
    """Prompts are cut in three ways, prefixes are reused, and the tokens are scored."""
    wide = {} if architecture == "qwen3_next" else WIDE
    model = small(architecture, scheme, wide, max_position_embeddings=512)
    cache = {"prefill_chunk": 64, "reuse_prefixes": False}
    draft = {"kind": "ngram", "num_speculative_tokens": 3}
    config = {"cache": cache, "draft": draft, "max_batch_size": 6, "debug": {"self_check": False}}
    decoder = specgraph.compile_speculative(model, config)
    alone = [by_itself(decoder, index) for index in range(len(PROMPTS))]
    for seed, chunk, reuse in ((0, 64, False), (1, 24, True), (2, 2048, True)):
        decoder.config.cache.prefill_chunk = chunk
        decoder._runners.cache.reuse_prefixes = reuse
        decoder._runners.idle = None
        with decoder.session(return_logprobs=True) as session:
            found = random_session(session, seed)
        assert len(found) >= len(PROMPTS) - 6
        for index, result in found.items():
            assert result == alone[index]
    # Options draw from a part of the distribution, and scores are of all of it; greedy tokens are of all of it, too.
    greedy = [index for index in range(len(PROMPTS)) if index % 3 == 0 and index % 4 and index % 5]
    given = [torch.cat([PROMPTS[index], torch.tensor(alone[index].tokens)]) for index in greedy]
    scored = decoder.score(given, start=[len(PROMPTS[index]) for index in greedy])
    assert [x.tolist() for x in scored.logprobs] == [alone[index].logprobs for index in greedy]
