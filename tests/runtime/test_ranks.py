"""Several GPUs that share a target, of which devices of a CPU take the places: each runs its graphs in a thread."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph import ConfigError, NumericsError, SpeculativeDecoder
from specgraph.cli.loading import shared_place
from specgraph.compiler import compile as compiling
from specgraph.config import load_config
from specgraph.ir.traffic import STAGE, sent_bytes
from specgraph.kernels.peers import ThreadGroup, not_waiting
from specgraph.runtime.execution import runner_pool
from specgraph.runtime.memory.snapshots import Snapshots
from tests.decoding import compiled, in_a_stream_and_a_session
from tests.models import ragged_prompts, shared_model

PROMPTS = ragged_prompts((3, 17, 8, 1))
COUNT, NEW = 2, 12


class Threads:
    """Makes pools that replay a graph by calling its function: the first rank's waits for those of the others."""

    def __init__(self) -> None:
        self._made = 0
        self._others = [ThreadPoolExecutor(1) for _ in range(COUNT)]
        self._under_way: list[Future[Any]] = []

    def __call__(self, device: torch.device) -> Any:
        self._made += 1
        return Pool(self, (self._made - 1) % COUNT)

    def replay(self, rank: int, function: Callable[[], object]) -> None:
        """Run a function in the thread of its rank, or here for the first one, which the others then have met."""
        if rank:
            run = contextvars.copy_context().run
            self._under_way.append(self._others[rank].submit(run, torch.no_grad()(function)))
        else:
            function()
            self.settle()

    def settle(self) -> None:
        """Wait for the other ranks, as what follows on a stream does."""
        for other in self._under_way:
            other.result(60)
        self._under_way.clear()


class Pool:
    """What a workspace takes for a GPU's pool of graphs."""

    num_bytes = 0

    def __init__(self, threads: Threads, rank: int) -> None:
        self._threads, self._rank = threads, rank

    def capture(self, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        with not_waiting():
            packed = function()

        def replay() -> None:
            self._threads.replay(self._rank, lambda: packed.copy_(function()))

        return replay, packed


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SpeculativeDecoder]:
    cpu, load_snapshots = torch.device("cpu"), Snapshots.load
    monkeypatch.setattr(compiling, "shared_gpus", lambda config, device: [cpu] * config.parallel.tensor)
    monkeypatch.setattr(runner_pool, "PeerGroup", lambda devices: ThreadGroup(len(devices)))

    def make(kind: str, k: int = 1, architecture: str = "llama", **extra: Any) -> SpeculativeDecoder:
        model = shared_model(architecture, dtype=torch.float64)
        decoder = compiled(model, kind, k, parallel={"tensor": COUNT}, **extra)
        for program in (decoder._program, *decoder._runners.others):
            program.captured = True
        decoder._runners.make_pool = threads = Threads()

        def load(own: Snapshots, given: Any) -> None:
            threads.settle()
            load_snapshots(own, given)

        monkeypatch.setattr(Snapshots, "load", load)
        return decoder

    return make


@pytest.mark.parametrize(("kind", "k"), [("none", 1), ("ngram", 4)])
def test_tokens_are_those_of_one_device(ranks: Callable[..., SpeculativeDecoder], kind: str, k: int) -> None:
    one, many = compiled(shared_model("llama", dtype=torch.float64), kind, k), ranks(kind, k)
    for options in ({}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.3}):
        found, expected = (own.generate(PROMPTS, max_new_tokens=NEW, **options) for own in (many, one))
        assert all(map(torch.equal, found.new_tokens, expected.new_tokens))
        assert found.stats.emitted_per_step == expected.stats.emitted_per_step
    assert len(many.ranks) == COUNT and [*many.ranks[1]][:4] == [*many.stages][:4]


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5_text"])
def test_streams_sessions_cut_prompts_and_shared_prefixes(
    ranks: Callable[..., SpeculativeDecoder], architecture: str
) -> None:
    cache = {"prefill_chunk": 5, "block_size": 4, "reuse_prefixes": True}
    expected = [own.tolist() for own in compiled(shared_model(architecture, dtype=torch.float64), "none").generate(
        PROMPTS, max_new_tokens=NEW).new_tokens]  # fmt: skip
    many = ranks("ngram", 3, architecture, cache=cache, max_batch_size=2)
    streamed, in_session, _ = in_a_stream_and_a_session(many, PROMPTS, max_new_tokens=NEW)
    assert streamed == in_session == expected
    again, once_more, stats = in_a_stream_and_a_session(many, [PROMPTS[1]] * 3, max_new_tokens=NEW)
    assert again == once_more == [expected[1]] * 3 and stats.reused_tokens > 0


def test_a_cancelled_sequence_stops_on_every_device(ranks: Callable[..., SpeculativeDecoder]) -> None:
    many = ranks("none")
    expected = many.generate(PROMPTS, max_new_tokens=NEW).new_tokens
    with many.session() as session:
        first, second = (session.submit(PROMPTS[row], max_new_tokens=NEW) for row in (1, 2))
        session.step()
        session.cancel(first)
        tokens = [token for event in session for token in event.tokens if event.id == second]
        memories = [session._engine._runner.space, *session._engine._runner.space.others]
        assert all(not bool(memory.state["num_rows"].any()) for memory in memories)
    assert tokens == expected[2].tolist()


