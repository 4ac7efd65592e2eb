"""The model ``specgraph`` of the evaluation harness gives the answers of the harness's own model ``hf``.

The tasks and their data are local, and the models are the shipped ones in float64, so that no two tokens come close.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="the extra 'eval' is not installed")

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import simple_parse_args_string
from safetensors.torch import load_file, save_file

from specgraph import ConfigError
from specgraph.evaluation import __main__ as command
from specgraph.evaluation.lm_eval import SpecgraphLM, StopStrings
from tests.cli.conftest import save_model

ROOT = Path(__file__).parents[2] / "examples"
MODELS = ROOT / "models" / "tiny-math"
QUESTIONS = [json.loads(line) for line in (ROOT / "data" / "gsm8k_test_200.jsonl").read_text().splitlines()[:4]]
TASKS: dict[str, str] = {
    "answers": """
output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n", "Question:", "."], max_gen_toks: 24}
metric_list: [{metric: exact_match}]
""",
    "choices": """
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: ["{{answer}}", "7", " there are no more", "{{question}}"]
doc_to_target: 0
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} {{answer}} {{question}} {{answer}} {{question}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, text in TASKS.items():
        source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{source}{text}")
    return folder


@functools.cache
def model(kind: str) -> Any:
    """``hf``, or specgraph with a drafter; ``suffix`` gets a model that is loaded already."""
    common: dict[str, Any] = {"pretrained": str(MODELS / "target"), "dtype": "float64", "max_length": 160}
    if kind == "hf":
        return HFLM(**common, device="cpu", batch_size=4)
    if kind == "suffix":
        common |= {"pretrained": model("ngram").model, "tokenizer": str(MODELS / "target")}
    config = {"draft.kind": kind, "draft.num_speculative_tokens": 3, "debug.self_check": False}
    return SpecgraphLM(**common, device="cpu", max_batch_size=3, **config)


def evaluated(kind: str, folder: Path, task: str, **options: Any) -> dict[str, Any]:
    found = simple_evaluate(
        model=model(kind), tasks=[task], task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True, bootstrap_iters=0, **options,
    )  # fmt: skip
    assert found is not None
    return dict(found)


def responses(found: dict[str, Any], task: str) -> list[Any]:
    samples = sorted(found["samples"][task], key=lambda sample: int(sample["doc_id"]))
    return [sample["resps"] for sample in samples]


def numbers(found: dict[str, Any], task: str) -> dict[str, float]:
    return {name: value for name, value in found["results"][task].items() if isinstance(value, float)}


def test_texts_are_those_of_hf(tasks: Path) -> None:
    found, expected = (evaluated(kind, tasks, "answers") for kind in ("ngram", "hf"))
    texts = responses(found, "answers")
    assert texts == responses(expected, "answers")
    assert len({str(text) for text in texts}) > 1 and all(text[0][0] for text in texts)
    assert numbers(found, "answers") == numbers(expected, "answers")


def test_choices_are_those_of_hf(tasks: Path) -> None:
    found, expected = (evaluated(kind, tasks, "choices") for kind in ("ngram", "hf"))
    for own, theirs in zip(responses(found, "choices"), responses(expected, "choices"), strict=True):
        values = [(float(a[0][0]), float(b[0][0])) for a, b in zip(own, theirs, strict=True)]
        assert all(a == pytest.approx(b, rel=1e-5) for a, b in values)
        assert [str(a[0][1]) for a in own] == [str(b[0][1]) for b in theirs]
    assert numbers(found, "choices") == numbers(expected, "choices")


def test_perplexities_are_those_of_hf(tasks: Path) -> None:
    """The texts are longer than ``max_length``, so that they are cut into windows."""
    found, expected = (evaluated(kind, tasks, "texts") for kind in ("ngram", "hf"))
    assert numbers(found, "texts") == pytest.approx(numbers(expected, "texts"), rel=1e-5)
    assert numbers(found, "texts")["word_perplexity,none"] > 1


def test_drawn_texts_are_the_same_for_any_draft(tasks: Path) -> None:
    options = {"gen_kwargs": {"do_sample": True, "temperature": 0.9, "top_k": 20}, "torch_random_seed": 5}
    kinds = ("ngram", "suffix")
    first, second = (responses(evaluated(kind, tasks, "answers", **options), "answers") for kind in kinds)
    assert first == second
    assert first != responses(evaluated("ngram", tasks, "answers"), "answers")


def test_log_likelihoods_at_the_longest_length_are_those_of_hf() -> None:
    """A context that is too long loses its first tokens, and the last token is not run."""
    ids = model("hf").tok_encode(" ".join(question["question"] for question in QUESTIONS))
    requests = [(None, ids[: count - 3], ids[count - 3 : count]) for count in (160, 161, 162, 200)]
    found, expected = (model(kind)._loglikelihood_tokens(requests, disable_tqdm=True) for kind in ("ngram", "hf"))
    for (a, first), (b, second) in zip(found, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-5) and first is second


def test_stop_strings_are_looked_for_in_new_text_only() -> None:
    tokenizer = model("hf").tokenizer
    prompt, new = tokenizer.encode("one\n"), tokenizer.encode("\n two.", add_special_tokens=False)
    ends = StopStrings(tokenizer, ["\n\n", ".", ""], len(prompt))
    seen = [ends(torch.tensor([prompt + new[: count + 1]]), None) for count in range(len(new))]
    assert seen == [False] * (len(new) - 1) + [True]


def test_the_command_is_the_harness_with_our_model(
    tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lm_eval.tasks.TaskManager", functools.partial(TaskManager, include_defaults=False))
    arguments = {"pretrained": MODELS / "target", "draft": MODELS / "eagle3", "draft.num_speculative_tokens": 1}
    given = ",".join(f"{name}={value}" for name, value in arguments.items())
    monkeypatch.setattr(
        sys, "argv",
        ["lm-eval", "run", "--model", "specgraph", "--model_args", given, "--tasks", str(tasks / "choices.yaml"),
         "--device", "cpu", "--limit", "2"],
    )  # fmt: skip
    assert command.main() == 0
    assert "acc_norm" in capsys.readouterr().out


def incomplete(folder: Path) -> Path:
    save_model(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


PLAIN = {
    "draft=none": "none",
    "draft.kind=none": "none",
    "draft=None,lowering=eager": "none",
    "lowering=eager,numerics=fast": "ngram",
    "draft=suffix,draft.num_speculative_tokens=2": "suffix",
    "": "ngram",
}


@pytest.mark.parametrize("text", PLAIN)
def test_arguments_of_the_command_name_a_drafter_and_groups(text: str) -> None:
    """As the harness reads them: the word none is Python's None there."""
    common = {"pretrained": str(MODELS / "draft"), "device": "cpu", "debug.self_check": False}
    made = SpecgraphLM(**common, **simple_parse_args_string(text))
    config = made.decoder.config
    assert config.draft.kind == PLAIN[text]
    assert config.lowering.name == "eager" or "eager" not in text
    assert config.numerics == ("fast" if "fast" in text else "bitwise")
    assert config.draft.num_speculative_tokens == (2 if "=2" in text else 4)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "nowhere": (
        {"pretrained": "/nowhere"},
        "pretrained=/nowhere cannot be loaded as a causal LM: there is no such folder",
    ),
    "an argument": ({"drafts": 3}, "cannot be loaded as a causal LM: .* unexpected keyword argument 'drafts'"),
    "a key": ({"draft.nope": 3}, "Unknown configuration key 'draft.nope'"),
    "an encoder": ({"backend": "seq2seq"}, "backend=seq2seq is for models with an encoder; specgraph runs causal LMs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_model_that_is_refused_is_one_sentence(name: str) -> None:
    given, message = WRONG[name]
    with pytest.raises(ConfigError, match=message) as caught:
        SpecgraphLM(**{"pretrained": str(MODELS / "target"), "device": "cpu", **given})
    assert "\n" not in str(caught.value)


def test_a_model_with_random_tensors_is_refused_by_the_command(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lm_eval.tasks.TaskManager", functools.partial(TaskManager, include_defaults=False))
    given = ["--model", "specgraph", "--model_args", f"pretrained={incomplete(tmp_path)}", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["lm-eval", "run", *given, "--tasks", str(tasks / "choices.yaml")])
    assert command.main() == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: pretrained=") and "its files lack 1 tensors of a LlamaForCausalLM" in said


def test_the_command_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert command.main() == 2
    assert capsys.readouterr().err == "lm_eval and accelerate must be installed: pip install -e '.[eval]'\n"
