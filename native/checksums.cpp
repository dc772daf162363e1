// Implements checksums.h. A pass of an engine without outputs takes the checksums of its inputs.

#include "checksums.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include "crc_combine.h"
#include "parallel_for.h"

namespace ecckpt {
namespace {

// A long span is read as several streams at once: the hardware prefetchers follow each of them.
constexpr std::size_t streams = 4;
constexpr std::size_t least_stream_bytes = std::size_t{64} << 10;

// The CRC of a part of a span, where the border between two threads divides the span.
struct PartOfSpan {
    std::size_t span, begin, length;
    std::uint32_t checksum;
};

void append(const Engine &engine, const std::uint8_t *const *inputs, std::size_t count,
            std::size_t length, std::uint32_t *checksums) {
    std::uint32_t none = 0;  // a pass that takes checksums of inputs needs a table for outputs too
    const Pass pass = {
        .inputs = inputs,
        .input_count = count,
        .coded_count = count,
        .copies = nullptr,
        .outputs = nullptr,
        .output_count = 0,
        .offset = 0,
        .length = length,
        .coefficients = nullptr,
        .input_crcs = checksums,
        .output_crcs = &none,
        .streaming = false,
    };
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
        whole = combined_crc(whole, checksums[j], j + 1 < streams ? stride : stride + tail_bytes);
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
        parallel_for(total, least_share_bytes, threads,
                     [this](std::size_t begin, std::size_t end) { take_share(begin, end); });
        combine_parts();
    }

private:
    std::size_t length_of(std::size_t at) const {
        return static_cast<std::size_t>(spans_[at].length);
    }

    // Takes the bytes `begin` .. `end` of the concatenation of all spans.
    void take_share(std::size_t begin, std::size_t end) {
        std::size_t at = 0, start = 0;
        for (; start < end; start += length_of(at), ++at) {
            const std::size_t length = length_of(at);
            const std::size_t skipped = begin > start ? std::min(begin - start, length) : 0;
            const std::size_t stop = std::min(end - start, length);
            if (stop <= skipped) continue;
            const auto *bytes = reinterpret_cast<const std::uint8_t *>(spans_[at].address);
            const PartOfSpan part = {
                .span = at,
                .begin = skipped,
                .length = stop - skipped,
                .checksum = checksum(engine_, bytes + skipped, stop - skipped),
            };
            if (part.length == length) {
                checksums_[at] = part.checksum;
            } else {
                const std::lock_guard<std::mutex> lock(parts_mutex_);
                parts_.push_back(part);
            }
        }
    }

    void combine_parts() {
        std::sort(parts_.begin(), parts_.end(), [](const PartOfSpan &a, const PartOfSpan &b) {
            return a.span != b.span ? a.span < b.span : a.begin < b.begin;
        });
        for (const PartOfSpan &part : parts_)
            checksums_[part.span] =
                part.begin == 0 ? part.checksum
                                : combined_crc(checksums_[part.span], part.checksum, part.length);
    }

    const Engine &engine_;
    const Span *spans_;
    const std::size_t count_;
    std::uint32_t *checksums_;
    std::mutex parts_mutex_;
    std::vector<PartOfSpan> parts_;
};

}  // namespace

void checksum_spans(const Engine &engine, const Span *spans, std::size_t count,
                    std::uint32_t *checksums, std::size_t threads) {
    Checksums(engine, spans, count, checksums).take_all(threads);
}

}  // namespace ecckpt
