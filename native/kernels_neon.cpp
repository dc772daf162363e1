// The engine for 64-bit Arm: products by two 16-entry table look-ups per byte, CRC32C by carry-less
// multiplication. Compiled with -march=armv8-a+crypto+crc (crypto: AES with PMULL, SHA-1, SHA-2).

#include <arm_neon.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>

#include "nibble_tables.h"
#include "pass_driver.h"
#include "polynomials.h"

namespace ecckpt {
namespace {

inline uint64x2_t carryless_product(poly64_t a, poly64_t b) {
    return vreinterpretq_u64_p128(vmull_p64(a, b));
}

struct Neon {
    static constexpr std::size_t column_bytes = 64;
    static constexpr int column_vectors = 4;
    static constexpr std::size_t pass_outputs = 4;  // their sums take 16 of the 32 registers
    static constexpr bool pairs_inputs = false;     // pairs gain by a three-way XOR only

    struct Column {
        uint8x16_t of[column_vectors];
    };
    using Coefficient = NibbleTable;
    // 64 bytes whose CRC, from a register of zero, is that of the columns so far.
    using CrcState = Column;

    static Coefficient coefficient(std::uint8_t c) { return nibble_tables.of[c]; }

    static Column zero() { return {{vdupq_n_u8(0), vdupq_n_u8(0), vdupq_n_u8(0), vdupq_n_u8(0)}}; }

    static Column load(const std::uint8_t *bytes) {
        return {
            {vld1q_u8(bytes), vld1q_u8(bytes + 16), vld1q_u8(bytes + 32), vld1q_u8(bytes + 48)}};
    }

    // Ignores `streaming`: these cores notice whole lines being overwritten and do not read them
    // first.
    static void store(bool, std::uint8_t *bytes, const Column &x) {
        for (int v = 0; v < column_vectors; ++v) vst1q_u8(bytes + 16 * v, x.of[v]);
    }

    template <int outputs>
    static void add_products(Column *sums, const Coefficient *coefficients, const Column &x) {
        const uint8x16_t low_bits = vdupq_n_u8(0x0F);
        for (int r = 0; r < outputs; ++r) {
            const uint8x16_t low = vld1q_u8(coefficients[r].low);
            const uint8x16_t high = vld1q_u8(coefficients[r].high);
            for (int v = 0; v < column_vectors; ++v) {
                const uint8x16_t by_low = vqtbl1q_u8(low, vandq_u8(x.of[v], low_bits));
                const uint8x16_t by_high = vqtbl1q_u8(high, vshrq_n_u8(x.of[v], 4));
                sums[r].of[v] = veorq_u8(sums[r].of[v], veorq_u8(by_low, by_high));
            }
        }
    }

    static CrcState crc_state(std::uint32_t raw) {
        std::uint8_t bytes[column_bytes] = {};
        const std::uint32_t last = crc_before_32_zeros(raw);
        std::memcpy(bytes + column_bytes - 4, &last, 4);
        return load(bytes);
    }

    static std::uint32_t crc_register(const CrcState &state) {
        std::uint8_t bytes[column_bytes];
        store(false, bytes, state);
        return crc_bytes(0, bytes, column_bytes);
    }

    // Moves each 128 bits of the state 512 bits further in the message, which multiplies them by
    // x^512, and adds the column. The low half comes first in the message: its power is higher by
    // 64. A carry-less product of reflected numbers comes out one power too high, hence the - 1. A
    // constant has 32 bits, which stand in the upper half.
    static CrcState append(const CrcState &state, const Column &x) {
        constexpr poly64_t low = std::uint64_t{crc_power(512 + 64 - 1)} << 32;
        constexpr poly64_t high = std::uint64_t{crc_power(512 - 1)} << 32;
        CrcState sum;
        for (int v = 0; v < column_vectors; ++v) {
            const poly64x2_t value = vreinterpretq_p64_u8(state.of[v]);
            const uint64x2_t moved = veorq_u64(carryless_product(vgetq_lane_p64(value, 0), low),
                                               carryless_product(vgetq_lane_p64(value, 1), high));
            sum.of[v] = veorq_u8(vreinterpretq_u8_u64(moved), x.of[v]);
        }
        return sum;
    }

    static CrcState append(const CrcState &state, const Column &x, const std::uint8_t *) {
        return append(state, x);
    }
};

void copy(const std::uint8_t *source, std::uint8_t *target, std::size_t length) {
    std::memcpy(target, source, length);
}

bool supported() {
    const unsigned long needed =
        HWCAP_ASIMD | HWCAP_AES | HWCAP_PMULL | HWCAP_SHA1 | HWCAP_SHA2 | HWCAP_CRC32;
    return (getauxval(AT_HWCAP) & needed) == needed;
}

}  // namespace

const Engine neon_engine = {
    .name = "neon",
    .pass_outputs = Neon::pass_outputs,
    .supported = supported,
    .code = code_pass<Neon>,
    .copy = copy,
};

}  // namespace ecckpt
