"""Checks of the shell commands that the pages show.

``explore``, ``diff``, ``inspect`` and ``doctor`` run in this process, and so do ``generate`` and ``dump`` where they
name the models of this repository, with few tokens. The other commands of the command line need a GPU, a model of the
reader's or minutes: their configuration is composed and checked as far as the work itself. What installs something is
compared with ``setup.cfg``, and ``make`` with the Makefile.
"""

from __future__ import annotations

import configparser
import contextlib
import functools
import inspect
import io
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest
from omegaconf import DictConfig, OmegaConf

from benchmarks.command import read_options
from benchmarks.soak import SoakOptions
from specgraph.bench.config import BenchConfig, check_bench_config
from specgraph.bench.models import SHAPES
from specgraph.cli import commands, main
from specgraph.cli.command_table import COMMANDS
from specgraph.config import Config
from specgraph.config.drafters import trained_by
from specgraph.training.config import HeadTrainConfig, check_head_config
from tests.gpu.pieces import PIECES
from tests.test_examples import NAMES

ROOT = Path(__file__).parents[2]
RUN = ("generate", "dump", "explore", "diff", "inspect")
QUICK = {
    "generate": ("max_new_tokens=6", "limit=1"),
    "dump": ("weights=false",),
    "explore": ("bandwidth=100",),
    "diff": (),
    "inspect": (),
}  # fmt: skip
"""What a command that runs is given in addition, so that it is quick."""
STANDS_FOR = "path/of/a/"
"""Begins the names that stand for a model or a head of the reader's."""
PATHS = ("model", "target", "prompts", "data", "eval_data", "draft.model", "target.checkpoint")
"""Keys that name files or folders, which must exist in the folder of the test."""


class CommandError(AssertionError):
    """A command of a page is wrong."""


def run_command(words: Sequence[str]) -> str:
    """Run or check one command, and return what it printed."""
    words = [word for index, word in enumerate(words) if index or not re.match(r"[A-Z_]+=", word)]
    for prefix, check in CHECKS.items():
        if words[: len(prefix)] == [*prefix]:
            return check([*words[len(prefix) :]])
    raise CommandError(f"no test knows how to check the command {' '.join(words)!r}")


def _specgraph(words: list[str]) -> str:
    name, *rest = words or ["--help"]
    if name == "doctor":
        return _main(["doctor", *(rest or ["decode=false"])])
    theirs = name != "inspect" and any(STANDS_FOR in word for word in rest)
    if {"--help", "--cfg"} & set(words) or name not in RUN or theirs:
        with _composed_only():
            return _main(words)
    given = [*QUICK[name], *(("device=cpu",) if name in ("generate", "dump") else ())]
    keys = {word.partition("=")[0] for word in rest}
    extra = [word for word in given if word.partition("=")[0] not in keys]
    if "prompts" not in keys:
        extra = [word for word in extra if not word.startswith("limit=")]
    return _main([name, *rest, *extra])


def _main(words: Sequence[str]) -> str:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(words)
    if status:
        raise CommandError(f"python -m specgraph {' '.join(words)} gave {status}: {err.getvalue()}")
    return out.getvalue()


