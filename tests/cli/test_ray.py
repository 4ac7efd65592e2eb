"""``engine=ray`` and examples/ray_batch.py: several processes give what one gives, also if one of them is killed."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specgraph.cli import main
from specgraph.cli.ray_workers import _own, _workers
from specgraph.errors import ConfigError, InputError
from tests.ray_workers import Killer, records

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = EXAMPLES / "models" / "tiny-math" / "draft"
KEYS = [
    f"model={MODEL}", "template=Question: {question}\\nAnswer:", "dtype=float64", "lowering=eager", "format=jsonl",
    "debug.self_check=false", "temperature=0.8", "seed=7", "max_new_tokens=60", "limit=8",
    "draft.num_speculative_tokens=4",  # else the time of steps decides how many drafts each has
    f"prompts={EXAMPLES / 'data' / 'gsm8k_test_200.jsonl'}",
]  # fmt: skip


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Ray on this machine, which leaves nothing in the home directory."""
    library = pytest.importorskip("ray", reason="needs specgraph[ray]")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("RAY_enable_worker_prestart", "0")
        library.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
        yield library
        library.shutdown()


def test_two_workers_of_which_one_is_killed_lose_nothing(ray: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *KEYS]) == 0
    alone = records(capsys.readouterr().out)
    killer = Killer()
    killer.start()
    assert main(["generate", *KEYS, "engine=ray", "workers=2"]) == 0
    killer.over.set()
    killer.join()
    found = records(capsys.readouterr().out)
    assert found == alone and len(alone) == 8
    assert killer.killed is not None and len(killer.seen) >= 3  # the two, and the one in place of the first


def test_the_example_gives_the_answers_of_one_process(
    ray: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker, and one CPU for it, so this would wait for ever if anything else took one."""

    class Busy:  # here, so that Ray takes it along and need not import this file
        def begin(self) -> None: ...

    busy = ray.remote(num_cpus=1)(Busy).remote()
    ray.get(busy.begin.remote())
    monkeypatch.setattr(sys, "argv", ["ray_batch.py", "--model", str(MODEL), "--limit", "4", "--workers", "1"])
    runpy.run_path(str(EXAMPLES / "ray_batch.py"), run_name="__main__")
    assert "4 of 4 answers are those of one process" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["engine=rya"], "There is no engine=rya (did you mean 'ray'?); it is local or ray."),
        (["workers=2"], "workers=2 is for engine=ray; leave it out, or add that."),
        (["engine=ray", "workers=0"], "workers must be at least 1, got 0."),
        (["engine=ray", "compare=true"], "compare is not there with engine=ray"),
        (["engine=ray", "trace=-"], "trace is not there with engine=ray"),
    ],
)
def test_keys_that_do_not_go_together(keys: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *KEYS, *keys]) == 2
    assert message in capsys.readouterr().err


def test_workers_of_several_gpus() -> None:
    there = {"GPU": 5.0, "CPU": 8.0}
    assert _workers(None, there, 2) == 2 and _workers(1, there, 2) == 1 and _workers(None, there, 0) == 1
    with pytest.raises(ConfigError, match="workers=3, but Ray has 5 GPUs, and each worker takes 2; ask for fewer"):
        _workers(3, there, 2)


def test_more_workers_than_ray_has_room_for_are_refused(ray: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *KEYS, "engine=ray", "workers=3"]) == 2
    assert "workers=3, but Ray has 2 CPUs, and each worker takes one; ask for fewer." in capsys.readouterr().err


def test_an_error_of_a_worker_is_shown_as_it_was() -> None:
    inner, outer = InputError("Prompt 0 is too long."), RuntimeError("a task has failed\n  at many lines")
    outer.__cause__ = RuntimeError("in between")
    outer.__cause__.cause = inner  # type: ignore[attr-defined]
    assert _own(outer) is inner
    assert isinstance(_own(MemoryError("no room")), ConfigError) and "has failed: no room" in str(
        _own(MemoryError("no room"))
    )
