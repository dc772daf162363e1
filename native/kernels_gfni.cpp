// AVX-512 with GFNI and VPCLMULQDQ: one instruction multiplies 64 bytes, two fold a CRC over them.
// Compiled with -mavx512f -mavx512bw -mavx512vl -mgfni -mvpclmulqdq -mpclmul -msse4.2.
//
// A column is 128 bytes at the same offset of all streams. Each stream has one 64-byte CRC
// accumulator in the L1 cache: going round the streams hides the latency of folding.

#include <immintrin.h>

#include "field.h"
#include "hardware_crc.h"
#include "kernels.h"
#include "stream_groups.h"
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

inline __m512i xor3(__m512i a, __m512i b, __m512i c) {
    return _mm512_ternarylogic_epi64(a, b, c, 0x96);
}

inline __m512i product(__m512i x, std::uint64_t matrix) {
    const __m512i everywhere = _mm512_set1_epi64(static_cast<long long>(matrix));
    return _mm512_gf2p8affine_epi64_epi8(x, everywhere, 0);
}

// -- CRC32C ---------------------------------------------------------------------------------------

// Moving 128 bits `bits` further in the message multiplies them by x^bits. The low quadword comes
// first in the message, so it stands 64 powers higher. A carry-less product of reflected numbers
// comes out one power too high, hence the - 1. Only the upper half of a constant is occupied.
template <unsigned bits>
inline __m512i moved_and_added(__m512i value, __m512i sum) {
    constexpr auto low = static_cast<long long>(std::uint64_t{crc_power(bits + 64 - 1)} << 32);
    constexpr auto high = static_cast<long long>(std::uint64_t{crc_power(bits - 1)} << 32);
    const __m512i constants = _mm512_set_epi64(high, low, high, low, high, low, high, low);
    return xor3(_mm512_clmulepi64_epi128(value, constants, 0x00),
                _mm512_clmulepi64_epi128(value, constants, 0x11), sum);
}

