"""What ``lowering=auto`` stands for, and the sentence that says why."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest
import torch

import specgraph
from specgraph.config import choose_lowering, load_config, settle_lowering
from specgraph.config.lowering import DISABLED
from specgraph.errors import SpecgraphWarning
from tests.decoding import CONFIG, compiled
from tests.models import make_model


@pytest.fixture
def equipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that has what Inductor needs."""
    monkeypatch.delenv(DISABLED, raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/g++" if name == "g++" else None)


@pytest.mark.usefixtures("equipped")
def test_on_a_cpu_with_a_compiler_it_is_inductor() -> None:
    assert choose_lowering("auto", "cpu", torch.float32) == ("inductor", "there is a C++ compiler, g++")
    settled = settle_lowering(load_config(), "cpu", torch.float32).lowering
    assert (settled.name, settled.remainder, settled.kernels, settled.cuda_graph) == (
        "inductor",
        "inductor",
        False,
        False,
    )


@pytest.mark.usefixtures("equipped")
def test_without_what_it_needs_it_is_eager_and_says_what(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "Python.h").unlink()
    assert choose_lowering("auto", "cpu") == (
        "eager",
        f"a C++ compiler needs Python.h, which is not in {tmp_path}; install the headers of Python (python3-dev)",
    )
    monkeypatch.setenv("CXX", "icpx")
    assert choose_lowering("auto", "cpu") == (
        "eager", "there is no C++ compiler (icpx); install one, or name one in the environment variable CXX"
    )  # fmt: skip
    monkeypatch.setenv(DISABLED, "1")
    assert choose_lowering("auto", "cpu") == ("eager", "TORCH_COMPILE_DISABLE=1 switches torch.compile off")


@pytest.mark.usefixtures("equipped")
def test_float64_and_gpus_have_their_own() -> None:
    assert choose_lowering("auto", "cpu", torch.float64) == ("eager", "float64 is for checking")
    assert choose_lowering("auto", "cuda:1", torch.float64) == ("eager", "float64 is for checking")
    assert choose_lowering("auto", "cuda:1", torch.bfloat16) == ("gpu", "the target is on a GPU")
    assert choose_lowering("inductor", "cpu", torch.float64) == ("inductor", "lowering=inductor was asked for")


def test_kernels_on_a_cpu_are_said_to_be_slow() -> None:
    with pytest.warns(SpecgraphWarning, match="lowering=gpu was asked for, and the target is on a CPU") as warned:
        specgraph.compile_speculative(make_model("llama", num_hidden_layers=1), {**CONFIG, "lowering": "gpu"})
    assert [warning.filename for warning in warned] == [__file__]


def test_the_report_says_what_runs_and_why() -> None:
    asked = compiled(make_model("llama"), lowering={"name": "eager"})
    assert "- lowering: eager, because lowering=eager was asked for\n" in asked.report()
    chosen = compiled(make_model("llama", dtype=torch.float64))
    assert "- lowering: eager, because float64 is for checking\n" in chosen.report()
