"""One composition by Hydra's rules: in Python and on the command line, anywhere in a process, and without a trace."""

from __future__ import annotations

import copy
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.singleton import Singleton
from omegaconf import DictConfig, OmegaConf

from specgraph.cli import main
from specgraph.cli.keys import GenerateConfig
from specgraph.config import Config, compose, load_config
from specgraph.config.compose import jobs
from specgraph.errors import ConfigError

OVERRIDES = ["draft=eagle3", "verify=block", "draft.num_speculative_tokens=3", "passes.lookup_first.match=9"]
MAPPING: dict[str, Any] = {
    "draft": "eagle3", "verify": "block", "draft.num_speculative_tokens": 3,
    "passes": {"lookup_first": {"match": 9}},
}  # fmt: skip


@pytest.fixture
def singletons() -> Any:
    """Hydra's objects that a process has once, which a test may change."""
    state = Singleton.get_state()
    yield
    Singleton.set_state(state)


@pytest.mark.parametrize("overrides", [OVERRIDES, [f"+{item}" if "." in item else item for item in OVERRIDES]])
def test_overrides_mean_what_a_mapping_means(overrides: list[str]) -> None:
    assert compose(Config, {}, overrides) == compose(Config, MAPPING)
    assert compose(Config, {"verify": "typical", "draft.num_speculative_tokens": 9}, overrides) == compose(
        Config, MAPPING
    )


def test_overrides_take_keys_away_and_follow_others() -> None:
    cfg = compose(Config, {}, ["~passes.share_weights", "passes.x.y=${max_batch_size}", "max_batch_size=3"])
    assert "share_weights" not in cfg.passes and cfg.passes.x.y == 3


def test_a_k_takes_the_place_of_a_table_that_counts_less() -> None:
    table = {"draft.num_speculative_tokens": {1: 5, 2: 0}}
    assert compose(Config, table).draft.num_speculative_tokens_by_load == {1: 5, 2: 0}
    draft = compose(Config, table, ["draft.num_speculative_tokens=3"]).draft
    assert (draft.num_speculative_tokens, draft.num_speculative_tokens_by_load, draft.adaptive) == (3, None, False)


def test_files_of_a_user_have_defaults_lists_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "mine.yaml").write_text("defaults: [suffix, _self_]\nmax_match: 9\n")
    draft = compose(Config, {}, ["draft=mine"], folder=tmp_path).draft
    assert (draft.kind, draft.max_match, draft.num_speculative_tokens) == ("suffix", 9, 8)


def test_a_sweep_has_a_job_for_every_combination() -> None:
    given = ["verify=glob(*t*,exclude=s*)", "max_length=range(1,3)", "draft.model='a,b'"]
    assert jobs(given) == [
        [f"verify={rule}", f"max_length={length}", "draft.model='a,b'"]
        for rule in ("probabilistic", "typical") for length in (1, 2)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("max_length=1,2", ["max_length", "several values", "-m"]),
        ("~max_length", ["max_length"]),
        ("~nothing", ["'nothing'", "valid keys"]),
        ("draft@target=eagle3", ["draft@target"]),
        ("hydra.run.dir=x", ["Unknown configuration key 'hydra'"]),
        ("draft._target_=nowhere.Mine", ["nowhere.Mine", "full name"]),
        ("pipeline.order=[1]", ["pipeline.order", "list of texts"]),
    ],
)
def test_refused_overrides(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(Config, {}, [override])
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


def test_within_a_hydra_main_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, singletons: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text("rate: 1\ndecoder:\n  verify: block\n  draft: {num_speculative_tokens: 3}\n")
    monkeypatch.setattr(
        sys, "argv", ["app", "decoder.draft.num_speculative_tokens=5", "hydra.run.dir=.", "hydra.output_subdir=null"]
    )
    seen: list[tuple[Any, ...]] = []

    @hydra.main(version_base=None, config_path=str(tmp_path), config_name="mine")
    def app(cfg: DictConfig) -> None:
        config, before = load_config(cfg.decoder), GlobalHydra.instance().hydra
        code = main(["generate", "draft=eagle3", "--cfg", "job"])
        seen.append((config.verify.rule, config.draft.num_speculative_tokens, code))
        assert before is not None and GlobalHydra.instance().hydra is before

    monkeypatch.chdir(tmp_path)
    app()
    assert seen == [("block", 5, 0)]
    assert "kind: eagle3" in capsys.readouterr().out


def test_two_threads_at_once() -> None:
    def composed(number: int) -> DictConfig:
        return compose(Config, {"max_batch_size": number}, [f"max_length={number}", f"draft.model=a{number}"])

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(composed, range(1, 41)))
    assert [(cfg.max_batch_size, cfg.max_length, cfg.draft.model) for cfg in found] == [
        (number, number, f"a{number}") for number in range(1, 41)
    ]


def test_a_composition_takes_less_than_50_ms() -> None:
    """Of this thread's own time, since other processes may be running. The first one reads the files."""

    def seconds(call: Any) -> float:
        began = time.thread_time()
        call()
        return time.thread_time() - began

    for call in (lambda: load_config(MAPPING), lambda: compose(GenerateConfig, {}, OVERRIDES)):
        call()
        assert min(seconds(call) for _ in range(5)) < 0.05


def test_nothing_stays_behind(capsys: pytest.CaptureFixture[str]) -> None:
    def state() -> list[Any]:
        """What Hydra keeps for the whole process: its version, GlobalHydra, the ConfigStore and others."""
        stored = copy.deepcopy(ConfigStore.instance().repo)
        kept = {cls: dict(vars(made)) for cls, made in Singleton._instances.items()}
        return [kept, stored, list(sys.argv)]

    assert GlobalHydra.instance().hydra is None
    before = state()
    load_config(MAPPING)
    assert main(["generate", *OVERRIDES, "--help"]) == 0
    assert main(["generate", *OVERRIDES, "-m", "max_length=1,2", "--cfg", "job"]) == 0
    assert state() == before


def test_a_composition_is_a_copy() -> None:
    compose(Config).cache.block_size = 7
    compose(Config).passes.insert_draft.rule = "x"
    assert compose(Config).cache.block_size == 16
    assert OmegaConf.to_container(compose(Config).passes.insert_draft, resolve=False) == {"rule": "${verify.rule}"}
