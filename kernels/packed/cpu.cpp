// Products of rows in float32 with a weight in few bits; see cpu.py. Vectors are those of GCC and Clang.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

#ifdef __AVX512F__
constexpr long LANES = 16, TOGETHER = 8;  // so many rows have two sums each, and there are 32 registers
#else
constexpr long LANES = 8, TOGETHER = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(1)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

// A number stands in the highest bits of its lane: sign, E bits of exponent, M bits of mantissa.
template <int E, int M> struct Float {
    static constexpr int BITS = 1 + E + M;
    static constexpr bool HAS_ZEROS = false;
    static Floats read(Words top) {
        constexpr uint32_t bias = 128 - (1 << (E - 1)), digits = ((1u << (E + M)) - 1) << (23 - M);
        const Floats zero = {};
        // Subnormal numbers are read as if they had a leading one and half of their step. Twice that less the least
        // normal number is their value, and more than the value of all others.
        const Floats normal = (Floats)((top >> (8 - E) & digits) + (bias << 23));
        const Floats subnormal = 2.0f * normal - (Floats)((Words)zero + ((bias + 1) << 23));
        return (Floats)((Words)(subnormal < normal ? subnormal : normal) | (top & 0x80000000u));
    }
};

template <int B, uint32_t FLIPPED, bool ZEROS = false> struct Integer {
    static constexpr int BITS = B;
    static constexpr bool HAS_ZEROS = ZEROS;
    static Floats read(Words top) { return __builtin_convertvector((Ints)(top ^ FLIPPED) >> (32 - B), Floats); }
};

#if defined(__GNUC__) && !defined(__clang__)
// A table of all magnitudes takes fewer instructions.
struct E2m1 : Float<2, 1> {
    static Floats read(Words top) {
        constexpr float values[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
        Floats magnitudes;
        for (int lane = 0; lane < LANES; lane++) magnitudes[lane] = values[lane % 8];
        return (Floats)((Words)__builtin_shuffle(magnitudes, (Ints)(top >> 28)) | (top & 0x80000000u));
    }
};
#else
using E2m1 = Float<2, 1>;
#endif

// The weight of an output as it is stored, and a scale and a zero point for each of its words.
template <class Number> struct Weight {
    const uint8_t* bytes;
    long words;
    const float *scales, *zeros;

    Words read(long first) const {
        const long left = words - first;
        if (left >= LANES) return *(const Words*)(bytes + 4 * first);
        Words some{};
        std::memcpy(&some, bytes + 4 * first, 4 * left);
        return some;
    }
    Floats number(Words some, long first, int j) const {
        const Floats number = Number::read(some << (32 - Number::BITS * (j + 1)));
        return Number::HAS_ZEROS ? number - *(const Floats*)(zeros + first) : number;
    }
};

// The products of R rows with the weight of an output. Number j of LANES neighbouring words is multiplied with what x
// holds in that order, and the sum over j with the scales of the words. Every row has the same sums in the same order,
// whichever R it is among.
template <int R, class Number>
void add_up(const Weight<Number>& weight, const float* x, long steps, float* out, long outputs) {
    constexpr int N = 32 / Number::BITS;
    Floats sums[R] = {};
    for (long step = 0; step < steps; step++) {
        Floats parts[R] = {};
        const Words some = weight.read(step * LANES);
        #pragma GCC unroll 8
        for (int j = 0; j < N; j++) {
            const Floats number = weight.number(some, step * LANES, j);
            for (int r = 0; r < R; r++)
                parts[r] += number * *(const Floats*)(x + ((r * steps + step) * N + j) * LANES);
        }
        for (int r = 0; r < R; r++) sums[r] += parts[r] * *(const Floats*)(weight.scales + step * LANES);
    }
    for (int r = 0; r < R; r++) {
        float sum = 0;
        for (int lane = 0; lane < LANES; lane++) sum += sums[r][lane];
        out[r * outputs] = sum;
    }
}

template <class Number>
void product(const float* x, const uint8_t* words, const void* scales, const float* zeros, float* out, long rows,
             long outputs, long inputs, long outputs_together, long group, int are_exponents, int threads) {
    constexpr int N = 32 / Number::BITS;
    const long of_row = inputs / N, steps = (of_row + LANES - 1) / LANES, groups = (inputs + group - 1) / group;
    #pragma omp parallel num_threads(threads)
    {
        std::vector<float> scale((steps + 1) * LANES), zero((steps + 1) * LANES);
        #pragma omp for
        for (long o = 0; o < outputs; o++) {
            for (long g = 0; g < groups; g++) {
                const long at = o / outputs_together * groups + g, end = std::min(of_row, (g + 1) * group / N);
                float value;
                if (are_exponents) {
                    const uint32_t exponent = ((const uint8_t*)scales)[at];
                    const uint32_t bits = exponent ? exponent << 23 : 1u << 22;  // the least one is subnormal
                    std::memcpy(&value, &bits, 4);
                } else {
                    value = ((const float*)scales)[at];
                }
                // The last vector of a group may reach beyond it, where the next group overwrites it.
                for (long w = g * group / N; w < end; w += LANES) {
                    *(Floats*)&scale[w] = Floats{} + value;
                    if (Number::HAS_ZEROS) *(Floats*)&zero[w] = Floats{} + zeros[at];
                }
            }
            const Weight<Number> weight{words + 4 * of_row * o, of_row, scale.data(), zero.data()};
            const long of_x = steps * N * LANES;
            long r = 0;
            for (; r + TOGETHER <= rows; r += TOGETHER)
                add_up<TOGETHER>(weight, x + r * of_x, steps, out + r * outputs + o, outputs);
            for (; r + 2 <= rows; r += 2) add_up<2>(weight, x + r * of_x, steps, out + r * outputs + o, outputs);
            if (r < rows) add_up<1>(weight, x + r * of_x, steps, out + r * outputs + o, outputs);
        }
    }
}

}  // namespace

#define PRODUCT(name, ...)                                                                                            \
    extern "C" void name(const float* x, const uint8_t* words, const void* scales, const float* zeros, float* out,    \
                         long rows, long outputs, long inputs, long outputs_together, long group, int are_exponents,  \
                         int threads) {                                                                               \
        product<__VA_ARGS__>(x, words, scales, zeros, out, rows, outputs, inputs, outputs_together, group,            \
                             are_exponents, threads);                                                                 \
    }
PRODUCT(e2m1, E2m1)
PRODUCT(e4m3, Float<4, 3>)
PRODUCT(int4, Integer<4, 0x80000000u>)
PRODUCT(int4_zeros, Integer<4, 0x80000000u, true>)
PRODUCT(int8, Integer<8, 0>)
extern "C" long lanes() { return LANES; }
