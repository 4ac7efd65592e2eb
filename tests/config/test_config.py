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
    assert set(config.passes) == set(PASSES) == set(config.pipeline.order)
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
    assert load_config({"passes.fuse_verify": {}}) == load_config({"passes": {"fuse_verify": {}}})
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


TABLE = "draft.num_speculative_tokens is a table of the numbers of"
TABLES: dict[str, tuple[Any, str]] = {
    "empty": ({}, f"{TABLE} sequences []; they begin with 1 and ascend, such as {{1: 7, 8: 5, 32: 2}}."),
    "without 1": ({2: 3}, f"{TABLE} sequences [2]; they begin with 1 and ascend"),
    "descending": ({1: 3, 8: 2, 4: 1}, f"{TABLE} sequences [1, 8, 4]; they begin with 1 and ascend"),
    "below 1": ({0: 3, 1: 2}, f"{TABLE} sequences [0, 1]; they begin with 1 and ascend"),
    "negative": ({1: 3, 2: -1}, f"{TABLE} drafts [3, -1]; they are 0 or more, and one of them is at least 1"),
    "no drafts": ({1: 0}, f"{TABLE} drafts [0]; they are 0 or more, and one of them is at least 1 (draft=none drafts"),
    "text": ({"one": 3}, "draft.num_speculative_tokens is a number, or a table from numbers of sequences to numbers of "
                         "drafts, such as {1: 7, 8: 5, 32: 2}; not {'one': 3}."),
    "fraction": ({1: 2.5}, "draft.num_speculative_tokens is a number, or a table"),
    "switch": ({1: True}, "draft.num_speculative_tokens is a number, or a table"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "message"), TABLES.values(), ids=TABLES.keys())
def test_a_table_that_says_no_k_gets_one_sentence(given: Any, message: str) -> None:
    for key in ("num_speculative_tokens", "num_speculative_tokens_by_load"):
        with pytest.raises(ConfigError) as caught:
            load_config({"draft": {key: given}})
        assert str(caught.value).startswith(message)


CACHE_KEYS = "block_size, prefill_chunk, pool_tokens, memory_share, reuse_prefixes, snapshots"
MISTAKES: dict[str, tuple[Any, str]] = {
    "part of a nested key": (
        {"draft": {"num_spec": 3}},
        "Unknown configuration key 'draft.num_spec': did you mean 'draft.num_speculative_tokens'?",
    ),
    "misspelt group": ({"vrify": {}}, "Unknown configuration key 'vrify': did you mean 'verify'?"),
    "key of another group": ({"block_size": 8}, "Unknown configuration key 'block_size': did you mean "
                             "'cache.block_size'?"),
    "nothing near": ({"cache": {"zzz": 1}}, "Unknown configuration key 'cache.zzz': valid keys are cache.block_size, "
                     "cache.prefill_chunk, cache.pool_tokens, "),
    "text for a number": ({"draft": {"num_speculative_tokens": "x"}},
                          "draft.num_speculative_tokens is an integer, not 'x'."),
    "fraction for an integer": ({"max_length": 2.5}, "max_length is an integer or null, not 2.5."),
    "text for a switch": ({"debug": {"self_check": "maybe"}}, "debug.self_check is true or false, not 'maybe'."),
    "list for a text": ({"draft": {"model": ["a"]}}, "draft.model is a text or null, not ['a']."),
    "number for a group": ({"cache": 3}, f"cache is a group of keys ({CACHE_KEYS}), not 3."),
    "null for a group": ({"cache": None}, f"cache is a group of keys ({CACHE_KEYS}), not None."),
    "text for a list": ({"pipeline": {"order": "a"}}, "pipeline.order is a list of texts, not 'a'."),
    "no text in a list": ({"pipeline": {"order": [1]}}, "pipeline.order is a list of texts; 1 in it is not one."),
    "dots in an unknown key": ({"draft.num_spec": 3}, "Unknown configuration key 'draft.num_spec': did you mean "
                               "'draft.num_speculative_tokens'?"),
    "dots behind a value": ({"max_length.a": 3, "max_length": 4}, "max_length.a is given beside max_length=4; leave"),
    "the same key twice": ({"draft.parallel": True, "draft": {"parallel": True}}, "draft.parallel is given twice; "),
    "unknown choice": ({"draft": "ngrm"}, "There is no draft=ngrm (did you mean 'ngram'?); draft is one of "),
    "unknown preset": ("stric", "Unknown preset 'stric' (did you mean 'strict'?); there are "),
    "no such file": ("missing.yaml", "There is no configuration file 'missing.yaml'; give a YAML file, or a "
                     "preset's name."),
    "not a configuration": (3, "A configuration is a mapping, a YAML path or a preset name, not int."),
    "out of range": ({"draft": {"num_speculative_tokens": 0}}, "draft.num_speculative_tokens must be at least 1, "
                     "got 0."),
    "unknown pass in the order": ({"pipeline": {"order": ["fuse_verfy"]}},
                                  "Unknown pass 'fuse_verfy' (did you mean 'fuse_verify'?); there are "),
    "options of an unknown pass": ({"passes": {"share_weight": {}}},
                                   "Unknown pass 'share_weight' (did you mean 'share_weights'?); there are "),
    "unknown option": ({"passes": {"lookup_first": {"matc": 1}}}, "Unknown configuration key "
                       "'passes.lookup_first.matc': did you mean 'passes.lookup_first.match'?"),
    "options that are none": ({"passes": {"fuse_verify": 4}}, "passes.fuse_verify is a group of options, not 4."),
    "target that is no pass": ({"passes": {"x": {"_target_": "builtins.dict"}}, "pipeline": {"order": ["x"]}},
                               "passes.x._target_ made a dict, which is not a specgraph Pass."),
    "target that is missing": ({"passes": {"x": {"_target_": "nowhere.X"}}, "pipeline": {"order": ["x"]}},
                               "passes.x: Error locating target 'nowhere.X'"),
    "reference to nothing": ({"passes": {"x": {"y": "${nope}"}}}, "passes.x.y: Interpolation key 'nope' not found."),
}  # fmt: skip


@pytest.mark.parametrize(("given", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_gets_one_sentence(given: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_passes(load_config(given))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [", "is not YAML: "), ("- a\n", "holds a list; a configuration is a mapping of keys to values.")],
)
def test_a_file_that_is_no_mapping(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml .*"[:9]) as caught:
        load_config(tmp_path / "bad.yaml")
    assert message in str(caught.value)
