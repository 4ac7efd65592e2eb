"""Models for the command line, and an empty folder for every test to run in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specgraph.cli import commands
from specgraph.config import Config
from specgraph.errors import PassError
from specgraph.runtime.decoder import SpeculativeDecoder
from tests.models import make_model


def save_model(folder: Path, **shape: Any) -> Path:
    """A random llama over bytes, with its tokenizer."""
    entries = ["<eos>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({entry: index for index, entry in enumerate(entries)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(folder)
    make_model(
        "llama", vocab_size=len(entries), eos_token_id=0, pad_token_id=1, bos_token_id=None, **shape
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "target")


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "draft", num_hidden_layers=1, seed=1)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands run in an empty folder, so that a test sees whatever they leave behind."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that reach ``compile_speculative``, which goes no further."""
    seen: list[Config] = []

    def stop(model: object, config: Config) -> None:
        seen.append(config)
        raise PassError("stopped here")

    monkeypatch.setattr(commands, "compile_speculative", stop)
    return seen


_DECODERS: dict[tuple[int, str], tuple[object, SpeculativeDecoder]] = {}
"""Decoders by their model and configuration. The model is kept, so that no other one gets its id."""


@pytest.fixture
def cached_decoders(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder of the same model and configuration is compiled once, since most tests are about what is around it."""
    compile_speculative = commands.compile_speculative

    def cached(model: Any, config: Config) -> SpeculativeDecoder:
        key = id(model), repr(config)
        if key not in _DECODERS:
            _DECODERS[key] = model, compile_speculative(model, config)
        return _DECODERS[key][1]

    monkeypatch.setattr(commands, "compile_speculative", cached)
