"""Parts of packed weights, for devices that share a product: they have its entries, and round rows as it does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specgraph.kernels.packed.formats import FORMATS

OUTPUTS, INPUTS = 256, 512
LEAST = {
    "int4": 32, "int4_zeros": 32, "int4_act_order": 16, "int4_arranged": 128, "mxfp4": 32, "mxfp4_arranged": 32,
    "nvfp4": 16, "nvfp4_rows": 16, "fp8_blocks": 128, "fp8_blocks_arranged": 128, "fp8_channel": 1, "int8_channel": 1,
    "fp8_static": 1, "int8_static": 1,
}  # fmt: skip
"""How many inputs a part has at least. Those of ``int4_act_order`` have all 16 groups."""
REST = {"fp8_static": "fp8_token", "int8_static": "int8_token", "nvfp4_rows": "nvfp4"}
"""The formats without the scale that only a calibration finds."""


def weight_in(name: str, *experts: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(*experts, OUTPUTS, INPUTS, generator=generator)
    group = 32 if name in ("int4", "int4_zeros") else None
    weight = [*FORMATS[REST.get(name, name)].quantise(dense, group)]
    if name == "int4_act_order":
        weight = [*FORMATS["int4_zeros"].quantise(dense, 32), torch.randperm(INPUTS, generator=generator).int() // 32]
    return [*weight, torch.tensor([3.0])] if name in REST else weight


@pytest.mark.parametrize("name", FORMATS)
def test_parts_have_the_entries_of_the_weight(name: str) -> None:
    form, weight = FORMATS[name], weight_in(name)
    entries, rows = form.dequantise(weight, torch.float64), torch.randn(3, INPUTS, dtype=torch.float64)
    for begin in (0, 128):
        part = form.part(weight, begin, 128, of_inputs=False)
        assert torch.equal(form.dequantise(part, torch.float64), entries[begin : begin + 128])
        assert torch.equal(form.quantise_rows(rows, part), form.quantise_rows(rows, weight))
    if name not in LEAST:
        with pytest.raises(ValueError, match=f"{name} rounds a row of activations by one scale for all 512 inputs"):
            form.part(weight, 0, 256, of_inputs=True)
        return
    size = LEAST[name]
    for begin, wide in ((0, size), (256 - size, 2 * size), (INPUTS - size, size)):
        if begin % size == 0:
            part, own = form.part(weight, begin, wide, of_inputs=True), slice(begin, begin + wide)
            assert torch.equal(form.dequantise(part, torch.float64), entries[:, own])
            assert torch.equal(form.quantise_rows(rows[:, own], part), form.quantise_rows(rows, weight)[:, own])
            assert part[0].untyped_storage().data_ptr() == weight[0].untyped_storage().data_ptr()
    if size > 1:
        with pytest.raises(ValueError, match=r"are no whole groups of|number of groups must divide"):
            form.part(weight, 0, size // 2, of_inputs=True)


@pytest.mark.parametrize("name", ["int4", "mxfp4_arranged", "fp8_blocks", "nvfp4"])
def test_every_matrix_of_a_stack_is_cut(name: str) -> None:
    form, weight = FORMATS[name], weight_in(name, 3)
    entries = form.dequantise(weight, torch.float64)
    for part, own in (
        (form.part(weight, 128, 128, of_inputs=False), entries[:, 128:256]),
        (form.part(weight, 384, 128, of_inputs=True), entries[:, :, 384:]),
    ):
        assert torch.equal(form.dequantise(part, torch.float64), own)


def test_outputs_that_share_a_scale_or_a_word_stay_together() -> None:
    for name, together in (("fp8_blocks", 128), ("int4_zeros", 8)):
        for begin, size in ((together // 2, together), (0, together // 2)):
            with pytest.raises(
                ValueError, match=f"outputs {begin} to .* of 256 in {name} are no whole groups of {together}"
            ):
                FORMATS[name].part(weight_in(name), begin, size, of_inputs=False)
    last = FORMATS["fp8_blocks"].quantise(torch.randn(192, 128))  # the last block is not full
    assert [len(tensor) for tensor in FORMATS["fp8_blocks"].part(last, 128, 64, of_inputs=False)] == [64, 1]
