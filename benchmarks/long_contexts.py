"""Acceptance and time per step by the length of the context, for heads with and without ``draft.window``.

    python -m benchmarks.long_contexts [heads=[eagle3,mtp,dflash]] [contexts=[2048,8192,16384,32768]] [window=512]
                                       [length=16384] [head_length=2048] [target_seconds=120] [head_seconds=30]

It trains everything first. The target, a Llama of 7 million parameters, learns texts of up to ``length`` tokens; the
heads learn texts of ``head_length``, since published heads were trained on short ones, too. A text is made of pieces of
32 to 128 tokens. A piece is either new, of a chain in which each token has eight successors, or a copy of what stood
anywhere before, which a model notices after a token or two. Tokens are drawn at temperature 1 under ``strict``.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from specgraph.compiler.compile import compile_speculative
from specgraph.drafters.base import DraftHead
from specgraph.runtime.decoder import SpeculativeDecoder
from specgraph.training.chain import ChainLoss
from specgraph.training.config import ChainConfig, HeadTrainConfig, OptimConfig
from specgraph.training.data import Encoded
from specgraph.training.head import bf16_copy, build_head
from specgraph.training.loop import HeadLoop
from specgraph.training.teacher import Teacher
from specgraph.training.updates import Updates, autocast_on

PAD, VOCAB, SUCCESSORS, PIECE = 0, 2048, 8, (32, 129)


@dataclass
class Options:
    """The words of the command line. ``row_tokens`` is how many tokens an update of the target has."""

    heads: list[str] = field(default_factory=lambda: ["eagle3", "mtp", "dflash"])
    contexts: list[int] = field(default_factory=lambda: [2048, 8192, 16384, 32768])
    window: int = 512
    length: int = 16384
    head_length: int = 2048
    row_tokens: int = 65536
    target_seconds: float = 120.0
    head_seconds: float = 30.0
    copied: float = 0.6
    drafts: int = 4
    batch: int = 4
    steps: int = 100
    hidden_size: int = 256
    layers: int = 8


class Texts:
    """Texts of tokens, in which a share ``copied`` of all pieces repeats what stood before."""

    def __init__(self, copied: float, seed: int = 0) -> None:
        self._dice, self._copied = np.random.default_rng(seed), copied
        self._after = np.random.default_rng(0).integers(PAD + 1, VOCAB, (VOCAB, SUCCESSORS))
        self._odds = 0.5 ** np.arange(1, SUCCESSORS + 1)
        self._odds[-1] *= 2

    def draw(self, count: int, length: int) -> Tensor:
        """int64 ``[count, length]``."""
        dice, texts = self._dice, np.empty((count, length), np.int64)
        chosen = dice.choice(SUCCESSORS, (count, length), p=self._odds)
        texts[:, 0] = dice.integers(PAD + 1, VOCAB, count)
        for place in range(1, length):
            texts[:, place] = self._after[texts[:, place - 1], chosen[:, place]]
        for text in texts:
            at = PIECE[1]
            while at < length:
                size = min(int(dice.integers(*PIECE)), length - at)
                if dice.random() < self._copied:
                    begin = int(dice.integers(0, at - size + 1))
                    text[at : at + size] = text[begin : begin + size]
                at += size
        return torch.from_numpy(texts)


def train_target(options: Options, device: torch.device) -> LlamaForCausalLM:
    """A target that has learned short texts first, and whole ones in the second half of the time."""
    heads = options.hidden_size // 64
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=options.hidden_size, intermediate_size=3 * options.hidden_size,
        num_hidden_layers=options.layers, num_attention_heads=heads, num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=4096 + 2 * max(options.contexts), tie_word_embeddings=True, pad_token_id=PAD,
        bos_token_id=None, eos_token_id=None, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device)
    updates, texts = Updates(model, OptimConfig(weight_decay=0.1)), Texts(options.copied)
    begin, step, share = time.monotonic(), 0, 0.0
    while share < 1:
        length = options.length if share > 0.5 else max(256, options.length // 16)
        tokens = texts.draw(max(1, options.row_tokens // length), length).to(device)
        with autocast_on(device):
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = updates.update(
            F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()), min(1.0, step / 50, 1.05 - share)
        )
        step, share = step + 1, (time.monotonic() - begin) / options.target_seconds
        if step % 50 == 0:
            print(f"target: update {step} of texts of {length}, {float(loss):.3f} nats/token", file=sys.stderr)
    return model.to(torch.bfloat16 if device.type == "cuda" else torch.float32).eval().requires_grad_(False)


def train_head(kind: str, model: LlamaForCausalLM, options: Options, folder: str) -> DraftHead:
    """A head for the target, from texts of ``head_length`` tokens."""
    optim = OptimConfig(steps=100_000, batch_size=8, max_seconds=options.head_seconds, eval_every=10**6,
                        checkpoint_every=10**6)  # fmt: skip
    chain = ChainConfig(steps=options.drafts, anchors=0.1 if kind == "dflash" else 1.0)
    cfg = HeadTrainConfig(draft=kind, output=f"{folder}/{kind}", eval_drafts=options.drafts, chain=chain, optim=optim)
    drawn = Texts(options.copied, seed=1).draw(1024, options.head_length).tolist()
    learned, heldout = [Encoded(ids, 1) for ids in drawn[:-8]], [Encoded(ids, 1) for ids in drawn[-8:]]
    head = build_head(model, cfg, PAD, learned)
    teacher = Teacher(model, head.features)
    head.module.match_scale(teacher(torch.tensor(drawn[-2:], device=model.device)).hidden)
    _, measured = HeadLoop(ChainLoss(head, options.drafts, 0.0), teacher, cfg, lambda: None).run(learned, heldout, PAD)
    print(f"{kind}: {measured.acceptance_length:.2f} tokens per step on such texts", file=sys.stderr)
    trained = bf16_copy(head) if model.dtype == torch.bfloat16 else head
    trained.module.eval().requires_grad_(False)
    return trained


def steps_of(decoder: SpeculativeDecoder, prompts: list[list[int]], steps: int) -> tuple[float, float]:
    """Tokens per sequence and step, and seconds per step, of ``steps`` steps in which all prompts are done."""
    room = (decoder.config.max_length or 0) - len(prompts[0])  # some decode while the prompts of others run
    stream = decoder.stream(prompts, max_new_tokens=room, eos_token_id=[], temperature=1.0, seed=[*range(len(prompts))])
    with contextlib.closing(stream):
        next(chunk for chunk in stream if all(chunk.tokens))
        next(itertools.islice(stream, 4, None))
        begin = time.perf_counter()
        emitted = sum(len(own) for chunk in itertools.islice(stream, steps) for own in chunk.tokens)
        return emitted / steps / len(prompts), (time.perf_counter() - begin) / steps


def rows(model: LlamaForCausalLM, heads: dict[str, DraftHead], options: Options) -> Iterator[list[str]]:
    """The cells of the table, of plain decoding first. Everything is decoded once before it is measured."""
    texts = Texts(options.copied, seed=2).draw(options.batch, max(options.contexts))
    kinds: list[tuple[str, int | None]] = [("none", None), *itertools.product(heads, (None, options.window))]
    for kind, window in kinds:
        draft: dict[str, Any] = {"kind": kind, "num_speculative_tokens": options.drafts, "window": window}
        prompt_steps = options.batch * max(options.contexts) // 512
        longest = max(options.contexts) + (options.drafts + 1) * (options.steps + 16 + prompt_steps)
        config = {"draft": draft, "max_length": longest, "max_batch_size": options.batch}
        decoder = compile_speculative(model, {**config, "cache": {"reuse_prefixes": False}}, draft=heads.get(kind))
        for context in options.contexts:
            prompts = texts[:, :context].tolist()
            steps_of(decoder, prompts, 8)
            tokens, seconds = steps_of(decoder, prompts, options.steps)
            rate = options.batch * tokens / seconds
            yield [kind, str(window or "-"), str(context), f"{tokens:.2f}", f"{1e3 * seconds:.2f}", f"{rate:.0f}"]


def main() -> None:
    """Train, measure, and print a table of Markdown."""
    options: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Options), OmegaConf.from_cli(sys.argv[1:])))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = train_target(options, device)
    with tempfile.TemporaryDirectory() as folder:
        heads = {kind: train_head(kind, model, options, folder) for kind in options.heads}
    header = ["drafter", "window", "context", "tokens/step", "ms/step", "tokens/s"]
    for row in itertools.chain([header, ["---"] * 2 + ["---:"] * 4], rows(model, heads, options)):
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
