"""A draft model with another tokenizer: it reads the target's tokens in its own ids and drafts those that both have."""

from __future__ import annotations

import functools
import itertools
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

import specgraph
from specgraph import UnsupportedModelError
from specgraph.checkpoints import shared_tokens, tokenizers
from specgraph.drafters import draft_model
from specgraph.kernels import verify
from tests.decoding import CONFIG, compiled
from tests.detectors import NextLogits, failing
from tests.drafters.contract import CachedDraftContract, Case, by_rule, planted
from tests.harness import drafting_stage, forced_run
from tests.models import VOCAB, double_model
from tests.runtime import test_distribution

TEXTS = ("the drafts of a step are read by the target, which takes the first that would have been drawn by it alone",
         "a tokenizer cuts a text in tokens; the other cuts it at others, and both know the letters.")  # fmt: skip
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
END, MASK = 2, 3
"""The end of a text for the draft, and what it reads for a token that is not drafted yet."""


def pieces_of(text: str, blank: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Letters, and behind them the beginnings of the words of a text, with what each of those is merged of."""
    known, merges = [*sorted({*text} - {" "}), blank], list[tuple[str, str]]()
    for word in re.findall("[a-z]+", text):
        for begin, letter in itertools.pairwise(itertools.accumulate(word, initial=blank)):
            if letter not in known:
                merges.append((begin, letter[-1]))
                known.append(letter)
    return known, merges


def byte_level(size: int, text: str) -> Tokenizer:
    """As of GPT-2, with few letters."""
    known, merges = pieces_of(text, "Ġ")
    pieces = ["<pad>", "<s>", "</s>", *known][:size]
    kept = [merge for merge in merges if "".join(merge) in pieces]
    made = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, kept))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(pieces[:3])
    return made


def sentencepiece(text: str) -> Tokenizer:
    """As of Llama 2: bytes to fall back on stand in front of other tokens. Some of those are ends of words."""
    known, merges = pieces_of(text, "▁")
    ends = [("s", "t"), ("a", "d"), ("e", "ad")]
    known, merges = [*known, *map("".join, ends)], [*merges, *ends]
    pieces = ["<unk>", "<s>", "<end>", "<mask>", *BYTES, *known]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def letters(text: str, blank: bool) -> Tokenizer:
    """A tokenizer whose tokens are letters, of sentencepiece or byte-level."""
    made = Tokenizer(models.BPE({letter: index for index, letter in enumerate(text)}, []))
    made.decoder = decoders.Metaspace() if blank else decoders.ByteLevel()
    return made


def fast(made: Tokenizer) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=made)


_KEPT = tempfile.TemporaryDirectory()


@functools.cache
def folder(kind: str) -> Path:
    """The folder of a tokenizer, which goes with the process."""
    kinds: dict[str, Callable[[], tuple[Tokenizer, dict[str, str]]]] = {
        "target": lambda: (
            byte_level(VOCAB, TEXTS[0]),
            {"bos_token": "<s>", "eos_token": "</s>"},
        ),
        "bytes": lambda: (byte_level(140, TEXTS[1]), {"bos_token": "<s>", "eos_token": "</s>"}),
        "pieces": lambda: (sentencepiece(TEXTS[1]), {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "<end>"}),
        "letters": lambda: (letters("etaoinshrdl", blank=False), {}),
        "a few letters": lambda: (letters("zyxwshniotea", blank=True), {}),
    }
    made, special = kinds[kind]()
    path = Path(_KEPT.name) / kind
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(path)
    return path


@functools.cache
def target() -> PreTrainedModel:
    return loaded(double_model("llama", 0), "target")


def loaded(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """The model, as if it had been loaded from the folder of a tokenizer."""
    model.name_or_path = str(folder(kind))
    return model


@functools.cache
def draft(name: str) -> PreTrainedModel:
    return {
        "bytes": lambda: loaded(double_model("llama", 1, num_hidden_layers=1, vocab_size=150), "bytes"),
        "pieces": lambda: loaded(double_model("qwen3", 2, vocab_size=340, eos_token_id=END), "pieces"),
    }[kind_of(name)]()


def kind_of(name: str) -> str:
    return name.removesuffix(", parallel")


# The oracle, which spells the tokens in plain Python; all of them are ASCII


@functools.cache
def spelled(kind: str) -> dict[int, str]:
    """What every token stands for. Tokens with a role are spelled by it."""
    vocabulary = PreTrainedTokenizerFast.from_pretrained(folder(kind)).get_vocab()
    roles = {"<s>": "(begin)", "</s>": "(end)", "<end>": "(end)", "<pad>": "(pad)", "<unk>": "", "<mask>": "(mask)"}
    roles |= {piece: chr(byte) for byte, piece in enumerate(BYTES)}
    return {index: roles.get(token, token.replace("Ġ", " ").replace("▁", " ")) for token, index in vocabulary.items()}


@functools.cache
def known(kind: str) -> dict[str, int]:
    """The id of what can be spelled. A letter is a token of its own sooner than a byte, though that has a lower id."""
    return {text: index for index, text in sorted(spelled(kind).items()) if text}


def read(kind: str, token: int) -> int:
    """What a draft reads for a token of the target."""
    text, ids = spelled("target").get(token, "(padding)"), known(kind)
    ends = [text] if text.startswith("(") else [text[place:] for place in range(len(text))]
    return next((ids[end] for end in ends if end in ids), 0 if kind == "pieces" else 2)


def oracle(name: str) -> NextLogits:
    """Logits of the shared tokens by the plain model, without a cache, in the order of the target's ids."""
    kind = kind_of(name)
    shared = [known(kind)[text] for _, text in sorted(spelled("target").items()) if text in known(kind)]

    @torch.no_grad()
    def next_logits(accepted: Sequence[list[int]], drafted: Sequence[list[int]]) -> Tensor:
        rows = []
        for tokens, drafts in zip(accepted, drafted, strict=True):
            more = [MASK] * len(drafts) if kind != name else [read(kind, token) for token in drafts]
            ids = torch.tensor([[*(read(kind, token) for token in tokens), *more]])
            rows.append(draft(name)(input_ids=ids, use_cache=False).logits[0, -1, shared])
        return torch.stack(rows)

    return next_logits


class TestDrafts(CachedDraftContract):
    KIND = "draft_model"
    target = staticmethod(target)
    draft = staticmethod(draft)
    oracle = staticmethod(oracle)
    PASSES: ClassVar = {"parallel": True}
    CASES = (Case("bytes", 4, "probabilistic"), *by_rule("pieces", 4), Case("pieces, parallel", 4, "probabilistic"))
    REAL = (*by_rule("pieces", 4), Case("bytes", 3), Case("pieces, parallel", 4))
    SEEDED = (Case("pieces", 4), Case("bytes", 3), Case("pieces, parallel", 4))
    POISONED = (Case("pieces", 4),)
    BUGS: ClassVar = planted(Case("pieces", 4), {"noise off by one position": {"oracle"}})

    @classmethod
    def keys(cls, name: str) -> dict[str, Any]:
        return {"parallel": True, "mask_token_id": MASK} if kind_of(name) != name else {}


# Broken maps


def broken(shared: shared_tokens.SharedTokens, which: str) -> shared_tokens.SharedTokens:
    return shared._replace(**{which: getattr(shared, which).roll(1)})


@pytest.mark.parametrize("which", ["draft_ids", "reads"])
def test_a_wrong_map_is_found_and_changes_no_token(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = tokenizers.share_tokens
    monkeypatch.setattr(tokenizers, "share_tokens", lambda *given: broken(right(*given), which))
    case = Case("pieces", 4)
    decoder = TestDrafts.compiled_with(case, None)
    run = forced_run(drafting_stage(decoder), TestDrafts.PROMPTS, TestDrafts.LIMITS, seed=0)
    assert failing(TestDrafts.detectors(run, case)) == {"oracle"}
    assert TestDrafts.tokens_of(decoder) == TestDrafts.plain_tokens()


# Distributions: three tokens, two of which the draft knows beside one that the target does not


@pytest.fixture
def three_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of three tokens: ``a b c`` for the target, and ``z c a`` for the draft."""
    shared = shared_tokens.share_tokens(fast(letters("abc", blank=False)), fast(letters("zca", blank=True)), 3, 3)
    assert shared.draft_ids.tolist() == [2, 1] and shared.target_ids.tolist() == [0, 2]
    assert shared.reads.tolist() == [2, 0, 1]
    monkeypatch.setattr(draft_model, "compare_tokenizers", lambda *models: ("", shared))


def p_value(rule: str, runs: int) -> float:
    model, other = (test_distribution.model(seed) for seed in (0, 1))
    extra: dict[str, Any] = {"verify": {"rule": rule}, "max_batch_size": test_distribution.BATCH}
    decoder = compiled(model, "draft_model", 2, other, **extra)
    counts, _ = test_distribution.sampled(decoder, runs, 1.0, 0)
    return test_distribution.p_value(counts, test_distribution.exact_joint(1.0, 0))


@pytest.mark.usefixtures("three_letters")
@pytest.mark.parametrize("rule", ["probabilistic", "block"])
def test_the_joint_distribution_is_the_targets(rule: str) -> None:
    assert p_value(rule, 3) > 1e-3


@pytest.mark.usefixtures("three_letters")
def test_a_shifted_map_in_verification_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = verify.invert_vocabulary
    monkeypatch.setattr(verify, "invert_vocabulary", lambda *given: right(*given).roll(1))
    assert p_value("probabilistic", 2) < 1e-9


# What is reported and what is refused


def test_a_folder_is_enough_and_the_report_says_what_is_shared(tmp_path: Path) -> None:
    for kind, model in (("target", target()), ("pieces", draft("pieces"))):
        shutil.copytree(folder(kind), tmp_path / kind)
        model.save_pretrained(tmp_path / kind)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float64)
    config = {**CONFIG, "draft": {"kind": "draft_model"}}  # no K: chains end where the draft is not sure
    decoder = specgraph.compile_speculative(model, config, draft=tmp_path / "pieces")
    shared = len(set(known("pieces")) & set(spelled("target").values()))
    assert (
        f", and drafts what it shares: {shared} of the target's {len(spelled('target'))} tokens (95.0% of "
        in decoder.report()
    )
    assert TestDrafts.tokens_of(decoder) == TestDrafts.plain_tokens()


def test_tokenizers_of_a_repository_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = {"org/target": target(), "org/pieces": draft("pieces")}
    cached = {(name, "config.json"): "there" for name in pair}
    monkeypatch.setattr(tokenizers, "try_to_load_from_cache", lambda *asked: cached.get(asked))
    read = AutoTokenizer.from_pretrained
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: read(folder(str(name).removeprefix("org/"))))
    for name, model in pair.items():
        monkeypatch.setattr(model, "name_or_path", name)
    _, shared = tokenizers.compare_tokenizers(*pair.values())
    assert shared is not None and len(shared.draft_ids) == len({*spelled("target").values()} & {*known("pieces")})


def word_pieces() -> Any:
    made = Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1, "##s": 2}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    return fast(made)


REFUSED = {
    "few shared": (
        lambda: fast(letters("xyz", blank=True)),
        r"shares 0 of the target's 3 tokens \(0.0% .* less than 50%",
    ),
    "word pieces": (word_pieces, "the draft's is neither byte-level nor of sentencepiece, .* or draft by ngram"),
    "no decoder": (lambda: object(), "the draft's is neither byte-level nor of sentencepiece"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tokens_that_cannot_be_matched_are_refused_in_one_sentence(name: str) -> None:
    other, message = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        shared_tokens.share_tokens(fast(letters("abc", blank=False)), other(), 3, 3)
    assert "\n" not in str(caught.value)
