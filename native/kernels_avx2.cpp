// AVX2: products by two 16-entry shuffles (low and high half of a byte), CRC32C by crc32.
// Compiled with -mavx2 -msse4.2.

#include <immintrin.h>

#include "halves.h"
#include "hardware_crc.h"
#include "kernels.h"
#include "stream_groups.h"
#include "streaming_copy.h"

namespace ecckpt {
namespace {

constexpr std::size_t column_bytes = 64;
constexpr std::size_t widest = 4;  // 4 outputs x 2 sums leave 8 of 16 registers for the rest

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

inline void store(bool streaming, std::uint8_t *bytes, __m256i value) {
    if (streaming)
        _mm256_stream_si256(reinterpret_cast<__m256i *>(bytes), value);
    else
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(bytes), value);
}

// A pass, laid out for the loop over columns. Registers are those of the inputs, then of the
// outputs; tables are the coefficients by input, then by output.
struct Layout {
    Stream streams[max_fragments];
    Halves tables[max_fragments * widest];
    std::uint32_t registers[max_fragments + widest];
};

struct Column {
    __m256i first, second;
};

template <bool copies, bool crcs>
inline Column take(bool streaming, const Stream &stream, std::size_t at, std::uint32_t &raw) {
    _mm_prefetch(reinterpret_cast<const char *>(stream.ahead + at), _MM_HINT_T0);
    if (crcs) raw = crc_bytes(raw, stream.bytes + at, column_bytes);
    const Column x = {load(stream.bytes + at), load(stream.bytes + at + 32)};
    if (copies && stream.copy != nullptr) {
        store(streaming, stream.copy + at, x.first);
        store(streaming, stream.copy + at + 32, x.second);
    }
    return x;
}

template <int outputs>
inline void add_products(Column *sums, const Halves *tables, Column x) {
    const __m256i low_bits = _mm256_set1_epi8(0x0F);
    const __m256i first_low = _mm256_and_si256(x.first, low_bits);
    const __m256i second_low = _mm256_and_si256(x.second, low_bits);
    const __m256i first_high = _mm256_and_si256(_mm256_srli_epi64(x.first, 4), low_bits);
    const __m256i second_high = _mm256_and_si256(_mm256_srli_epi64(x.second, 4), low_bits);
    for (int r = 0; r < outputs; ++r) {
        sums[r].first = _mm256_xor_si256(sums[r].first, times(tables[r], first_low, first_high));
        sums[r].second =
            _mm256_xor_si256(sums[r].second, times(tables[r], second_low, second_high));
    }
}

template <int outputs, bool copies, Crcs crcs>
void code_columns(const Pass &pass, Layout &layout, std::size_t length) {
    for (std::size_t at = pass.offset; at < pass.offset + length; at += column_bytes) {
        Column sums[outputs ? outputs : 1];
        for (int r = 0; r < outputs; ++r)
            sums[r] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
        for (std::size_t j = 0; j < pass.input_count; ++j) {
            const Column x = take<copies, crcs == Crcs::all>(pass.streaming, layout.streams[j], at,
                                                                        layout.registers[j]);
            if (j < pass.coded_count)
                add_products<outputs>(sums, layout.tables + j * outputs, x);
        }
        for (int r = 0; r < outputs; ++r) {
            store(pass.streaming, pass.outputs[r] + at, sums[r].first);
            store(pass.streaming, pass.outputs[r] + at + 32, sums[r].second);
            if (crcs == Crcs::none) continue;
            // Not read back from the output: streaming stores have left for memory.
            alignas(32) std::uint8_t column[column_bytes];
            store(false, column, sums[r].first);
            store(false, column + 32, sums[r].second);
            std::uint32_t &raw = layout.registers[pass.input_count + r];
            raw = crc_bytes(raw, column, column_bytes);
        }
    }
}

// -- engine ---------------------------------------------------------------------------------------

using Columns = void (*)(const Pass &, Layout &, std::size_t);

template <bool copies, Crcs crcs>
Columns by_outputs(const Pass &pass) {
    constexpr Columns choices[widest + 1] = {
        code_columns<0, copies, crcs>, code_columns<1, copies, crcs>,
        code_columns<2, copies, crcs>, code_columns<3, copies, crcs>,
        code_columns<4, copies, crcs>};
    return choices[pass.output_count];
}

template <bool copies>
Columns by_crcs(const Pass &pass) {
    if (pass.input_crcs) return by_outputs<copies, Crcs::all>(pass);
    if (pass.output_crcs) return by_outputs<copies, Crcs::outputs>(pass);
    return by_outputs<copies, Crcs::none>(pass);
}

Columns columns_for(const Pass &pass) {
    return pass.copies ? by_crcs<true>(pass) : by_crcs<false>(pass);
}

void code(const Pass &pass) {
    Layout layout;
    point_ahead(pass, layout.streams);
    lay_out_tables(pass, layout.tables);
    std::uint32_t *of_outputs = layout.registers + pass.input_count;
    for (std::size_t j = 0; pass.input_crcs && j < pass.input_count; ++j)
        layout.registers[j] = ~pass.input_crcs[j];
    for (std::size_t r = 0; pass.output_crcs && r < pass.output_count; ++r)
        of_outputs[r] = ~pass.output_crcs[r];

    const std::size_t whole = pass.length / column_bytes * column_bytes;
    const std::size_t rest = pass.length - whole, at = pass.offset + whole;
    columns_for(pass)(pass, layout, whole);
    code_rest(pass, whole, layout.tables);

    for (std::size_t j = 0; pass.input_crcs && j < pass.input_count; ++j)
        pass.input_crcs[j] = ~crc_bytes(layout.registers[j], pass.inputs[j] + at, rest);
    for (std::size_t r = 0; pass.output_crcs && r < pass.output_count; ++r)
        pass.output_crcs[r] = ~crc_bytes(of_outputs[r], pass.outputs[r] + at, rest);
}

void move_line(const std::uint8_t *source, std::uint8_t *target) {
    const __m256i x = load(source), y = load(source + 32);
    store(true, target, x);
    store(true, target + 32, y);
}

void copy(const std::uint8_t *source, std::uint8_t *target, std::size_t length) {
    copy_lines<move_line>(source, target, length);
}

bool supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("sse4.2"); }

}  // namespace

const Engine avx2_engine = {"avx2", widest, supported, code, copy};

}  // namespace ecckpt
