"""What is particular to packed weights in the kernels of products: how a tile of stored numbers becomes an operand.

Numbers are read as int32 words of eight (of four bits) or four (of eight bits), and become bfloat16 or float16 in the
registers in which ``wgmma`` takes them. A quad of lanes holds the inputs of a line of that operand, each lane two
neighbours of every eight. Numbers that are arranged (:mod:`specgraph.kernels.packed.arranged`) stand in the words of
the lanes that hold them. Of others every lane expands words of its own, too: the inputs of a line are taken in another
order, which is that of the rows of ``x``, too. Input ``k`` of the operand, in binary from the highest digit, is

    pair of a word | word of a lane | lane of a quad, two digits | one of a pair

and input ``lane | word | pair | one of a pair`` of the weight. Sums have this order for any number of rows.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether Triton's interpreter runs the kernels. It has no assembly, so that numbers are made in another way there."""


@triton.constexpr_function
def per_word(FORMAT):
    """How many numbers a word holds."""
    return 4 if FORMAT == "fp8_blocks" else 8


@triton.constexpr_function
def _int4_source(PAIR, HALF, ARRANGED):
    """The bits ``0x4300 | n`` are 128 + n in bfloat16, and ``0x6400 | n`` 1024 + n in float16."""
    magic, offset, kind = ("0x64006400", "0x64086408", "f16") if HALF else ("0x43004300", "0x43084308", "bf16")
    if ARRANGED:
        found = f"shr.u32 t, $2, {4 * PAIR};"
    else:
        found = f"shr.u32 t, $2, 4; prmt.b32 t, $2, t, 0x{4 + PAIR}{4 + PAIR}{PAIR}{PAIR};"
    return f"""{{
        .reg .b32 t, o;
        {found}
        lop3.b32 t, t, 0x000F000F, {magic}, 0xEA;
        mov.b32 o, {offset};
        sub.rn.{kind}x2 t, t, o;
        mov.b32 {{$0, $1}}, t;
    }}"""


@triton.constexpr_function
def _arranged_mxfp4_source(PAIR, HALF, SCALED):
    """Signs and magnitudes are moved to their places in bfloat16, where they are ``2 ** -126`` times the number.

    The two factors of ``SCALED`` have ``2 ** 126`` in them. In float16 magnitudes stand three places higher, and are
    ``2 ** -14`` times the number.
    """
    found = (
        "shl.b32 t, $2, 6; and.b32 t, t, 0x81C081C0;",
        "shl.b32 t, $2, 2; and.b32 t, t, 0x81C081C0;",
        "shf.r.wrap.b32 t, $2, $2, 4; and.b32 t, t, 0x81C081C0;",
        "and.b32 a, $2, 0x81808180; shr.u32 t, $2, 8; lop3.b32 t, t, 0x00400040, a, 0xEA;",
    )[PAIR]
    if HALF:
        found += """
            and.b32 a, t, 0x80008000; shl.b32 t, t, 3; lop3.b32 t, t, 0x0E000E00, a, 0xEA;
            mov.b32 a, 0x74007400; mul.rn.f16x2 t, t, a;"""
    else:
        found += f"mov.b32 a, {'$3' if SCALED else '0x7E807E80'}; mul.rn.bf16x2 t, t, a;"
    return f"""{{
        .reg .b32 a, t;
        {found}
        mov.b32 {{$0, $1}}, t;
    }}"""


