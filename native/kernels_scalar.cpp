// The engine in plain C++, for every CPU. It is the simplest one: read it first. It does not use
// pass_driver.h, whose loops are for sums in vector registers.

#include <cstring>

#include "engine.h"
#include "polynomials.h"

namespace ecckpt {
namespace {

constexpr std::size_t tile_bytes = 2048;  // small enough that a sum stays in the L1 cache

// -- CRC32C, eight bytes per step -----------------------------------------------------------------

struct CrcTables {
    std::uint32_t of[8][256];  // of[z][b]: the register after byte b and z zero bytes
};

constexpr CrcTables make_crc_tables() {
    CrcTables tables{};
    for (unsigned byte = 0; byte < 256; ++byte) {
        std::uint32_t raw = byte;
        for (int step = 0; step < 8; ++step) raw = (raw >> 1) ^ ((raw & 1) ? crc_polynomial : 0);
        tables.of[0][byte] = raw;
    }
    for (int zeros = 1; zeros < 8; ++zeros)
        for (unsigned byte = 0; byte < 256; ++byte) {
            const std::uint32_t raw = tables.of[zeros - 1][byte];
            tables.of[zeros][byte] = (raw >> 8) ^ tables.of[0][raw & 0xFF];
        }
    return tables;
}

constexpr CrcTables crc_tables = make_crc_tables();

std::uint32_t appended_crc(std::uint32_t crc, const std::uint8_t *bytes, std::size_t length) {
    std::uint32_t raw = ~crc;
    for (; length >= 8; bytes += 8, length -= 8) {
        std::uint64_t word;
        std::memcpy(&word, bytes, 8);
        word ^= raw;
        raw = 0;
        for (int byte = 0; byte < 8; ++byte)
            raw ^= crc_tables.of[7 - byte][(word >> (8 * byte)) & 0xFF];
    }
    for (; length > 0; ++bytes, --length)
        raw = (raw >> 8) ^ crc_tables.of[0][(raw ^ *bytes) & 0xFF];
    return ~raw;
}

// -- coding ---------------------------------------------------------------------------------------

struct Products {
    std::uint8_t of[256][256];
};

// The first call fills the table: the compiler would take long to compute 64 KiB.
const Products &products() {
    static const Products table = [] {
        Products made;
        for (unsigned a = 0; a < 256; ++a)
            for (unsigned b = 0; b < 256; ++b) made.of[a][b] = gf_product(a, b);
        return made;
    }();
    return table;
}

void code(const Pass &pass) {
    const Products &table = products();
    std::uint8_t sum[tile_bytes];
    for (std::size_t done = 0; done < pass.length; done += tile_bytes) {
        const std::size_t left = pass.length - done;
        const std::size_t length = left < tile_bytes ? left : tile_bytes;
        const std::size_t at = pass.offset + done;
        for (std::size_t j = 0; j < pass.input_count; ++j) {
            const std::uint8_t *input = pass.inputs[j] + at;
            if (pass.input_crcs)
                pass.input_crcs[j] = appended_crc(pass.input_crcs[j], input, length);
            if (pass.copies && pass.copies[j]) std::memcpy(pass.copies[j] + at, input, length);
        }
        for (std::size_t r = 0; r < pass.output_count; ++r) {
            std::memset(sum, 0, length);
            for (std::size_t j = 0; j < pass.coded_count; ++j) {
                const auto &row = table.of[pass.coefficients[r * pass.coded_count + j]];
                const std::uint8_t *input = pass.inputs[j] + at;
                for (std::size_t i = 0; i < length; ++i) sum[i] ^= row[input[i]];
            }
            std::memcpy(pass.outputs[r] + at, sum, length);
            if (pass.output_crcs)
                pass.output_crcs[r] = appended_crc(pass.output_crcs[r], sum, length);
        }
    }
}

void copy(const std::uint8_t *source, std::uint8_t *target, std::size_t length) {
    std::memcpy(target, source, length);
}

bool supported() { return true; }

}  // namespace

const Engine scalar_engine = {
    .name = "scalar",
    .pass_outputs = 8,
    .supported = supported,
    .code = code,
    .copy = copy,
};

}  // namespace ecckpt
