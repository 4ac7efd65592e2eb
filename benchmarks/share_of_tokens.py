"""What a draft of another family is worth by how many tokens it shares with the target, in tokens per decode step.

    python -m benchmarks.share_of_tokens [--models examples/models/tiny-math] [--missing 0 400 1000 1600 2200 2600]

The draft model of the target gets other ids for its tokens, and the last ones of its tokenizer, which are the rarest,
are renamed, so that the target has no token of their strings. So it is a draft of another tokenizer that knows as much
as before. Questions of GSM8K, greedily, with K = 5, in float64 on a CPU, where no token may change.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import specgraph
from benchmarks.texts import ask, read_questions
from specgraph.checkpoints import shared_tokens
from specgraph.checkpoints.tokenizers import compare_tokenizers


def other_family(draft: Path, folder: Path, missing: int) -> Path:
    """A copy of a draft model in which ids are permuted, and the last ``missing`` tokens have other names."""
    shutil.copytree(draft, folder)
    model: Any = AutoModelForCausalLM.from_pretrained(draft)
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    special, vocabulary = {token["id"] for token in tokenizer["added_tokens"]}, tokenizer["model"]["vocab"]
    rows = len(model.get_input_embeddings().weight)
    own = torch.tensor([index for index in range(rows) if index not in special])
    new = torch.arange(rows).index_copy(
        0, own, own[torch.randperm(len(own), generator=torch.Generator().manual_seed(0))]
    )
    with torch.no_grad():
        for weight in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
            weight.copy_(weight[new.argsort()])
    model.save_pretrained(folder)
    kept = len(vocabulary) - missing
    named = {token if index < kept else f"no token {index}": int(new[index]) for token, index in vocabulary.items()}
    merges = [pair for pair in tokenizer["model"]["merges"] if {*pair, "".join(pair)} <= named.keys()]
    tokenizer["model"] |= {"vocab": named, "merges": merges}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def decoded(target: PreTrainedModel, draft: Path, prompts: list[Tensor], count: int) -> tuple[float, list[list[int]]]:
    """Tokens per decode step, and the tokens."""
    options = {"kind": "draft_model", "num_speculative_tokens": 5}
    config = {"draft": options, "lowering": "eager", "max_batch_size": 8, "debug": {"self_check": False}}
    out = specgraph.compile_speculative(target, config, draft=draft).generate(
        prompts, max_new_tokens=count, temperature=0.0
    )
    emitted = [number for steps in out.stats.emitted_per_step for number in steps]
    return sum(emitted) / len(emitted), [tokens.tolist() for tokens in out.new_tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("examples/models/tiny-math"))
    parser.add_argument("--questions", type=Path, default=Path("examples/data/gsm8k_test_200.jsonl"))
    parser.add_argument("--count", type=int, default=40, help="of questions")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--missing", type=int, nargs="+", default=[0, 400, 1000, 1600, 2200, 2600])
    given = parser.parse_args()
    shared_tokens.LEAST_SHARE = 0.0  # which would refuse what is to be shown
    target = AutoModelForCausalLM.from_pretrained(given.models / "target", dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(given.models / "target")
    prompts = [torch.tensor(ids) for ids in ask(tokenizer, read_questions(given.questions)[: given.count])]
    rate, expected = decoded(target, given.models / "draft", prompts, given.new_tokens)
    print(f"{rate:.3f} tokens per step with the target's tokenizer")
    for missing in given.missing:
        with tempfile.TemporaryDirectory() as folder:
            draft = other_family(given.models / "draft", Path(folder) / "draft", missing)
            about, _ = compare_tokenizers(target, AutoModelForCausalLM.from_pretrained(draft))
            rate, tokens = decoded(target, draft, prompts, given.new_tokens)
        changed = sum(own != other for own, other in zip(tokens, expected, strict=True))
        print(f"{rate:.3f}: {about.rpartition(': ')[2]}; {changed} of {len(tokens)} sequences changed", flush=True)


if __name__ == "__main__":
    main()