@triton.constexpr_function
def _mxfp4_source(PAIR, HALF, SCALED):
    """In bfloat16 the three lowest bits of a number are the lowest of the exponent and the highest of the mantissa, so
    that they are ``2 ** -126`` times its magnitude. Bits of both halves are moved there by one product of integers.

    In float16 they are looked up: ``prmt`` finds four bytes at a time in tables, which have 64 more than twice the
    number. Where the highest bit of a digit of its selector is set, it gives the sign of a byte, which is 0 here.
    """
    if HALF:
        first = PAIR % 2 * 2
        return f"""{{
            .reg .b32 q, n, t, m;
            shr.u32 q, $2, {16 if PAIR >= 2 else 0};
            xor.b32 n, q, 0x8888;
            mov.b32 t, 0x43424140;
            mov.b32 m, 0x4C484644;
            prmt.b32 t, t, m, q;
            mov.b32 q, 0x3D3E3F40;
            mov.b32 m, 0x34383A3C;
            prmt.b32 n, q, m, n;
            or.b32 t, t, n;
            mov.b32 m, 0x64646464;
            prmt.b32 t, t, m, 0x4{first + 1}4{first};
            mov.b32 m, 0x64406440;
            sub.rn.f16x2 t, t, m;
            mov.b32 m, 0x38003800;
            mul.rn.f16x2 t, t, m;
            mov.b32 {{$0, $1}}, t;
        }}"""
    places = f"0x{12 + PAIR:X}{4 + PAIR}{8 + PAIR:X}{PAIR}"
    return f"""{{
        .reg .b32 a, t, m;
        and.b32 a, $2, 0x0F0F0F0F;
        shr.u32 t, $2, 4;
        and.b32 t, t, 0x0F0F0F0F;
        prmt.b32 t, a, t, {places};
        mul.lo.u32 t, t, 0x1040;
        and.b32 t, t, 0x81C081C0;
        mov.b32 m, 0x7E807E80;
        mul.rn.bf16x2 t, t, m;
        {"mov.b32 m, {$3, $3}; mul.rn.bf16x2 t, t, m;" if SCALED else ""}
        mov.b32 {{$0, $1}}, t;
    }}"""


@triton.constexpr_function
def _fp8_source(PAIR):
    return f"""{{
        .reg .b16 lo, hi;
        .reg .b32 t;
        mov.b32 {{lo, hi}}, $2;
        cvt.rn.f16x2.e4m3x2 t, {"hi" if PAIR else "lo"};
        mov.b32 {{$0, $1}}, t;
    }}"""


@triton.constexpr_function
def pair_source(PAIR, FORMAT, ARRANGED, HALF, SCALED):
    if FORMAT == "int4":
        return _int4_source(PAIR, HALF, ARRANGED)
    if FORMAT == "mxfp4":
        return _arranged_mxfp4_source(PAIR, HALF, SCALED) if ARRANGED else _mxfp4_source(PAIR, HALF, SCALED)
    return _fp8_source(PAIR)


