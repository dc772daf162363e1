// The AVX2 engine: products by two 16-entry shuffles per byte, CRC32C by the crc32 instruction.
// Compiled with -mavx2 -msse4.2.

#include <immintrin.h>

#include "nibble_tables.h"
#include "pass_driver.h"
#include "streaming_copy.h"

namespace ecckpt {
namespace {

inline __m256i load_vector(const std::uint8_t *bytes) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(bytes));
}

inline void store_vector(bool streaming, std::uint8_t *bytes, __m256i value) {
    if (streaming)
        _mm256_stream_si256(reinterpret_cast<__m256i *>(bytes), value);
    else
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(bytes), value);
}

// A shuffle looks up within each half of a register: both halves get the table.
inline __m256i both_lanes(const std::uint8_t *table) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(table)));
}

inline __m256i product(const NibbleTable &table, __m256i low, __m256i high) {
    return _mm256_xor_si256(_mm256_shuffle_epi8(both_lanes(table.low), low),
                            _mm256_shuffle_epi8(both_lanes(table.high), high));
}

struct Avx2 {
    static constexpr std::size_t column_bytes = 64;
    static constexpr std::size_t pass_outputs = 4;  // their sums take 8 of the 16 registers
    static constexpr bool pairs_inputs = false;     // pairs gain by a three-way XOR only

    struct Column {
        __m256i first, second;
    };
    using Coefficient = NibbleTable;
    // The crc32 instruction works on the raw register itself.
    using CrcState = std::uint32_t;

    static Coefficient coefficient(std::uint8_t c) { return nibble_tables.of[c]; }

    static Column zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }

    static Column load(const std::uint8_t *bytes) {
        return {load_vector(bytes), load_vector(bytes + 32)};
    }

    static void store(bool streaming, std::uint8_t *bytes, const Column &x) {
        store_vector(streaming, bytes, x.first);
        store_vector(streaming, bytes + 32, x.second);
    }

    template <int outputs>
    static void add_products(Column *sums, const Coefficient *coefficients, const Column &x) {
        const __m256i low_bits = _mm256_set1_epi8(0x0F);
        const __m256i first_low = _mm256_and_si256(x.first, low_bits);
        const __m256i second_low = _mm256_and_si256(x.second, low_bits);
        const __m256i first_high = _mm256_and_si256(_mm256_srli_epi64(x.first, 4), low_bits);
        const __m256i second_high = _mm256_and_si256(_mm256_srli_epi64(x.second, 4), low_bits);
        for (int r = 0; r < outputs; ++r) {
            const Coefficient &table = coefficients[r];
            sums[r].first = _mm256_xor_si256(sums[r].first, product(table, first_low, first_high));
            sums[r].second =
                _mm256_xor_si256(sums[r].second, product(table, second_low, second_high));
        }
    }

    static CrcState crc_state(std::uint32_t raw) { return raw; }
    static std::uint32_t crc_register(CrcState raw) { return raw; }

    static CrcState append(CrcState raw, const Column &, const std::uint8_t *source) {
        return crc_bytes(raw, source, column_bytes);
    }

    // A sum is not read back from its output: a streaming store has sent it to memory.
    static CrcState append(CrcState raw, const Column &x) {
        alignas(32) std::uint8_t bytes[column_bytes];
        store(false, bytes, x);
        return crc_bytes(raw, bytes, column_bytes);
    }
};

void copy_line(const std::uint8_t *source, std::uint8_t *target) {
    Avx2::store(true, target, Avx2::load(source));
}

void copy(const std::uint8_t *source, std::uint8_t *target, std::size_t length) {
    copy_lines<copy_line>(source, target, length);
}

bool supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("sse4.2"); }

}  // namespace

const Engine avx2_engine = {
    .name = "avx2",
    .pass_outputs = Avx2::pass_outputs,
    .supported = supported,
    .code = code_pass<Avx2>,
    .copy = copy,
};

}  // namespace ecckpt
