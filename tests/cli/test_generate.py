"""``generate``: JSON lines, conversations, the decoder's arguments as keys, models with code of their own."""

from __future__ import annotations

import functools
import inspect
import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specgraph import SpecgraphWarning
from specgraph.cli import loading, main
from specgraph.cli.generation import NO_KEYS, GenerationKeys, option_names
from specgraph.runtime.decoder import SpeculativeDecoder
from specgraph.runtime.requests.arguments import HONOURED, OWN, PROCESSING, STRUCTURE
from tests.models import with_own_code

pytestmark = pytest.mark.usefixtures("cached_decoders")
QUICK = ["debug.self_check=false", "max_new_tokens=8", "lowering=eager", "dtype=float64"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)
CHAT = [{"role": "system", "content": "Short."}, {"role": "user", "content": "One?"}]


@pytest.fixture(scope="module")
def chat_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def _records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@functools.cache
def _loaded(folder: Path) -> tuple[Any, Any]:
    return AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def _expected(folder: Path, prompt: str, **options: Any) -> list[int]:
    """The new tokens of transformers' own ``generate``."""
    tokenizer, model = _loaded(folder)
    given = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    out = model.generate(**given, max_new_tokens=8, do_sample=False, tokenizer=tokenizer, **options)
    new: list[int] = out[0, given["input_ids"].shape[1] :].tolist()
    return new


