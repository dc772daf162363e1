#include "sharing.h"

#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

namespace ecckpt {

void share_out(std::size_t total, std::size_t grain, std::size_t least, std::size_t threads,
               const std::function<void(std::size_t, std::size_t)> &work) {
    const std::size_t shares = std::max<std::size_t>(std::min(threads, total / least), 1);
    const std::size_t share = (total / shares + grain - 1) / grain * grain;
    std::vector<std::thread> helpers;
    helpers.reserve(shares - 1);
    std::size_t begin = 0;
    try {
        while (helpers.size() + 1 < shares && begin + share < total) {
            helpers.emplace_back(std::cref(work), begin, begin + share);
            begin += share;
        }
    } catch (const std::system_error &) {
    }
    work(begin, total);
    for (std::thread &helper : helpers) helper.join();
}

}  // namespace ecckpt
