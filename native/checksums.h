// CRC32C of many separate ranges as one operation.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace ecckpt {

struct Span {
    std::int64_t address;
    std::int64_t length;
};

// Puts the CRC32C of each range into `checksums`; lengths are at least 0. `threads` (at least 1)
// share the bytes evenly, however they are spread over the ranges.
void checksum_spans(const Engine &engine, const Span *spans, std::size_t count,
                    std::uint32_t *checksums, std::size_t threads);

}  // namespace ecckpt
