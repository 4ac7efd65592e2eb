"""The configuration of ``python -m specgraph bench``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from specgraph.config import Config
from specgraph.config.compose import AUTO
from specgraph.config.errors import did_you_mean
from specgraph.config.schemes import SCHEMES
from specgraph.errors import ConfigError
from specgraph.plots import check_plot

KINDS = ("steps", "first_token", "sessions", "cpu", "tune")


@dataclass
class BenchConfig(Config):
    """Keys of ``bench``. A drafter that is named without a checkpoint, as in ``draft=eagle3``, gets a random head."""

    what: str = "steps"
    """steps: whole decode steps; first_token: whole requests for one token; sessions: many prompts at once, and in
    batches of max_batch_size; cpu: whole answers, one prompt at a time, beside transformers' generate and its assisted
    generation; tune: acceptance and step times of several drafts, rules and K on a file of prompts, and which of them
    to take for each number of sequences.
    """
    target: str = MISSING
    """llama-3-8b-shape, llama-3-70b-shape, llama-3.2-1b-shape, qwen3-30b-a3b-shape, gpt-oss-20b-shape,
    gpt-oss-120b-shape, qwen3.5-9b-shape, qwen3.5-small-shape or tiny-shape (random weights), or the folder or name of a
    model.
    """
    weights: str | None = None
    """int4, mxfp4, fp8 or another scheme of specgraph.quantise: the weights of a shape are packed in it; null leaves
    them in dtype.
    """
    batch_sizes: list[int] | None = None
    """Numbers of sequences that are decoded together; each is measured. null: [1,8,32], and [1,8] for first_token."""
    num_speculative_tokens: list[Any] | None = None
    """Values of K; each is measured. They take the place of draft.num_speculative_tokens. tune knows auto, too. null:
    [3,7], and [3,7,auto] for tune."""
    prompt_lengths: list[int] = field(default_factory=lambda: [128, 2048, 8000])
    """first_token: lengths of the random prompts; each is measured."""
    num_prompts: int = 256
    """sessions: how many prompts are decoded; those of a file are repeated if there are fewer."""
    prompt_range: list[int] = field(default_factory=lambda: [64, 1024])
    """sessions: the shortest and the longest random prompt."""
    new_range: list[int] = field(default_factory=lambda: [16, 512])
    """sessions: the fewest and the most tokens that a random prompt adds. One of a file ends at its EOS, and adds the
    most of these at the latest.
    """
    prompt_length: int = 128
    """The length of the random prompt of every sequence."""
    steps: int = 50
    """How many decode steps are measured; the result is the median."""
    warmup: int = 5
    """How many decode steps run before those that are measured."""
    drafts: list[str] = field(default_factory=lambda: ["none", "ngram"])
    """cpu, tune: what drafts, each by the folder of a checkpoint or by the name of a drafter. For cpu, a head that is
    named without a checkpoint is random, and verify.rule, by default synthetic, decides about its drafts; all others
    run strict."""
    rules: list[str] = field(default_factory=lambda: ["strict"])
    """tune: verification rules; each is measured."""
    temperature: float = 0.0
    """tune: of the requests. At 0 all lossless rules accept the same drafts."""
    threads: list[int] = field(default_factory=lambda: [1, 2])
    """cpu: numbers of threads; each is measured."""
    prompts: str | None = None
    """sessions, cpu, tune: a file of prompts, as for `generate`; null makes random ones, for cpu of prompt_length
    tokens. tune needs a file."""
    template: str | None = None
    """sessions, cpu, tune: a text around each prompt of the file, as for `generate`."""
    limit: int | None = None
    """cpu, tune: how many prompts are decoded; null: 4 for cpu and 32 for tune."""
    new_tokens: int = 96
    """cpu, tune: the most tokens that are added to a prompt."""
    rounds: int = 5
    """sessions, cpu: how often everything is decoded; the best time counts."""
    dtype: str = "auto"
    """float32, bfloat16, float16 or float64; auto is float32 on a CPU, bfloat16 or the checkpoint's own elsewhere."""
    device: str = "auto"
    """cpu, cuda, cuda:1 and so on; auto takes a GPU if there is one."""
    trust_remote_code: bool = False
    """Run the code of a model or tokenizer that is not transformers' own."""
    json: str | None = None
    """Also write the results to this file."""
    plot: str | None = None
    """Also draw the results to this file (.png, .svg or .pdf); needs matplotlib."""

    @property
    def num_decoded(self) -> int:
        """How many prompts are decoded."""
        return self.limit or (32 if self.what == "tune" else 4)

    @property
    def counts(self) -> list[Any]:
        """The values of K that are measured."""
        return self.num_speculative_tokens or [3, 7, *[AUTO] * (self.what == "tune")]

    @property
    def batches(self) -> list[int]:
        """The numbers of sequences that are measured."""
        return self.batch_sizes or ([1, 8] if self.what == "first_token" else [1, 8, 32])