@contextlib.contextmanager
def _composed_only() -> Iterator[None]:
    """Commands compose and check their configuration, and do no work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands, "run", _check)
        yield


def _check(name: str, cfg: DictConfig, *, first: bool = True) -> dict[str, str]:
    """In the place of :func:`commands.run`: refuse what the command would refuse before its work."""
    options = OmegaConf.to_object(cfg)
    if issubclass(COMMANDS[name].schema(), Config):
        commands._compiled_part(cfg)
    if isinstance(options, BenchConfig):
        check_bench_config(options)
    if isinstance(options, HeadTrainConfig):
        check_head_config(options)
    for key in PATHS:
        value = OmegaConf.select(cfg, key, throw_on_missing=True)
        if isinstance(value, str) and value and value not in SHAPES and not Path(value).exists():
            raise CommandError(f"{key}={value} does not exist in the folder of the test")
    return {}


def _evaluation(words: list[str]) -> str:
    """lm_eval would load data sets, so only the arguments of our model are compared with what it takes."""
    from specgraph.evaluation.lm_eval import SpecgraphLM  # imports the harness, which takes seconds

    given = dict(zip(words[::2], words[1::2], strict=True))
    assert given["--model"] == "specgraph" and "--tasks" in given
    taken = inspect.signature(SpecgraphLM).parameters
    for word in given["--model_args"].split(","):
        key, _, value = word.partition("=")
        if key not in taken:
            raise CommandError(f"the model of lm_eval takes {', '.join(taken)}, not {key}")
        if key in ("pretrained", "draft") and not Path(value).exists():
            raise CommandError(f"{word} does not exist in the folder of the test")
    return ""


def _pip(words: list[str]) -> str:
    extras = configparser.ConfigParser()
    extras.read(ROOT / "setup.cfg")
    for word in words:
        match = re.fullmatch(r"(-e|-c|constraints\.txt)|(\.)(?:\[([\w,]+)\])?", word)
        if match is None:
            raise CommandError(f"pip install {word}: this is not specgraph")
        for extra in (match[3] or "").split(","):
            if extra and extra not in extras["options.extras_require"]:
                raise CommandError(f"setup.cfg has no extra {extra}")
    return ""


def _make(words: list[str]) -> str:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for word in words:
        if word not in targets:
            raise CommandError(f"the Makefile has no target {word}")
    return ""


def _example(words: list[str]) -> str:
    """Examples run in tests, but for those that take minutes, which ``make`` runs. Their options must exist."""
    path = Path(words[0])
    made = f"$(BIN)/python {path}" in (ROOT / "Makefile").read_text()
    tested = path.stem in NAMES or any(f'"{path.name}"' in own.read_text() for own in (ROOT / "tests").rglob("*.py"))
    if path.parent != Path("examples") or not (tested or made):
        raise CommandError(f"nothing runs {path}")
    for word in words[1:]:
        if word.startswith("--") and f'"{word}"' not in (ROOT / path).read_text():
            raise CommandError(f"{path} has no option {word}")
        if word.startswith("examples/") and not (ROOT / word).exists():
            raise CommandError(f"there is no {word}")
    return ""


def _on_a_gpu(words: list[str]) -> str:
    """Its pieces must exist."""
    known = {piece.name for piece in PIECES}
    if words[0] != "--piece" or not {*words[1:]} <= known:
        raise CommandError(f"tests/gpu/run_offline.sh takes --piece with {', '.join(sorted(known))}, not {words}")
    return ""


def _pytest(words: list[str]) -> str:
    for word in words:
        if "/" in word and not (ROOT / word.partition("::")[0]).exists():
            raise CommandError(f"there is no {word}")
    return ""


BENCHMARKS = ("count_lines", "fetch_models", "real_models", "markdown", "published_table")
TIMED = ("kernels", "options", "soak")


def _benchmark(name: str, words: list[str]) -> str:
    """A developer's tool that needs a model of gigabytes: its options must exist."""
    text = (ROOT / "benchmarks" / f"{name}.py").read_text()
    unknown = [word for word in words if word.startswith("--") and f'"{word}"' not in text]
    if unknown:
        raise CommandError(f"benchmarks/{name}.py has no option {', '.join(unknown)}")
    return ""


def _timed(name: str, words: list[str]) -> str:
    """A script that times something on a GPU, or for a long time: its keys must exist, and so must what they name."""
    options = SoakOptions if name == "soak" else BenchConfig
    config, given = read_options(words, options, {})
    check_bench_config(given)
    for path in (given.target, config.draft.model):
        if path is not None and path not in SHAPES and not Path(path).exists():
            raise CommandError(f"{path} does not exist in the folder of the test")
    return ""


def _trained_head(words: list[str]) -> str:
    """The model, the folder of questions, where to work, the algorithm and the seconds."""
    *_, algorithm, seconds = words
    if algorithm not in trained_by() or not (ROOT / "benchmarks" / "train_head.sh").exists() or not seconds.isdigit():
        raise CommandError(f"train_head.sh takes an algorithm and seconds, not {algorithm!r} and {seconds!r}")
    return ""


CHECKS = cast(
    "dict[tuple[str, ...], Callable[[list[str]], str]]",
    {
        ("python", "-m", "specgraph"): _specgraph,
        ("python", "-m", "specgraph.evaluation"): _evaluation,
        ("python", "-m", "pytest"): _pytest,
        ("python", "-m", "pip", "install"): _pip,
        ("pip", "install"): _pip,
        ("make",): _make,
        ("bash", "tests/gpu/run_offline.sh"): _on_a_gpu,
        ("bash", "benchmarks/train_head.sh"): _trained_head,
        **{("python", "-m", f"benchmarks.{name}"): functools.partial(_benchmark, name) for name in BENCHMARKS},
        **{("python", "-m", f"benchmarks.{name}"): functools.partial(_timed, name) for name in TIMED},
        ("python",): _example,
    },
)
