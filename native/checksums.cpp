#include "checksums.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include "crc_joining.h"
#include "sharing.h"

namespace ecckpt {
namespace {

// A long range is read in so many places at once: the hardware prefetchers follow each of them.
constexpr std::size_t streams = 4;
constexpr std::size_t least_stream_bytes = std::size_t{64} << 10;

// Starting a thread costs as much as reading about this much.
constexpr std::size_t least_share_bytes = std::size_t{1} << 20;

constexpr std::size_t page_bytes = 4096;

// A range that the border between two threads cuts: the CRC of a part of it.
struct Part {
    std::size_t span, begin, length;
    std::uint32_t checksum;
};

void append(const Engine &engine, const std::uint8_t *const *inputs, std::size_t count,
            std::size_t length, std::uint32_t *checksums) {
    std::uint32_t none = 0;  // checksums of inputs come only with those of outputs: there are none
    const Pass pass = {inputs, count, count, nullptr, nullptr, 0, 0, length, nullptr, checksums,
                       &none, false};
    engine.code(pass);
}

std::uint32_t checksum(const Engine &engine, const std::uint8_t *bytes, std::size_t length) {
    const std::size_t stride = length / streams / page_bytes * page_bytes;
    if (stride < least_stream_bytes) {
        std::uint32_t whole = 0;
        if (length > 0) append(engine, &bytes, 1, length, &whole);
        return whole;
    }
    const std::uint8_t *inputs[streams];
    std::uint32_t checksums[streams] = {};
    for (std::size_t j = 0; j < streams; ++j) inputs[j] = bytes + j * stride;
    append(engine, inputs, streams, stride, checksums);
    const std::uint8_t *tail = bytes + streams * stride;
    const std::size_t tail_bytes = length - streams * stride;
    if (tail_bytes > 0) append(engine, &tail, 1, tail_bytes, &checksums[streams - 1]);
    std::uint32_t whole = checksums[0];
    for (std::size_t j = 1; j < streams; ++j)
        whole = joined_crc(whole, checksums[j], j + 1 < streams ? stride : stride + tail_bytes);
    return whole;
}

class Checksums {
public:
    Checksums(const Engine &engine, const Span *spans, std::size_t count, std::uint32_t *checksums)
        : engine_(engine), spans_(spans), count_(count), checksums_(checksums) {}

    void take_all(std::size_t threads) {
        std::size_t total = 0;
        for (std::size_t at = 0; at < count_; ++at) {
            total += length_of(at);
            if (length_of(at) == 0) checksums_[at] = 0;
        }
        share_out(total, page_bytes, least_share_bytes, threads,
                  [this](std::size_t begin, std::size_t end) { take_share(begin, end); });
        join_parts();
    }

private:
    std::size_t length_of(std::size_t at) const {
        return static_cast<std::size_t>(spans_[at].length);
    }

    // Takes the bytes `begin` .. `end` of all ranges laid end to end.
    void take_share(std::size_t begin, std::size_t end) {
        std::size_t at = 0, start = 0;
        for (; start < end; start += length_of(at), ++at) {
            const std::size_t length = length_of(at);
            const std::size_t skipped = begin > start ? std::min(begin - start, length) : 0;
            const std::size_t stop = std::min(end - start, length);
            if (stop <= skipped) continue;
            const auto *bytes = reinterpret_cast<const std::uint8_t *>(spans_[at].address);
            const Part part = {at, skipped, stop - skipped,
                               checksum(engine_, bytes + skipped, stop - skipped)};
            if (part.length == length) {
                checksums_[at] = part.checksum;
            } else {
                const std::lock_guard<std::mutex> lock(parts_mutex_);
                parts_.push_back(part);
            }
        }
    }

    void join_parts() {
        std::sort(parts_.begin(), parts_.end(), [](const Part &a, const Part &b) {
            return a.span != b.span ? a.span < b.span : a.begin < b.begin;
        });
        for (const Part &part : parts_)
            checksums_[part.span] =
                part.begin == 0 ? part.checksum
                                : joined_crc(checksums_[part.span], part.checksum, part.length);
    }

    const Engine &engine_;
    const Span *spans_;
    const std::size_t count_;
    std::uint32_t *checksums_;
    std::mutex parts_mutex_;
    std::vector<Part> parts_;
};

}  // namespace

void checksum_spans(const Engine &engine, const Span *spans, std::size_t count,
                    std::uint32_t *checksums, std::size_t threads) {
    Checksums(engine, spans, count, checksums).take_all(threads);
}

}  // namespace ecckpt
