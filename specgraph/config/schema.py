"""The keys of the configuration, except those of ``draft``: their types, and what they mean.

The string below a field is its help on the command line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specgraph.config.draft import DraftConfig
from specgraph.config.drafters import DraftKeys
from specgraph.config.groups import conf_files

LOWERINGS = ("auto", "eager", "inductor", "gpu")
NUMERICS = ("bitwise", "fast")
MOST_DEVICES = 8
"""The most devices that share one target."""


@dataclass
class VerifyConfig:
    """How drafts are accepted."""

    rule: str = "strict"
    """strict, probabilistic, block; typical and synthetic are lossy."""
    posterior_threshold: float = 0.09
    """typical: the acceptance threshold (epsilon)."""
    posterior_alpha: float = 0.3
    """typical: its factor on exp(-entropy) (delta)."""
    acceptance_rate: float = 0.7
    """synthetic: the probability that a draft is accepted."""
    odd_acceptance_rate: float | None = None
    """synthetic: the probability in sequences with an odd seed; null: the same."""


@dataclass
class CacheConfig:
    """The KV cache."""

    block_size: int = 16
    """Tokens per page."""
    prefill_chunk: int = 2048
    """Prompt tokens of a sequence per prefill step, at most. A GPU takes less time per token in larger steps."""
    pool_tokens: int | None = None
    """The most tokens that the pages of a session, or of a generate call, hold, all its sequences together; null: as
    many as it can use, but no more than memory_share allows."""
    memory_share: float | None = None
    """The largest share of the free memory that the pages of a session take; null: 0.9. On a CPU, a session with
    neither this nor pool_tokens takes less: pages for 2,048 tokens of each sequence, in at most a quarter of the free
    memory, but always for one sequence of max_length."""
    reuse_prefixes: bool = True
    """Sequences that begin with the same tokens share the pages of these, with the same bits."""
    snapshots: int | None = None
    """How many copies of recurrent state are kept for later sequences that begin with the same tokens; null: two for
    each of max_batch_size sequences, 16 at least, but no more than a tenth of the free memory."""


@dataclass
class PipelineConfig:
    """Which passes run, in this order, and what is checked in between."""

    order: list[str] = field(default_factory=lambda: list(conf_files()["pipeline/default"]["order"]))
    """Names of passes, applied top to bottom."""
    verify: bool = True
    """Check the program after every pass."""


@dataclass
class LoweringConfig:
    """How the graphs are run."""

    name: str = "auto"
    """eager, inductor (compiled code), gpu (Triton kernels and a CUDA graph), or auto, which is gpu on a GPU, inductor
    on a CPU if there is a C++ compiler, and else eager, as always in float64."""
    kernels: bool | None = None
    """Rewrite the graphs for our own kernels; null: as the name says."""
    remainder: str | None = None
    """How the nodes run that none of our kernels covers, eager or inductor; null: as the name says."""
    cuda_graph: bool | None = None
    """Replay the whole step as one CUDA graph; null: as the name says, on a GPU."""


@dataclass
class ParallelConfig:
    """Several devices for the target: GPUs of this machine, or devices of a CPU, which take turns."""

    tensor: int = 1
    """How many devices share each linear layer and the heads of attention."""
    devices: list[str] | None = None
    """Their names, such as [cuda:0, cuda:1] or [cpu, cpu]; null: the target's own and the GPUs that follow it, or so
    many devices of a CPU. A target that is on the CPU is moved to the GPUs that are named, to each its part."""


@dataclass
class DebugConfig:
    """Checks, dumps and progress."""

    dump_dir: str | None = None
    """Write the graphs of every stage to this folder after compiling."""
    self_check: bool = True
    """Compare cached decoding with the model's own forward on random tokens before trusting it."""
    self_check_tokens: int = 1024
    """The longest sequence that the self-check runs. It reports sliding windows that are longer, since it cannot test
    them."""
    progress: bool | None = None
    """Show progress of long work on standard error; null shows it on a terminal."""


@dataclass
class Config:
    """Everything `compile_speculative` can be told."""

    draft: DraftConfig = field(default_factory=DraftKeys)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    passes: dict[str, Any] = field(default_factory=dict)
    """The options of every pass, as passes.NAME.OPTION."""
    lowering: LoweringConfig = field(default_factory=LoweringConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    numerics: str = "bitwise"
    """On a GPU: bitwise (the bits of a row do not depend on the other rows) or fast (they may depend on them; no node
    is refused)."""
    check_numerics: bool = False
    """Run every stage on the same input and name the first pass whose output differs."""
    max_batch_size: int = 64
    """The most sequences that are decoded together; others wait for a row."""
    max_length: int | None = None
    """The longest sequence, which includes the prompt; null takes the model's own limit. With the rope types
    longrope and dynamic, that is the original length of pretraining; a larger one gives all sequences the rotary
    frequencies of long ones."""