@pytest.mark.parametrize(("kind", "k"), [("none", 1), ("ngram", 3)])
def test_the_host_takes_part_in_steps(ranks: Callable[..., SpeculativeDecoder], kind: str, k: int) -> None:
    """With some sequences and not with others, in prompt steps and in decode steps."""

    def even(batch: int, ids: Tensor) -> list[int]:
        return list(range(int(ids[-1]) % 2, 60, 2))

    one, many = compiled(shared_model("llama", dtype=torch.float64), kind, k), ranks(kind, k)
    for options in ({}, {"temperature": 1.0, "seed": 3}):
        given: dict[str, Any] = {"max_new_tokens": NEW, "prefix_allowed_tokens_fn": even, **options}
        found, expected = (own.generate(PROMPTS, **given) for own in (many, one))
        assert all(map(torch.equal, found.new_tokens, expected.new_tokens))
        plain = [own.generate(PROMPTS, max_new_tokens=NEW, **options).new_tokens for own in (many, one)]
        assert all(map(torch.equal, *plain))
        assert not all(map(torch.equal, found.new_tokens, plain[0]))


def test_tokens_are_scored_with_the_bits_that_they_were_drawn_with(ranks: Callable[..., SpeculativeDecoder]) -> None:
    many = ranks("ngram", 3, cache={"prefill_chunk": 5, "block_size": 4})
    settings: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.7, "top_k": 20})
    for logprobs, options in zip(("raw", "processed"), settings, strict=True):
        seeded = {"seed": 4} if options else {}
        out = many.generate(PROMPTS, max_new_tokens=NEW, return_logprobs=logprobs, **options, **seeded)
        scored = many.score(out, logprobs=logprobs, **options)
        assert all(map(torch.equal, scored.logprobs, out.logprobs))
        assert options or all(bool(row.all()) for row in scored.is_greedy)
    one = compiled(shared_model("llama", dtype=torch.float64), "none").score(out)
    assert all(map(torch.equal, many.score(out).logprobs, one.logprobs))


def test_a_dump_has_the_programs_of_every_device(ranks: Callable[..., SpeculativeDecoder], tmp_path: Path) -> None:
    many = ranks("none")
    for _ in range(2):  # a dump replaces an earlier one
        many.dump(tmp_path / "graphs")
    other = tmp_path / "graphs" / "device_1"
    assert [path.name for path in sorted(other.glob("0*"))] == [path.name for path in sorted(other.parent.glob("0*"))]
    shard = next(other.glob("*_shard"))
    written = "".join(path.read_text() for path in shard.glob("*.py"))
    assert "rank=1, world_size=2" in written and "rank=0" not in written
    assert "this is the graph of device 1" in (other / "report.md").read_text()


def test_bytes_that_are_sent_to_other_devices(ranks: Callable[..., SpeculativeDecoder]) -> None:
    many, one = ranks("none"), compiled(shared_model("llama", dtype=torch.float64), "none")
    text = many.model.config
    sums = 2 * text.num_hidden_layers  # behind attention and behind the MLP
    assert sent_bytes(many.stages[STAGE], 3) == 3 * sums * text.hidden_size * 8 * (COUNT - 1)
    assert sent_bytes(one.stages[STAGE], 3) == 0


def test_a_gpu_that_waited_in_vain_is_named_and_the_next_call_begins_anew(
    ranks: Callable[..., SpeculativeDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    many = ranks("none")
    expected = many.generate(PROMPTS, max_new_tokens=NEW).new_tokens
    broken = many._runners.idle
    assert broken is not None and isinstance(broken.group, ThreadGroup)
    monkeypatch.setattr(broken.group, "waited_in_vain", lambda: ["cuda:1"])
    monkeypatch.setattr(broken.group, "gather", lambda part, rank: [part * torch.nan] * COUNT)
    for fails in (lambda: many.generate(PROMPTS, max_new_tokens=NEW), lambda: many.score(PROMPTS[:2])):
        many._runners.idle = broken
        with pytest.raises(NumericsError, match=r"cuda:1 waited in vain for what another GPU of cpu, cpu should"):
            fails()
    assert all(map(torch.equal, many.generate(PROMPTS, max_new_tokens=NEW).new_tokens, expected))


def test_a_model_on_the_cpu_is_for_the_gpus_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)

    def shared(device: str, **parallel: Any) -> list[str]:
        config = load_config({"parallel": parallel})
        return [str(gpu) for gpu in compiling.shared_gpus(config, torch.device(device))]

    assert shared("cpu", tensor=2, devices=["cuda:1", "cuda:3"]) == ["cuda:1", "cuda:3"]
    assert shared("cuda:1", tensor=3) == ["cuda:1", "cuda:0", "cuda:2"]
    assert shared("cpu", tensor=2) == shared("cpu", tensor=2, devices=["cpu", "cpu"]) == []
    with pytest.raises(ConfigError, match="begins with cuda:1, and the model is on cuda:0; move it there, or"):
        shared("cuda:0", tensor=2, devices=["cuda:1", "cuda:0"])
    with pytest.raises(ConfigError, match="GPUs, and there are 4"):
        shared("cpu", tensor=2, devices=["cuda:0", "cuda:4"])


def test_the_command_line_loads_a_shared_model_on_the_cpu() -> None:
    config = load_config({"parallel": {"tensor": 2}})
    assert shared_place(config, ("cuda:1", "auto")) == ("cpu", "auto")
    assert config.parallel.devices == ["cuda:1", "cuda:2"]
    for kept in ({}, {"tensor": 2, "devices": ["cpu", "cpu"]}):
        assert shared_place(load_config({"parallel": kept}), ("cpu", "float32")) == ("cpu", "float32")
    assert shared_place(load_config(None), ("cuda", "bfloat16")) == ("cuda", "bfloat16")
