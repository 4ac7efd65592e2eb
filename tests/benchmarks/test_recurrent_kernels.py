"""The kernels of targets with recurrent layers: which ops are found, the bytes they move, and that they run."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, MambaConfig

from benchmarks.kernels import main
from benchmarks.recurrent import CACHED, KINDS, RecurrentCall, prompt_case, recurrent_calls, step_case
from benchmarks.sizes import Sizes
from specgraph.bench.models import shape_config
from specgraph.kernels.ops import find
from specgraph.kernels.recurrent.arguments import CHUNK
from specgraph.kernels.state import RECURRENT
from tests.models import BASE, HYBRIDS

CPU = torch.device("cpu")
DELTA, CONV, SCAN = "cached_delta_rule", "cached_conv", "cached_scan"
WORDS = {
    "olmo_hybrid": {CONV: "96 channels, 4 weights", DELTA: "4 heads of 8x8"},
    "kimi_linear": {CONV: "96 channels, 4 weights", DELTA: "4 heads of 8x8, gates per channel"},
    "mamba2": {CONV: "128 channels, 4 weights", DELTA: "8 heads of 16x8, 2 of keys, no corrections"},
    "mamba": {CONV: "48 channels, 4 weights", SCAN: "48 channels of 8"},
    "lfm2": {CONV: "32 channels, 3 weights"},
}
"""What is said of the ops of each target, see tests.models."""


@functools.cache
def calls_of(architecture: str, dtype: torch.dtype = torch.float32) -> tuple[RecurrentCall, ...]:
    config = AutoConfig.for_model(architecture, **{**BASE, **HYBRIDS[architecture]})
    return tuple(recurrent_calls(config, dtype))


def test_every_recurrent_op_has_cases() -> None:
    assert KINDS.keys() == RECURRENT.keys()


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_the_ops_of_every_target_are_found(architecture: str) -> None:
    """Layers that are alike count once; Zamba2's two have equal shapes."""
    found = [find(RECURRENT[call.op].op) for call in calls_of(architecture)]
    names = [op.name for op in found if op is not None]
    assert len(names) == len(set(names)) and CONV in names
    if architecture in WORDS:
        words = {
            name: KINDS[call.op].words(call.operands) for name, call in zip(names, calls_of(architecture), strict=True)
        }
        assert words == WORDS[architecture]


def test_a_target_without_recurrent_layers_has_none() -> None:
    assert recurrent_calls(shape_config("tiny-shape"), torch.float32) == []


STATE = 4 * 8 * 8
ROW = 4 * 8 + 4 * 8 + 4 + 4 * CHUNK
"""Elements of the states of four heads, and of a cached row: key, error, gate and row of the inverse."""


def test_bytes_of_the_delta_rule() -> None:
    """A step reads the state, and a chunk of a prompt writes it, too. A row has q, k, v, gate, rate and a result."""
    (_, call) = calls_of("olmo_hybrid")
    inputs = 4 * 4 * 8 + 2 * 4
    step = step_case(call, 2, 3, CPU)
    assert (step.kernel, step.shape) == (DELTA, f"4 heads of 8x8, batch 2, 3 rows, {CACHED} behind a boundary")
    assert step.bytes == 4 * 2 * (STATE + ROW * (CACHED + 3) + 3 * inputs)
    prompt = prompt_case(call, 40, CPU)
    assert prompt.shape == "4 heads of 8x8, batch 1, 40 rows of a prompt"
    assert prompt.bytes == 4 * (2 * STATE + ROW * CHUNK + 40 * inputs)


@pytest.mark.parametrize("architecture", WORDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_calls_run_and_a_step_repeats(architecture: str, dtype: torch.dtype) -> None:
    for call in calls_of(architecture, dtype):
        for case in (step_case(call, 2, 3, CPU), step_case(call, 1, 1, CPU), prompt_case(call, 40, CPU)):
            run, libraries = case.make()
            first, second = run(), run()
            assert isinstance(first, Tensor) and isinstance(second, Tensor) and not libraries
            assert first.isfinite().all() and first.count_nonzero() > 0.9 * first.numel(), case.shape
            assert "prompt" in case.shape or torch.equal(first, second), case.shape


def test_of_a_target_without_attention_only_the_vocabulary_is_a_known_linear() -> None:
    sizes = Sizes.of(MambaConfig(hidden_size=32, vocab_size=101))
    assert sizes.linears == {"lm_head": (32, 101)}


def test_the_script_times_recurrent_ops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = MambaConfig(hidden_size=32, vocab_size=101, num_hidden_layers=1, state_size=8)
    config.save_pretrained(tmp_path / "model")
    given = [f"target={tmp_path / 'model'}", "device=cpu", "dtype=float32", "steps=3", "warmup=1", "prompt_length=9"]
    rows = main([*given, "batch_sizes=[2]", "num_speculative_tokens=[2]", "cache.prefill_chunk=32"])
    assert f"{SCAN}, 64 channels of 8, batch 2, 3 rows, 7 behind a boundary: " in capsys.readouterr().out
    found = [row for row in rows if row["kernel"] == SCAN]
    assert [row["shape"] for row in found] == [
        f"64 channels of 8, batch {where}"
        for where in ("2, 1 rows, 7 behind a boundary", "2, 3 rows, 7 behind a boundary", "1, 32 rows of a prompt")
    ]
    assert all(row["us"] > 0 and row["library"] is None for row in found)
    assert all(row["limit_us"] == pytest.approx(row["bytes"] / 1e3) for row in found)
    assert {row["kernel"] for row in rows} >= {SCAN, CONV, "linear", "rms_norm", "verify"}
    assert "paged_attention" not in {row["kernel"] for row in rows}
