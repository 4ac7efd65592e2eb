"""What the formats of packed weights mean, entry by entry, and what a mistaken layout would make of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specgraph.kernels.packed.arranged import FP8_BLOCKS_ARRANGED, INT4_ARRANGED, MXFP4_ARRANGED
from specgraph.kernels.packed.format import Format
from specgraph.kernels.packed.formats import FORMATS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {
    "int4": (5, 48),
    "int4_arranged": (5, 384),
    "mxfp4": (5, 96),
    "mxfp4_arranged": (5, 96),
    "fp8_blocks": (200, 144),
    "fp8_blocks_arranged": (200, 256),
}
"""Weights of three groups or of 2 x 2 blocks; the last ones of those are not full."""
NAMES = tuple(name for name in FORMATS if name in SHAPES)
"""The formats of two tensors."""


def floating(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """The value of a sign, an exponent and a mantissa, in this order."""
    bias, mantissa = 2 ** (exponent_bits - 1) - 1, (code & (1 << mantissa_bits) - 1) / 2**mantissa_bits
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    value = (1 + mantissa) * 2.0 ** (exponent - bias) if exponent else mantissa * 2.0 ** (1 - bias)
    return -value if code >> exponent_bits + mantissa_bits else value


VALUES = {
    "int4": [code - 8.0 for code in range(16)],
    "int4_arranged": [code - 8.0 for code in range(16)],
    "mxfp4": [floating(code, 2, 1) for code in range(16)],
    "mxfp4_arranged": [floating(code, 2, 1) for code in range(16)],
    "nvfp4": [floating(code, 2, 1) for code in range(16)],
    "fp8_blocks": [floating(code, 4, 3) for code in range(256)],  # 127 and 255 are no numbers
    "fp8_blocks_arranged": [floating(code, 4, 3) for code in range(256)],
}
"""What each code means."""
BITS = {name: 8 if name.startswith("fp8") else 4 for name in VALUES}


def place(name: str, i: int, per_element: int) -> tuple[int, int]:
    """The element of input ``i``, and which number of the element it is."""
    if not name.endswith("_arranged"):
        return i // per_element, i % per_element
    # 128 inputs are, from the highest digit, 4 blocks, 2 halves, 2 quarters, 4 lanes and 2 of a pair.
    block, half, quarter, lane, of_pair = i // 32 % 4, i // 16 % 2, i // 8 % 2, i // 2 % 4, i % 2
    if name.startswith("fp8"):  # eight words of four numbers for a lane
        return i // 128 * 128 + 4 * (8 * lane + 2 * block + half) + 2 * quarter + of_pair, 0
    number = 4 * of_pair + 2 * half + quarter
    return (i // 32 * 4 + lane if name.startswith("mxfp4") else i // 128 * 16 + 4 * lane + block), number


def code_of(name: str, word: int, number: int) -> int:
    """One of the numbers of an element, whose lowest bits are those of the first one."""
    if name != "mxfp4_arranged":
        return word >> BITS[name] * number & (1 << BITS[name]) - 1
    half, number = divmod(number, 4)
    low = (0, 4, 10, 14)[number]
    places = (low, low + 1, low + 2, low + 9) if number < 3 else (low, 7, 8, 15)  # the sign comes last
    return sum((word >> (16 * half + place) % 32 & 1) << bit for bit, place in enumerate(places))


def matrix(name: str, weight: Sequence[Tensor], dtype: torch.dtype = torch.float64) -> Tensor:
    """The weight ``[O, I]`` or ``[E, O, I]``, by a loop over its entries."""
    numbers, scale, *of_output = (part.detach().cpu() for part in weight)
    if numbers.dim() == 3:
        return torch.stack([matrix(name, parts, dtype) for parts in zip(*weight, strict=True)])
    name = name.removesuffix("_rows")
    kind = torch.int32 if name.startswith("int4") or name == "mxfp4_arranged" else torch.uint8
    words = numbers.view(kind).tolist()
    per_word = 8 * kind.itemsize // BITS[name]
    inputs, values = len(words[0]) * per_word, VALUES[name]
    if name == "mxfp4_arranged":  # four exponents in an element
        scale = torch.stack([scale >> 8 * place & 255 for place in range(4)], -1).flatten(-2)[:, : inputs // 32]
    if name == "nvfp4":
        scale = scale.float() / of_output[0].float()
    scales = [[2.0 ** (x - 127) if name.startswith("mxfp4") else x for x in row] for row in scale.tolist()]
    outer, inner = (128, 128) if name.startswith("fp8") else (1, inputs // len(scales[0]))
    places = [place(name, i, per_word) for i in range(inputs)]
    entries = [
        [values[code_of(name, words[o][word], number)] * scales[o // outer][i // inner]
         for i, (word, number) in enumerate(places)] for o in range(len(words))
    ]  # fmt: skip
    return torch.tensor(entries, dtype=dtype, device=weight[0].device)


def rounded_rows(name: str, x: Tensor) -> Tensor:
    """Rows as a format quantises them, in float32 or float64."""
    rows = x.to(torch.promote_types(x.dtype, torch.float32))
    if not name.startswith("fp8"):
        return rows
    parts = []
    for part in rows.split(128, -1):
        top = part.abs().amax(-1, keepdim=True).float() / 448
        scale = top.where(top > 0, 1).to(rows.dtype)
        parts.append((part / scale).float().to(torch.float8_e4m3fn).to(rows.dtype) * scale)
    return torch.cat(parts, -1)


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def random_weight(name: str, experts: int | None = None, seed: int = 0) -> list[Tensor]:
    """Random numbers, all codes among them, and random scales; a stack of them for a number of experts."""
    if experts is not None:
        made = [random_weight(name, seed=seed + expert) for expert in range(experts)]
        return [torch.stack(parts) for parts in zip(*made, strict=True)]
    outputs, inputs = SHAPES[name]
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (outputs, inputs * BITS[name] // 8), generator=generator, dtype=torch.uint8)
    if name.startswith("int4"):
        return [codes.view(torch.int32).to(DEVICE), normal(outputs, 3, dtype=torch.bfloat16, seed=seed)]
    if name.startswith("mxfp4"):
        exponents = torch.randint(119, 129, (outputs, 3), generator=generator)
        if name == "mxfp4":
            return [codes.to(DEVICE), exponents.to(torch.uint8).to(DEVICE)]
        joined = exponents[:, 0] | exponents[:, 1] << 8 | exponents[:, 2] << 16 | 127 << 24
        return [codes.to(DEVICE), joined[:, None].to(torch.int32).to(DEVICE)]
    codes[codes & 127 == 127] = 0  # no numbers
    return [codes.view(torch.float8_e4m3fn).to(DEVICE), normal(2, 2, dtype=torch.float32, seed=seed).exp() / 64]


def form_of(name: str) -> Format:
    return FORMATS[name]


def _bits(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A change of the stored bytes, which are the two numbers of a byte where they have four bits."""
    return lambda numbers, scale: (change(numbers.view(torch.uint8)).contiguous().view(numbers.dtype), scale)


