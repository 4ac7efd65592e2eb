"""A dump and a trace of one small decoder, and tokens that try to leave the page."""

from __future__ import annotations

import json
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from specgraph import SpeculativeDecoder
from specgraph.explore import Bandwidth, explore
from specgraph.runtime.outputs.output import GenerateOutput
from tests.decoding import compiled
from tests.models import ragged_prompts, shared_model
from tests.runtime.test_decoder import noisy_copy

HOSTILE = (
    "</script><script>window.broken = 1</script>", '<img src=x onerror="window.broken = 1">', "<!--", "]]>", "&lt;b>",
    "\"'`", "\\", "\n", "\t", "\r\n", "\x00", "\x1b[31m", "\u2028", "\u202eabc", "\u05d0\u05d1", "\u0645\u0631",
    "\U0001f468\u200d\U0001f469", "\ud83d", "", " ", "${alert(1)}", "{own}", "javascript:alert(1)", "e\u0301",
    "\ufeff", "x" * 200,
)  # fmt: skip
"""Texts that tokens can have: they end elements and strings, are not shown, or turn the direction of what follows."""
SPEED = 50e9
"""Bytes per second of the memory that the page is told of."""


class Hostile:
    """A tokenizer whose tokens are :data:`HOSTILE`."""

    def decode(self, tokens: Any) -> str:
        return "".join(HOSTILE[int(token) % len(HOSTILE)] for token in tokens)


@dataclass
class Made:
    """A decoder, its dump, what it decoded with its trace, and the page of both."""

    decoder: SpeculativeDecoder
    dump: Path
    out: GenerateOutput
    trace: Path
    page: Path

    @property
    def data(self) -> dict[str, Any]:
        """What the page holds."""
        return page_data(self.page)


class Scripts(HTMLParser):
    """The scripts of a page, as a browser delimits them, and the names of all elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = attributes, text + data

    def handle_endtag(self, tag: str) -> None:
        self.tags.append(f"/{tag}")


def page_data(page: Path) -> dict[str, Any]:
    """The data of a page."""
    found = [text for attributes, text in Scripts(page.read_text("utf-8")).scripts if attributes.get("id") == "data"]
    assert len(found) == 1
    return dict(json.loads(found[0]))


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A draft that is like its target, so that some drafts are accepted and some are not."""
    folder = tmp_path_factory.mktemp("explore")
    options: dict[str, Any] = {"max_length": 64, "lowering": {"name": "gpu"}}
    decoder = compiled(shared_model("llama"), "draft_model", 3, draft=noisy_copy().float(), **options)
    dump = decoder.dump(folder / "graphs")
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 5, "eos_token_id": [], "max_new_tokens": 24}
    out = decoder.generate(ragged_prompts((9, 3)), trace=True, **sampling)
    assert out.trace is not None
    trace = out.trace.save(folder / "trace.jsonl", Hostile())
    page = explore(dump, folder / "page.html", trace=trace, bandwidth=lambda _: Bandwidth(SPEED, "as the test says"))
    return Made(decoder, dump, out, trace, page)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[SpeculativeDecoder, Path]:
    """A decoder whose target two devices of a CPU share, and the page of its dump."""
    folder = tmp_path_factory.mktemp("shared")
    decoder = compiled(shared_model("llama"), "none", parallel={"tensor": 2, "devices": ["cpu", "cpu"]})
    return decoder, explore(decoder.dump(folder / "graphs"), folder / "page.html")
