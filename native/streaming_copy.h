// The order in which a large copy walks through memory; how one line moves is the engine's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace ecckpt {
namespace {

constexpr std::size_t page_bytes = 4096;
constexpr std::size_t copy_streams = 4;

// Copies with `move_line(source, target)`, which moves 64 bytes to an aligned target.
// Four pages advance together: the hardware prefetchers follow each of them, and a single stream
// would leave part of the memory bandwidth unused.
template <void (*move_line)(const std::uint8_t *, std::uint8_t *)>
void copy_lines(const std::uint8_t *source, std::uint8_t *target, std::size_t length) {
    const std::size_t head = (0 - reinterpret_cast<std::uintptr_t>(target)) % line_bytes;
    if (length < head + copy_streams * line_bytes) {
        std::memcpy(target, source, length);
        return;
    }
    std::memcpy(target, source, head);
    std::size_t at = head;
    while (length - at >= copy_streams * line_bytes) {
        std::size_t stride = (length - at) / copy_streams / line_bytes * line_bytes;
        if (stride > page_bytes) stride = page_bytes;
        for (std::size_t end = at + stride; at < end; at += line_bytes)
            for (std::size_t stream = 0; stream < copy_streams; ++stream)
                move_line(source + at + stream * stride, target + at + stream * stride);
        at += (copy_streams - 1) * stride;
    }
    std::memcpy(target + at, source + at, length - at);
}

}  // namespace
}  // namespace ecckpt
