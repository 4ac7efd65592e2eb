"""The same checkpoint in the package ``speculators``, an implementation that is not ours, and here."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from specgraph.drafters.eagle3 import Eagle3Drafter
from tests.checkpoints import layouts
from tests.checkpoints.layouts import HIDDEN, VOCAB
from tests.checkpoints.running import draft, load, target

# It is imported where it is used, since importing it takes seconds in every process that collects tests.
pytestmark = pytest.mark.skipif(find_spec("speculators") is None, reason="make installs it")

LENGTH, ROWS, STEPS = 9, 6, 4
"""Tokens, rows in front of the drafts, drafts."""
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, 2 layers, normed residual": {"layers": 2, "norm_before_residual": True, "seed": 1},
    "qwen3, normed output": {"qk_norms": True, "norm_output": True, "seed": 2},
    "norm before fc": {"norm_before_fc": True, "seed": 3},
    "fc norms, target's embedding": {"fc_norm": True, "embedding": False, "seed": 4},
}


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verifier")
    target().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("algorithm", ["eagle3", "peagle"])
def test_logits_are_those_of_speculators(
    algorithm: Literal["eagle3", "peagle"], case: str, verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``save_head`` writes what they read, from a folder that follows the description of the layout."""
    written = layouts.speculators(algorithm, **CASES[case])
    head = load(written.save(tmp_path / "given"))
    # All tensors: with a transformers newer than theirs, a missing embedding is sometimes left uninitialised.
    folder = Eagle3Drafter.save_head(head, tmp_path / "saved", target_name=str(verifier), algorithm=algorithm,
                       num_speculative_tokens=STEPS)  # fmt: skip
    model, logits = _their_model(folder, algorithm)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(LENGTH, layouts.FEATURES, HIDDEN, generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, VOCAB, (LENGTH,), generator=generator)
    inputs = {
        "hidden_states": features.flatten(1)[None], "input_ids": tokens[None],
        "document_ids": torch.zeros(1, LENGTH, dtype=torch.int64), "position_ids": torch.arange(LENGTH)[None],
    }  # fmt: skip
    if algorithm == "eagle3":
        model(**inputs, ttt_steps=STEPS)
        theirs = torch.stack([step[0, ROWS - 1] for step in logits])
    else:
        from speculators.losses import resolve_loss_config

        _fix_sampling(monkeypatch)
        model(**inputs, verifier_last_hidden_states=torch.zeros(1, LENGTH, HIDDEN, dtype=torch.float64),
              loss_config=resolve_loss_config("ce", "eager"))  # fmt: skip
        theirs = torch.cat([logits[0][0, ROWS - 1 : ROWS], logits[0][0, LENGTH:]])
    _, ours = draft(head, tokens[:ROWS].tolist(), features[:ROWS], STEPS,
                    parallel=algorithm == "peagle", follow=tokens[ROWS:].tolist())  # fmt: skip
    torch.testing.assert_close(ours[ROWS - 1 :], theirs, rtol=1e-4, atol=1e-4)


def _their_model(folder: Path, algorithm: str) -> tuple[Any, list[Tensor]]:
    """Their draft model on the CPU, and the list in which the logits of every call of its head arrive."""
    from speculators import Eagle3DraftModel, PEagleDraftModel, SpeculatorModelConfig

    config: Any = SpeculatorModelConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    model: Any = {"eagle3": Eagle3DraftModel, "peagle": PEagleDraftModel}[algorithm]
    loaded = model.from_pretrained(str(folder), config=config).double().eval()
    logits: list[Tensor] = []
    loaded.lm_head.register_forward_hook(lambda module, args, out: logits.append(out.detach()))
    return loaded, logits


def _fix_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens, and one chain of masks behind the last row, in the place of random chains."""
    from speculators.models.peagle import core

    anchors = torch.cat([torch.arange(LENGTH), torch.full((STEPS - 1,), ROWS - 1)])
    depths = torch.cat([torch.zeros(LENGTH, dtype=torch.int64), torch.arange(1, STEPS)])
    monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **_: (anchors, depths))
