// Implements parallel_for.h with threads that live as long as one call.

#include "parallel_for.h"

#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

namespace ecckpt {

void parallel_for(std::size_t total, std::size_t least, std::size_t threads,
                  const std::function<void(std::size_t, std::size_t)> &work) {
    const std::size_t shares = std::max<std::size_t>(std::min(threads, total / least), 1);
    const std::size_t share = (total / shares + page_bytes - 1) / page_bytes * page_bytes;
    std::vector<std::thread> helpers;
    helpers.reserve(shares - 1);
    std::size_t begin = 0;
    try {
        while (helpers.size() + 1 < shares && begin + share < total) {
            helpers.emplace_back(std::cref(work), begin, begin + share);
            begin += share;
        }
    } catch (const std::system_error &) {
        // The call below covers everything from `begin` on.
    }
    work(begin, total);
    for (std::thread &helper : helpers) helper.join();
}

}  // namespace ecckpt