@triton.jit
def _arranged_mxfp4_code(words, PLACE: tl.constexpr):
    """The four bits of one of the numbers of every word, whose sign and magnitude are moved to bits 15 and 8 to 6."""
    words = words.to(tl.uint32, bitcast=True)
    if PLACE % 4 == 0:
        words = words << 6
    elif PLACE % 4 == 1:
        words = words << 2
    elif PLACE % 4 == 2:
        words = (words >> 4) | (words << 28)
    else:
        words = (words & 0x81808180) | ((words >> 8) & 0x00400040)
    half = (words >> (16 * (PLACE // 4))).to(tl.int32)
    return ((half >> 12) & 8) | ((half >> 6) & 7)


@triton.jit
def _number(words, PLACE: tl.constexpr, FORMAT: tl.constexpr, ARRANGED: tl.constexpr):
    """The number at one place of every word, in float32."""
    if FORMAT == "fp8_blocks":
        code = (words >> (8 * PLACE)) & 255
        number = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        code = _arranged_mxfp4_code(words, PLACE) if FORMAT == "mxfp4" and ARRANGED else (words >> (4 * PLACE)) & 15
        if FORMAT == "int4":
            number = (code - 8).to(tl.float32)
        else:
            exponent, mantissa = (code >> 1) & 3, code & 1
            double = tl.where(exponent == 0, mantissa, (2 + mantissa) << tl.maximum(exponent - 1, 0))
            number = tl.where(code >= 8, -double, double).to(tl.float32) * 0.5
    return number


@triton.jit
def _pair(
    words, factor, PAIR: tl.constexpr, FORMAT: tl.constexpr, ARRANGED: tl.constexpr, HALF: tl.constexpr
):
    """One pair of the numbers of every word: ``[O, W, 2]``, in float16 if ``HALF``, else in bfloat16.

    They are multiplied with ``factor``, unless it is None. Of numbers that are arranged it is a pair in an int32, with
    ``2 ** 126`` in it.
    """
    KIND: tl.constexpr = tl.float16 if HALF else tl.bfloat16
    if INTERPRETED:
        APART: tl.constexpr = ARRANGED and per_word(FORMAT) == 8
        first = _number(words, PAIR if APART else 2 * PAIR, FORMAT, ARRANGED)
        second = _number(words, PAIR + 4 if APART else 2 * PAIR + 1, FORMAT, ARRANGED)
        if factor is not None:
            if ARRANGED:
                factor = (factor & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True).to(tl.float32) * 2.0**-126
            first *= factor.to(tl.float32)
            second *= factor.to(tl.float32)
        first = first.to(KIND)
        second = second.to(KIND)
    elif factor is None:
        first, second = tl.inline_asm_elementwise(
            pair_source(PAIR, FORMAT, ARRANGED, HALF, False), "=h,=h,r", [words],
            dtype=(tl.float16, tl.float16) if HALF else (tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        first, second = tl.inline_asm_elementwise(
            pair_source(PAIR, FORMAT, ARRANGED, HALF, True), "=h,=h,r,r" if ARRANGED else "=h,=h,r,h", [words, factor],
            dtype=(tl.float16, tl.float16) if HALF else (tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
        )  # fmt: skip
    return tl.join(first, second)


@triton.jit
def expand_arranged(words, factor, FORMAT: tl.constexpr, HALF: tl.constexpr):
    """The operand ``[O, K]`` from words ``[O, W]`` that are arranged, whose inputs have their own order.

    ``factor`` ``[O, W]`` is that of :func:`_pair`.
    """
    LINES: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    pairs = tl.join(_pair(words, factor, 0, FORMAT, True, HALF), _pair(words, factor, 1, FORMAT, True, HALF))
    if per_word(FORMAT) == 4:
        # ---- [O, lane, 16 inputs, one of a pair, half of 16 inputs]
        pairs = tl.permute(tl.reshape(pairs, (LINES, 4, W // 4, 2, 2)), (0, 2, 4, 1, 3))
        numbers = tl.reshape(pairs, (LINES, 4 * W))
    else:
        others = tl.join(_pair(words, factor, 2, FORMAT, True, HALF), _pair(words, factor, 3, FORMAT, True, HALF))
        pairs = tl.join(pairs, others)
        if FORMAT == "mxfp4":
            # ---- [O, 32 inputs, lane, one of a pair, half of 16 inputs, half of 32]
            pairs = tl.permute(tl.reshape(pairs, (LINES, W // 4, 4, 2, 2, 2)), (0, 1, 5, 4, 2, 3))
        else:
            # ---- [O, lane, 32 inputs, one of a pair, half of 16 inputs, half of 32]
            pairs = tl.permute(tl.reshape(pairs, (LINES, 4, W // 4, 2, 2, 2)), (0, 2, 5, 4, 1, 3))
        numbers = tl.reshape(pairs, (LINES, 8 * W))
    return numbers


@triton.jit
def expand(words, factor, FORMAT: tl.constexpr, ARRANGED: tl.constexpr, HALF: tl.constexpr):
    """The operand ``[O, K]`` from ``[O, W]`` words, in the order of :func:`order`: float16 if ``HALF``, or bfloat16.

    ``factor`` ``[O, 4]`` in bfloat16 multiplies the numbers of each quarter of the words, unless it is None. Of
    arranged words it is that of :func:`expand_arranged`.
    """
    LINES: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    if ARRANGED:
        numbers = expand_arranged(words, factor, FORMAT, HALF)
    else:
        # ---- from the order of memory, lane by lane, to the one in which lanes take turns
        words = tl.reshape(tl.permute(tl.reshape(words, (LINES, 4, W // 4)), (0, 2, 1)), (LINES, W))
        if factor is not None:
            factor = tl.reshape(tl.broadcast_to(factor[:, None, :], (LINES, W // 4, 4)), (LINES, W))
        pairs = tl.join(_pair(words, factor, 0, FORMAT, False, HALF), _pair(words, factor, 1, FORMAT, False, HALF))
        if per_word(FORMAT) == 8:
            others = tl.join(_pair(words, factor, 2, FORMAT, False, HALF), _pair(words, factor, 3, FORMAT, False, HALF))
            numbers = tl.reshape(tl.permute(tl.join(pairs, others), (0, 4, 3, 1, 2)), (LINES, 8 * W))
        else:
            numbers = tl.reshape(tl.permute(pairs, (0, 3, 1, 2)), (LINES, 4 * W))
    return numbers


@triton.jit
def order(K: tl.constexpr, PER_WORD: tl.constexpr, ARRANGED: tl.constexpr):
    """Which input of a block of ``K`` every input of an operand is: ``[K]``."""
    W: tl.constexpr = K // PER_WORD
    k = tl.arange(0, K)
    if ARRANGED:
        return k
    word = (k // 2) % 4 * (W // 4) + k % (2 * W) // 8
    return tl.max_contiguous(tl.multiple_of(word * PER_WORD + k // (2 * W) * 2 + k % 2, 2), 2)


@triton.jit
def packed_rows(
    words,
    scales,
    row,
    stride,
    scale_stride,
    begin,
    scale_begin,
    SCALE_ROWS: tl.constexpr,
    ALIGNED_WORDS: tl.constexpr,
):
    """The addresses of rows of words, and of their scales, of a matrix that has so many words and scales in front."""
    offset = begin + row.to(tl.int64) * stride
    if ALIGNED_WORDS:
        offset = tl.multiple_of(offset, 4)
    return words + offset, scales + scale_begin + (row // SCALE_ROWS).to(tl.int64) * scale_stride


@triton.jit
def power_of_two(exponent, SINGLE: tl.constexpr):
    """``2 ** (exponent - 127)``, a scale of ``mxfp4``, in float32 if ``SINGLE``, else in bfloat16."""
    bits = exponent.to(tl.int32)
    if SINGLE:
        power = tl.where(bits > 0, bits << 23, 0x400000).to(tl.float32, bitcast=True)
    else:
        power = tl.where(bits > 0, bits << 7, 0x40).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return power


@triton.jit
def factor_pair(exponent):
    """Twice ``2 ** (exponent - 1)`` in bfloat16, in one int32."""
    return exponent * 0x00800080 + 0x3F003F00


@triton.jit
def _load_scales(scale_rows, x_scale_rows, real, first, in_features, GROUP: tl.constexpr):
    """Load the scales of the group of an input, ``[O]`` and, if there are any, those of rows of x ``[N]``.

    Those of 16 bits are kept in int32: a pair of them would be packed, and so waited for, as soon as it is loaded.
    """
    group = tl.minimum(first, in_features - 1) // GROUP
    scale = tl.load(scale_rows + group)
    if scale.dtype.primitive_bitwidth == 16:
        scale = scale.to(tl.uint16, bitcast=True).to(tl.int32)
    x_scale = tl.load(x_scale_rows + group, mask=real, other=0.0) if x_scale_rows is not None else 0.0
    return scale, x_scale


@triton.jit
def _scale_factor(scale, KIND: tl.constexpr):
    """What :func:`_load_scales` loaded from memory of type ``KIND``, in float32."""
    if KIND.is_uint8():
        factor = power_of_two(scale, True)
    elif KIND.primitive_bitwidth == 16:
        factor = scale.to(tl.uint16).to(KIND, bitcast=True).to(tl.float32)
    else:
        factor = scale
    return factor


@triton.jit
def multiply_packed(
    word_rows,
    scale_rows,
    x_rows,
    x_scale_rows,
    real,
    k_slice,
    in_features,
    BLOCK_O: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    EVEN_K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    DOT_K: tl.constexpr,
    ALIGNED_WORDS: tl.constexpr,
    ARRANGED: tl.constexpr,
):
    """Compute one slice of the product: ``[BLOCK_O, BLOCK_N]``.

    ``DOT_K`` inputs are multiplied at a time. Their sum is multiplied with the scale of ``GROUP`` inputs, of which they
    are a part, or, if they are several groups of ``mxfp4``, their numbers are multiplied with scales beforehand; of
    arranged ones, a scale holds the exponents of four groups. Rows of ``ALIGNED_WORDS`` begin at multiples of 16 bytes
    and are as long.
    """
    PER_WORD: tl.constexpr = per_word(FORMAT)
    WORDS: tl.constexpr = DOT_K // PER_WORD
    X_TYPE: tl.constexpr = x_rows.dtype.element_ty
    HALF: tl.constexpr = X_TYPE.is_fp16()
    SCALE_TYPE: tl.constexpr = scale_rows.dtype.element_ty
    EXPONENTS: tl.constexpr = FORMAT == "mxfp4" and ARRANGED
    word = tl.arange(0, WORDS)
    k = order(DOT_K, PER_WORD, ARRANGED)
    acc = tl.zeros((BLOCK_O, BLOCK_N), tl.float32)
    if DOT_K <= GROUP:
        scale, x_scale = _load_scales(scale_rows, x_scale_rows, real, k_slice * BLOCKS * BLOCK_K, in_features, GROUP)
    for block in range(BLOCKS):
        for part in tl.static_range(BLOCK_K // DOT_K):
            first = (k_slice * BLOCKS + block) * BLOCK_K + part * DOT_K
            # ---- words [BLOCK_O, WORDS] and x [DOT_K, BLOCK_N]
            word_tile = word_rows[:, None] + (first // PER_WORD + word)[None, :]
            x_tile = x_rows[None, :] + (first + k)[:, None]
            if EVEN_K:
                words = tl.load(word_tile)
                x = tl.load(x_tile, mask=real[None, :], other=0.0)
            else:
                end = tl.cast(in_features, tl.int32) // PER_WORD
                if ALIGNED_WORDS:
                    end = tl.multiple_of(end, 4)
                words = tl.load(word_tile, mask=(first // PER_WORD + word < end)[None, :], other=0)
                x = tl.load(x_tile, mask=(first + k < in_features)[:, None] & real[None, :], other=0.0)
            if DOT_K > GROUP:
                # ---- a quarter of the words belongs to one group: factors [BLOCK_O, 4]
                tl.static_assert(DOT_K == 4 * GROUP)
                group = first // GROUP + tl.arange(0, 4)
                scale_tile = scale_rows[:, None] + group[None, :]
                if EVEN_K:
                    exponent = tl.load(scale_tile)
                else:
                    exponent = tl.load(scale_tile, mask=(group * GROUP < in_features)[None, :], other=127)
                factor = power_of_two(exponent, False)
                acc = tl.dot(expand(words, factor, FORMAT, ARRANGED, HALF).to(X_TYPE), x, acc, input_precision="ieee")
            elif EXPONENTS and DOT_K == GROUP:
                # ---- a scale is the exponents of four groups, whose words are neighbours: factors [BLOCK_O, WORDS]
                factor = factor_pair((scale[:, None] >> (word // 4 * 8)[None, :]) & 255)
                scale, x_scale = _load_scales(scale_rows, x_scale_rows, real, first + DOT_K, in_features, GROUP)
                acc = tl.dot(expand(words, factor, FORMAT, ARRANGED, HALF).to(X_TYPE), x, acc, input_precision="ieee")
            else:
                sums = tl.dot(expand(words, None, FORMAT, ARRANGED, HALF).to(X_TYPE), x, input_precision="ieee")
                if EXPONENTS:
                    scale = power_of_two((scale >> (part % 4 * 8)) & 255, True)
                factor = tl.broadcast_to(_scale_factor(scale, SCALE_TYPE)[:, None], (BLOCK_O, BLOCK_N))
                if x_scale_rows is not None:
                    factor *= x_scale[None, :]
                acc = tl.fma(sums, factor, acc)
                # ---- the scales of the next sum, which arrive during its product: [BLOCK_O] and [BLOCK_N]
                scale, x_scale = _load_scales(scale_rows, x_scale_rows, real, first + DOT_K, in_features, GROUP)
    return acc
