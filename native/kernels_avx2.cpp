// AVX2: products by two 16-entry shuffles (low and high half of a byte), CRC32C by crc32.
// Compiled with -mavx2 -msse4.2.

#include <immintrin.h>

#include "field.h"
#include "hardware_crc.h"
#include "kernels.h"
#include "streaming_copy.h"

namespace ecckpt {
namespace {

constexpr std::size_t column_bytes = 64;
constexpr std::size_t widest = 4;  // 4 outputs x 2 sums leave 8 of 16 registers for the rest

// -- tables ---------------------------------------------------------------------------------------

struct Halves {
    std::uint8_t low[16];   // c * 0x00 .. c * 0x0F
    std::uint8_t high[16];  // c * 0x00 .. c * 0xF0
};

struct HalvesTable {
    Halves of[256];
};

constexpr HalvesTable make_halves() {
    HalvesTable table{};
    for (unsigned c = 0; c < 256; ++c)
        for (unsigned x = 0; x < 16; ++x) {
            table.of[c].low[x] = gf_product(c, x);
            table.of[c].high[x] = gf_product(c, x << 4);
        }
    return table;
}

constexpr HalvesTable halves = make_halves();

// -- columns --------------------------------------------------------------------------------------

inline __m256i both_lanes(const std::uint8_t *table) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(table)));
}

inline __m256i times(const Halves &table, __m256i low, __m256i high) {
    return _mm256_xor_si256(_mm256_shuffle_epi8(both_lanes(table.low), low),
                            _mm256_shuffle_epi8(both_lanes(table.high), high));
}

inline __m256i load(const std::uint8_t *bytes) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(bytes));
}

template <bool streaming>
inline void store(std::uint8_t *bytes, __m256i value) {
    if (streaming)
        _mm256_stream_si256(reinterpret_cast<__m256i *>(bytes), value);
    else
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(bytes), value);
}

// Codes the whole columns of a pass; `raw` holds the registers of the inputs, then of the outputs,
// and `tables` the coefficients by input, then by output.
template <int outputs, bool streaming, bool input_crcs>
void code_columns(const Pass &pass, std::size_t length, const Halves *tables, std::uint32_t *raw) {
    const __m256i low_bits = _mm256_set1_epi8(0x0F);
    for (std::size_t at = pass.offset; at < pass.offset + length; at += column_bytes) {
        __m256i first[outputs ? outputs : 1], second[outputs ? outputs : 1];
        for (int r = 0; r < outputs; ++r) first[r] = second[r] = _mm256_setzero_si256();
        for (std::size_t j = 0; j < pass.input_count; ++j) {
            const std::uint8_t *input = pass.inputs[j] + at;
            _mm_prefetch(reinterpret_cast<const char *>(input + 512), _MM_HINT_T0);
            if (input_crcs) raw[j] = crc_bytes(raw[j], input, column_bytes);
            if (!outputs) continue;
            const __m256i x = load(input), y = load(input + 32);
            const __m256i x_low = _mm256_and_si256(x, low_bits);
            const __m256i y_low = _mm256_and_si256(y, low_bits);
            const __m256i x_high = _mm256_and_si256(_mm256_srli_epi64(x, 4), low_bits);
            const __m256i y_high = _mm256_and_si256(_mm256_srli_epi64(y, 4), low_bits);
            for (int r = 0; r < outputs; ++r) {
                const Halves &table = tables[j * outputs + r];
                first[r] = _mm256_xor_si256(first[r], times(table, x_low, x_high));
                second[r] = _mm256_xor_si256(second[r], times(table, y_low, y_high));
            }
        }
        for (int r = 0; r < outputs; ++r) {
            store<streaming>(pass.outputs[r] + at, first[r]);
            store<streaming>(pass.outputs[r] + at + 32, second[r]);
            // Not read back from the output: streaming stores have left for memory.
            alignas(32) std::uint8_t column[column_bytes];
            store<false>(column, first[r]);
            store<false>(column + 32, second[r]);
            std::uint32_t &crc = raw[pass.input_count + r];
            crc = crc_bytes(crc, column, column_bytes);
        }
    }
}

// Codes what is left after the last whole column, byte by byte.
void code_rest(const Pass &pass, std::size_t done, const Halves *tables, std::uint32_t *raw) {
    const std::size_t at = pass.offset + done, length = pass.length - done;
    if (pass.input_crcs)
        for (std::size_t j = 0; j < pass.input_count; ++j)
            raw[j] = crc_bytes(raw[j], pass.inputs[j] + at, length);
    for (std::size_t r = 0; r < pass.output_count; ++r) {
        std::uint8_t *output = pass.outputs[r] + at;
        for (std::size_t i = 0; i < length; ++i) {
            unsigned sum = 0;
            for (std::size_t j = 0; j < pass.input_count; ++j) {
                const Halves &table = tables[j * pass.output_count + r];
                const std::uint8_t byte = pass.inputs[j][at + i];
                sum ^= table.low[byte & 15] ^ table.high[byte >> 4];
            }
            output[i] = static_cast<std::uint8_t>(sum);
        }
        std::uint32_t &crc = raw[pass.input_count + r];
        crc = crc_bytes(crc, output, length);
    }
}

// -- engine ---------------------------------------------------------------------------------------

using Columns = void (*)(const Pass &, std::size_t, const Halves *, std::uint32_t *);

template <bool streaming, bool input_crcs>
Columns columns_for(std::size_t outputs) {
    constexpr Columns choices[widest + 1] = {
        code_columns<0, streaming, input_crcs>, code_columns<1, streaming, input_crcs>,
        code_columns<2, streaming, input_crcs>, code_columns<3, streaming, input_crcs>,
        code_columns<4, streaming, input_crcs>};
    return choices[outputs];
}

void code(const Pass &pass) {
    Halves tables[max_fragments * widest];
    std::uint32_t raw[max_fragments + widest];
    for (std::size_t j = 0; j < pass.input_count; ++j) {
        raw[j] = pass.input_crcs ? ~pass.input_crcs[j] : 0;
        for (std::size_t r = 0; r < pass.output_count; ++r)
            tables[j * pass.output_count + r] =
                halves.of[pass.coefficients[r * pass.input_count + j]];
    }
    for (std::size_t r = 0; r < pass.output_count; ++r)
        raw[pass.input_count + r] = ~pass.output_crcs[r];

    const std::size_t whole = pass.length / column_bytes * column_bytes;
    const Columns columns = pass.input_crcs
                                ? (pass.streaming ? columns_for<true, true>(pass.output_count)
                                                  : columns_for<false, true>(pass.output_count))
                                : (pass.streaming ? columns_for<true, false>(pass.output_count)
                                                  : columns_for<false, false>(pass.output_count));
    columns(pass, whole, tables, raw);
    code_rest(pass, whole, tables, raw);

    if (pass.input_crcs)
        for (std::size_t j = 0; j < pass.input_count; ++j) pass.input_crcs[j] = ~raw[j];
    for (std::size_t r = 0; r < pass.output_count; ++r)
        pass.output_crcs[r] = ~raw[pass.input_count + r];
}

void move_line(const std::uint8_t *source, std::uint8_t *target) {
    const __m256i x = load(source), y = load(source + 32);
    store<true>(target, x);
    store<true>(target + 32, y);
}

void copy(const std::uint8_t *source, std::uint8_t *target, std::size_t length) {
    copy_lines<move_line>(source, target, length);
}

bool supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("sse4.2"); }

}  // namespace

const Engine avx2_engine = {"avx2", widest, supported, code, copy};

}  // namespace ecckpt
