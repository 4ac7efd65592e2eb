"""Drafters are found, and nothing lists them: by their files here, and by the full name of their class elsewhere."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml
from torch import Tensor, nn

import specgraph
from specgraph.cli.help import describe
from specgraph.config import DraftConfig, load_config
from specgraph.config.drafters import DRAFTERS, DraftKeys, drafter_kinds
from specgraph.drafters.base import Draft, Drafter, Target
from specgraph.drafters.registry import drafter_class, drafter_classes
from specgraph.drafters.step import DraftStep
from specgraph.errors import ConfigError
from specgraph.ir.exporting import export_module
from tests.decoding import CONFIG, assert_same_tokens, compiled
from tests.models import VOCAB, make_model, ragged_prompts

ROOT = Path(specgraph.__file__).parents[1]
MEDUSA = ROOT / "examples" / "models" / "tiny-math" / "medusa"
OWN = f"{__name__}.Successors"


@dataclass
class SuccessorsConfig(DraftConfig):
    """Keys of a user's own drafter."""

    stride: int = 1
    """How far apart the proposed ids are."""

    def check(self) -> None:
        if self.stride == 0:
            raise ConfigError("draft.stride must not be 0.")


class _Count(nn.Module):
    """``[B]`` last tokens to K ids that follow them: ``last + stride``, ``last + 2 * stride``, ..."""

    def __init__(self, count: int, stride: int) -> None:
        super().__init__()
        self.register_buffer("steps", stride * torch.arange(1, count + 1))

    def forward(self, last: Tensor) -> Tensor:
        return (last.unsqueeze(1) + self.steps) % VOCAB


@dataclass(frozen=True, eq=False)
class Successors(Drafter):
    """A drafter from outside of the package: proposes the ids behind the last token."""

    kind: ClassVar[str] = OWN
    Config: ClassVar[type[DraftConfig]] = SuccessorsConfig

    @classmethod
    def make(cls, options: Any, target: Target, given: Any) -> Draft:
        module = _Count(options.num_speculative_tokens, options.stride)
        batch = torch.export.Dim("batch", min=1)
        graph = export_module(module, (torch.zeros(3, dtype=torch.int64),), {"last": {0: batch}}, "draft")
        return Draft(cls(options.num_speculative_tokens, {"draft": graph}))

    def build(self, step: DraftStep) -> int:
        tokens, row = step.next_tokens(VOCAB), step.last
        last = step.call(torch.gather, tokens, 1, step.call(_column, row, name="column"), name="last_token")
        step.propose("draft", last=step.call(_flat, last, name="last_ids"), name="proposals")
        return 1


def _column(row: Tensor) -> Tensor:
    return row.clamp_min(0).unsqueeze(1)


def _flat(values: Tensor) -> Tensor:
    return values[:, 0]


@pytest.mark.parametrize("kind", drafter_kinds())
def test_a_drafter_is_its_file_its_class_and_its_preset(kind: str) -> None:
    cls = drafter_class(kind)
    assert (cls.kind, cls.__module__) == (kind, f"specgraph.drafters.{kind}")
    assert cls.Config is DRAFTERS[kind]
    preset = yaml.safe_load((ROOT / "conf" / "draft" / f"{kind}.yaml").read_text())
    assert preset["kind"] == kind and load_config(kind).draft.kind == kind
    assert kind == "none" or f"| `{kind}` | " in (ROOT / "README.md").read_text()


def test_every_class_in_the_folder_is_found_and_one_takes_what_no_other_claims() -> None:
    assert {cls.kind for cls in drafter_classes()} == set(drafter_kinds()) >= {"ngram", "none", "eagle3"}
    assert [cls.kind for cls in drafter_classes() if cls.fallback] == [drafter_classes()[-1].kind] == ["draft_model"]


