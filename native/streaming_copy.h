// The copying loop of the x86 engines. An engine supplies the function that copies one cache line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "engine.h"

namespace ecckpt {
namespace {

constexpr std::size_t copy_streams = 4;
constexpr std::size_t stream_bytes = std::size_t{64} << 10;
constexpr std::size_t step_bytes = 2 * line_bytes;
constexpr std::size_t copy_ahead_bytes = 256;

// Copies with `copy_line(source, target)`, which copies 64 bytes to an aligned target.
// Four streams advance together, so far apart that the hardware prefetchers follow each of them. A
// single stream would leave part of the memory bandwidth unused.
template <void (*copy_line)(const std::uint8_t *, std::uint8_t *)>
void copy_lines(const std::uint8_t *source, std::uint8_t *target, std::size_t length) {
    const std::size_t head = (0 - reinterpret_cast<std::uintptr_t>(target)) % line_bytes;
    if (length < head + copy_streams * step_bytes) {
        std::memcpy(target, source, length);
        return;
    }
    std::memcpy(target, source, head);
    std::size_t at = head;
    while (length - at >= copy_streams * step_bytes) {
        std::size_t stride = (length - at) / copy_streams / step_bytes * step_bytes;
        if (stride > stream_bytes) stride = stream_bytes;
        for (std::size_t end = at + stride; at < end; at += step_bytes)
            for (std::size_t stream = 0; stream < copy_streams; ++stream)
                for (std::size_t line = 0; line < step_bytes; line += line_bytes) {
                    const std::size_t here = at + stream * stride + line;
                    __builtin_prefetch(source + here + copy_ahead_bytes);
                    copy_line(source + here, target + here);
                }
        at += (copy_streams - 1) * stride;
    }
    std::memcpy(target + at, source + at, length - at);
}

}  // namespace
}  // namespace ecckpt
