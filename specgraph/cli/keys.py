"""The keys of the commands beyond those of ``Config``, a class for each command."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from specgraph.cli.generation import FurtherKeys, GenerationKeys
from specgraph.config import Config, DraftConfig
from specgraph.config.drafters import DraftKeys


@dataclass
class ModelConfig(Config):
    """Keys of every command that compiles a model."""

    model: str = MISSING
    """The target: a folder or a name for AutoModelForCausalLM, or a GGUF file, which is dequantised."""
    gguf_file: str | None = None
    """The name of a GGUF file in the folder `model`; the same as model=FOLDER/FILE.gguf."""
    dtype: str = "auto"
    """float32, bfloat16, float16 or float64; auto is float32 on a CPU and the checkpoint's own elsewhere."""
    device: str = "auto"
    """cpu, cuda, cuda:1 and so on; auto takes a GPU if there is one."""
    trust_remote_code: bool = False
    """Run the code of a model or tokenizer that is not transformers' own."""


@dataclass
class GenerateConfig(GenerationKeys, FurtherKeys, ModelConfig):
    """Keys of ``generate``."""

    prompt: str | None = None
    """One text to continue, taken literally."""
    prompts: str | None = None
    """A file: .txt (one text per line) or .jsonl (a text in the field `question` or `prompt`, or `messages`, a list of
    objects with `role` and `content`, which the tokenizer's chat template joins; beside them, `tools` and
    `chat_template_kwargs` of this conversation)."""
    tools: Any = None
    """The functions that the model may call, in all conversations: a JSON file with a list of schemas, or the list."""
    chat_template_kwargs: Any = None
    """Further variables of the chat template for all conversations: chat_template_kwargs={enable_thinking: false}."""
    template: str | None = None
    """A text in which every prompt takes the place of {question} or {prompt}; \\n is a new line:
    template="Question: {question}\\nAnswer:"."""
    limit: int | None = None
    """How many prompts of the file are read; null reads all."""
    batch_size: int | None = None
    """How many prompts are decoded together; null is max_batch_size."""
    engine: str = "local"
    """local, or ray: decode in several processes by Ray Data, on one machine or, where RAY_ADDRESS names a cluster, on
    many. The texts are the same."""
    workers: int | None = None
    """With engine=ray, how many processes have a decoder; null is one per GPU, and one where there is none."""
    format: str = "text"
    """text, or jsonl: one JSON object per prompt on standard output, in the order of the prompts and each as soon as it
    is done, with prompt (or messages), text, tokens, finish_reason and stats; the table goes to standard error."""
    stream: bool = False
    """Print text while it is decoded, one prompt after the other."""
    trace: str | None = None
    """Write what happened to every draft to this file, one JSON object per line; - prints it, with colours on a
    terminal."""
    plot: str | None = None
    """Draw the share of steps that accepted each draft position to this file (.png, .svg or .pdf); in a sweep, a curve
    for each job. Needs matplotlib."""
    compare: bool = False
    """Decode with draft=none, too, and with transformers' generate (and assisted generation, if the draft is a model),
    unless there are stop_strings or a max_time. Print the ratios of speeds, and whether the tokens equal those of
    draft=none."""


@dataclass
class DumpConfig(ModelConfig):
    """Keys of ``dump``."""

    out: str = "graphs"
    """The folder for the graphs."""
    weights: bool | None = None
    """Save the parameters beside the graphs; null does so up to 256 MB."""


@dataclass
class ExploreConfig:
    """Keys of ``explore``."""

    dump: str = MISSING
    """The folder that `dump`, or decoder.dump, wrote."""
    trace: str | None = None
    """The file that `generate trace=FILE` wrote with the same model and options; the page then shows every draft."""
    out: str = "explore.html"
    """The file for the page, in a folder that exists."""
    bandwidth: float | None = None
    """GB/s of the memory that holds the weights, for the limit of a step's time; null measures it on this machine, if
    there is a trace."""


@dataclass
class DiffConfig:
    """Keys of ``diff``."""

    old: str = MISSING
    """A folder that `dump` wrote, or the folder of one stage in it."""
    new: str = MISSING
    """Another one of the same kind."""
    graph: str | None = None
    """step, target or another module: compare this graph alone, and show all of it; null compares all graphs."""
    numerics: bool = False
    """Run both on the same random tokens, and name the first node whose value differs; the dumps must have weights."""


@dataclass
class InspectConfig:
    """Keys of ``inspect``."""

    path: str = MISSING
    """The checkpoint: its folder, or one weights file in it."""
    target: str | None = None
    """A model, as a folder or a name; inspect says whether the checkpoint fits it. Its weights are not loaded."""
    draft: DraftConfig = field(default_factory=DraftKeys)
    """Options that override the checkpoint's, as for `generate`."""
