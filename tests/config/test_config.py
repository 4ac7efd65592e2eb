"""The configuration: defaults, presets, overlays, and what is said about mistakes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from omegaconf import OmegaConf

from specgraph.compiler.build_passes import build_passes
from specgraph.config import Config, group_choices, load_config, presets
from specgraph.config.drafters import drafter_options
from specgraph.config.groups import default_groups
from specgraph.errors import ConfigError
from specgraph.ir.program import Program
from specgraph.passes import PASSES, Pass, PassResult


@dataclass(frozen=True)
class Idle(Pass):
    """A user's own pass: does nothing, ``note`` times."""

    note: int = 1
    name: ClassVar[str] = "idle"

    def apply(self, program: Program) -> PassResult:
        return PassResult(0, notes=(f"idle {self.note}",))


def test_defaults_come_from_the_groups_and_build_every_pass() -> None:
    config = load_config()
    assert [p.name for p in build_passes(config)] == config.pipeline.order
    assert set(config.passes) == set(PASSES) == {*config.pipeline.order, "shard"}
    shared = build_passes(load_config({"parallel": {"tensor": 2}}))
    assert [p.name for p in shared if p.name not in config.pipeline.order] == ["shard"], "only if it is asked for"
    assert config.draft.kind == "ngram" and config.verify.rule == "strict" and config.lowering.name == "auto"


def test_a_config_object_overlays_nothing_by_itself() -> None:
    assert load_config(Config()) == load_config()
    assert load_config(load_config()) == load_config()


def test_options_that_follow_other_groups_follow_them_until_passes_are_built() -> None:
    config = load_config({"cache": {"block_size": 8}})
    config.verify.rule = "block"
    made = {p.name: p for p in build_passes(dataclasses.replace(config, max_batch_size=2))}
    assert getattr(made["insert_kv_cache"], "block_size") == 8  # noqa: B009
    assert getattr(made["insert_verify"], "rule") == "block"  # noqa: B009


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_loads_and_is_the_group_choice_of_that_name(name: str) -> None:
    assert load_config(name) == load_config({presets()[name]: name})


def test_every_group_file_is_a_preset_and_names_are_unique() -> None:
    choices = [choice for group in default_groups() for choice in group_choices(group) if choice != "default"]
    assert sorted(choices) == sorted(presets())


def test_a_preset_changes_its_group_alone() -> None:
    config = load_config("probabilistic")
    assert config.verify.rule == "probabilistic"
    assert dataclasses.replace(config, verify=load_config().verify) == load_config()


def test_yaml_file_mapping_and_dictconfig_are_the_same(tmp_path: Path) -> None:
    wanted: dict[str, Any] = {"verify": "block", "draft": {"num_speculative_tokens": 7}, "max_length": 99}
    file = tmp_path / "mine.yaml"
    file.write_text("verify: block\ndraft:\n  num_speculative_tokens: 7\nmax_length: 99\n")
    assert load_config(file) == load_config(str(file)) == load_config(wanted) == load_config(OmegaConf.create(wanted))
    assert load_config(file).draft.num_speculative_tokens == 7


def test_keys_may_be_joined_by_dots() -> None:
    wanted = {"verify": "block", "draft": {"kind": "eagle3", "num_speculative_tokens": 7}, "cache": {"block_size": 8}}
    given = {"verify": "block", "draft.num_speculative_tokens": 7, "draft": {"kind": "eagle3"}, "cache.block_size": 8}
    assert load_config(given) == load_config(wanted)
    assert load_config({"draft": "eagle3", "draft.num_speculative_tokens": 7}).draft.num_speculative_tokens == 7
    assert load_config({"passes.few_rows": {}}) == load_config({"passes": {"few_rows": {}}})
    assert given["draft"] == {"kind": "eagle3"}


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert load_config(tmp_path / "empty.yaml") == load_config()


def test_own_pass_enters_by_target() -> None:
    idle = {"_target_": "tests.config.test_config.Idle", "note": 3}
    given = {"passes": {"idle": idle}, "pipeline": {"order": ["idle"]}}
    assert [repr(p) for p in build_passes(load_config(given))] == ["Idle(note=3)"]


def test_k_by_load_is_a_table_beside_its_largest_k(tmp_path: Path) -> None:
    file, table = tmp_path / "mine.yaml", {1: 5, 8: 7, 64: 0}
    file.write_text("draft:\n  kind: eagle3\n  num_speculative_tokens: {1: 5, 8: 7, 64: 0}\n")
    given = {"draft": {"kind": "eagle3", "num_speculative_tokens": table}}
    config = load_config(given)
    assert (config.draft.num_speculative_tokens, config.draft.num_speculative_tokens_by_load) == (7, table)
    assert config == load_config(file) == load_config(OmegaConf.create(given)) == load_config(config)
    assert drafter_options(config.draft).num_speculative_tokens == 7
    assert load_config().draft.num_speculative_tokens_by_load is None