def test_json_lines_are_all_that_is_on_standard_output(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """``tests/test_distribution_files.py`` runs a process, of which the same is wanted."""
    prompts = ["one", "zwölf \U0001f600", "ab, (c)"]
    Path("p.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    arguments = [f"model={model}", "prompts=p.jsonl", "format=jsonl", "batch_size=2", *QUICK]
    assert main(["generate", *arguments]) == 0
    shown = capfd.readouterr()
    records = _records(shown.out)
    assert [record["prompt"] for record in records] == prompts
    for record in records:
        assert list(record) == ["prompt", "text", "tokens", "finish_reason", "stats"]
        assert record["tokens"] == _expected(model, record["prompt"])
        assert record["finish_reason"] in ("eos", "length")
        stats = record["stats"]
        assert stats["prompt_tokens"] == len(record["prompt"].encode())  # the tokenizer's tokens are bytes
        assert stats["new_tokens"] == len(record["tokens"]) == 1 + round(stats["steps"] * stats["tokens_per_step"])
    assert "tokens per step" in shown.err


def test_json_lines_of_a_sweep(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [f"model={model}", "prompt=ab", "format=jsonl", "-m", "max_new_tokens=0,3", "lowering=eager"]
    assert main(["generate", *given, "debug.self_check=false"]) == 0
    shown = capsys.readouterr()
    nothing, some = _records(shown.out)
    assert (nothing["tokens"], nothing["text"], nothing["finish_reason"]) == ([], "", "length")
    assert nothing["stats"] == {"prompt_tokens": 2, "new_tokens": 0, "steps": 0, "tokens_per_step": None}
    assert len(some["tokens"]) == 3 and shown.err.count("=== ") == 2
    assert re.search("accepted per position +-( -)*\n", shown.err) and "nan" not in shown.err


def test_conversations_have_the_chat_template(chat_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records: list[dict[str, Any]] = [{"messages": CHAT}, {"prompt": "plain", "messages": CHAT}]
    Path("c.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    given = [f"model={chat_model}", "prompts=c.jsonl", "temperature=0", *QUICK]
    assert main(["generate", *given, "format=jsonl"]) == 0
    chat, plain = _records(capsys.readouterr().out)
    assert chat["messages"] == CHAT and "prompt" not in chat
    assert chat["tokens"] == _expected(chat_model, "<system>Short.<user>One?<answer>")
    assert plain["prompt"] == "plain" and plain["tokens"] == _expected(chat_model, "plain")
    assert main(["generate", *given]) == 0
    assert "--- 1: One?\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        (CHAT, [], "messages need a chat template, which the model's tokenizer lacks; give the texts as prompts."),
        (CHAT, ["template='{question}'"], "c.jsonl:1: template is for texts; messages have the tokenizer's chat templ"),
        ([], [], "c.jsonl:1: messages is a list of objects with role and content, at least one of them."),
        ("hello", [], "c.jsonl:1: messages is a list of objects with role and content, "),
        ([{"role": "user"}], [], "c.jsonl:1: messages is a list of objects with role and content, "),
    ],
)
def test_conversations_that_do_not_work(
    messages: Any, options: list[str], message: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("c.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    assert main(["generate", f"model={model}", "prompts=c.jsonl", *options]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: {message}") and shown.count("\n") == 1


def test_a_chat_template_that_refuses(chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "strict"
    shutil.copytree(chat_model, folder)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('Roles must alternate') }}")
    Path("c.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    assert main(["generate", f"model={folder}", "prompts=c.jsonl"]) == 2
    assert capsys.readouterr().err == "error: The chat template refuses a conversation: Roles must alternate.\n"


def test_every_argument_of_the_decoder_is_a_key_or_is_left_out_for_a_reason() -> None:
    arguments = OWN | HONOURED | PROCESSING | STRUCTURE
    assert set(option_names()) | NO_KEYS.keys() == arguments
    assert not set(option_names()) & NO_KEYS.keys()
    named = set(inspect.signature(SpeculativeDecoder.generate).parameters) - {"self", "others"}
    assert named <= arguments
    assert set(GenerationKeys.__annotations__) <= set(option_names())


def test_keys_reach_the_decoder(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, tokenizer = _expected(model, "one two"), AutoTokenizer.from_pretrained(model)
    stop = next(text for token in plain[2:] if (text := tokenizer.decode([token])).isalnum() and text.isascii())
    cases: dict[str, dict[str, Any]] = {
        "repetition_penalty=1.7": {"repetition_penalty": 1.7},
        f"stop_strings=[zz,{stop}]": {"stop_strings": ["zz", stop]},
        f"eos_token_id=[{plain[3]},3]": {"eos_token_id": [plain[3], 3]},
    }
    for key, options in cases.items():
        given = [f"model={model}", "prompt=one two", "temperature=0", "format=jsonl", *QUICK]
        assert main(["generate", *given, key]) == 0
        (record,) = _records(capsys.readouterr().out)
        assert record["tokens"] == _expected(model, "one two", **options) != plain


def test_a_structure_is_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    target = Path(__file__).parents[2] / "examples/models/tiny-math/target"
    schema = "json_schema={type: object, properties: {a: {enum: [1, 22]}}, required: [a], additionalProperties: false}"
    for key, pattern in (
        ('regex="[0-9]{2} (apples|pears)"', "[0-9]{2} (apples|pears)"),
        (schema, r"{\s*.a.\s*:[^}]*}"),
    ):
        given = [f"model={target}", "prompt=one two", "format=jsonl", *QUICK, "max_new_tokens=60"]
        assert main(["generate", *given, key]) == 0
        (record,) = _records(capsys.readouterr().out)
        assert re.fullmatch(pattern, record["text"]), record["text"]


def test_a_structure_begins_behind_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    target = Path(__file__).parents[2] / "examples/models/tiny-math/target"
    prompt = "prompt='Question: What is 3 + 4?\\nAnswer:'"
    given = [f"model={target}", prompt, "format=jsonl", *QUICK, "max_new_tokens=40"]
    assert main(["generate", *given, 'regex="[a-c]{5}"', 'structure_after="="']) == 0
    (record,) = _records(capsys.readouterr().out)
    assert re.fullmatch("[^=]+=[a-c]{5}", record["text"]), record["text"]
    assert main(["generate", *given, "structure_after=5"]) == 2
    assert capsys.readouterr().err.startswith("error: structure_after needs a structure; give grammar or json_schema")


REFUSED = {
    "temperature=-1": "temperature must be 0 or more, got -1.0.",
    "top_k=-3": "top_k must be 0 (off) or a positive integer, got -3.",
    "top_p=0": "top_p must be in (0, 1], got 0.0.",
    "min_p=2": "min_p must be in [0, 1], got 2.0.",
    "max_new_tokens=-1": "max_new_tokens must be an integer of at least 0, got -1.",
    "eos_token_id=999": "eos_token_id has 999, which is not a token id; ids are 0 to 257.",
    "eos_token_id=end": "eos_token_id must be a token id or a list of them, not str.",
    "stop_strings=[a,'']": "stop_strings is a text or a list of texts that are not empty, not ['a', ''].",
    "max_new_tokens=99999": "max_new_tokens=99999 is more than the decoder's max_length of 128, which counts the ",
    "max_length=8 max_new_tokens=9": "max_new_tokens=9 is more than the decoder's max_length of 8, which counts the ",
    "max_time=0": "max_time must be a number of seconds above 0, got 0.0.",
    "repetition_penalty=0": "repetition_penalty must be more than 0; 1 is off, got 0.0.",
    "repetition_penalty=much": "repetition_penalty is a number or null, not 'much'.",
    "format=json": "There is no format=json (did you mean 'jsonl'?); it is text or jsonl.",
    "num_beams=4": "num_beams is no key of generate (tokens are chosen greedily or by sampling)",
    "eos=3": "Unknown configuration key 'eos': did you mean 'eos_token_id'?",
}


@pytest.mark.parametrize(("override", "message"), REFUSED.items(), ids=REFUSED.keys())
def test_options_are_checked_before_a_model_is_loaded(
    override: str, message: str, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(loading, "load_causal_lm", load)
    loading.load_model.cache_clear()
    assert main(["generate", f"model={model}", "prompt=a", *override.split()]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {message}") and shown.err.count("\n") == 1 and shown.out == ""


def test_a_stream_of_json(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", f"model={model}", "prompt=a", "format=jsonl", "stream=true"]) == 2
    assert capsys.readouterr().err.startswith("error: format=jsonl writes a line when a text is done, and stream=true ")


def test_a_model_with_code_of_its_own(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "own"
    shutil.copytree(model, folder)
    with_own_code(folder)
    given = [f"model={folder}", "prompt=one", "temperature=0", "format=jsonl", *QUICK]
    assert main(["generate", *given]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and shown.endswith(
        "it comes with code of its own; read that code, and if you trust it, set trust_remote_code=true.\n"
    )
    assert main(["generate", *given, "trust_remote_code=true"]) == 0
    (record,) = _records(capsys.readouterr().out)
    assert record["tokens"] == _expected(model, "one")


def test_compare_with_options_of_its_own(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("two.txt").write_text("one two\nab\n")
    (stop, end) = (_expected(model, prompt)[2] for prompt in ("one two", "ab"))
    given = [f"model={model}", "prompts=two.txt", "temperature=0", "compare=true", "format=jsonl", *QUICK]
    for key, peers in ((f"eos_token_id=[{stop},{end}]", True), ("stop_strings=[zz]", False)):
        assert main(["generate", *given, key]) == 0
        shown = capsys.readouterr()
        assert len(_records(shown.out)) == 2
        assert re.search(r"^tokens equal +yes$", shown.err, re.MULTILINE)
        assert ("tokens/s, transformers generate" in shown.err) is peers


@pytest.mark.parametrize("given", [["top_p=0.9", "seed=3", "compare=true"], ["top_p=0.9", "stream=true"], []])
def test_sampling_options_without_a_temperature_are_warned_of_once(model: Path, given: list[str]) -> None:
    """The seeds that the command draws by itself are nobody's wish."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default", SpecgraphWarning)
        assert main(["generate", f"model={model}", "prompt=one", *QUICK, *given]) == 0
    said = [str(warning.message) for warning in seen if warning.category is SpecgraphWarning]
    names = " and ".join(option.partition("=")[0] for option in given[:-1])
    assert [text.partition(" ha")[0] for text in said] == ([names] if given else [])


def test_conversations_have_tools_and_variables_of_the_template(
    chat_model: Path, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of all conversations by a key, and of one beside its messages; a message may have tool calls alone."""
    folder = empty_folder / "model"
    shutil.copytree(chat_model, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for t in tools or [] %}[{{ t.name }}]{% endfor %}{{ mood }}{% for m in messages %}<{{ m.role }}>"
        "{{ m.content or m.tool_calls[0].function.arguments.a }}{% endfor %}"
    )
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 5}'}}]}
    talk = [{"role": "user", "content": "One?"}, call, {"role": "tool", "content": "6"}]
    records = [
        {"messages": talk},
        {"messages": talk[:1], "tools": [{"name": "g"}], "chat_template_kwargs": {"mood": "z"}},
    ]
    (empty_folder / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (empty_folder / "tools.json").write_text(json.dumps([{"name": "f"}]))
    given = ["prompts=chats.jsonl", "tools=tools.json", "chat_template_kwargs={mood: a}", "format=jsonl"]
    assert main(["generate", f"model={folder}", *given, *QUICK]) == 0
    texts = ["[f]a<user>One?<assistant>5<tool>6", "[g]z<user>One?"]
    for record, text in zip(_records(capsys.readouterr().out), texts, strict=True):
        assert record["tokens"] == _expected(folder, text)


def test_what_no_conversation_reads_is_refused(
    model: Path, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for given, message in (
        (["prompt=one", "chat_template_kwargs={enable_thinking: false}"], "these prompts are texts; leave it out"),
        (["prompt=one", "tools=tool.json"], "tools=tool.json: there is no such file; give a JSON file with a list"),
    ):
        assert main(["generate", f"model={model}", *given, *QUICK]) == 2
        assert message in capsys.readouterr().err
