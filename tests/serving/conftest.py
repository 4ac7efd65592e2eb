"""The server of examples/serve.py in a process of its own, and the decoder whose tokens it has to give."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import specgraph

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = EXAMPLES / "models" / "tiny-math" / "draft"
TEMPLATE = (
    '{# Calls are written as <tool_call>{"name": ..., "arguments": ...}</tool_call>. #}'
    "{% for m in messages %}{% if m.role == 'user' %}Question: {% endif %}{{ m.content }}\n{% endfor %}Answer:"
)
"""That of serve.py, which says in addition how the model writes calls."""
KEY, ROWS, WAITING = "a key of the tests", 8, 40
CONFIG = {"max_batch_size": ROWS, "max_length": 256, "lowering": "eager"}


class Server(NamedTuple):
    """Where a server listens, and where its output goes."""

    url: str
    log: Path

    def stats(self) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.url}/stats", headers={"Authorization": f"Bearer {KEY}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            stats: dict[str, Any] = json.load(answer)
        return stats


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("ray.serve", reason="needs specgraph[serve]")
    home = tmp_path_factory.mktemp("home")
    model = home / "model"
    shutil.copytree(MODEL, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, EXAMPLES / "serve.py", "--model", model, "--name", "tiny", "--dtype", "float64"]
    command += ["--port", str(port), "--config", json.dumps(CONFIG), "--max-waiting", str(WAITING)]
    # Ray writes its token into the home directory, and these tests leave nothing there.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HOME": str(home),
                   "SPECGRAPH_API_KEY": KEY, "RAY_USAGE_STATS_ENABLED": "0",
                   "RAY_enable_worker_prestart": "0"}  # fmt: skip
    server = Server(f"http://127.0.0.1:{port}", home / "log")
    with server.log.open("wb") as log:
        process = subprocess.Popen(command, cwd=home, env=environment, stdout=log, stderr=log)
    try:
        _wait(server, process)
        yield server
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:  # on a machine that other tests keep busy, Ray takes longer
            process.kill()
            process.wait(60)


def _wait(server: Server, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        try:
            server.stats()
            return
        except OSError:
            assert process.poll() is None, server.log.read_text()
            time.sleep(0.2)
    raise AssertionError(server.log.read_text())


class Alone(NamedTuple):
    """A decoder, which gets one request at a time."""

    decoder: specgraph.SpeculativeDecoder
    tokenizer: Any

    def __call__(self, question: str, *, seed: int, **options: Any) -> Any:
        prompt = self.tokenizer(f"Question: {question}\nAnswer:")["input_ids"]
        given = {"temperature": 0.0, "seed": [seed], "tokenizer": self.tokenizer, "return_logprobs": True, **options}
        return self.decoder.generate([prompt], **given)


@pytest.fixture(scope="module")
def alone() -> Alone:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float64)
    decoder = specgraph.compile_speculative(model, CONFIG)
    return Alone(decoder, AutoTokenizer.from_pretrained(MODEL))
