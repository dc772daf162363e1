// Work that can be cut anywhere, done by several threads.
#pragma once

#include <cstddef>
#include <functional>

namespace ecckpt {

// Calls `work(begin, end)` for consecutive ranges that make up 0 .. total, each in a thread of its
// own, the last in this one; returns when all are done. Borders are multiples of `grain`. There are
// at most `threads` ranges, and fewer if one would be less than `least`. If the machine has no more
// threads to give, this one does the rest.
void share_out(std::size_t total, std::size_t grain, std::size_t least, std::size_t threads,
               const std::function<void(std::size_t, std::size_t)> &work);

}  // namespace ecckpt