inline __m512i crc_column(__m512i accumulator, __m512i first, __m512i second) {
    return moved_and_added<1024>(accumulator, moved_and_added<512>(first, second));
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

inline void store(bool streaming, std::uint8_t *bytes, __m512i value) {
    if (streaming)
        _mm512_stream_si512(reinterpret_cast<__m512i *>(bytes), value);
    else
        _mm512_storeu_si512(bytes, value);
}

struct Column {
    __m512i first, second;
};

// A pass, laid out for the loop over columns. Accumulators are those of the inputs, then of the
// outputs; matrices are the coefficients by input, then by output.
struct Layout {
    Stream streams[max_fragments];
    std::uint64_t matrices[max_fragments * widest];
    __m512i accumulators[max_fragments + widest];
    Column sums[widest * tile_bytes / column_bytes];  // of a tile, between two groups of streams
};

template <bool copies, bool crcs>
inline Column take(bool streaming, const Stream &stream, std::size_t at, __m512i &accumulator) {
    _mm_prefetch(reinterpret_cast<const char *>(stream.ahead + at), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char *>(stream.ahead + at + 64), _MM_HINT_T0);
    const Column x = {_mm512_loadu_si512(stream.bytes + at),
                      _mm512_loadu_si512(stream.bytes + at + 64)};
    if (copies && stream.copy != nullptr) {
        store(streaming, stream.copy + at, x.first);
        store(streaming, stream.copy + at + 64, x.second);
    }
    if (crcs) accumulator = crc_column(accumulator, x.first, x.second);
    return x;
}

// Codes the whole columns from `begin` to `end` of one group of streams.
template <int outputs, bool copies, Crcs crcs>
void code_group(const Pass &pass, Layout &layout, const Group &group, std::size_t begin,
                std::size_t end) {
    constexpr bool input_crcs = crcs == Crcs::all;
    const bool streaming = pass.streaming;
    constexpr int room = outputs ? outputs : 1;
    Column *saved = layout.sums;
    for (std::size_t at = begin; at < end; at += column_bytes, saved += outputs) {
        Column sums[room];
        for (int r = 0; r < outputs; ++r)
            sums[r] = group.first ? Column{_mm512_setzero_si512(), _mm512_setzero_si512()}
                                  : saved[r];
        const std::uint64_t *matrices = layout.matrices + group.begin * outputs;
        std::size_t j = group.begin;
        for (; j + 1 < group.coded_end; j += 2, matrices += 2 * outputs) {
            const Column x = take<copies, input_crcs>(streaming, layout.streams[j], at,
                                                                 layout.accumulators[j]);
            const Column y = take<copies, input_crcs>(streaming, layout.streams[j + 1], at,
                                                                 layout.accumulators[j + 1]);
            for (int r = 0; r < outputs; ++r) {
                const std::uint64_t by_x = matrices[r], by_y = matrices[outputs + r];
                sums[r].first =
                    xor3(sums[r].first, product(x.first, by_x), product(y.first, by_y));
                sums[r].second =
                    xor3(sums[r].second, product(x.second, by_x), product(y.second, by_y));
            }
        }
        if (j < group.coded_end) {
            const Column x = take<copies, input_crcs>(streaming, layout.streams[j], at,
                                                                 layout.accumulators[j]);
            for (int r = 0; r < outputs; ++r) {
                sums[r].first = _mm512_xor_si512(sums[r].first, product(x.first, matrices[r]));
                sums[r].second = _mm512_xor_si512(sums[r].second, product(x.second, matrices[r]));
            }
            ++j;
        }
        for (; j < group.end; ++j)
            take<copies, input_crcs>(streaming, layout.streams[j], at, layout.accumulators[j]);
        for (int r = 0; r < outputs && !group.last; ++r) saved[r] = sums[r];
        for (int r = 0; r < outputs && group.last; ++r) {
            store(streaming, pass.outputs[r] + at, sums[r].first);
            store(streaming, pass.outputs[r] + at + 64, sums[r].second);
            if (crcs != Crcs::none) {
                __m512i &accumulator = layout.accumulators[pass.input_count + r];
                accumulator = crc_column(accumulator, sums[r].first, sums[r].second);
            }
        }
    }
}

template <int outputs, bool copies, Crcs crcs>
void code_columns(const Pass &pass, Layout &layout, std::size_t length) {
    const Groups groups = grouped(pass);
    point_ahead(pass, groups, layout.streams);
    const std::size_t end = pass.offset + length;
    const std::size_t step = groups.count > 1 ? tile_bytes : length;
    for (std::size_t at = pass.offset; at < end; at += step)
        for (std::size_t g = 0; g < groups.count; ++g)
            code_group<outputs, copies, crcs>(pass, layout, groups.of(g), at,
                                                         at + step < end ? at + step : end);
}

// Codes what is left after the last whole column. Masked bytes are neither read nor written.
void code_rest(const Pass &pass, std::size_t done, const std::uint64_t *matrices) {
    for (; done < pass.length; done += 64) {
        const std::size_t left = pass.length - done, at = pass.offset + done;
        const __mmask64 mask = left < 64 ? (__mmask64{1} << left) - 1 : ~__mmask64{0};
        for (std::size_t r = 0; r < pass.output_count; ++r) {
            __m512i sum = _mm512_setzero_si512();
            for (std::size_t j = 0; j < pass.coded_count; ++j) {
                const __m512i x = _mm512_maskz_loadu_epi8(mask, pass.inputs[j] + at);
                sum = _mm512_xor_si512(sum, product(x, matrices[j * pass.output_count + r]));
            }
            _mm512_mask_storeu_epi8(pass.outputs[r] + at, mask, sum);
        }
        for (std::size_t j = 0; pass.copies && j < pass.input_count; ++j)
            if (pass.copies[j])
                _mm512_mask_storeu_epi8(pass.copies[j] + at, mask,
                                        _mm512_maskz_loadu_epi8(mask, pass.inputs[j] + at));
    }
}

// -- engine ---------------------------------------------------------------------------------------

using Columns = void (*)(const Pass &, Layout &, std::size_t);

template <bool copies, Crcs crcs>
Columns by_outputs(const Pass &pass) {
    constexpr Columns choices[widest + 1] = {
        code_columns<0, copies, crcs>, code_columns<1, copies, crcs>,
        code_columns<2, copies, crcs>, code_columns<3, copies, crcs>,
        code_columns<4, copies, crcs>, code_columns<5, copies, crcs>,
        code_columns<6, copies, crcs>, code_columns<7, copies, crcs>,
        code_columns<8, copies, crcs>};
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
    for (std::size_t j = 0; j < pass.coded_count; ++j)
        for (std::size_t r = 0; r < pass.output_count; ++r)
            layout.matrices[j * pass.output_count + r] =
                affine.of[pass.coefficients[r * pass.coded_count + j]];
    __m512i *of_outputs = layout.accumulators + pass.input_count;
    for (std::size_t j = 0; pass.input_crcs && j < pass.input_count; ++j)
        layout.accumulators[j] = accumulator_of(~pass.input_crcs[j]);
    for (std::size_t r = 0; pass.output_crcs && r < pass.output_count; ++r)
        of_outputs[r] = accumulator_of(~pass.output_crcs[r]);

    const std::size_t whole = pass.length / column_bytes * column_bytes;
    const std::size_t rest = pass.length - whole, at = pass.offset + whole;
    if (whole > 0) columns_for(pass)(pass, layout, whole);
    code_rest(pass, whole, layout.matrices);

    for (std::size_t j = 0; pass.input_crcs && j < pass.input_count; ++j)
        pass.input_crcs[j] =
            ~crc_bytes(register_of(layout.accumulators[j]), pass.inputs[j] + at, rest);
    for (std::size_t r = 0; pass.output_crcs && r < pass.output_count; ++r)
        pass.output_crcs[r] = ~crc_bytes(register_of(of_outputs[r]), pass.outputs[r] + at, rest);
}

void move_line(const std::uint8_t *source, std::uint8_t *target) {
    store(true, target, _mm512_loadu_si512(source));
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