TABLES: dict[str, tuple[Any, str]] = {
    "empty": ({}, "sequences []; they begin with 1"),
    "without 1": ({2: 3}, "sequences [2]; they begin with 1"),
    "descending": ({1: 3, 8: 2, 4: 1}, "sequences [1, 8, 4]; they begin with 1 and ascend"),
    "below 1": ({0: 3, 1: 2}, "sequences [0, 1]"),
    "negative": ({1: 3, 2: -1}, "drafts [3, -1]; they are 0 or more"),
    "no drafts": ({1: 0}, "at least 1 (draft=none drafts"),
    "text": ({"one": 3}, "not {'one': 3}"),
    "fraction": ({1: 2.5}, "not {1: 2.5}"),
    "switch": ({1: True}, "not {1: True}"),
}


@pytest.mark.parametrize(("given", "words"), TABLES.values(), ids=TABLES.keys())
@pytest.mark.parametrize("key", ["num_speculative_tokens", "num_speculative_tokens_by_load"])
def test_a_table_that_says_no_k_is_refused(given: Any, words: str, key: str) -> None:
    with pytest.raises(ConfigError, match=r"^draft\.num_speculative_tokens is an? (integer,.* )?table") as caught:
        load_config({"draft": {key: given}})
    assert words in str(caught.value)


SENTENCES: dict[str, tuple[Any, str]] = {
    "key": ({"draft": {"num_spec": 3}},
            "Unknown configuration key 'draft.num_spec': did you mean 'draft.num_speculative_tokens'?"),
    "type": ({"max_length": 2.5}, "max_length is an integer or null, not 2.5."),
    "word": ({"draft": {"num_speculative_tokens": "automatic"}},
             "draft.num_speculative_tokens is an integer, auto, or a table from numbers of sequences to numbers of "
             "drafts, such as {1: 7, 8: 5, 32: 2}, not 'automatic'."),
    "group": ({"cache": None}, "cache is a group of keys (block_size, prefill_chunk, pool_tokens, memory_share, "
              "reuse_prefixes, snapshots), not None."),
    "range": ({"draft": {"num_speculative_tokens": 0}}, "draft.num_speculative_tokens must be at least 1, got 0."),
    "file": ("missing.yaml", "There is no configuration file 'missing.yaml'; give a YAML file, or a preset's name."),
}  # fmt: skip
"""What is said, word by word."""


@pytest.mark.parametrize(("given", "message"), SENTENCES.values(), ids=SENTENCES.keys())
def test_a_mistake_gets_one_sentence(given: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(given)
    assert str(caught.value) == message


OWN = {"_target_": "builtins.dict"}
MISTAKES: list[tuple[Any, str, str]] = [
    ({"vrify": {}}, "'vrify'", "'verify'"),
    ({"block_size": 8}, "'block_size'", "'cache.block_size'"),
    ({"cache": {"zzz": 1}}, "'cache.zzz'", "valid keys are cache.block_size"),
    ({"draft": {"num_speculative_tokens": "x"}}, "draft.num_speculative_tokens", "an integer"),
    ({"debug": {"self_check": "maybe"}}, "debug.self_check", "true or false"),
    ({"draft": {"model": ["a"]}}, "draft.model", "a text or null"),
    ({"cache": 3}, "cache", "a group of keys"),
    ({"pipeline": {"order": "a"}}, "pipeline.order", "a list of texts"),
    ({"pipeline": {"order": [1]}}, "pipeline.order", "1 in it is not one"),
    ({"draft.num_spec": 3}, "'draft.num_spec'", "'draft.num_speculative_tokens'"),
    ({"max_length.a": 3, "max_length": 4}, "max_length.a", "leave one of them out"),
    ({"draft.parallel": True, "draft": {"parallel": True}}, "draft.parallel", "given twice"),
    ({"draft": "ngrm"}, "draft=ngrm", "'ngram'"),
    ("stric", "'stric'", "'strict'"),
    (3, "mapping, a YAML path or a preset", "int"),
    ({"pipeline": {"order": ["insert_verfy"]}}, "'insert_verfy'", "'insert_verify'"),
    ({"passes": {"share_weight": {}}}, "'share_weight'", "'share_weights'"),
    ({"passes": {"lookup_first": {"matc": 1}}}, "matc'", "'passes.lookup_first.match'"),
    ({"passes": {"few_rows": 4}}, "passes.few_rows", "group of options"),
    ({"passes": {"x": OWN}, "pipeline": {"order": ["x"]}}, "passes.x._target_", "not a specgraph Pass"),
    ({"passes": {"x": {"_target_": "nowhere.X"}}, "pipeline": {"order": ["x"]}}, "passes.x", "'nowhere.X'"),
    ({"passes": {"x": {"y": "${nope}"}}}, "passes.x.y", "'nope' not found"),
]


@pytest.mark.parametrize(("given", "key", "word"), MISTAKES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_mistake_names_the_key_and_what_is_allowed(given: Any, key: str, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_passes(load_config(given))
    assert key in str(caught.value) and word in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"a: [", "is not YAML: "), (b"- a\n", "holds a list; "), (b"a: zw\xf6lf\n", "not UTF-8 at byte 5; ")],
)
def test_a_file_that_is_no_mapping(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "bad.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.yaml") as caught:
        load_config(tmp_path / "bad.yaml")
    assert words in str(caught.value)
