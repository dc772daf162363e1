// CRC32C by the crc32 instruction; only for files compiled with -msse4.2.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <nmmintrin.h>

namespace ecckpt {
namespace {

// Takes and returns the raw register (the CRC with all bits inverted).
inline std::uint32_t crc_bytes(std::uint32_t raw, const std::uint8_t *bytes, std::size_t length) {
    std::uint64_t wide = raw;
    for (; length >= 8; bytes += 8, length -= 8) {
        std::uint64_t word;
        std::memcpy(&word, bytes, 8);
        wide = _mm_crc32_u64(wide, word);
    }
    raw = static_cast<std::uint32_t>(wide);
    for (; length > 0; ++bytes, --length) raw = _mm_crc32_u8(raw, *bytes);
    return raw;
}

}  // namespace
}  // namespace ecckpt