def _each_nibble(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda codes: change(codes & 15) & 15 | (change(codes >> 4) & 15) << 4


FAULTS: dict[str, dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]] = {
    "int4": {
        "swapped nibbles": _bits(lambda codes: codes << 4 | codes >> 4),
        "the neighbouring group's scale": lambda numbers, scale: (numbers, scale.roll(1, -1)),
        "offset forgotten": _bits(lambda codes: codes ^ 0x88),  # as if two's complement were stored
        "bytes reversed": _bits(lambda codes: codes.unflatten(-1, (-1, 4)).flip(-1).flatten(-2)),
        "scale inverted": lambda numbers, scale: (numbers, 1 / scale),
    },
    "mxfp4": {
        "swapped nibbles": _bits(lambda codes: codes << 4 | codes >> 4),
        "the neighbouring group's scale": lambda numbers, scale: (numbers, scale.roll(1, -1)),
        "sign behind the exponent": _bits(_each_nibble(lambda codes: codes << 1 | codes >> 3)),
        "exponent behind the mantissa": _bits(_each_nibble(lambda codes: codes & 8 | codes >> 1 & 3 | codes << 2 & 4)),
        "scale inverted": lambda numbers, scale: (numbers, 254 - scale),
        "offset of the scale": lambda numbers, scale: (numbers, scale + 1),
    },
    "fp8_blocks": {
        "the neighbouring block's scale": lambda numbers, scale: (numbers, scale.roll(1, -1)),
        "the block's scale below": lambda numbers, scale: (numbers, scale.roll(1, -2)),
        "sign behind the exponent": _bits(lambda codes: codes << 1 | codes >> 7),
        "e5m2": _bits(lambda codes: codes.view(torch.float8_e5m2).float().to(torch.float8_e4m3fn).view(torch.uint8)),
        "scale inverted": lambda numbers, scale: (numbers, 1 / scale),
    },
}  # fmt: skip
"""For each format, weights that are stored in another way."""
FAULTS["int4_arranged"] = {
    **FAULTS["int4"],
    "published order": lambda numbers, scale: INT4_ARRANGED.restore((numbers, scale)),
    "lanes and blocks exchanged": lambda numbers, scale: (
        numbers.unflatten(-1, (-1, 4, 4)).mT.flatten(-3).contiguous(),
        scale,
    ),
}
FAULTS["fp8_blocks_arranged"] = {
    **FAULTS["fp8_blocks"], "published order": lambda numbers, scale: FP8_BLOCKS_ARRANGED.restore((numbers, scale)),
}  # fmt: skip
FAULTS["mxfp4_arranged"] = {
    "swapped nibbles": FAULTS["mxfp4"]["swapped nibbles"],
    "published order": lambda numbers, scale: (MXFP4_ARRANGED.restore((numbers, scale))[0], scale),
    "exponents in the other order": lambda numbers, scale: (
        numbers,
        scale.view(torch.uint8).flip(-1).view(torch.int32),
    ),
}
EVERY_FAULT = [(name, fault) for name, faults in FAULTS.items() for fault in faults]
PUBLISHED_FAULTS = [(name, fault) for name, fault in EVERY_FAULT if not name.endswith("_arranged")]
"""Those of formats that files have."""
