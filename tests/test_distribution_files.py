"""The wheel and the sdist have every file of the package, and the package works from the wheel alone.

Both are built by the tools of this environment, without a network, from a copy of the files that git knows.
"""

from __future__ import annotations

import configparser
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {"specgraph": "specgraph", "passes": "specgraph/passes", "kernels": "specgraph/kernels",
           "conf": "specgraph/conf"}  # fmt: skip
"""The folders of the sources, and where an installed package has them."""
ALONE = """
import runpy
import sys

import torch

installed, model, *arguments = sys.argv[1:]
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
sys.path.insert(0, installed)
sys.argv = ["specgraph", *arguments]
try:
    runpy.run_module("specgraph", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, end.code

import specgraph
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
decoder = specgraph.compile_speculative(model, {"lowering": "eager", "debug.self_check": False})
out = decoder.generate([[5, 6, 7]], max_new_tokens=4, eos_token_id=[])
assert len(out.new_tokens[0]) == 4
ours = [module for name, module in sys.modules.items() if name.split(".")[0] == "specgraph"]
assert len(ours) > 100
strangers = [module for module in ours if not module.__file__.startswith(installed)]
assert not strangers, strangers
"""
"""Runs the command line, decodes, and sees that all of specgraph was imported from the folder of the wheel. The
environment has the repository as an editable package, whose finder is taken out."""


def _files() -> dict[str, Path]:
    """What an installed package must have, by its path there: every file of the folders of sources."""
    found = {}
    for folder, place in SOURCES.items():
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.parent.name != "__pycache__":
                found[f"{place}/{path.relative_to(ROOT / folder)}"] = path
    return found


def _run(*command: str | Path, at: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=at, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel, and an sdist of the same sources."""
    folder = tmp_path_factory.mktemp("distribution")
    copy = folder / "sources"
    copy.mkdir()
    for name in (*SOURCES, "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    # The wheel is built from the sdist, so it cannot have what the sdist lacks.
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", copy, at=folder)
    return folder / "dist"


def test_every_file_is_in_both(built: Path) -> None:
    files = _files()
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    packages = {name.replace(".", "/") for name in setup["options"]["packages"].split()}
    assert {name.rpartition("/")[0] for name in files if name.endswith(".py")} == packages
    assert any(name.endswith("conf/draft/eagle3.yaml") for name in files) and "specgraph/py.typed" in files

    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert inside == set(files)
        for name, path in files.items():
            assert archive.read(name) == path.read_bytes(), name
        (about,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        assert "Provides-Extra: grammar" in archive.read(about).decode()

    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in files.values()}
    assert sources | {"setup.cfg", "pyproject.toml", "README.md", "LICENSE"} <= inside


def test_the_wheel_works_alone(built: Path, tmp_path: Path) -> None:
    """It is installed into a folder of its own, in front of the environment, whose specgraph is the repository."""
    (wheel,) = built.glob("*.whl")
    target, empty = tmp_path / "installed", tmp_path / "empty"
    empty.mkdir()
    _run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel,
         at=empty)  # fmt: skip
    model = ROOT / "examples" / "models" / "tiny-math" / "draft"  # the smaller of its models
    arguments = ["generate", f"model={model}", "prompt=Question: What is 3 + 4?", "max_new_tokens=4", "lowering=eager",
                 "device=cpu", "draft=suffix", "debug.self_check=false", "format=jsonl"]  # fmt: skip
    shown = _run(sys.executable, "-c", ALONE, target, model, *arguments, at=empty)
    (line,) = shown.splitlines()  # a process writes nothing else to its standard output
    assert len(json.loads(line)["tokens"]) == 4


def test_a_clone_that_is_not_installed_in_place_runs_in_its_own_folder() -> None:
    """As after ``pip install .``: the clone's folder hides the installed package, and has no ``specgraph/conf``."""
    code = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
import specgraph, specgraph.conf, specgraph.kernels.ops, specgraph.passes
from specgraph.config import load_config
print(specgraph.conf.__file__, load_config("none").draft.kind)
"""
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.split() == [str(ROOT / "conf" / "__init__.py"), "none"]