def test_a_drafter_that_does_not_exist_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"draft.kind is one of dflash, dflash2, draft_model, .*, suffix, not 'nope'\."
    ):
        drafter_class("nope")
    model = make_model("llama", num_hidden_layers=1)
    with pytest.raises(ConfigError, match="draft is empty; give a model, or the folder or name of a checkpoint"):
        compiled(model, draft="")
    with pytest.raises(
        ConfigError, match="The draft '/nowhere' cannot be loaded as a causal LM: there is no such folder"
    ):
        compiled(model, draft="/nowhere")


def test_a_draft_for_another_drafter_than_the_configuration_names_is_refused() -> None:
    model, small = make_model("llama", num_hidden_layers=1), make_model("llama", num_hidden_layers=1, seed=1)
    with pytest.raises(ConfigError) as caught:
        specgraph.compile_speculative(model, {**CONFIG, "draft": "suffix"}, draft=small)
    assert str(caught.value) == (
        "draft.kind is 'suffix', and the draft of the class LlamaForCausalLM is one for 'draft_model'; leave "
        "draft.kind out, or give a draft for 'suffix'."
    )
    with pytest.raises(ConfigError, match=r"draft.kind is 'eagle3', and the draft .*/medusa is one for 'medusa'"):
        specgraph.compile_speculative(model, {**CONFIG, "draft": "eagle3"}, draft=MEDUSA)


def test_the_keys_of_all_drafters_carry_their_text() -> None:
    texts = describe(DraftKeys)
    assert texts["max_ngram"] == "ngram: the longest n-gram looked up."
    assert all(texts.values()) and texts.keys() == {item.name for item in dataclasses.fields(DraftKeys)}


def test_a_drafter_from_outside_decodes_as_the_model_alone() -> None:
    model = make_model("llama", dtype=torch.float64)
    plain = compiled(model, "none").generate(ragged_prompts(), max_new_tokens=12, eos_token_id=[]).new_tokens
    own = {"_target_": OWN, "num_speculative_tokens": 3, "stride": 2}
    decoder = specgraph.compile_speculative(model, {**CONFIG, "draft": own})
    out = decoder.generate(ragged_prompts(), max_new_tokens=12, eos_token_id=[])
    assert_same_tokens(model, ragged_prompts(), out.new_tokens, plain)
    # A K that was given is one that holds for every step.
    assert decoder.config.draft == SuccessorsConfig(OWN, 3, stride=2, adaptive=False)
    assert load_config(decoder.config) == decoder.config
    assert "drafted by" in decoder.report() and "Successors" in decoder.report()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"_target_": "nowhere.Drafter"},
            "draft._target_=nowhere.Drafter: No module named 'nowhere'; give the full name of",
        ),
        (
            {"_target_": "Drafter"},
            "draft._target_=Drafter: Empty module name; give the full name of a class, module.Class",
        ),
        (
            {"_target_": f"{__name__}.Drafters"},
            f"draft._target_={__name__}.Drafters: module '{__name__}' has no attribute",
        ),
        ({"_target_": "builtins.dict"}, "draft._target_ names builtins.dict, which is not a specgraph Drafter with a"),
        ({"_target_": OWN, "strid": 2}, "Unknown configuration key 'draft.strid': did you mean 'draft.stride'?"),
        ({"_target_": OWN, "stride": 0}, "draft.stride must not be 0."),
        ({"kind": "egale3"}, f"draft.kind is one of {', '.join(drafter_kinds())}, not 'egale3'."),
    ],
)
def test_mistakes_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"draft": given})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("kind", drafter_kinds())
def test_a_class_that_derives_from_a_drafters_configuration_is_checked_as_it_is(kind: str) -> None:
    derived = dataclasses.make_dataclass("Derived", [], bases=(DRAFTERS[kind],))
    again = dataclasses.make_dataclass("Again", [], bases=(derived,))
    again(kind=kind).check()
    with pytest.raises(ConfigError, match=r"num_speculative_tokens must be at least 1, got 0"):
        again(kind=kind, num_speculative_tokens=0).check()
