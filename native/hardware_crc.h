// CRC32C of bytes by the CPU's own instruction: crc32 on x86, crc32c on Arm. Only for files whose
// flags allow it (-msse4.2 or +crc).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "engine.h"

#if ECCKPT_X86
#include <nmmintrin.h>
#elif ECCKPT_ARM
#include <arm_acle.h>
#endif

namespace ecckpt {
namespace {

#if ECCKPT_X86
// The instruction takes and returns 64 bits. With 32 bits GCC clears the upper half at each step.
using CrcRegister = std::uint64_t;

inline CrcRegister crc_word(CrcRegister raw, std::uint64_t word) {
    return _mm_crc32_u64(raw, word);
}
inline std::uint32_t crc_byte(std::uint32_t raw, std::uint8_t byte) {
    return _mm_crc32_u8(raw, byte);
}
#elif ECCKPT_ARM
using CrcRegister = std::uint32_t;

inline CrcRegister crc_word(CrcRegister raw, std::uint64_t word) { return __crc32cd(raw, word); }
inline std::uint32_t crc_byte(std::uint32_t raw, std::uint8_t byte) { return __crc32cb(raw, byte); }
#endif

// Takes and returns the raw register (the CRC with all bits inverted).
inline std::uint32_t crc_bytes(std::uint32_t raw, const std::uint8_t *bytes, std::size_t length) {
    CrcRegister wide = raw;
    for (; length >= 8; bytes += 8, length -= 8) {
        std::uint64_t word;
        std::memcpy(&word, bytes, 8);
        wide = crc_word(wide, word);
    }
    raw = static_cast<std::uint32_t>(wide);
    for (; length > 0; ++bytes, --length) raw = crc_byte(raw, *bytes);
    return raw;
}

}  // namespace
}  // namespace ecckpt
