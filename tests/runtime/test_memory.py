"""What a session takes on a CPU: how much at most, and how much of it is resident."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specgraph import SpeculativeDecoder
from specgraph.ir.state import untouched_zeros
from specgraph.runtime.memory import sizing as memory
from specgraph.runtime.memory.host_memory import available_bytes
from specgraph.runtime.memory.pages import num_pages
from specgraph.runtime.memory.sizes import StateSizes
from tests.decoding import CONFIG, compiled
from tests.models import make_model

GIB, MIB = 1 << 30, 1 << 20
V1, V2 = 9223372036854771712, "max"
"""What a group without a limit says in both versions."""


def tree(folder: Path, groups: str, **files: object) -> Path:
    """A file system in which 8 GiB are available, and a process is in ``groups``. Names have ``__`` for slashes."""
    written = {"proc/meminfo": f"MemTotal: {16 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\n",
               "proc/self/cgroup": groups}  # fmt: skip
    written |= {f"sys/fs/cgroup/{name.replace('__', '/')}": str(text) for name, text in files.items()}
    for name, text in written.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    return folder


def in_version_1(name: str, limit: object, used: int, inactive: int = 0) -> dict[str, object]:
    return {f"memory__{name}memory.limit_in_bytes": limit, f"memory__{name}memory.usage_in_bytes": used,
            f"memory__{name}memory.stat": f"cache 1\ntotal_inactive_file {inactive}"}  # fmt: skip


def in_version_2(name: str, limit: object, used: int, inactive: int = 0) -> dict[str, object]:
    return {
        f"{name}memory.max": limit,
        f"{name}memory.current": used,
        f"{name}memory.stat": f"inactive_file {inactive}",
    }


ONE, TWO = "4:cpu:/\n3:memory:/outer/inner\n0::/", "0::/outer/inner"
TREES: dict[str, tuple[str, dict[str, object], int]] = {
    "no groups": ("", {}, 8 * GIB),
    "v2 without a limit": (TWO, in_version_2("outer__inner__", V2, GIB), 8 * GIB),
    "v2": (TWO, in_version_2("outer__inner__", 4 * GIB, GIB), 3 * GIB),
    "v2, a cache of files": (TWO, in_version_2("outer__inner__", 4 * GIB, 3 * GIB, 2 * GIB), 3 * GIB),
    "v2, the limit of a group around it": (TWO, in_version_2("outer__inner__", V2, GIB)
                                           | in_version_2("outer__", 4 * GIB, 2 * GIB), 2 * GIB),
    "v2, inside of a container": ("0::/", in_version_2("", 2 * GIB, GIB), GIB),
    "v2, a path of the host": ("0::/../outer", in_version_2("", 2 * GIB, GIB), GIB),
    "v2, more than there is": (TWO, in_version_2("outer__inner__", 64 * GIB, GIB), 8 * GIB),
    "v2, more than its limit": (TWO, in_version_2("outer__inner__", GIB, 2 * GIB), 0),
    "v1 without a limit": (ONE, in_version_1("outer__inner__", V1, GIB), 8 * GIB),
    "v1": (ONE, in_version_1("outer__inner__", 4 * GIB, 2 * GIB, GIB), 3 * GIB),
    "v1, the limit of a group around it": (ONE, in_version_1("outer__inner__", V1, GIB)
                                           | in_version_1("outer__", 4 * GIB, 2 * GIB), 2 * GIB),
    "v1, inside of a container": (ONE, in_version_1("", 2 * GIB, GIB), GIB),
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_the_limit_of_a_control_group_is_seen(name: str, tmp_path: Path) -> None:
    groups, files, expected = TREES[name]
    assert available_bytes(tree(tmp_path, groups, **files)) == expected


def test_without_linux_the_free_pages_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"SC_AVPHYS_PAGES": 5, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr("os.sysconf", sizes.__getitem__)
    assert available_bytes(tmp_path) == 5 * 4096
    monkeypatch.setattr("os.sysconf", {}.__getitem__)
    with pytest.raises(KeyError):
        available_bytes(tmp_path)
    monkeypatch.delattr("os.sysconf")
    assert available_bytes(tmp_path) == math.inf


def test_what_is_available_on_this_machine_is_found() -> None:
    assert 0 < available_bytes() < 1 << 50


def test_large_pools_are_zeros_that_can_be_written() -> None:
    pool = untouched_zeros([1024, 16, 2, 64], torch.bfloat16)
    assert pool.shape == (1024, 16, 2, 64) and pool.dtype == torch.bfloat16
    assert pool.is_contiguous() and pool.data_ptr() % 64 == 0 and not pool.count_nonzero()
    pool[7] = 1
    assert int(pool.count_nonzero()) == 16 * 2 * 64


def decoder_of(**cache: Any) -> SpeculativeDecoder:
    """One with pages of 16 tokens, and 4 sequences of up to 16,384 tokens each."""
    model = make_model("llama", max_position_embeddings=16384)
    return compiled(model, "none", max_batch_size=4, cache={**CONFIG["cache"], "block_size": 16, **cache})


def test_a_session_has_pages_for_2048_tokens_of_each_sequence_and_for_one_of_the_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder, plenty = decoder_of(), 1 << 40
    monkeypatch.setattr(memory, "free_bytes", lambda device: plenty)
    longest = num_pages(16384, 16)
    with decoder.session() as session:
        assert session.capacity.pages == longest
    sizes, program = StateSizes(4, 1, 4 * longest, 1), decoder._program
    cache = decoder.config.cache
    assert memory.modest(program, cache, sizes).num_pages == 4 * num_pages(2048, 16)
    page = memory.page_bytes(program)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 400 * page)
    assert memory.modest(program, cache, sizes).num_pages == 100
    assert memory.modest(program, cache, replace(sizes, pages_per_sequence=longest)).num_pages == longest
    monkeypatch.setattr(memory, "free_bytes", lambda device: math.inf)
    assert memory.modest(program, cache, sizes).num_pages == 4 * num_pages(2048, 16)
    assert memory.modest(program, replace(cache, memory_share=0.9), sizes) == sizes
    assert memory.modest(program, replace(cache, pool_tokens=1 << 20), sizes) == sizes


def test_what_is_asked_for_counts_and_not_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1 << 40)
    with decoder_of(memory_share=0.9).session() as session:
        assert session.capacity.pages == 4 * num_pages(16384, 16)
    with decoder_of(pool_tokens=1600).session() as session:
        assert session.capacity.pages == 100


def test_a_session_says_what_it_has_taken_and_what_it_takes_at_most() -> None:
    decoder = decoder_of()
    page, prompt = memory.page_bytes(decoder._program), [5] * 40
    with decoder.session() as session:
        first = session.capacity
        assert first.most_bytes - first.used_bytes == first.pages * page
        session.submit(prompt, max_new_tokens=8)
        list(session)
        assert session.capacity.used_bytes == first.used_bytes + 3 * page
        session.submit(prompt, max_new_tokens=8)
        session.submit(prompt, max_new_tokens=8)
        list(session)
        assert session.capacity.used_bytes == first.used_bytes + 6 * page
        assert session.capacity.most_bytes == first.most_bytes


CHILD = """
import json, sys
import psutil
from tests.runtime.test_memory import wide_decoder
decoder, resident, found = wide_decoder(), psutil.Process().memory_info, []
decoder.generate([[5, 6]], max_new_tokens=2)  # what the first call takes once
found.append([resident().rss, 0, 0])
with decoder.session() as session:
    found.append([resident().rss, session.capacity.used_bytes, session.capacity.most_bytes])
    for _ in range(2):
        session.submit([5] * int(sys.argv[1]), max_new_tokens=1, eos_token_id=[])
        list(session)
        found.append([resident().rss, session.capacity.used_bytes, session.capacity.most_bytes])
