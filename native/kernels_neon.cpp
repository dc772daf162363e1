// 64-bit Arm: products by two 16-entry table look-ups (low and high half of a byte), CRC32C by
// carry-less multiplication. Compiled with -march=armv8-a+crypto+crc (crypto: AES with PMULL,
// SHA-1, SHA-2).
//
// A column is 64 bytes at the same offset of all streams, each of which has one 64-byte CRC
// accumulator. Stores are ordinary ones: these cores notice whole lines being overwritten and do
// not read them first.

#include <arm_acle.h>
#include <arm_neon.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>

#include <cstring>

#include "halves.h"
#include "kernels.h"
#include "stream_groups.h"

namespace ecckpt {
namespace {

constexpr std::size_t column_bytes = 64;
constexpr int column_vectors = 4;
constexpr std::size_t widest = 4;  // 4 outputs x 4 sums are half of the 32 registers

// -- multiplication -------------------------------------------------------------------------------

struct Column {
    uint8x16_t of[column_vectors];
};

inline Column load(const std::uint8_t *bytes) {
    return {{vld1q_u8(bytes), vld1q_u8(bytes + 16), vld1q_u8(bytes + 32), vld1q_u8(bytes + 48)}};
}

inline void store(std::uint8_t *bytes, const Column &column) {
    for (int v = 0; v < column_vectors; ++v) vst1q_u8(bytes + 16 * v, column.of[v]);
}

template <int outputs>
inline void add_products(Column *sums, const Halves *tables, const Column &x) {
    const uint8x16_t low_bits = vdupq_n_u8(0x0F);
    for (int r = 0; r < outputs; ++r) {
        const uint8x16_t low = vld1q_u8(tables[r].low), high = vld1q_u8(tables[r].high);
        for (int v = 0; v < column_vectors; ++v) {
            const uint8x16_t by_low = vqtbl1q_u8(low, vandq_u8(x.of[v], low_bits));
            const uint8x16_t by_high = vqtbl1q_u8(high, vshrq_n_u8(x.of[v], 4));
            sums[r].of[v] = veorq_u8(sums[r].of[v], veorq_u8(by_low, by_high));
        }
    }
}

// -- CRC32C ---------------------------------------------------------------------------------------

inline uint64x2_t product(poly64_t a, poly64_t b) {
    return vreinterpretq_u64_p128(vmull_p64(a, b));
}

// Moving 128 bits 512 bits further in the message multiplies them by x^512. The low half comes
// first in the message, so it stands 64 powers higher. A carry-less product of reflected numbers
// comes out one power too high, hence the - 1. Only the upper half of a constant is occupied.
inline Column crc_column(const Column &accumulator, const Column &x) {
    constexpr poly64_t low = std::uint64_t{crc_power(512 + 64 - 1)} << 32;
    constexpr poly64_t high = std::uint64_t{crc_power(512 - 1)} << 32;
    Column sum;
    for (int v = 0; v < column_vectors; ++v) {
        const poly64x2_t value = vreinterpretq_p64_u8(accumulator.of[v]);
        const uint64x2_t moved = veorq_u64(product(vgetq_lane_p64(value, 0), low),
                                           product(vgetq_lane_p64(value, 1), high));
        sum.of[v] = veorq_u8(vreinterpretq_u8_u64(moved), x.of[v]);
    }
    return sum;
}

// Takes and returns the raw register (the CRC with all bits inverted).
inline std::uint32_t crc_bytes(std::uint32_t raw, const std::uint8_t *bytes, std::size_t length) {
    for (; length >= 8; bytes += 8, length -= 8) {
        std::uint64_t word;
        std::memcpy(&word, bytes, 8);
        raw = __crc32cd(raw, word);
    }
    for (; length > 0; ++bytes, --length) raw = __crc32cb(raw, *bytes);
    return raw;
}

// 64 bytes that leave the register at `raw` when it starts from zero.
inline Column accumulator_of(std::uint32_t raw) {
    std::uint8_t bytes[column_bytes] = {};
    const std::uint32_t last = crc_before_32_zeros(raw);
    std::memcpy(bytes + column_bytes - 4, &last, 4);
    return load(bytes);
}

inline std::uint32_t register_of(const Column &accumulator) {
    std::uint8_t bytes[column_bytes];
    store(bytes, accumulator);
    return crc_bytes(0, bytes, column_bytes);
}

// -- columns --------------------------------------------------------------------------------------

// A pass, laid out for the loop over columns. Accumulators are those of the inputs, then of the
// outputs; tables are the coefficients by input, then by output.
struct Layout {
    Stream streams[max_fragments];
    Halves tables[max_fragments * widest];
    Column accumulators[max_fragments + widest];
};

template <int outputs, Crcs crcs>
void code_columns(const Pass &pass, Layout &layout, std::size_t length) {
    for (std::size_t at = pass.offset; at < pass.offset + length; at += column_bytes) {
        Column sums[outputs ? outputs : 1];
        for (int r = 0; r < outputs; ++r)
            for (int v = 0; v < column_vectors; ++v) sums[r].of[v] = vdupq_n_u8(0);
        for (std::size_t j = 0; j < pass.input_count; ++j) {
            const Stream &stream = layout.streams[j];
            __builtin_prefetch(stream.ahead + at);
            const Column x = load(stream.bytes + at);
            if (stream.copy != nullptr) store(stream.copy + at, x);
            Column &accumulator = layout.accumulators[j];
            if (crcs == Crcs::all) accumulator = crc_column(accumulator, x);
            if (j < pass.coded_count)
                add_products<outputs>(sums, layout.tables + j * outputs, x);
        }
        for (int r = 0; r < outputs; ++r) {
            store(pass.outputs[r] + at, sums[r]);
            Column &accumulator = layout.accumulators[pass.input_count + r];
            if (crcs != Crcs::none) accumulator = crc_column(accumulator, sums[r]);
        }
    }
}

// -- engine ---------------------------------------------------------------------------------------

using Columns = void (*)(const Pass &, Layout &, std::size_t);

template <Crcs crcs>
Columns by_outputs(const Pass &pass) {
    constexpr Columns choices[widest + 1] = {code_columns<0, crcs>, code_columns<1, crcs>,
                                             code_columns<2, crcs>, code_columns<3, crcs>,
                                             code_columns<4, crcs>};
    return choices[pass.output_count];
}

Columns columns_for(const Pass &pass) {
    if (pass.input_crcs) return by_outputs<Crcs::all>(pass);
    if (pass.output_crcs) return by_outputs<Crcs::outputs>(pass);
    return by_outputs<Crcs::none>(pass);
}

void code(const Pass &pass) {
    Layout layout;
    point_ahead(pass, layout.streams);
    lay_out_tables(pass, layout.tables);
    Column *of_outputs = layout.accumulators + pass.input_count;
    for (std::size_t j = 0; pass.input_crcs && j < pass.input_count; ++j)
        layout.accumulators[j] = accumulator_of(~pass.input_crcs[j]);
    for (std::size_t r = 0; pass.output_crcs && r < pass.output_count; ++r)
        of_outputs[r] = accumulator_of(~pass.output_crcs[r]);

    const std::size_t whole = pass.length / column_bytes * column_bytes;
    const std::size_t rest = pass.length - whole, at = pass.offset + whole;
    columns_for(pass)(pass, layout, whole);
    code_rest(pass, whole, layout.tables);

    for (std::size_t j = 0; pass.input_crcs && j < pass.input_count; ++j)
        pass.input_crcs[j] =
            ~crc_bytes(register_of(layout.accumulators[j]), pass.inputs[j] + at, rest);
    for (std::size_t r = 0; pass.output_crcs && r < pass.output_count; ++r)
        pass.output_crcs[r] = ~crc_bytes(register_of(of_outputs[r]), pass.outputs[r] + at, rest);
}

void copy(const std::uint8_t *source, std::uint8_t *target, std::size_t length) {
    std::memcpy(target, source, length);
}

bool supported() {
    const unsigned long needed =
        HWCAP_ASIMD | HWCAP_AES | HWCAP_PMULL | HWCAP_SHA1 | HWCAP_SHA2 | HWCAP_CRC32;
    return (getauxval(AT_HWCAP) & needed) == needed;
}

}  // namespace

const Engine neon_engine = {"neon", widest, supported, code, copy};

}  // namespace ecckpt
