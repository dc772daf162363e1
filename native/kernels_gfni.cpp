// AVX-512 with GFNI and VPCLMULQDQ: one instruction multiplies 64 bytes, two fold a CRC over them.
// Compiled with -mavx512f -mavx512bw -mavx512vl -mgfni -mvpclmulqdq -mpclmul -msse4.2.
//
// A column is 128 bytes at the same offset of all streams. Each stream has one 64-byte CRC
// accumulator in the L1 cache: going round the streams hides the latency of folding.

#include <immintrin.h>

#include "field.h"
#include "hardware_crc.h"
#include "kernels.h"
#include "streaming_copy.h"

namespace ecckpt {
namespace {

constexpr std::size_t column_bytes = 128;
constexpr std::size_t widest = 8;  // 8 outputs x 2 sums are half of the 32 registers

// -- multiplication -------------------------------------------------------------------------------

struct AffineTable {
    std::uint64_t of[256];
};

// The 8 x 8 bit matrix of "times c" for gf2p8affineqb: byte 7 - i holds the row of result bit i.
constexpr AffineTable make_affine() {
    AffineTable table{};
    for (unsigned c = 0; c < 256; ++c)
        for (unsigned in = 0; in < 8; ++in) {
            const std::uint64_t product = gf_product(c, 1u << in);
            for (unsigned out = 0; out < 8; ++out)
                table.of[c] |= ((product >> out) & 1) << (8 * (7 - out) + in);
        }
    return table;
}

constexpr AffineTable affine = make_affine();

inline __m512i plus_product(__m512i sum, __m512i x, std::uint64_t matrix) {
    const __m512i product =
        _mm512_gf2p8affine_epi64_epi8(x, _mm512_set1_epi64(static_cast<long long>(matrix)), 0);
    return _mm512_xor_si512(sum, product);
}

// -- CRC32C ---------------------------------------------------------------------------------------

inline __m512i xor3(__m512i a, __m512i b, __m512i c) {
    return _mm512_ternarylogic_epi64(a, b, c, 0x96);
}

// Moving 128 bits `bits` further in the message multiplies them by x^bits. The low quadword comes
// first in the message, so it stands 64 powers higher. A carry-less product of reflected numbers
// comes out one power too high, hence the - 1. Only the upper half of a constant is occupied.
template <unsigned bits>
inline __m512i fold(__m512i value) {
    constexpr auto low = static_cast<long long>(std::uint64_t{crc_power(bits + 64 - 1)} << 32);
    constexpr auto high = static_cast<long long>(std::uint64_t{crc_power(bits - 1)} << 32);
    const __m512i constants = _mm512_set_epi64(high, low, high, low, high, low, high, low);
    return _mm512_xor_si512(_mm512_clmulepi64_epi128(value, constants, 0x00),
                            _mm512_clmulepi64_epi128(value, constants, 0x11));
}

inline __m512i crc_column(__m512i accumulator, __m512i first, __m512i second) {
    return xor3(fold<1024>(accumulator), fold<512>(first), second);
}

// 64 bytes that leave the register at `raw` when it starts from zero.
inline __m512i accumulator_of(std::uint32_t raw) {
    const auto last = static_cast<long long>(std::uint64_t{crc_before_32_zeros(raw)} << 32);
    return _mm512_set_epi64(last, 0, 0, 0, 0, 0, 0, 0);
}

inline std::uint32_t register_of(__m512i accumulator) {
    alignas(64) std::uint8_t bytes[64];
    _mm512_store_si512(bytes, accumulator);
    return crc_bytes(0, bytes, 64);
}

// -- columns --------------------------------------------------------------------------------------

template <bool streaming>
inline void store(std::uint8_t *bytes, __m512i value) {
    if (streaming)
        _mm512_stream_si512(reinterpret_cast<__m512i *>(bytes), value);
    else
        _mm512_storeu_si512(bytes, value);
}

// Codes the whole columns of a pass; `crcs` holds the accumulators of the inputs, then of the
// outputs, and `matrices` the coefficients by input, then by output.
template <int outputs, bool streaming, bool input_crcs>
void code_columns(const Pass &pass, std::size_t length, const std::uint64_t *matrices,
                  __m512i *crcs) {
    for (std::size_t at = pass.offset; at < pass.offset + length; at += column_bytes) {
        __m512i first[outputs ? outputs : 1], second[outputs ? outputs : 1];
        for (int r = 0; r < outputs; ++r) first[r] = second[r] = _mm512_setzero_si512();
        for (std::size_t j = 0; j < pass.input_count; ++j) {
            const std::uint8_t *input = pass.inputs[j] + at;
            _mm_prefetch(reinterpret_cast<const char *>(input + 512), _MM_HINT_T0);
            _mm_prefetch(reinterpret_cast<const char *>(input + 576), _MM_HINT_T0);
            const __m512i x = _mm512_loadu_si512(input), y = _mm512_loadu_si512(input + 64);
            if (input_crcs) crcs[j] = crc_column(crcs[j], x, y);
            for (int r = 0; r < outputs; ++r) {
                first[r] = plus_product(first[r], x, matrices[j * outputs + r]);
                second[r] = plus_product(second[r], y, matrices[j * outputs + r]);
            }
        }
        for (int r = 0; r < outputs; ++r) {
            store<streaming>(pass.outputs[r] + at, first[r]);
            store<streaming>(pass.outputs[r] + at + 64, second[r]);
            __m512i &crc = crcs[pass.input_count + r];
            crc = crc_column(crc, first[r], second[r]);
        }
    }
}

// Codes what is left after the last whole column. Masked bytes are neither read nor written.
void code_rest(const Pass &pass, std::size_t done, const std::uint64_t *matrices) {
    for (; done < pass.length; done += 64) {
        const std::size_t left = pass.length - done, at = pass.offset + done;
        const __mmask64 mask = left < 64 ? (__mmask64{1} << left) - 1 : ~__mmask64{0};
        for (std::size_t r = 0; r < pass.output_count; ++r) {
            __m512i sum = _mm512_setzero_si512();
            for (std::size_t j = 0; j < pass.input_count; ++j)
                sum = plus_product(sum, _mm512_maskz_loadu_epi8(mask, pass.inputs[j] + at),
                                   matrices[j * pass.output_count + r]);
            _mm512_mask_storeu_epi8(pass.outputs[r] + at, mask, sum);
        }
    }
}

// -- engine ---------------------------------------------------------------------------------------

using Columns = void (*)(const Pass &, std::size_t, const std::uint64_t *, __m512i *);

template <bool streaming, bool input_crcs>
Columns columns_for(std::size_t outputs) {
    constexpr Columns choices[widest + 1] = {
        code_columns<0, streaming, input_crcs>, code_columns<1, streaming, input_crcs>,
        code_columns<2, streaming, input_crcs>, code_columns<3, streaming, input_crcs>,
        code_columns<4, streaming, input_crcs>, code_columns<5, streaming, input_crcs>,
        code_columns<6, streaming, input_crcs>, code_columns<7, streaming, input_crcs>,
        code_columns<8, streaming, input_crcs>};
    return choices[outputs];
}

void code(const Pass &pass) {
    std::uint64_t matrices[max_fragments * widest];
    __m512i crcs[max_fragments + widest];
    for (std::size_t j = 0; j < pass.input_count; ++j) {
        if (pass.input_crcs) crcs[j] = accumulator_of(~pass.input_crcs[j]);
        for (std::size_t r = 0; r < pass.output_count; ++r)
            matrices[j * pass.output_count + r] =
                affine.of[pass.coefficients[r * pass.input_count + j]];
    }
    for (std::size_t r = 0; r < pass.output_count; ++r)
        crcs[pass.input_count + r] = accumulator_of(~pass.output_crcs[r]);

    const std::size_t whole = pass.length / column_bytes * column_bytes;
    const std::size_t rest = pass.length - whole, at = pass.offset + whole;
    const Columns columns = pass.input_crcs
                                ? (pass.streaming ? columns_for<true, true>(pass.output_count)
                                                  : columns_for<false, true>(pass.output_count))
                                : (pass.streaming ? columns_for<true, false>(pass.output_count)
                                                  : columns_for<false, false>(pass.output_count));
    columns(pass, whole, matrices, crcs);
    code_rest(pass, whole, matrices);

    for (std::size_t j = 0; pass.input_crcs && j < pass.input_count; ++j)
        pass.input_crcs[j] = ~crc_bytes(register_of(crcs[j]), pass.inputs[j] + at, rest);
    for (std::size_t r = 0; r < pass.output_count; ++r) {
        const std::uint32_t raw = register_of(crcs[pass.input_count + r]);
        pass.output_crcs[r] = ~crc_bytes(raw, pass.outputs[r] + at, rest);
    }
}

void move_line(const std::uint8_t *source, std::uint8_t *target) {
    store<true>(target, _mm512_loadu_si512(source));
}

void copy(const std::uint8_t *source, std::uint8_t *target, std::size_t length) {
    copy_lines<move_line>(source, target, length);
}

bool supported() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("gfni") &&
           __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("pclmul") &&
           __builtin_cpu_supports("sse4.2");
}

}  // namespace

const Engine gfni_engine = {"gfni", widest, supported, code, copy};

}  // namespace ecckpt
