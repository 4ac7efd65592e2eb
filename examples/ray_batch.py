"""Answer a file of questions with Ray Data: a decoder per worker, a GPU per worker, on one machine or on many.

pip install -e '.[ray]' && python examples/ray_batch.py --workers 2

A seed belongs to a question and not to a worker, so the answers are those of a single process, however many workers
there are. If a worker dies, Ray starts another one, which answers again what the first had not handed over.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import specgraph
from specgraph.runtime.requests.sampling import hash_seed

try:
    import ray
    import ray.data
except ImportError as error:
    raise SystemExit("examples/ray_batch.py needs Ray; install it with pip install -e '.[ray]'.") from error

HERE = Path(__file__).parent


class Answers:
    """What a worker does: it compiles once, and then answers one batch of questions after the other."""

    def __init__(self, folder: str, draft: str | None = None) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"  # a worker sees the GPU that Ray gave it, and no other
        dtype = torch.bfloat16 if device == "cuda" else torch.float64
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.decoder = specgraph.compile_speculative(model.to(device), draft=draft)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        prompts = [self.tokenizer(f"Question: {question}\nAnswer:")["input_ids"] for question in batch["question"]]
        seeds = [hash_seed(1, int(place)) for place in batch["place"]]
        out = self.decoder.generate(prompts, max_new_tokens=60, temperature=0.8, seed=seeds)
        answers = [self.tokenizer.decode(new, skip_special_tokens=True) for new in out.new_tokens]
        return {"place": batch["place"], "question": batch["question"], "answer": answers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(HERE / "models" / "tiny-math" / "target"))
    parser.add_argument("--draft")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=int, default=16, help="how many questions are answered")
    given = parser.parse_args()
    with (HERE / "data" / "gsm8k_test_200.jsonl").open() as lines:
        questions = [json.loads(line)["question"] for line in lines][: given.limit]

    ray.init(include_dashboard=False, ignore_reinit_error=True)
    rows = [{"place": place, "question": text} for place, text in enumerate(questions)]
    # The batches are made here, since a task that made them would find no CPU where workers have taken all.
    parts = 2 * given.workers
    answers = ray.data.from_items(rows, override_num_blocks=parts).map_batches(
        Answers, fn_constructor_args=(given.model, given.draft), batch_size=-(-len(rows) // parts), num_cpus=1,
        num_gpus=int(torch.cuda.is_available()), compute=ray.data.ActorPoolStrategy(size=given.workers),
    )  # fmt: skip
    found = sorted(answers.take_all(), key=lambda row: row["place"])  # or answers.write_json(folder)
    for row in found[:2]:
        print(f"Q: {row['question']}\nA:{row['answer']}\n")

    alone = Answers(given.model, given.draft)({"place": range(len(questions)), "question": questions})
    same = sum(row["answer"] == answer for row, answer in zip(found, alone["answer"], strict=True))
    print(f"{same} of {len(questions)} answers are those of one process")
    assert same == len(questions)


if __name__ == "__main__":
    main()
