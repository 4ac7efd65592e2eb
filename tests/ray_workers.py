"""What the tests of ``engine=ray`` share, on CPUs and on GPUs."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import psutil


class Killer(threading.Thread):
    """Kills the first worker that is at work."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: set[int] = set()
        self.killed: int | None = None
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.2):
            for process in psutil.process_iter(["cmdline"]):
                title = " ".join(process.info["cmdline"] or ())
                if "MapWorker(MapBatches(Worker))" not in title or process.pid in self.seen:
                    continue
                if self.killed is None and ".submit" in title:
                    time.sleep(0.5)  # in the middle of its first call
                    process.kill()
                    self.killed = process.pid
                if self.killed is not None:
                    self.seen.add(process.pid)


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]
