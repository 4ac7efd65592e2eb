"""A decoder under ``numerics: fast`` on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.decoding import compiled
from tests.models import make_model, ragged_prompts


@pytest.mark.parametrize("kind", ["ngram", "draft_model"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_decoder_gives_the_tokens_of_bitwise(architecture: str, kind: str) -> None:
    """In float32, where rounding decides nothing, in captured steps."""
    model, prompts = make_model(architecture, dtype=torch.float32).cuda(), ragged_prompts((3, 17, 8))
    draft = make_model("llama", seed=1, dtype=torch.float32).cuda() if kind == "draft_model" else None
    bitwise, fast = (
        compiled(model, kind, 3, draft, lowering={"name": "gpu"}, numerics=numerics).generate(
            prompts, max_new_tokens=12, eos_token_id=[]
        )
        for numerics in ("bitwise", "fast")
    )
    assert all(map(torch.equal, bitwise.new_tokens, fast.new_tokens))
