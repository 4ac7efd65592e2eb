"""``doctor``: on this machine as it is, and on machines where something is missing or broken."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from specgraph.cli import doctor, main
from specgraph.kernels.packed import experts, linear
from specgraph.kernels.packed.formats import ARRANGED, FORMATS

Done = subprocess.CompletedProcess[str]
WORKS = '{"lowering": "eager", "cuda_graph": false, "seconds": 2.0}'


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The devices and lowerings with which decoding is tried; each works, without being run."""
    seen: list[tuple[str, str]] = []
    run = doctor._run

    def note(command: Any, seconds: float) -> Done:
        if "specgraph.cli.try_decoding" not in command:
            return run(command, seconds)
        seen.append((command[-2], command[-1]))
        return Done(command, 0, f"a warning\n{WORKS}\n", "")

    monkeypatch.setattr(doctor, "_run", note)
    return seen


def _missing(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    version = metadata.version

    def without(name: str) -> str:
        if name == package:
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without)


def test_a_real_one_decodes(empty_folder: Path) -> None:
    environment = {**os.environ, "TORCH_COMPILE_DISABLE": "1"}
    command = [sys.executable, "-m", "specgraph", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    for package in ("specgraph", "torch", "hydra-core"):
        assert f"\n{package:<20}{metadata.version(package)}\n" in done.stdout
    assert "TORCH_COMPILE_DISABLE=1 switches torch.compile off" in done.stdout
    assert "decode on cpu       works with lowering=eager, " in done.stdout
    assert done.stdout.endswith("specgraph can decode on this machine.\n")
    assert list(empty_folder.iterdir()) == []


def test_it_says_what_runs(decoded: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    parts = [line for line in shown.splitlines() if line.startswith("== ")]
    assert parts[:6] == [f"== {name} ==" for name in ("Versions", "Devices", "Compilers", "What runs", "Optional parts",
                                                      "Decoding")]  # fmt: skip
    assert ("cpu", "auto") in decoded
    assert "model on cpu" in shown and "paged_attention" in shown and "not known" not in shown


def shown_ways(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The formats of packed weights that a report names, by their way."""
    lines = capsys.readouterr().out.splitlines()
    return {line[:20].strip().removeprefix("packed, "): line.rpartition(": ")[2] for line in lines
            if line.startswith("  packed, ")}  # fmt: skip


@pytest.mark.usefixtures("torch_compile")
def test_it_says_how_packed_weights_are_multiplied(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "decode=false"]) == 0
    found = shown_ways(capsys)
    if not torch.cuda.is_available():
        assert {"int4", "mxfp4", "nvfp4_rows"} <= {*found["cpu"].split(", ")} and found["whole"] == "int4_act_order"
    arranged = {form.name for form in ARRANGED.values()}
    named = {name for formats in found.values() for name in formats.split(", ")}
    assert {name for name in named if not name.startswith("experts in ")} == FORMATS.keys() - arranged


@pytest.mark.parametrize("is_hopper", [False, True])
def test_the_ways_of_a_gpu_are_what_the_ops_choose(is_hopper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without one: the ops are asked about tensors that are elsewhere."""
    for module in (linear, experts):
        monkeypatch.setattr(module, "runs_gluon", lambda _: is_hopper)
    found = doctor._ways("cuda", torch.device("cpu"))
    expanded = ["int4", "mxfp4", "fp8_blocks"]
    if is_hopper:
        assert (found["hopper"], found["triton"]) == (expanded, ["experts in int4", "experts in fp8_blocks"])
    else:
        assert "hopper" not in found and found["triton"] == expanded
    assert "cpu" not in found and {"nvfp4", "int4_zeros", "fp8_static"} <= {*found["whole"]}


def test_it_says_which_gpus_cannot_share_a_target() -> None:
    assert doctor._reach(3, lambda a, b: True).text.startswith("all 3 reach each other's memory")
    assert doctor._reach(3, lambda a, b: (a, b) != (2, 0)).text.startswith("0 and 2 cannot reach each other's memory")


def test_every_optional_package_has_a_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[2] / "setup.cfg")
    extras = {key: text for key, text in setup["options.extras_require"].items() if key not in doctor._FOR_DEVELOPERS}
    named = {re.split(r"\W", line)[0] for text in extras.values() for line in text.split()}
    assert named - doctor._always_there() == set(doctor.PURPOSES)
    assert main(["doctor", "decode=false"]) == 0
    shown = capsys.readouterr().out
    part = shown.partition("== Optional parts ==\n")[2].partition("\n\n")[0].splitlines()
    assert "matplotlib" in [line.split()[0] for line in part]
    assert all(line.endswith(f", for {doctor.PURPOSES[line.split()[0]]}") for line in part)


def test_a_missing_optional_package(
    decoded: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _missing(monkeypatch, "accelerate")
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "accelerate          missing, for evaluation by lm_eval" in shown
    assert "- For evaluation by lm_eval --model specgraph: python -m pip install 'accelerate>=1.10'" in shown


@pytest.mark.parametrize("package", ["tabulate", "torch"])
def test_a_missing_package_that_is_needed(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _missing(monkeypatch, package)
    assert main(["doctor", "decode=false"]) == 1
    shown = capsys.readouterr().out
    assert f"- Install {package}: python -m pip install '{package}>=" in shown
    assert shown.endswith("specgraph cannot decode on this machine.\n")


def test_an_environment_that_is_ready_is_named_first(
    monkeypatch: pytest.MonkeyPatch, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty_folder / ".venv").mkdir()
    (empty_folder / ".venv" / ".ready").touch()
    assert main(["doctor", "decode=false"]) == 0
    assert ".venv" not in capsys.readouterr().out.replace(sys.executable, "")
    _missing(monkeypatch, "tabulate")
    assert main(["doctor", "decode=false"]) == 1
    advice = capsys.readouterr().out.partition("== What to do ==\n")[2].splitlines()
    activate = empty_folder / ".venv" / "bin" / "activate"
    assert advice[0] == f"- Use the environment that make has made: source {activate}"
    assert advice[1].startswith("- Install tabulate: ")


def test_a_copy_that_hides_the_folder_of_the_sources(
    monkeypatch: pytest.MonkeyPatch, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty_folder / "specgraph" / "cli").mkdir(parents=True)
    (empty_folder / "specgraph" / "cli" / "doctor.py").touch()
    (empty_folder / "examples").mkdir()
    monkeypatch.chdir(empty_folder / "examples")
    assert main(["doctor", "decode=false"]) == 0
    shown = capsys.readouterr().out
    assert f", the copy in {Path(doctor.__file__).parents[1]}, which hides that in {empty_folder}\n" in shown
    assert f"To run the code in {empty_folder}, install that folder: python -m pip install -e {empty_folder}\n" in shown


WITHOUT_FINDERS = (
    "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Editable' not in str(f)];"
    "from specgraph.cli import main; sys.exit(main(['doctor', 'decode=false']))"
)
"""As in a folder that is not the one that was installed for editing."""


def test_a_folder_that_hides_the_installed_copy_and_is_no_clone(tmp_path: Path) -> None:
    """Without torch, whose import takes seconds, and of which the clone below has need."""
    shutil.copytree(Path(doctor.__file__).parents[1], tmp_path / "specgraph")
    script = WITHOUT_FINDERS.replace("import sys;", "import sys; sys.modules.update(torch=None, transformers=None);")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert f"{tmp_path / 'specgraph'} has no kernels: it is not installed, or it hides a copy that is" in done.stdout
    assert f"- Install this folder itself, and not a copy: python -m pip install -e {tmp_path}\n" in done.stdout


def test_a_clone_that_hides_the_installed_copy_runs() -> None:
    root = Path(doctor.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_FINDERS], capture_output=True, text=True, check=False, cwd=root
    )
    assert done.returncode == 0 and "has no kernels" not in done.stdout


def test_an_old_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "2.9.1+cu128" if name == "torch" else version(name))
    assert main(["doctor", "decode=false"]) == 1
    assert "torch               2.9.1+cu128, but 2.11 is needed" in capsys.readouterr().out


def test_a_package_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as if a library of it were missing
    assert main(["doctor", "decode=false"]) == 1
    shown = capsys.readouterr().out
    assert "not known           ModuleNotFoundError: import of torch halted" in shown
    assert "== Optional parts ==" in shown  # what does not need it is there all the same


@pytest.mark.parametrize(
    ("done", "reason"),
    [
        (Done((), 1, "", "Traceback\nRuntimeError: no kernel image\n"), "RuntimeError: no kernel image"),
        (Done((), -11, "", ""), "the process ended with code -11"),
        (Done((), 0, "nothing", ""), "the process ended with code 0"),
        (Done((), 124, "", "it took more than 600 s"), "it took more than 600 s"),
    ],
)
def test_a_path_that_fails(
    done: Done, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    works = Done((), 0, WORKS, "")
    run = doctor._run

    def fail(command: Any, seconds: float) -> Done:
        tried = "specgraph.cli.try_decoding" in command
        return (done if command[-1] == "auto" or not eager else works) if tried else run(command, seconds)

    monkeypatch.setattr(doctor, "_run", fail)
    eager = True
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert f"decode on cpu       lowering=auto fails: {reason}" in shown
    assert f"- Decode on cpu with lowering=eager until this is repaired: lowering=auto fails: {reason}" in shown
    eager = False
    assert main(["doctor"]) == 1
    assert f"- On cpu, see to this: {reason}" in capsys.readouterr().out


def test_a_compiler_that_does_not_compile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken++"
    broken.write_text("#!/bin/sh\necho 'fatal error: no libstdc++' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    assert main(["doctor", "decode=false"]) == 0
    shown = capsys.readouterr().out
    assert "it does not compile: fatal error: no libstdc++" in shown
    assert f"- Repair the C++ compiler {broken}, or decode with lowering=eager: it fails with fatal error" in shown


def test_programs_that_do_not_start_or_end() -> None:
    assert "No such file" in doctor._run(["/nowhere/program"], 5).stderr
    slow = doctor._run([sys.executable, "-c", "import time; time.sleep(9)"], 0.2)
    assert (slow.returncode, slow.stderr) == (124, "it took more than 0 s")


def test_help_and_unknown_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--help"]) == 0
    assert "usage: python -m specgraph doctor [decode=false]" in capsys.readouterr().out
    assert main(["doctor", "decod=false"]) == 2
    assert capsys.readouterr().err == (
        "error: doctor does not take 'decod=false'; it takes decode=true or decode=false.\n"
    )


def test_it_runs_without_the_packages_that_other_commands_need() -> None:
    script = (
        "import sys; sys.modules.update(dict.fromkeys(['hydra', 'omegaconf', 'transformers', 'torch']));"
        "from specgraph.cli import main; sys.exit(main(['doctor', 'decode=false']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert "== Optional parts ==" in done.stdout
    other = script.replace("'doctor', 'decode=false'", "'generate'")
    done = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: omegaconf is missing; python -m specgraph doctor says what to do.\n"
