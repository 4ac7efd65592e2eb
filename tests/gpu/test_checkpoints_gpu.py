"""A head on a GPU: in the target's dtype, and without a second copy of a tensor that is the target's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from specgraph.checkpoints.loading import shared_notes
from specgraph.drafters.eagle3 import Eagle3DraftConfig as DraftConfig
from specgraph.drafters.eagle3 import Eagle3Drafter
from specgraph.drafters.registry import open_checkpoint
from tests.checkpoints import layouts
from tests.checkpoints.running import info, target


@pytest.mark.parametrize("change", [False, True])
def test_a_head_on_a_gpu(change: bool, tmp_path: Path) -> None:
    model: Any = copy.deepcopy(target()).to("cuda", torch.bfloat16)
    written = layouts.specforge_parallel()
    copied = model.model.embed_tokens.weight.detach().cpu().clone()
    copied[-1, -1] += change
    written.tensors["embed_tokens.weight"] = copied
    checkpoint = open_checkpoint(written.save(tmp_path))
    head = Eagle3Drafter.load(checkpoint, DraftConfig(), model, info(model))
    tensors = [*head.module.parameters(), head.module.draft_to_target, head.module.rotary.inv_freq]
    assert all(isinstance(tensor, torch.Tensor) and tensor.is_cuda for tensor in tensors)
    assert {parameter.dtype for parameter in head.module.parameters()} == {torch.bfloat16}
    assert (head.module.embed_tokens.weight is model.model.embed_tokens.weight) is not change
    assert torch.equal(head.module.embed_tokens.weight.cpu(), copied)
    shared = "shared while loading: draft.embed_tokens.weight is target.model.embed_tokens.weight, "
    assert any(note.startswith(shared) for note in shared_notes(checkpoint.tensors, head.module, model)) is not change