def check_bench_config(config: BenchConfig) -> None:
    """Refuse values that cannot be measured, before a model is built.

    Raises:
        ConfigError: a value is not allowed; the message says which are.
    """
    check_kind(config.what)
    _check_numbers(config)
    _check_weights(config)
    if config.prompts is not None and config.target.endswith("-shape"):
        raise ConfigError(
            f"prompts={config.prompts} needs a tokenizer, and target={config.target} has none; give the folder of a "
            "model, or leave prompts out."
        )
    _check_files(config)


def check_kind(what: str) -> None:
    """Refuse what ``bench`` cannot measure.

    Raises:
        ConfigError: says what there is.
    """
    if what not in KINDS:
        known = f"{', '.join(KINDS[:-1])} or {KINDS[-1]}"
        raise ConfigError(f"There is no bench {what}{did_you_mean(what, KINDS)}; it is {known}.")


def _check_numbers(config: BenchConfig) -> None:
    for key in ("batch_sizes", "prompt_lengths", "num_speculative_tokens", "threads"):
        values, word = getattr(config, key), AUTO if (key, config.what) == ("num_speculative_tokens", "tune") else None
        if values is not None and not (values and all(v == word or (type(v) is int and v > 0) for v in values)):
            allowed = f"numbers from 1 up{f', or {word}' if word else ''}"
            raise ConfigError(f"{key} is a list of {allowed}, such as [1,8], got {values}.")
    for key in ("prompt_range", "new_range"):
        values = getattr(config, key)
        if len(values) != 2 or not 1 <= values[0] <= values[1]:
            raise ConfigError(f"{key} is the least and the most, such as [16,512], got {values}.")
    for key in ("prompt_length", "steps", "warmup", "num_prompts", "limit", "new_tokens", "rounds"):
        value, low = getattr(config, key), 0 if key == "warmup" else 1
        if value is not None and value < low:
            raise ConfigError(f"{key} must be at least {low}, got {value}.")


def _check_weights(config: BenchConfig) -> None:
    if config.weights is None:
        return
    if config.weights not in SCHEMES:
        raise ConfigError(f"weights={config.weights} is no scheme; allowed is {', '.join(SCHEMES)}.")
    if not config.target.endswith("-shape"):
        raise ConfigError(
            f"weights={config.weights} is for shapes, and target={config.target} is none; quantise the model with "
            "specgraph.quantise and save it, and give its folder."
        )


def _check_files(config: BenchConfig) -> None:
    if config.json is not None and not Path(config.json).expanduser().absolute().parent.is_dir():
        raise ConfigError(f"json={config.json}: there is no folder for that file; create it first.")
    if config.plot is None:
        return
    if config.what == "cpu":
        raise ConfigError(f"plot={config.plot}: bench cpu has no limits to draw; leave plot out, or write json=FILE.")
    check_plot(config.plot)
