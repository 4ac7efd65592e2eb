"""Write a pass of your own, put it into the pipeline, and see what it did.

The pass takes the drafts away before they are verified, which turns speculation off inside the graph: the output stays
the same, the acceptance length becomes 1, and the report says what happened.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import specgraph
from specgraph.ir.graphs import calls
from specgraph.kernels import step
from specgraph.passes import Pass, PassResult

MODELS = Path(__file__).parent / "models" / "tiny-math"


def forced_only(drafts: Tensor, num_forced: Tensor) -> Tensor:
    """Keep the tokens that are known already, a prompt's, and have no draft (-1) behind them."""
    column = torch.arange(drafts.shape[1], device=drafts.device)
    return torch.where(column < num_forced.unsqueeze(1), drafts, -1)


class RefuseDrafts(Pass, requires={"verify"}):
    """``draft_tokens(...)`` becomes ``forced_only(draft_tokens(...), num_forced)``."""

    def apply(self, program: specgraph.Program) -> PassResult:
        nodes = list(calls(program.graph, step.draft_tokens))
        for node in nodes:
            with program.graph.inserting_after(node):
                refused = program.graph.call_function(forced_only, (node, program.input("num_forced")))
            node.replace_all_uses_with(refused, lambda user, new=refused: user is not new)
        return PassResult(len(nodes), expected=1)


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    model = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32)
    order = ["expose_features", "insert_kv_cache", "insert_draft", "insert_verify", "refuse_drafts"]
    cfg = {"pipeline": {"order": order}, "passes": {"refuse_drafts": {"_target_": f"{__name__}.RefuseDrafts"}}}
    decoder = specgraph.compile_speculative(model, cfg)
    prompt = tokenizer("Question: What is 2 + 2?\nAnswer:", return_tensors="pt").input_ids
    with_pass = decoder.generate(prompt, max_new_tokens=30)
    without = specgraph.compile_speculative(model).generate(prompt, max_new_tokens=30)
    assert torch.equal(with_pass.new_tokens[0], without.new_tokens[0])
    assert with_pass.stats.acceptance_length == 1
    decoder.stages["refuse_drafts"].print_readable()
    print(decoder.report())


if __name__ == "__main__":
    main()