found.append([resident().rss, 0, 0])
print(json.dumps(found))
"""


def wide_decoder() -> SpeculativeDecoder:
    """One whose tokens take 32 KiB each, in a pool of 512 MiB."""
    model = make_model("llama", hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
                       head_dim=1024, max_position_embeddings=8192)  # fmt: skip
    cache = {**CONFIG["cache"], "block_size": 16, "prefill_chunk": 256, "pool_tokens": 16384}
    return compiled(model, "none", lowering={"name": "eager"}, cache=cache)


def test_only_pages_that_are_used_are_resident() -> None:
    """The attention of a prompt copies as much for a moment, and what it has freed stays with the allocator."""
    tokens, slack = 1500, 100 * MIB
    command = [sys.executable, "-c", CHILD, str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    (before, *_), (opened, used, most), *later, (after, *_) = json.loads(done.stdout.splitlines()[-1])
    pages = num_pages(tokens + 1, 16) * 16 * 32 * 1024
    assert most > 512 * MIB and used < 8 * MIB
    assert opened < before + 8 * MIB
    for resident, taken, bound in later:
        assert opened + pages // 2 < resident < opened + pages + slack
        assert (taken - used, bound) == (pages, most)
    assert after < later[-1][0] - pages // 2  # a session that is closed but not forgotten
