"""Dump the graphs of every stage, read one, load it again and run it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import specgraph

MODELS = Path(__file__).parent / "models" / "tiny-math"


def main() -> None:
    target = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32)
    cfg = {"draft": {"num_speculative_tokens": 3}}
    decoder = specgraph.compile_speculative(target, cfg, draft=MODELS / "draft")
    with tempfile.TemporaryDirectory() as temporary:
        folder = decoder.dump(Path(temporary) / "graphs")
        for path in sorted(folder.rglob("*.py")):
            print(path.relative_to(folder), len(path.read_text().splitlines()), "lines")
        stage = next(folder.glob("*_insert_verify"))
        print((stage / "step.py").read_text())

        # A dumped stage runs: two sequences of one token each, one step.
        loaded = specgraph.load_dump(stage)
        state = loaded.allocate({"B": 2, "M": 1, "N": 2, "S": 16, "E": 1}, "cpu")
        state["block_table"].copy_(torch.tensor([[0], [1]]))
        state["max_length"].fill_(16)
        state["num_rows"].fill_(1)
        state["next_window"][:, 0] = torch.tensor([5, 6])
        emitted, num_emitted, _, _ = loaded.step()(window=state["next_window"], **state)
        print("emitted", emitted.tolist(), "of which", num_emitted.tolist())


if __name__ == "__main__":
    main()
