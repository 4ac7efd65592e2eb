"""Biases of words: every form against a search in plain Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph.kernels.processors import biases
from tests.kernels.processors.cases import context, contexts, forms, of_one, run

FORMS = forms(biases.ADD_BIASES)
Word = tuple[list[int], float, int]
ALWAYS = 1 << 62
PROMPT = [1, 6, 30, 20, 4]


def packed(words: list[list[Word]], room: int) -> dict[str, Tensor]:
    """The words of every sequence as the op takes them, with room for so many words and tokens."""
    empty = torch.zeros(len(words), room, dtype=torch.int64)
    tables = {"bias_tokens": empty - 1, "bias_ends": empty.clone()}
    tables |= {"bias_values": empty.float(), "bias_until": empty.clone()}
    for b, own in enumerate(words):
        end = 0
        for n, (tokens, value, until) in enumerate(own):
            tables["bias_tokens"][b, end : end + len(tokens)] = torch.tensor(tokens)
            end += len(tokens)
            tables["bias_ends"][b, n], tables["bias_values"][b, n], tables["bias_until"][b, n] = end, value, until
    return tables


def case(seed: int, *, room: int = 14, **shape: Any) -> tuple[dict[str, Any], list[list[Word]]]:
    """Words of one token, and words that some contexts end with; several with the same last token; one has none."""
    given: dict[str, Any] = {**context(seed, ids=4, **shape), "prompt_length": torch.tensor(PROMPT)}
    own: list[Word] = [([3], 1.5, ALWAYS), ([7], -float("inf"), ALWAYS), ([5], -2.0, 3), ([7], 4.0, ALWAYS)]
    pairs: list[Word] = [([a, 9], 0.25 * (a + 1), ALWAYS) for a in range(4)]
    long: list[Word] = [([a, b, 3], 8.0 + a + 4 * b, 9) for a in range(2) for b in range(2)]
    words = [own, [*own[::2], *pairs], [], [*long, *own[:1]], own]
    return {**given, **packed(words, room)}, words


def expected(given: dict[str, Any], words: list[list[Word]]) -> Tensor:
    out = given["logits"].double().clone()
    for b, r, tokens in contexts(given):
        for word, value, until in words[b]:
            before = word[:-1]
            here = tokens[len(tokens) - len(before) :] == before and len(before) <= len(tokens)
            if here and len(tokens) - PROMPT[b] < until and word[-1] < out.shape[2]:
                out[b, r, word[-1]] += value
    return out


@pytest.fixture(params=[None, 4], ids=["one block", "blocks of 4"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param is not None:
        monkeypatch.setattr(biases, "BLOCK", request.param)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (2, 9)])
def test_every_form_finds_the_words(form: str, rows: int, width: int) -> None:
    given, words = case(rows + width, rows=rows, width=width)
    wanted = expected(given, words)
    assert (wanted != given["logits"].double()).sum() > 5
    torch.testing.assert_close(run(FORMS[form], given).double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_has_the_bits_of_the_reference(dtype: torch.dtype) -> None:
    given, _ = case(1, dtype=dtype)
    actual = run(FORMS["triton"], given)
    assert actual.dtype == torch.float32 and torch.equal(actual, run(FORMS["reference"], given))


def test_float64_stays_float64() -> None:
    given, words = case(2, dtype=torch.float64)
    torch.testing.assert_close(run(FORMS["op"], given), expected(given, words), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("form", FORMS)
def test_a_sequence_does_not_depend_on_others_nor_on_the_room(form: str) -> None:
    given, words = case(3)
    whole = run(FORMS[form], given)
    for b in range(5):
        assert torch.equal(run(FORMS[form], of_one(given, b)), whole[b : b + 1])
    assert torch.equal(run(FORMS[form], {**given, **packed(words, 33)}), whole)
    assert torch.equal(whole[2], given["logits"][2])


@pytest.mark.parametrize("form", FORMS)
def test_a_word_that_reaches_into_the_drafts_sees_them(form: str) -> None:
    given, _ = case(4, rows=4)
    given["window"][0] = torch.tensor([1, 2, 3, 1])
    given |= packed([[([1, 2, 3, 11], 5.0, ALWAYS)], [], [], [], []], 4)
    changed = run(FORMS[form], given) - given["logits"]
    assert changed.nonzero().tolist() == [[0, 2, 11]]


def test_no_sequences() -> None:
    given, _ = case(5)
    none = {name: part if name == "history" else part[:0] for name, part in given.items()}
    for form in FORMS.values():
        assert run(form, none).shape == (0, 3, 19)


def test_shapes_that_do_not_fit_are_refused() -> None:
    given, _ = case(6)
    for name, value, message in (
        ("bias_tokens", given["bias_tokens"][:2], "bias_tokens must be [B, P] = [5, P], not [2, "),
        ("bias_tokens", given["bias_tokens"][:, 0], "bias_tokens must be [B, P] = [5, P], not [5]"),
        ("bias_until", given["bias_until"][:, :3], "bias_until must be [B, L] = [5, "),
    ):
        with pytest.raises(ValueError) as caught:
            torch.ops.specgraph.add_biases(*{**given, name: value}.values())
        assert message in str(caught.value)


def test_the_op_is_sound() -> None:
    torch.library.opcheck(torch.ops.specgraph.add_biases.default, tuple(case(7)[0].values()))
