// Copies of many separate ranges as one operation.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace ecckpt {

struct Range {
    std::int64_t source_address;
    std::int64_t target_address;
    std::int64_t length;
};

// Copies every range; ranges are at least 0 long and do not overlap. `threads` (at least 1) share
// the bytes evenly, however they are spread over the ranges.
void copy_ranges(const Engine &engine, const Range *ranges, std::size_t count, std::size_t threads);

}  // namespace ecckpt
