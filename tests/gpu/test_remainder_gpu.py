"""What no kernel of ours covers, compiled with Inductor, inside of a captured step."""

from __future__ import annotations

import pytest
import torch

from tests.decoding import compiled
from tests.models import make_model, ragged_prompts

PROMPTS = ragged_prompts((3, 17, 8))


@pytest.mark.usefixtures("torch_compile")
@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "phi"])
def test_inductor_gives_the_tokens_of_eager_nodes(architecture: str) -> None:
    """In float32, where the rounding of fused operations decides nothing."""
    model = make_model(architecture, dtype=torch.float32, num_hidden_layers=1).cuda()
    outputs = [
        compiled(model, k=2, lowering={"name": "gpu", "remainder": remainder}, numerics="fast").generate(
            PROMPTS, max_new_tokens=12, eos_token_id=[]
        )
        for remainder in ("eager", "inductor")
    ]
    assert outputs[0].stats.steps == outputs[1].stats.steps
    assert all(map(torch.equal, outputs[0].new_tokens, outputs[1].new_tokens))
