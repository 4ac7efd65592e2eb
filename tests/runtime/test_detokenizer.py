"""Pieces of text where tokens are bytes: what can no longer become a character is given up, so time stays linear."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specgraph.cli import main
from specgraph.runtime.outputs.detokenizer import IncrementalDetokenizer

TARGET = Path(__file__).parents[2] / "examples/models/tiny-math/target"
PARTS = [bytes([byte]) for byte in range(256)]
ACROSS = [
    b"\x88\xe7",
    b"\xbb\x88",
    b"\x88\xe7\xbb",
    b" \xe7",
    b"\x80\xf0\x9f",
    b"\x98\x80",
    "终".encode(),
    "😀a".encode(),
]
"""Tokens of several bytes, which end inside of a character or begin there."""
LETTERS = {"▁a": 256, "b": 257, "▁": 258, "<s>": 259, "▁中": 260, "<unk>": 261}


def byte_level() -> PreTrainedTokenizerFast:
    """As of GPT-2: a token is some bytes."""
    letters = bytes_to_unicode()
    ids = {"".join(letters[byte] for byte in part): number for number, part in enumerate([*PARTS, *ACROSS])}
    made = Tokenizer(models.BPE(ids, []))
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def byte_fallback() -> PreTrainedTokenizerFast:
    """As of Llama 2 and Gemma: a character without a token is a token for each of its bytes."""
    ids = {f"<0x{byte:02X}>": byte for byte in range(256)} | LETTERS
    made = Tokenizer(models.BPE(ids, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")


class Counted:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.count = tokenizer, 0

    def decode(self, tokens: list[int], **options: Any) -> Any:
        self.count += len(tokens)
        return self.tokenizer.decode(tokens, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


RUNS: dict[str, tuple[Any, list[int], int]] = {
    "bytes that are no character": (byte_level, [0x80], 1),
    "the same for each byte": (byte_fallback, [0x80], 1),
    "characters behind such a byte": (byte_fallback, [0x80, 0xE7, 0xBB, 0x88], 1),
    "tokens that end inside of characters": (byte_level, [0xE7, 0xBB, 256, 0xBB, 256], 2),
    "special tokens": (byte_fallback, [259], 0),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_takes_linear_time_and_its_text_comes_as_it_goes(name: str) -> None:
    make, run, least = RUNS[name]
    tokenizer = Counted(make())
    pieces = IncrementalDetokenizer(tokenizer)
    shown = [pieces.add([token]) for _ in range(400) for token in run]
    assert tokenizer.count < 40 * len(shown)  # about 2,000 times as many if all is decoded again
    assert sum(map(bool, shown)) >= 400 * least - 3


def joined(tokenizer: Any, tokens: list[int], most: int, draw: random.Random) -> str:
    """The pieces of tokens that come up to ``most`` at a time."""
    pieces, text, place = IncrementalDetokenizer(tokenizer), "", 0
    while place < len(tokens):
        count = draw.randint(1, most)
        text, place = text + pieces.add(tokens[place : place + count]), place + count
    return text + pieces.add([], last=True)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_pieces_are_the_text_of_any_bytes(most: int) -> None:
    tokenizer, draw = byte_level(), random.Random(most)
    some = [0xE7, 0xBB, 0x88, 0xF0, 0x9F, 0x98, 0x80, 0xE2, 65]
    for _ in range(1500):
        pool = draw.choice([some, range(256), range(256, len(PARTS) + len(ACROSS)), range(len(PARTS) + len(ACROSS))])
        tokens = [draw.choice(pool) for _ in range(draw.randint(1, 14))]
        assert joined(tokenizer, tokens, most, draw) == tokenizer.decode(tokens)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_pieces_are_the_text_of_characters_in_bytes(most: int) -> None:
    """Of bytes that are no character this tokenizer makes another text with every byte behind them."""
    tokenizer, draw = byte_fallback(), random.Random(most)
    parts = [*(list(text.encode()) for text in ("终", "😀", "é", "a")), *([number] for number in range(256, 261))]
    for _ in range(1500):
        tokens = [token for _ in range(draw.randint(1, 8)) for token in draw.choice(parts)]
        assert joined(tokenizer, tokens, most, draw) == tokenizer.decode(tokens, skip_special_tokens=True)


def test_the_command_line_streams_such_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    bad = next(number for number in range(len(tokenizer)) if tokenizer.decode([number]) == "\N{REPLACEMENT CHARACTER}")
    given = ["prompt=one", "stream=true", "max_new_tokens=9", "lowering=eager", "debug.self_check=false"]
    assert main(["generate", f"model={TARGET}", *given, f"sequence_bias=[[[{bad}],1000.0]]"]) == 0
    assert "\N{REPLACEMENT CHARACTER}" * 9 in capsys.readouterr().out
