"""Files as AWQ and GPTQ write them, of random words, and the models that they mean, by loops over bits."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.models import make_model, saved
from tests.once import once

GROUP = 8
AWQ: dict[str, Any] = {
    "quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True,
    "modules_to_not_convert": None,
}  # fmt: skip
GPTQ: dict[str, Any] = {
    "quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq", "desc_act": False,
    "sym": False,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "awq": AWQ, "gptq": GPTQ, "gptq_v2": {**GPTQ, "checkpoint_format": "gptq_v2"},
    "symmetric": {**GPTQ, "sym": True}, "act-order": {**GPTQ, "desc_act": True},
    "symmetric act-order": {**GPTQ, "desc_act": True, "sym": True},
    "act-order of inputs": {**GPTQ, "desc_act": True},
    "awq rows": {**AWQ, "group_size": -1}, "gptq rows": {**GPTQ, "group_size": -1},
}  # fmt: skip
"""What configurations state. The last act-order is the same for all layers that read one input, as GPTQ finds it."""
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs stands in each place of a word of AWQ."""


def _bits(word: int, place: int) -> int:
    return word >> 4 * place & 15


def matrix(stated: Mapping[str, Any], layer: Mapping[str, Tensor]) -> Tensor:
    """The weight ``[O, I]`` of a layer in float64, from the tensors of its files."""
    words, zeros, scales = (layer[name].tolist() for name in ("qweight", "qzeros", "scales"))
    if stated["quant_method"] == "awq":
        inputs, outputs = len(words), 8 * len(words[0])
        size = inputs if stated["group_size"] == -1 else stated["group_size"]
        entries = [
            [(_bits(words[i][o // 8], ORDER.index(o % 8)) - _bits(zeros[i // size][o // 8], ORDER.index(o % 8)))
             * scales[i // size][o] for i in range(inputs)] for o in range(outputs)
        ]  # fmt: skip
        return torch.tensor(entries, dtype=torch.float64)
    inputs, outputs, groups = 8 * len(words), len(words[0]), layer["g_idx"].tolist()
    less = 0x11111111 if stated["checkpoint_format"] == "gptq" else 0
    entries = [
        [(_bits(words[i // 8][o], i % 8) - _bits(zeros[groups[i]][o // 8] + less, o % 8)) * scales[groups[i]][o]
         for i in range(inputs)] for o in range(outputs)
    ]  # fmt: skip
    return torch.tensor(entries, dtype=torch.float64)


def random_layer(kind: str, outputs: int, inputs: int, seed: int, of_inputs: int = 0) -> dict[str, Tensor]:
    """The tensors of a layer: random words, and scales of which all are positive.

    ``of_inputs`` is the seed of an order that is that of inputs.
    """
    stated, generator = KINDS[kind], torch.Generator().manual_seed(seed)
    size = inputs if stated["group_size"] == -1 else stated["group_size"]
    groups = inputs // size

    def words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)

    zeros = words(groups, outputs // 8)
    if stated.get("sym"):
        zeros.fill_(0x77777777)  # 8, less one
    scales = ((torch.rand(groups, outputs, generator=generator) + 0.5) * 0.02).half()
    if stated["quant_method"] == "awq":
        return {"qweight": words(inputs, outputs // 8), "qzeros": zeros, "scales": scales}
    order = torch.arange(inputs)
    if stated["desc_act"]:
        source = torch.Generator().manual_seed(of_inputs) if kind.endswith("of inputs") else generator
        order = torch.randperm(inputs, generator=source)
    index = (order // size).to(torch.int32)
    return {"qweight": words(inputs // 8, outputs), "qzeros": zeros, "scales": scales, "g_idx": index}


@once
def _written(architecture: str, kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """The tensors of the files, those of the files of the dense model that they mean, and its configuration."""
    with tempfile.TemporaryDirectory() as made:
        folder = saved(make_model(architecture, seed=3, dtype=torch.float64), Path(made))
        dense, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    packed = dict(dense)
    for seed, name in enumerate(sorted(dense)):
        if name.endswith("_proj.weight"):
            del packed[name]
            of_inputs = sorted(dense).index(re.sub("[kv]_proj", "q_proj", name).replace("up_proj", "gate_proj"))
            layer, path = random_layer(kind, *dense[name].shape, seed, of_inputs), name.removesuffix("weight")
            packed |= {f"{path}{leaf}": tensor for leaf, tensor in layer.items()}
            dense[name] = matrix(KINDS[kind], layer)
    return packed, dense, config


def write(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def files(folder: Path, kind: str, architecture: str = "llama", **stated: Any) -> tuple[Path, Path]:
    """The folders of a packed model and of the dense one that it means, in float64."""
    packed, dense, config = _written(architecture, kind)
    quantised = {**config, "quantization_config": {**KINDS[kind], **stated}}
    return write(folder / "packed", packed, quantised), write(folder / "dense", dense, config)


def by_transformers(folder: Path) -> PreTrainedModel:
    """The dense model, in float64."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()
