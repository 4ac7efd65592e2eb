"""Every fenced block of the README and of the pages runs, or is checked in a way that can fail.

The blocks of a page are taken from top to bottom, in a folder of their own in which the files of the repository are
links. ``path/of/a/model``, ``path/of/a/draft`` and ``path/of/a/head`` are models of tiny-math there, and
``questions.jsonl``, ``train.jsonl`` and ``gsm8k.jsonl`` have two questions.

- ``python`` blocks run in one namespace, which is a module, as a file would be.
- ``bash`` blocks run as :mod:`tests.docs.commands` says.
- ``yaml`` blocks are configurations. The first line is a comment with a file's name, under which later blocks find it.
- ``text`` behind one of these in the same section is its output, where ``...`` stands for anything. Any other ``text``
  is a picture of the pipeline, in which passes stand in the order of ``conf/pipeline/default.yaml``.
- Directives of Sphinx name pages and objects that exist. `make site` carries them out.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

import specgraph
import specgraph.compiler.compile
import specgraph.dropin.attach
from specgraph.cli import commands
from specgraph.config import load_config
from specgraph.config.drafters import drafter_kinds
from specgraph.kernels.ops import OPS
from specgraph.kernels.sampling.sample import RULES
from tests.docs.blocks import Block, blocks_of, commands_of
from tests.docs.commands import run_command

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MODELS = ROOT / "examples" / "models" / "tiny-math"
STANDS_FOR = {"model": "target", "draft": "draft", "head": "eagle3"}
"""What of tiny-math is at ``path/of/a/...``."""
SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

pytestmark = pytest.mark.usefixtures("shared", "folder")
_MODELS: dict[str, Any] = {}
_DECODERS: dict[tuple[int, str, str], tuple[Any, Any, Any]] = {}


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A model is loaded once for all pages, and a decoder is compiled once for the same arguments.

    The verifier and the self-check are left out. They have tests of their own, and take half of a compilation.
    """
    monkeypatch.setattr(specgraph.compiler.compile, "verify_program", lambda program: None)
    monkeypatch.setattr(specgraph.compiler.compile, "self_check", lambda *given: "not compared")
    load = AutoModelForCausalLM.from_pretrained

    def load_once(name: Any, **options: Any) -> Any:
        key = f"{Path(name).resolve()} {options}"
        if key not in _MODELS:
            _MODELS[key] = load(name, **options)
        return _MODELS[key]

    compile_speculative = specgraph.compiler.compile.compile_speculative

    def compile_once(model: Any, cfg: Any = None, *, draft: Any = None, **others: Any) -> Any:
        config = load_config(cfg)
        named = config.draft.model if draft is None else draft
        where = str(Path(named).resolve()) if isinstance(named, str | Path) else str(id(named))
        key = id(model), repr(replace(config, draft=replace(config.draft, model=None))), where
        if key not in _DECODERS or others:  # with the model and the draft, so that no other one gets their id
            _DECODERS[key] = compile_speculative(model, cfg, draft=draft, **others), model, draft
        return _DECODERS[key][0]

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load_once)
    for module in (specgraph.compiler.compile, specgraph.dropin.attach, commands):
        monkeypatch.setattr(module, "compile_speculative", compile_once)
    monkeypatch.setattr(
        commands, "load_model", lambda name, device, dtype, *_: load_once(name, dtype=getattr(torch, dtype))
    )
    known = dict(OPS)
    yield
    for name in OPS.keys() - known.keys():  # a page declares an op, which other tests do not expect
        del OPS[name]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What looks like the root of the repository. What blocks write is not in the repository."""
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name not in ("build", "graphs"):
            (tmp_path / path.name).symlink_to(path)
    placeholders = tmp_path / "path" / "of" / "a"
    placeholders.mkdir(parents=True)
    for name, model in STANDS_FOR.items():
        (placeholders / name).symlink_to(MODELS / model)
    lines = (ROOT / "examples" / "data" / "gsm8k_test_200.jsonl").read_text().splitlines(keepends=True)[:2]
    for name in ("questions", "train", "gsm8k"):
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Page:
    """Runs the blocks of a page, one after the other."""

    def __init__(self, name: str, folder: Path) -> None:
        self.module = types.ModuleType(f"page_{re.sub(r'[^a-z]', '_', name.lower())}")
        self.file = folder / f"{self.module.__name__}.py"
        self.module.__file__ = str(self.file)
        self.source = ""
        self.printed: str | None = None
        """What the block before has printed; None behind a block that prints nothing."""
        self.section = 0
        """That of the block before."""

    def run(self, block: Block) -> None:
        """Run or check a block."""
        language = re.sub(r"^{.*}.*$", "directive", block.language)
        check: Callable[[Block], str | None] | None = getattr(self, f"_{language}", None)
        if check is None or not language:
            raise AssertionError(f"{block.place}: no test knows how to check a block of the language {language!r}")
        if block.section != self.section:
            self.section, self.printed = block.section, None
        try:
            self.printed = check(block)
        except (Exception, SystemExit) as error:
            lines = [
                frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(self.file)
            ]
            place = f"{block.page.name}:{lines[-1]}" if lines else block.place
            raise AssertionError(f"{place}: {type(error).__name__}: {error}") from error

    def _python(self, block: Block) -> str:
        # Lines have the numbers that they have on the page, and the file exists, because Triton reads it.
        self.source += "\n" * (block.line - 1 - self.source.count("\n")) + block.text
        self.file.write_text(self.source)
        lines = "\n" * (block.line - 1) + block.text
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(lines, str(self.file), "exec"), vars(self.module))
        return out.getvalue()

    def _bash(self, block: Block) -> str:
        return [run_command(words) for words in commands_of(block.text)][-1]

    def _yaml(self, block: Block) -> None:
        first = block.text.splitlines()[0]
        name = re.fullmatch(r"# ([\w.-]+\.yaml)", first)
        assert name is not None, f"the first line names the file, as a comment, and is {first!r}"
        load_config(yaml.safe_load(block.text))
        Path(name[1]).write_text(block.text)

    def _text(self, block: Block) -> None:
        if self.printed is None:
            assert_in_order(block.text)
            return
        checker = doctest.OutputChecker()
        if not checker.check_output(block.text, self.printed, SAME):
            raise AssertionError(f"the block before printed\n{self.printed}\nand the page has\n{block.text}")

    def _directive(self, block: Block) -> None:
        """Pages of a toctree, objects of the reference, and files that are included."""
        lines = [line.strip() for line in block.text.splitlines() if line.strip()]
        if block.language == "{toctree}":
            for name in (line for line in lines if not line.startswith(":")):
                assert (ROOT / "docs" / f"{name}.md").is_file(), f"there is no page {name}"
        elif block.language == "{eval-rst}":
            for name in re.findall(r"^\.\. auto\w+:: ([\w.]+)", block.text, re.MULTILINE):
                assert find(name) is not None
        else:
            assert block.language.startswith("{include}"), f"no test knows the directive {block.language}"
            assert (ROOT / "docs" / block.language.split()[1]).is_file()


def find(name: str) -> Any:
    """The object of a full name."""
    package, _, rest = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return getattr(importlib.import_module(package), rest)


def assert_in_order(text: str) -> None:
    """The passes of the default pipeline that a picture names stand in its order; there are at least three."""
    order: list[str] = yaml.safe_load((ROOT / "conf" / "pipeline" / "default.yaml").read_text())["order"]
    named = [word for word in re.findall(r"\w+", text) if word in order]
    assert len(named) >= 3, "this text is neither the output of a block nor a picture of the pipeline"
    assert named == sorted(set(named), key=order.index), f"the passes {named} are not in the order of the pipeline"


def run_page(page: Path, folder: Path) -> None:
    """Run all blocks of a page."""
    running = Page(page.stem, folder)
    sys.modules[running.module.__name__] = running.module
    try:
        for block in blocks_of(page):
            running.run(block)
    finally:
        del sys.modules[running.module.__name__]


def test_pages_have_all_drafters_rules_and_names() -> None:
    drafters, rules, names = ((ROOT / "docs" / name).read_text() for name in ("drafters.md", "rules.md", "api.md"))
    assert [kind for kind in drafter_kinds() if f"| `{kind}` | " not in drafters] == []
    assert [rule for rule in RULES if f"| `{rule}` | " not in rules] == []
    assert [name for name in specgraph.__all__ if f":: specgraph.{name}" not in names] == []


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    """Sphinx sees to those of the pages."""
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_a_page(page: Path, folder: Path) -> None:
    run_page(page, folder)


@pytest.mark.parametrize(
    ("language", "text", "message"),
    [
        ("", "x = 1", "no test knows how to check a block of the language ''"),
        ("console", "$ ls", "no test knows how to check a block of the language 'console'"),
        ("python", "import specgraph\n\nspecgraph.compile(1)", "page.md:6: AttributeError: module 'specgraph' has no"),
        ("bash", "ls", "no test knows how to check the command 'ls'"),
        ("bash", "make demos", "the Makefile has no target demos"),
        ("bash", "pip install -e '.[evaluation]'", "setup.cfg has no extra evaluation"),
        ("bash", "pip install somethingelse", "this is not specgraph"),
        ("bash", "python -m specgraph bench target=llama-3-8b-shape batch_size=[1]", "gave 2: error: .*batch_sizes"),
        ("bash", "python -m specgraph bench target=llama-9-8b-shape", "target=llama-9-8b-shape does not exist"),
        ("bash", "python -m specgraph generate model=path/of/a/model prompt=x verify=strickt", "gave 2: error: "),
        ("bash", "python -m specgraph.evaluation --model specgraph --model_args drafts=x --tasks y", "not drafts"),
        ("bash", "python examples/none.py", "nothing runs examples/none.py"),
        ("yaml", "# mine.yaml\ndraft:\n  kinds: ngram", "kinds"),
        ("yaml", "draft: ngram", "the first line names the file"),
        ("text", "hello", "neither the output of a block nor a picture"),
        ("text", "insert_verify -> insert_draft -> share_weights", "not in the order of the pipeline"),
        ("{toctree}", "nowhere", "there is no page nowhere"),
        ("{eval-rst}", ".. autofunction:: specgraph.nothing", "has no attribute 'nothing'"),
        ("{figure}", "x.png", "no test knows the directive"),
    ],
)  # fmt: skip
def test_what_is_wrong_on_a_page(language: str, text: str, message: str, folder: Path) -> None:
    page = folder / "page.md"
    page.write_text(f"# A page\n\n```{language}\n{text}\n```\n")
    with pytest.raises(AssertionError, match=message):
        run_page(page, folder)


def test_output_is_compared(folder: Path) -> None:
    page = folder / "page.md"
    page.write_text("```python\nprint(1, 2, 3)\n```\n\nThis prints\n\n```text\n1 ... 3\n```\n")
    run_page(page, folder)
    page.write_text(page.read_text().replace("... 3", "... 4"))
    with pytest.raises(AssertionError, match="the block before printed"):
        run_page(page, folder)
