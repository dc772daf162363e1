// The engine for AVX-512 with GFNI and VPCLMULQDQ: one instruction multiplies 64 bytes, two fold a
// CRC32C over them.
// Compiled with -mavx512f -mavx512bw -mavx512vl -mgfni -mvpclmulqdq -mpclmul -msse4.2.

#include <immintrin.h>

#include "pass_driver.h"
#include "polynomials.h"
#include "streaming_copy.h"

namespace ecckpt {
namespace {

inline void store_vector(bool streaming, std::uint8_t *bytes, __m512i value) {
    if (streaming)
        _mm512_stream_si512(reinterpret_cast<__m512i *>(bytes), value);
    else
        _mm512_storeu_si512(bytes, value);
}

inline __m512i xor3(__m512i a, __m512i b, __m512i c) {
    return _mm512_ternarylogic_epi64(a, b, c, 0x96);
}

// -- multiplication -------------------------------------------------------------------------------

struct MatrixTable {
    std::uint64_t of[256];
};

// of[c] is the 8 x 8 bit matrix of "times c" as gf2p8affineqb takes it: byte 7 - i holds the row of
// result bit i.
constexpr MatrixTable make_matrices() {
    MatrixTable table{};
    for (unsigned c = 0; c < 256; ++c)
        for (unsigned in = 0; in < 8; ++in) {
            const std::uint64_t product = gf_product(c, 1u << in);
            for (unsigned out = 0; out < 8; ++out)
                table.of[c] |= ((product >> out) & 1) << (8 * (7 - out) + in);
        }
    return table;
}

constexpr MatrixTable matrices = make_matrices();

inline __m512i product(__m512i x, std::uint64_t matrix) {
    const __m512i everywhere = _mm512_set1_epi64(static_cast<long long>(matrix));
    return _mm512_gf2p8affine_epi64_epi8(x, everywhere, 0);
}

// -- CRC32C ---------------------------------------------------------------------------------------

// Moves each 128 bits of `value` `bits` further in the message, which multiplies them by x^bits,
// and adds them to `sum`. The low quadword comes first in the message: its power is higher by 64. A
// carry-less product of reflected numbers comes out one power too high, hence the - 1. A constant
// has 32 bits, which stand in the upper half of a quadword.
template <unsigned bits>
inline __m512i moved_and_added(__m512i value, __m512i sum) {
    constexpr auto low = static_cast<long long>(std::uint64_t{crc_power(bits + 64 - 1)} << 32);
    constexpr auto high = static_cast<long long>(std::uint64_t{crc_power(bits - 1)} << 32);
    const __m512i constants = _mm512_set_epi64(high, low, high, low, high, low, high, low);
    return xor3(_mm512_clmulepi64_epi128(value, constants, 0x00),
                _mm512_clmulepi64_epi128(value, constants, 0x11), sum);
}

// -- the instruction set for the driver -----------------------------------------------------------

struct Gfni {
    // Two vectors: with one or with four the loop is no faster (docs/decisions/0016).
    static constexpr std::size_t column_bytes = 128;
    static constexpr std::size_t pass_outputs = 8;  // their sums take 16 of the 32 registers
    // One three-way XOR adds both products: a quarter fewer instructions for many outputs.
    static constexpr bool pairs_inputs = true;

    struct Column {
        __m512i first, second;
    };
    using Coefficient = std::uint64_t;
    // 64 bytes whose CRC, from a register of zero, is that of the columns so far.
    using CrcState = __m512i;

    static Coefficient coefficient(std::uint8_t c) { return matrices.of[c]; }

    static Column zero() { return {_mm512_setzero_si512(), _mm512_setzero_si512()}; }

    static Column load(const std::uint8_t *bytes) {
        return {_mm512_loadu_si512(bytes), _mm512_loadu_si512(bytes + 64)};
    }

    static void store(bool streaming, std::uint8_t *bytes, const Column &x) {
        store_vector(streaming, bytes, x.first);
        store_vector(streaming, bytes + 64, x.second);
    }

    template <int outputs>
    static void add_products(Column *sums, const Coefficient *coefficients, const Column &x) {
        for (int r = 0; r < outputs; ++r) {
            const Coefficient by = coefficients[r];
            sums[r].first = _mm512_xor_si512(sums[r].first, product(x.first, by));
            sums[r].second = _mm512_xor_si512(sums[r].second, product(x.second, by));
        }
    }

    template <int outputs>
    static void add_products(Column *sums, const Coefficient *coefficients, const Column &x,
                             const Column &y) {
        for (int r = 0; r < outputs; ++r) {
            const Coefficient by_x = coefficients[r], by_y = coefficients[outputs + r];
            sums[r].first = xor3(sums[r].first, product(x.first, by_x), product(y.first, by_y));
            sums[r].second = xor3(sums[r].second, product(x.second, by_x), product(y.second, by_y));
        }
    }

    static CrcState crc_state(std::uint32_t raw) {
        const auto last = static_cast<long long>(std::uint64_t{crc_before_32_zeros(raw)} << 32);
        return _mm512_set_epi64(last, 0, 0, 0, 0, 0, 0, 0);
    }

    static std::uint32_t crc_register(CrcState state) {
        alignas(64) std::uint8_t bytes[64];
        _mm512_store_si512(bytes, state);
        return crc_bytes(0, bytes, 64);
    }

    static CrcState append(CrcState state, const Column &x) {
        return moved_and_added<1024>(state, moved_and_added<512>(x.first, x.second));
    }

    static CrcState append(CrcState state, const Column &x, const std::uint8_t *) {
        return append(state, x);
    }
};

// -- engine ---------------------------------------------------------------------------------------

void copy_line(const std::uint8_t *source, std::uint8_t *target) {
    store_vector(true, target, _mm512_loadu_si512(source));
}

void copy(const std::uint8_t *source, std::uint8_t *target, std::size_t length) {
    copy_lines<copy_line>(source, target, length);
}

bool supported() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("gfni") &&
           __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("pclmul") &&
           __builtin_cpu_supports("sse4.2");
}

}  // namespace

const Engine gfni_engine = {
    .name = "gfni",
    .pass_outputs = Gfni::pass_outputs,
    .supported = supported,
    .code = code_pass<Gfni>,
    .copy = copy,
};

}  // namespace ecckpt
