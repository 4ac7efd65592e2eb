"""``engine=ray`` on two GPUs: a worker on each gives what one process gives, also if one of them is killed."""

from __future__ import annotations

import runpy
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specgraph.cli import main
from tests.ray_workers import Killer, records

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
EXAMPLES = Path(__file__).parents[2] / "examples"
MODELS = EXAMPLES / "models" / "tiny-math"
KEYS = [
    f"model={MODELS / 'target'}", "template=Question: {question}\\nAnswer:", "format=jsonl", "temperature=0.8",
    "seed=7", "max_new_tokens=60", f"prompts={EXAMPLES / 'data' / 'gsm8k_test_200.jsonl'}", "max_batch_size=8",
]  # fmt: skip


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    library = pytest.importorskip("ray", reason="needs specgraph[ray]")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", str(tmp_path_factory.mktemp("ray")))
        library.init(include_dashboard=False, log_to_driver=False, logging_level="error")
        yield library
        library.shutdown()


class Watcher(threading.Thread):
    """Sees how much memory of each GPU others take at most, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.free = self._free()
        self.taken = [0 for _ in self.free]
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.2):
            now = zip(self.taken, self.free, self._free(), strict=True)
            self.taken = [max(most, before - free) for most, before, free in now]

    @staticmethod
    def _free() -> list[int]:
        return [torch.cuda.mem_get_info(device)[0] for device in range(torch.cuda.device_count())]


@pytest.mark.parametrize("draft", ["none", "eagle3"])
def test_two_gpus_give_what_one_gives_though_a_worker_is_killed(
    ray: Any, capsys: pytest.CaptureFixture[str], draft: str
) -> None:
    keys = [*KEYS, *([] if draft == "none" else [f"draft={MODELS / draft}"])]
    assert main(["generate", *keys]) == 0
    alone = records(capsys.readouterr().out)
    killer, watcher = Killer(), Watcher()
    killer.start()
    watcher.start()
    assert main(["generate", *keys, "engine=ray", "workers=2"]) == 0
    for thread in (killer, watcher):
        thread.over.set()
        thread.join()
    found = records(capsys.readouterr().out)
    assert found == alone and len(alone) == 200
    assert killer.killed is not None and len(killer.seen) >= 3  # the two, and the one in place of the first
    assert sorted(watcher.taken)[-2] > 1e8, watcher.taken  # a model and a context on each of two


def test_the_example_gives_the_answers_of_one_process_on_two_gpus(
    ray: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--draft", str(MODELS / "eagle3"), "--limit", "200", "--workers", "2"]
    monkeypatch.setattr(sys, "argv", ["ray_batch.py", *given])
    runpy.run_path(str(EXAMPLES / "ray_batch.py"), run_name="__main__")
    assert "200 of 200 answers are those of one process" in capsys.readouterr().out
