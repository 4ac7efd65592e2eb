"""Measures specgraph on a real model, beside transformers in the same process.

    python -m benchmarks.real_models MODEL --out FILE.jsonl [--draft FOLDER] [--gsm8k FILE] [--budget SECONDS]

Every cell is a set of prompts, a decoder, K, a number of sequences and a temperature. It appends one JSON line to the
file, and prints the Markdown table of all lines at the end. The same command goes on where it stopped: cells that are
in the file are skipped. Tokens, and on a GPU log-probabilities, are compared with those of plain decoding (draft=none).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

import specgraph
from benchmarks.fetch_models import convert
from benchmarks.markdown import table
from benchmarks.texts import SETS, read_prompts
from specgraph.bench.peers import transformers_generate
from specgraph.config import group_choices


@dataclass(frozen=True)
class Cell:
    """One number of the table: K is 0 for decoders without drafts."""

    prompts: str
    decoder: str
    k: int
    batch: int
    temperature: float


@dataclass(frozen=True)
class Choice:
    """A decoder and its K, for which several cells are measured."""

    decoder: str
    k: int

    @property
    def is_peer(self) -> bool:
        return self.decoder.startswith("transformers ")


Found = tuple[list[Tensor], list[Tensor] | None]
"""The new tokens of every prompt, and their log-probabilities if they were asked for."""


class Measurement:
    """The model, its prompts and what was measured before."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.begin = given, time.monotonic()
        self.file: Path = given.out
        self.folder = folder_of(given.model)
        self.model, self.tokenizer = load(self.folder, given.device, given.dtype)
        self.drafts = [str(folder_of(draft)) for draft in given.draft]
        self.prompts = {name: read_prompts(name, self.tokenizer, given.prompts, given.gsm8k) for name in given.sets}
        self.plain: dict[tuple[str, int, float], Found] = self._kept()
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.done = {tuple(json.loads(line)["cell"].values()) for line in lines}

    def run(self) -> int:
        """Measure what is missing, and return the number of cells for which there was no time."""
        left = 0
        for choice in self._choices():
            cells = [cell for cell in self._cells(choice) if tuple(asdict(cell).values()) not in self.done]
            if not cells or self._late():
                left += len(cells)
                continue
            begin = time.perf_counter()
            decode = self._decoder(choice)
            seconds = time.perf_counter() - begin
            print(f"{choice.decoder} K={choice.k}: compiled in {seconds:.1f} s", file=sys.stderr, flush=True)
            for number, cell in enumerate(cells):
                if self._late():
                    left += len(cells) - number
                    break
                self._measure(cell, decode)
            del decode
            gc.collect()  # frees the graphs and the memory of this decoder before the next one needs memory
            if self.model.device.type == "cuda":
                torch.cuda.empty_cache()
        return left

    def _late(self) -> bool:
        return time.monotonic() - self.begin > self.given.budget

    def _choices(self) -> Iterator[Choice]:
        """Plain decoding first, which the others are compared with, and transformers, which takes longest, last."""
        yield Choice("none", 0)
        for k, draft in itertools.product(self.given.k, [*self.given.drafters, *self.drafts]):
            yield Choice(draft, k)
        yield Choice("transformers generate", 0)
        for k in self.given.peer_k:
            yield Choice("transformers lookup", k)
        for draft in filter(is_model, self.drafts):
            for k in self.given.peer_k:
                yield Choice(f"transformers assisted {draft}", k)

    def _cells(self, choice: Choice) -> Iterator[Cell]:
        # transformers drafts for one sequence at a time.
        batches = [1] if choice.is_peer and choice.k else self.given.batch
        for name, batch, temperature in itertools.product(self.prompts, batches, self.given.temperature):
            yield Cell(name, choice.decoder, choice.k, batch, temperature)

    def _decoder(self, choice: Choice) -> Callable[..., Any]:
        return self._peer(choice) if choice.is_peer else self._ours(choice)

    def _ours(self, choice: Choice) -> Callable[..., Any]:
        longest = max(len(prompt) for prompts in self.prompts.values() for prompt in prompts)
        known = choice.decoder in group_choices("draft")
        draft: dict[str, Any] = {"kind": choice.decoder} if known else {}
        config = {
            "draft": draft | ({"num_speculative_tokens": choice.k} if choice.k else {}),
            "max_batch_size": max(self.given.batch),
            "max_length": longest + self.given.new_tokens + choice.k + 1,
            "lowering": {"name": self.given.lowering},
            "debug": {"self_check": False, "progress": False},
        }
        decoder = specgraph.compile_speculative(self.model, config, draft=None if known else choice.decoder)

        def decode(prompts: Sequence[Tensor], temperature: float, first: int, logprobs: bool = False) -> Any:
            return decoder.generate(
                list(prompts), max_new_tokens=self.given.new_tokens, temperature=temperature,
                seed=list(range(first, first + len(prompts))), return_logprobs=logprobs,
            )  # fmt: skip

        return decode

    def _peer(self, choice: Choice) -> Callable[..., Any]:
        options: dict[str, Any] = {"max_new_tokens": self.given.new_tokens}
        assistant = None
        if "assisted" in choice.decoder:
            assistant = load(Path(choice.decoder.split(" ", 2)[2]), self.given.device, self.given.dtype)[0]
            assistant.generation_config.num_assistant_tokens = choice.k
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
        elif choice.k:
            options["prompt_lookup_num_tokens"] = choice.k

        def decode(prompts: Sequence[Tensor], temperature: float, first: int) -> list[Tensor]:
            torch.manual_seed(first)
            sampling = {"do_sample": False}
            if temperature:
                sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            return transformers_generate(self.model, prompts, assistant, **options, **sampling)

        return decode

    def _measure(self, cell: Cell, decode: Callable[..., Any]) -> None:
        ours = not cell.decoder.startswith("transformers ")
        prompts = self.prompts[cell.prompts]
        if not ours:
            prompts = prompts[: self.given.peer_prompts]
        groups = [(at, prompts[at : at + cell.batch]) for at in range(0, len(prompts), cell.batch)]
        on_gpu = self.model.device.type == "cuda"
        # Compiles kernels and captures graphs, of which a GPU has one for each shape that is met.
        for at, some in groups if ours and on_gpu else groups[:1]:
            decode(some, cell.temperature, at)
        begin = time.perf_counter()
        outputs = [decode(some, cell.temperature, at) for at, some in groups]
        seconds = time.perf_counter() - begin
        tokens = [new for out in outputs for new in (out.new_tokens if ours else out)]
        line: dict[str, Any] = {
            "cell": asdict(cell),
            "tokens_per_second": sum(map(len, tokens)) / seconds,
            "tokens_per_step": None,
            "sequences": len(tokens),
            "differ": None,
            "differ_in_bits": None,
        }
        if ours:
            steps = [count for out in outputs for counts in out.stats.emitted_per_step for count in counts]
            line["tokens_per_step"] = sum(steps) / len(steps)
            logprobs = self._logprobs(cell, decode, groups) if on_gpu else None
            line["differ"], line["differ_in_bits"] = self._compare(cell, tokens, logprobs)
        line |= {"new_tokens": sum(map(len, tokens)), "seconds": seconds, **self._record()}
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.done.add(tuple(asdict(cell).values()))
        print(json.dumps(line), file=sys.stderr, flush=True)

    def _logprobs(self, cell: Cell, decode: Callable[..., Any], groups: Sequence[Any]) -> list[Tensor]:
        outputs = [decode(some, cell.temperature, at, logprobs=True) for at, some in groups]
        return [values.cpu() for out in outputs for values in out.logprobs]

    def _compare(
        self, cell: Cell, tokens: Sequence[Tensor], logprobs: Sequence[Tensor] | None
    ) -> tuple[int | None, int | None]:
        """How many sequences differ from plain decoding in a token, and in a bit of a log-probability."""
        key = (cell.prompts, cell.batch, cell.temperature)
        if cell.decoder == "none":
            self.plain[key] = ([new.cpu() for new in tokens], None if logprobs is None else list(logprobs))
            torch.save(self.plain, self._plain_file)
            return None, None
        known, values = self.plain[key]
        differ = sum(not torch.equal(a.cpu(), b) for a, b in zip(tokens, known, strict=True))
        if logprobs is None or values is None:
            return differ, None
        return differ, sum(not torch.equal(a, b) for a, b in zip(logprobs, values, strict=True))

    @property
    def _plain_file(self) -> Path:
        return self.file.with_suffix(".plain.pt")

    def _kept(self) -> dict[tuple[str, int, float], Found]:
        return torch.load(self._plain_file) if self._plain_file.exists() and self.file.exists() else {}

    def _record(self) -> dict[str, Any]:
        device = self.model.device
        name = (
            torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
        )
        return {"model": self.folder.name, "dtype": str(self.model.dtype).split(".")[1], "device": name}


