"""The command line, in this process: texts, sweeps, errors. One test starts a real one.

Every command has its help, its results and its refusals here, so the file is longer than others.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from specgraph.cli import commands, decode_prompts, main
from specgraph.cli.command_table import COMMANDS
from specgraph.cli.decode_prompts import Outcome, PeerOutcome
from specgraph.cli.help import describe
from specgraph.cli.summary import compare_rows
from specgraph.compiler.build_passes import build_passes
from specgraph.config import Config, compose, group_choices, load_config
from specgraph.errors import PassError, SpecgraphWarning

QUICK = ["debug.self_check=false", "max_new_tokens=12"]


def _rows(text: str) -> dict[str, str]:
    """The two columns of the table at the end."""
    lines = text.rstrip().rpartition("\n\n")[2].splitlines()
    pairs = [re.split(r"\s{2,}", line, maxsplit=1) for line in lines]
    return {pair[0]: pair[1] for pair in pairs}


def test_overview_and_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name}" in shown for name in COMMANDS)
    assert main([]) == 2
    assert main(["genrate"]) == 2
    assert capsys.readouterr().err == (
        "error: There is no command 'genrate' (did you mean 'generate'?); "
        "commands are generate, dump, explore, diff, inspect, bench, train, doctor.\n"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_every_key(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    described = describe(COMMANDS[command].schema())
    for key, text in described.items():
        assert text, f"{key} has no text below its field"
        assert f"\n{key}  " in shown


@pytest.mark.parametrize("command", ["generate", "dump", "bench"])
def test_help_lists_what_can_be_chosen(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "verify: block, probabilistic, strict" in shown
    assert main([command, "draft=none", "--help"]) == 0
    assert "kind: none" in capsys.readouterr().out


def test_help_of_train_shows_its_own_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "heldout: " in shown and "verify:" not in shown


def test_composed_defaults_are_those_of_load_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--cfg", "job"]) == 0
    composed = yaml.safe_load(capsys.readouterr().out)
    shared = {str(key): composed[key] for key in compose(Config)}
    assert shared == OmegaConf.to_container(compose(Config), resolve=False)
    assert load_config(shared) == load_config()


def test_groups_and_overrides_reach_the_compiler(model: Path, compiled: list[Config]) -> None:
    overrides = ["verify=probabilistic", "draft=draft_model", "draft.model=some/path", "lowering=inductor"]
    assert main(["generate", f"model={model}", "prompt=a", *overrides, "passes.lookup_first.match=1234"]) == 2
    (config,) = compiled
    assert (config.verify.rule, config.draft.kind, config.draft.model) == ("probabilistic", "draft_model", "some/path")
    made = {p.name: vars(p) for p in build_passes(config)}
    assert made["lookup_first"]["match"] == 1234
    assert made["compile_remainder"]["backend"] == "inductor"


@pytest.mark.parametrize("plus", ["", "+"])
def test_own_pass_from_the_command_line(plus: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = "pipeline.order=[expose_features,insert_kv_cache,idle,insert_draft,insert_verify,compile_remainder]"
    own = [f"{plus}passes.idle._target_=tests.config.test_config.Idle", f"{plus}passes.idle.note=7"]
    assert main(["dump", f"model={model}", "out=graphs", "debug.self_check=false", order, *own]) == 0
    shown = capsys.readouterr().out
    assert "- idle 7" in shown and "idle" in shown.splitlines()[-1]
    assert (Path("graphs") / "report.md").is_file()


def test_a_folder_that_is_not_for_a_dump_is_refused_before_compiling(
    model: Path, empty_folder: Path, compiled: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    (empty_folder / "thesis.md").write_text("years of work")
    assert main(["dump", f"model={model}", "out=."]) == 2
    assert " is not empty and holds no dump of specgraph. Nothing was written" in capsys.readouterr().err
    assert compiled == []


def test_a_warning_is_a_sentence(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def show(message: Warning, category: type[Warning], filename: str, number: int, *_: object) -> None:
        """As Python does, in place of pytest, which collects warnings."""
        sys.stderr.write(warnings.formatwarning(message, category, filename, number))

    given = ["dump", f"model={model}", "lowering=gpu", "out=graphs", "debug.self_check=false"]
    with warnings.catch_warnings():
        warnings.resetwarnings()
        monkeypatch.setattr(warnings, "showwarning", show)
        assert main(given) == 0
    assert "\nwarning: lowering=gpu was asked for, and the target is on a CPU" in f"\n{capsys.readouterr().err}"
    assert issubclass(SpecgraphWarning, UserWarning)  # which a process shows unless it is told not to


def test_a_pass_too_early_names_the_one_to_run_first(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = "pipeline.order=[insert_verify,insert_draft]"
    assert main(["dump", f"model={model}", "debug.self_check=false", order]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: insert_verify needs ")
    assert "put insert_draft before it in pipeline.order" in error


def test_speeds_say_what_they_include(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", f"model={model}", "prompt=one, two", *QUICK, "dtype=float64"]) == 0
    rows = _rows(capsys.readouterr().out)
    assert float(rows["tokens/s, with compiling"]) > 0 and "tokens/s" not in rows


def test_compare_says_that_tokens_are_equal(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = Path("texts.txt")
    texts.write_text("one, two\n\nabab (abab)\nxyz\n")
    arguments = [f"model={model}", f"prompts={texts}", "batch_size=2", "compare=true", "debug.dump_dir=graphs"]
    assert main(["generate", *arguments, *QUICK, "dtype=float64", "temperature=0.9", "top_p=0.95"]) == 0
    shown = capsys.readouterr().out
    assert [line[:5] for line in shown.splitlines() if line.startswith("---")] == ["--- 1", "--- 2", "--- 3"]
    rows = _rows(shown)
    assert rows["tokens equal"] == "yes"
    assert rows["graphs"] == "graphs" and Path("graphs/report.md").is_file()
    assert len(rows["accepted per position"].split()) == 4
    assert {"tokens", "tokens per step", "tokens/s", "tokens/s, draft=none", "times as fast as draft=none"} <= set(rows)
    assert {"tokens/s, transformers generate", "times as fast as transformers generate"} <= set(rows)
    assert not any("assisted" in name for name in rows)


def test_compare_has_assisted_generation_if_the_draft_is_a_model(
    model: Path, draft: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[PeerOutcome] = []

    def noting(outcome: Outcome, plain: Outcome, peers: list[PeerOutcome]) -> dict[str, str]:
        found.extend(peers)
        assert all(peer.tokens == outcome.tokens for peer in peers)
        return compare_rows(outcome, plain, peers)

    monkeypatch.setattr(commands, "compare_rows", noting)
    Path("two.txt").write_text("one, two\nab\n")
    given = [f"model={model}", "prompts=two.txt", f"draft={draft}", "compare=true", "temperature=0", "dtype=float64"]
    assert main(["generate", *given, *QUICK]) == 0
    rows = _rows(capsys.readouterr().out)
    assert [peer.name for peer in found] == ["generate", "assisted"]
    assert {"tokens/s, transformers assisted", "times as fast as transformers assisted"} <= set(rows)


def test_seeded_text_depends_on_neither_batches_nor_streaming(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("two.jsonl").write_text('{"question": "a"}\n{"prompt": "bc"}\n')
    shown = []
    for options in (["batch_size=1"], ["batch_size=2"], ["stream=true"]):
        given = [f"model={model}", "prompts=two.jsonl", "template='{question}!\\n'", "seed=3", "temperature=1"]
        assert main(["generate", *given, *QUICK, *options, "dtype=float64"]) == 0
        text, _, table = capsys.readouterr().out.rpartition("\n\n")
        shown.append((text, [line for line in table.splitlines() if "/s" not in line]))
    assert shown[0] == shown[1] == shown[2]
    assert "--- 2: bc!" in shown[0][0]


def test_texts_are_printed_as_soon_as_they_are_done(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("four.jsonl").write_text("".join(f'{{"prompt": "{word}"}}\n' for word in ("ab", "c", "de", "f")))
    printed: list[int] = []  # behind each step
    timed = decode_prompts._timed

    def watched(*args: Any) -> Any:
        for chunk in timed(*args):
            yield chunk
            printed.append(capsys.readouterr().out.count("--- "))

    monkeypatch.setattr(decode_prompts, "_timed", watched)
    assert main(["generate", f"model={model}", "prompts=four.jsonl", "batch_size=1", *QUICK, "max_new_tokens=5"]) == 0
    assert printed[-1] == 1 and [count for count in printed if count] == [1] * 4 and len(printed) > 8


def test_sweep_compares_its_jobs_and_leaves_nothing(
    model: Path, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"model={model}", "prompt=abab", "-m", "draft.num_speculative_tokens=1,4"]
    assert main(["generate", *given, *QUICK]) == 0
    shown = capsys.readouterr().out
    assert shown.count("=== ") == 2
    last = shown.rstrip().splitlines()[-2:]
    assert [line.split()[0] for line in last] == [f"draft.num_speculative_tokens={k}" for k in (1, 4)]
    assert list(empty_folder.iterdir()) == []
    assert Path.cwd() == empty_folder


def test_k_by_load_is_given_in_braces(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key, given = "draft.num_speculative_tokens", [f"model={model}", "prompt=abab", *QUICK]
    assert main(["generate", *given, f"{key}={{1: 3, 2: 0}}"]) == 0
    assert len(_rows(capsys.readouterr().out)["accepted per position"].split()) == 3
    assert main(["generate", *given, "-m", f"{key}={{1: 3, 2: 0}},{{1:2}}"]) == 0
    assert capsys.readouterr().out.count("=== ") == 2
    assert main(["generate", *given, f"{key}={{2: 3}}"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {key} is a table of the numbers of sequences [2]; they begin")


def test_one_bad_job_does_not_end_a_sweep(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [f"model={model}", "prompt=abab", "-m", "draft.num_speculative_tokens=0,2"]
    assert main(["generate", *given, *QUICK]) == 2
    shown = capsys.readouterr()
    assert shown.err == "error: draft.num_speculative_tokens must be at least 1, got 0.\n"
    assert "tokens per step" in shown.out


def test_draft_model_and_a_prompt_with_every_mark(
    model: Path, draft: Path, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = """Why (it's "so"), {x}=[1,2]: 50%? ${x} \\${y}\\"""
    given = [f"model={model}", "draft=draft_model", f"draft.model={draft}", f"prompt={prompt}"]
    assert main(["generate", *given, *QUICK]) == 0
    assert f"--- 1: {prompt}" in capsys.readouterr().out
    assert list(empty_folder.iterdir()) == []


@pytest.mark.parametrize("name", ["draft", "a b", "k=[v], {w}", "it's", "${x}"])
@pytest.mark.parametrize("quote", ["", "'"])
def test_a_draft_by_its_path(
    name: str, quote: str, model: Path, draft: Path, empty_folder: Path, compiled: list[Config]
) -> None:
    (empty_folder / name).symlink_to(draft)
    for given in (name, f"./{name}", str(empty_folder / name)):
        assert main(["generate", f"model={model}", "prompt=a", f"draft={quote}{given}{quote}"]) == 2
        assert compiled.pop().draft.model == str(Path(given))


def test_a_draft_by_its_path_runs_as_the_drafter_it_is(
    model: Path, draft: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for given in ([f"draft={draft}"], ["draft=draft_model", f"draft.model={draft}"]):
        assert main(["dump", f"model={model}", "out=graphs", "debug.self_check=false", *given]) == 0
        shown.append(capsys.readouterr().out)
    assert all("drafted by draft_model" in text and f"{draft}" in text for text in shown)


def test_a_lookup_in_front_of_a_draft(model: Path, draft: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [f"model={model}", "prompt=one two one two one", "compare=true", *QUICK]
    assert main(["generate", *given, f"draft={draft}", "draft.first=ngram", "draft.first_match=2"]) == 0
    assert "tokens equal" in capsys.readouterr().out
    assert main(["generate", *given, "draft=suffix", "draft.first=ngram"]) == 2
    assert capsys.readouterr().err.startswith("error: draft.first=ngram looks for drafts before another drafter makes")
    assert main(["generate", "--help"]) == 0
    assert "draft.first_match  " in capsys.readouterr().out


def test_a_name_counts_more_than_a_folder_of_that_name(
    model: Path, draft: Path, empty_folder: Path, compiled: list[Config]
) -> None:
    (empty_folder / "ngram").symlink_to(draft)
    assert main(["generate", f"model={model}", "prompt=a", "draft=ngram"]) == 2
    assert compiled.pop().draft.model is None
    assert main(["generate", f"model={model}", "prompt=a", "draft=./ngram"]) == 2
    assert compiled.pop().draft.model == "ngram"


def test_sweep_over_drafts_by_their_paths(
    model: Path, draft: Path, empty_folder: Path, compiled: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "the other=2"):
        (empty_folder / name).symlink_to(draft)
    assert main(["generate", f"model={model}", "prompt=a", "-m", "draft=one,./the other=2"]) == 2
    assert [config.draft.model for config in compiled] == ["one", "the other=2"]
    capsys.readouterr()
    assert main(["generate", f"model={model}", "prompt=a", "-m", "draft=one,ngram"]) == 2
    assert capsys.readouterr().err == (
        "error: draft=one,ngram: a sweep goes over names or over paths; run it once for each of the two.\n"
    )


OWN = "draft._target_=tests.drafters.test_registry.Successors"
"""A drafter from outside of the package, with the key ``draft.stride``."""


def test_a_drafter_of_a_user(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [f"model={model}", "prompt=Once", OWN, "draft.num_speculative_tokens=2", "compare=true", *QUICK]
    assert main(["generate", *given, "-m", "draft.stride=1,2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("tokens equal") == 3 and "draft.stride=2" in shown  # once per job, and their comparison
    assert main(["generate", OWN, "--help"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"draft\.stride +How far apart the proposed ids are\.\n", shown)
    assert "draft.kind  " in shown and "draft.max_ngram" not in shown
    assert main(["generate", f"model={model}", "prompt=a"]) == 0  # the keys of the next command are the usual ones


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([OWN, "draft.strid=2"], "Unknown configuration key 'draft.strid': did you mean 'draft.stride'?"),
        ([OWN, "draft.max_ngram=2"], "Unknown configuration key 'draft.max_ngram': "),
        ([OWN, "draft.stride=a"], "draft.stride is an integer, not 'a'."),
        ([OWN, "draft.stride=0"], "draft.stride must not be 0."),
        ([OWN, "draft=ngram"], f"{OWN} names the drafter, and so does draft=ngram; leave one of them out."),
        (["draft._target_=nowhere.Mine"], "draft._target_=nowhere.Mine: No module named 'nowhere'; give the full name"),
    ],
)
def test_mistakes_about_a_drafter_of_a_user(
    given: list[str], message: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", f"model={model}", "prompt=a", *given]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: {message}") and shown.count("\n") == 1


SENTENCES = {
    "draft=eagl3": f"There is no draft=eagl3 (did you mean 'eagle3'?); draft is one of "
                   f"{', '.join(group_choices('draft'))}; a checkpoint goes into draft.model.",
    "promt=x": "Unknown configuration key 'promt': did you mean 'prompt'?",
    "num_beams=4": "num_beams is no key of generate (tokens are chosen greedily or by sampling); leave it out.",
    "temperature=warm": "temperature is a number or null, not 'warm'.",
    "batch_size=65": "batch_size must be 1 to max_batch_size (64), got 65.",
}  # fmt: skip
"""What is said, word by word."""
MISTAKES = {
    "draft=./nowhere/eagle3": ("no such file or folder", "the path of a checkpoint"),
    "draft=.": ("There is no config.json",),
    "draft.num_speculative_token=3": ("'draft.num_speculative_token'", "'draft.num_speculative_tokens'"),
    "verify=stric": ("verify=stric", "'strict'", "block, "),
    "foo=1": ("'foo'", "valid keys are draft, "),
    "+foo=1": ("'foo'", "valid keys are draft, "),
    "+num_return_sequences=2": ("num_return_sequences", "leave it out"),
    "~drft": ("'drft'", "'draft'"),
    "draft.num_speculative_tokens=many": ("draft.num_speculative_tokens", "an integer", "'many'"),
    "cache=3": ("cache is a group of keys (block_size, ",),
    "draft.model=[a": ("Cannot read 'draft.model=[a'", "write key=value"),
    "passes.share_weight.x=1": ("'share_weight'", "'share_weights'"),
    "passes.lookup_first.matc=1": ("matc'", "'passes.lookup_first.match'"),
    "pipeline.order=[insert_drafts]": ("'insert_drafts'", "'insert_draft'"),
    "draft=draft_model": ("draft_model", "needs a model"),
    "debug.dump_dir=/dev/null/graphs": ("/dev/null/graphs", "no folder"),
    "draft=/dev draft.kind=ngram": ("draft=/dev names the draft", "draft.kind=ngram"),
    "dtype=fp16": ("dtype=fp16", "'float16'"),
    "dtype=float31": ("dtype=float31", "'float32'"),
    "device=gpu": ("device=gpu cannot be used",),
    "prompts=x.txt": ('prompt="some text"', "prompts=FILE"),
    "temperature=-1": ("temperature ",),
    "model=./nowhere": ("model=./nowhere", "no such folder"),
    "model=.": ("model=. cannot be loaded", "There is no config.json"),
    "model=": ("model is empty",),
    "prompt=": ("no token of the text ''",),
    "template='{answer}'": ("'answer'", "question, prompt"),
    "template='{'": ("template: ",),
    "template='Say something.'": ("template has no field",),
}


def _refused(override: str, model: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What standard error says, which is one line."""
    assert main(["generate", f"model={model}", "prompt=a", "debug.self_check=false", *shlex.split(override)]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1 and shown.out == ""
    return shown.err


@pytest.mark.parametrize("override", SENTENCES)
def test_a_mistake_gets_one_sentence(override: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _refused(override, model, capsys) == f"error: {SENTENCES[override]}\n"


@pytest.mark.parametrize("override", MISTAKES)
def test_a_mistake_names_the_key_and_what_is_allowed(
    override: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = _refused(override, model, capsys)
    assert all(word in shown for word in MISTAKES[override])


def test_a_file_in_another_encoding(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.txt").write_bytes("one\nzwölf\n".encode("latin-1"))
    assert main(["generate", "model=unused", "prompts=a.txt"]) == 2
    assert capsys.readouterr().err == "error: prompts=a.txt: not UTF-8 at byte 6; save the file as UTF-8.\n"
    assert main(["train", f"model={model}", "data=a.txt", "output=out"]) == 2
    assert capsys.readouterr().err == "error: data=a.txt: not UTF-8 at byte 6; save the file as UTF-8.\n"
    Path("a.txt").write_bytes(b"\xef\xbb\xbfone\r\n")  # as editors of Windows write it
    assert main(["generate", f"model={model}", "prompts=a.txt", "format=jsonl", *QUICK]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "one"


def test_a_model_without_a_tokenizer_gets_one_sentence(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("model").absolute()
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*token*"))
    assert main(["generate", "prompt=a", f"model={folder}"]) == 2
    assert capsys.readouterr().err == (
        f"error: model={folder} has no tokenizer that can be loaded: there are no files of one beside it.\n"
    )


@pytest.mark.parametrize("content", [None, "", "{", '{"version": "1.0"}'])
def test_a_damaged_tokenizer_gets_one_sentence(
    content: str | None, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path("damaged").absolute()
    shutil.copytree(model, folder)
    (folder / "tokenizer.json").unlink()
    if content is not None:
        (folder / "tokenizer.json").write_text(content)
    assert main(["generate", "prompt=a", f"model={folder}"]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: model={folder} has no tokenizer that can be loaded: ")
    assert shown.err.count("\n") == 1 and shown.out == ""


def _without(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _of_another_shape(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:5].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _quantized(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))


def _configured(**values: object) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return write


def _damaged_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"no pickle" * 99)


def _without_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {
        "model.norm.weight": "model-00002-of-00002.safetensors",
        "lm_head.weight": "model-00001-of-00002.safetensors",
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "tensors are missing": (
        _without,
        "its files lack 2 tensors of a LlamaForCausalLM, such as model.layers.1.mlp.up",
    ),
    "a tensor of another shape": (
        _of_another_shape,
        "model.norm.weight is [5] in its files, and [32] by its config",
    ),
    "a truncated file": (_truncated, ""),
    "garbage": (lambda folder: (folder / "model.safetensors").write_bytes(b"no tensors at all" * 99), ""),
    "an empty file": (lambda folder: (folder / "model.safetensors").write_bytes(b""), ""),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ""),
    "a damaged configuration": (lambda folder: (folder / "config.json").write_text("{"), ""),
    "weights for a library that is not there": (_quantized, ""),
    "a value of another type": (_configured(vocab_size="many"), "vocab_size"),
    "a shape that is none": (_configured(num_attention_heads=7), "32"),
    "a list for a configuration": (lambda folder: (folder / "config.json").write_text("[1]"), "holds a list, not an"),
    "a damaged generation configuration": (
        lambda folder: (folder / "generation_config.json").write_text("{"),
        "generation_config.json is not JSON (",
    ),
    "a pickle of garbage": (_damaged_pickle, "pytorch_model.bin is truncated or damaged (its pickle cannot be read)"),
    "a shard that is missing": (_without_shard, "model-00002-of-00002.safetensors"),
}


@pytest.mark.parametrize("key", ["model", "draft.model"])
@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_model_gets_one_sentence(
    damage: Callable[[Path], object], message: str, key: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path("damaged").absolute()
    shutil.copytree(model, folder)
    damage(folder)
    given = {"model": str(model), key: str(folder)}
    kind = ["draft=draft_model"] if key != "model" else []
    options = [f"{name}={value}" for name, value in given.items()]
    assert main(["generate", "prompt=a", "debug.self_check=false", *kind, *options]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and shown.out == ""
    assert "damaged" in shown.err and message in shown.err


@pytest.mark.parametrize("command", ["generate", "dump"])
def test_missing_model(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == 2
    assert capsys.readouterr().err.startswith(f"error: model is not set: python -m specgraph {command} model=PATH ")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.jsonl",
            '{"question": 1}\n',
            "a.jsonl:1: there is no text in a field question or prompt, and no",
        ),
        ("a.jsonl", '{"prompt": "x"}\n{\n', "a.jsonl:2: not JSON ("),
        ("a.txt", "\n", "prompts=a.txt: the file has no prompts."),
        ("a.csv", "x\n", "prompts=a.csv: a file of prompts ends in .txt (one per line) or .jsonl."),
    ],
)
def test_prompt_files_that_do_not_work(name: str, text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(name).write_text(text)
    assert main(["generate", "model=unused", f"prompts={name}"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_train_mistakes(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "model=some/path"]) == 2
    assert main(["train", "optim.step=3"]) == 2
    assert main(["train", "draft=draft_model"]) == 2
    assert main(["train", f"model={model}", "data=missing.jsonl"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors[0].startswith("error: data is not set: ")
    assert errors[1] == ("error: Unknown configuration key 'optim.step': did you mean 'optim.steps'?")
    assert errors[2].startswith("error: There is no draft=draft_model to train; draft is ")
    assert errors[3].startswith("error: data=missing.jsonl: there is no such file")


def test_train_gets_its_structured_configuration(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from specgraph import training

    def stop(model: object, tokenizer: object, cfg: training.HeadTrainConfig) -> None:
        raise PassError(f"{type(cfg).__name__} {cfg.draft} {cfg.data} {cfg.optim.steps} {cfg.head.layers}")

    monkeypatch.setattr(training, "train_head", stop)
    given = [f"model={model}", "data=x.jsonl", "draft=medusa", "optim.steps=5", "head.layers=2"]
    assert main(["train", *given]) == 2
    assert capsys.readouterr().err == "error: HeadTrainConfig medusa x.jsonl 5 2\n"


def test_full_error_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, model: Path, compiled: list[Config]) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(PassError, match="stopped here"):
        main(["generate", f"model={model}", "prompt=a"])
    assert os.environ["HYDRA_FULL_ERROR"] == "1"


def test_interrupt(monkeypatch: pytest.MonkeyPatch, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "compile_speculative", interrupt)
    arguments = list(sys.argv)
    assert main(["generate", f"model={model}", "prompt=a"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert sys.argv == arguments and "HYDRA_FULL_ERROR" not in os.environ


def test_real_process(empty_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "specgraph", "generate", "verify=stric"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: There is no verify=stric")
    assert list(empty_folder.iterdir()) == []


def test_help_needs_no_torch() -> None:
    """The command line's own modules, under a package that imports nothing."""
    folder = Path(commands.__file__).parents[1]
    script = (
        "import sys, types; package = types.ModuleType('specgraph'); "
        f"package.__path__ = [{str(folder)!r}]; sys.modules['specgraph'] = package; "
        "from specgraph.cli import main; codes = [main(['--help']), main(['generate', '--help'])]; "
        "sys.exit(any(codes) or bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == 0
