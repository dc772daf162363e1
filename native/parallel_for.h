// Divides a range among threads that work on it in parallel.
#pragma once

#include <cstddef>
#include <functional>

namespace ecckpt {

// Starting a thread costs as much time as coding or copying about this much.
constexpr std::size_t least_share_bytes = std::size_t{1} << 20;

// Borders between threads are multiples of this. Aligned buffers stay aligned then, and no two
// threads write the same cache line of a page-aligned buffer.
constexpr std::size_t page_bytes = 4096;

// Calls `work(begin, end)` for consecutive ranges that make up 0 .. total, and returns when all
// calls have returned. The last range runs in the calling thread, each other one in a thread of its
// own. Borders are multiples of `page_bytes`. There are at most `threads` ranges, and so few
// that their average length is at least `least`, if there is more than one. If the system refuses
// to start a thread, the calling thread takes all ranges that are left.
void parallel_for(std::size_t total, std::size_t least, std::size_t threads,
                  const std::function<void(std::size_t, std::size_t)> &work);

}  // namespace ecckpt