def folder_of(path: str) -> Path:
    """A model's folder; that of a GGUF file is made beside it."""
    given = Path(path)
    return convert(given, given.with_suffix("")) if given.suffix == ".gguf" else given


def load(folder: Path, device: str, dtype: str) -> tuple[PreTrainedModel, Any]:
    """A model and its tokenizer. Of its generation_config only the EOS is kept, so that all decoders sample alike."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    eos = model.generation_config.eos_token_id
    eos = tokenizer.eos_token_id if eos is None else eos
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=eos[0] if isinstance(eos, list) else eos)
    return model, tokenizer


def is_model(folder: str) -> bool:
    """Whether a draft is a causal LM, which transformers can take as an assistant, and not a head."""
    config = json.loads((Path(folder) / "config.json").read_text())
    return any(name.endswith("ForCausalLM") for name in config.get("architectures") or [])


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or a GGUF file, of which a folder is made beside it")
    parser.add_argument("--out", type=Path, required=True, help="the JSON lines")
    parser.add_argument("--draft", nargs="*", default=[], help="folders of draft models or heads")
    parser.add_argument("--drafters", nargs="*", default=["ngram", "suffix"], help="drafters without a checkpoint")
    parser.add_argument("--k", nargs="*", type=int, default=[2, 4, 8])
    parser.add_argument("--peer-k", nargs="*", type=int, default=[4], help="K of transformers' lookup and assistant")
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--temperature", nargs="*", type=float, default=[0.0, 0.7])
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=SETS)
    parser.add_argument("--gsm8k", help="the jsonl file of the questions")
    parser.add_argument("--prompts", type=int, default=80, help="of each set")
    parser.add_argument("--peer-prompts", type=int, help="how many of them transformers decodes; all if left out")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--budget", type=float, default=540, help="begin no cell after this many seconds")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if on_gpu else "float32")
    parser.add_argument("--lowering", default="auto")
    given = parser.parse_args()
    left = Measurement(given).run()
    print(table([json.loads(line) for line in given.out.read_text().splitlines()]))
    if left:
        print(f"{left} cells are left: run the same command again.")


if __name__ == "__main__":
    main()
