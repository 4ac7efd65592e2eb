"""Reinforcement learning with trl: a decoder rolls out, the trainer updates the weights, and the decoder goes on.

pip install -e '.[rl]' && python examples/reinforce.py

This is GRPO (Shao et al. 2024) on the tiny model, where an answer is worth more the more of it is numbers. The trainer
writes new weights into the tensors that the decoder reads. So the decoder is compiled once, and each rollout is of the
newest policy. A rollout is evaluated again by ``decoder.score`` before it is used.
"""

import argparse
import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import specgraph
from specgraph.runtime.requests.sampling import hash_seed

try:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    raise SystemExit("examples/reinforce.py needs trl; install it with pip install -e '.[rl]'.") from error

HERE = Path(__file__).parent
MODELS = HERE / "models" / "tiny-math"
ON_GPU = torch.cuda.is_available()


class Rollout:
    """trl's ``rollout_func``: it decodes the prompts of a step, and says how probable each token was."""

    def __init__(self, model: Any, tokenizer: Any, draft: Path | None, longest: int) -> None:
        # The trainer puts a forward function of its own on its model. The decoder gets other modules with the same
        # tensors, which stay as they are.
        self.policy = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
        self.tokenizer, self.draft, self.longest = tokenizer, draft, longest
        self.decoder: specgraph.SpeculativeDecoder | None = None
        self.rewards: list[float] = []
        self.differences: list[float] = []

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """The trainer repeats each prompt for as many answers as it wants, so each of them gets a seed of its own."""
        if self.decoder is None:  # by now, the trainer has moved the tensors to its device
            self.decoder = specgraph.compile_speculative(self.policy, draft=self.draft)
        ids = self.tokenizer(prompts)["input_ids"]
        seeds = [hash_seed(trainer.state.global_step, place) for place in range(len(ids))]
        out = self.decoder.generate(ids, max_new_tokens=self.longest, temperature=1.0, seed=seeds, return_logprobs=True)
        self.differences.append(self.evaluate(out))
        answers = [tokens.tolist() for tokens in out.new_tokens]
        self.rewards.append(sum(self.reward(answers)) / len(answers))
        print(f"rollout {len(self.rewards)}: reward {self.rewards[-1]:.3f}, {out.stats.acceptance_length:.2f} tokens "
              f"per step; evaluated again, log-probabilities differ by {self.differences[-1]:.1e}")  # fmt: skip
        logprobs = [values.tolist() for values in out.logprobs]
        return {"prompt_ids": ids, "completion_ids": answers, "logprobs": logprobs}

    def evaluate(self, out: Any) -> float:
        """The largest difference between the log-probabilities of a rollout and those of scoring: 0 on a GPU."""
        assert self.decoder is not None
        pairs = zip(out.logprobs, self.decoder.score(out).logprobs, strict=True)
        return max(float((rolled_out - scored).abs().max()) for rolled_out, scored in pairs)

    def reward(self, completion_ids: list[list[int]], **others: Any) -> list[float]:
        """The share of an answer's tokens that have a digit in them."""
        numbers = [[any(map(str.isdigit, self.tokenizer.decode([token]))) for token in ids] for ids in completion_ids]
        return [sum(own) / len(own) for own in numbers]


def train(
    folder: Path, draft: Path | None, dtype: torch.dtype, steps: int, questions: int = 4, answers: int = 8
) -> tuple[Any, Rollout]:
    """A trainer and its rollouts, after some steps."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with (HERE / "data" / "gsm8k_test_200.jsonl").open() as lines:
        prompts = [f"Question: {json.loads(line)['question']}\nAnswer:" for line in lines]
    rollout = Rollout(model, tokenizer, draft, longest=32)
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=steps, per_device_train_batch_size=questions * answers,
        num_generations=answers, max_completion_length=rollout.longest, learning_rate=2e-4, temperature=1.0,
        gradient_checkpointing=False, bf16=False, use_cpu=not ON_GPU, logging_strategy="no",
        report_to=[], save_strategy="no", disable_tqdm=True, seed=1,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model, reward_funcs=rollout.reward, args=config, train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer, rollout_func=rollout,
    )  # fmt: skip
    trainer.train()
    return trainer, rollout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    _, rollout = train(MODELS / "target", MODELS / "eagle3", dtype, parser.parse_args().steps)
    first, last = (sum(some) / len(some) for some in (rollout.rewards[:5], rollout.rewards[-5:]))
    print(f"the mean of the first five rewards is {first:.3f}, and of the last five {last:.3f}")


if __name__ == "__main__":
    main()
