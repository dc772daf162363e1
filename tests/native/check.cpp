// Checks every engine that this CPU can run, without Python: for sanitizers and for emulation.
//
//   check vectors FILE        cases whose results come from the Python reference code
//   check random SEED COUNT   random cases; each engine must agree with the scalar one
//
// Prints a line per engine. Exits with status 1 at the first difference. Each buffer ends where its
// allocation ends, so that AddressSanitizer reports any access past it.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "checksums.h"
#include "coding.h"
#include "engine.h"

namespace {

using Bytes = std::vector<std::uint8_t>;
using Sums = std::vector<std::uint32_t>;

struct Case {
    std::uint32_t input_count, coded_count, output_count, length, block_bytes, shift, threads;
    bool copies, checksums;
    Bytes coefficients;
    std::vector<Bytes> inputs;

    std::size_t rows() const { return (length + std::size_t{block_bytes} - 1) / block_bytes; }
};

struct Result {
    std::vector<Bytes> outputs;
    Sums input_sums, output_sums;
};

// Memory that starts `shift` bytes after a cache line and ends where its allocation ends.
class Buffer {
public:
    Buffer(std::size_t length, std::size_t shift, std::uint8_t fill)
        : shift_(shift), length_(length) {
        void *room = nullptr;  // posix_memalign takes any length, aligned_alloc only whole lines
        if (posix_memalign(&room, 64, shift + length + (shift + length == 0)) != 0) std::abort();
        room_ = static_cast<std::uint8_t *>(room);
        std::memset(room_, fill, shift + length);
    }
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;
    Buffer(Buffer &&other) noexcept
        : room_(other.room_), shift_(other.shift_), length_(other.length_) {
        other.room_ = nullptr;
    }
    ~Buffer() { std::free(room_); }

    std::uint8_t *bytes() const { return room_ + shift_; }

    bool is(const Bytes &expected, std::uint8_t fill) const {
        for (std::size_t i = 0; i < shift_; ++i)
            if (room_[i] != fill) return false;
        return length_ == 0 || std::memcmp(bytes(), expected.data(), length_) == 0;
    }

    Bytes content() const { return Bytes(bytes(), bytes() + length_); }

private:
    std::uint8_t *room_;
    std::size_t shift_, length_;
};

constexpr std::uint8_t poison = 0xAA;

struct Run {
    std::vector<Buffer> inputs, copies, outputs;
    Sums input_sums, output_sums;
};

Run run(const ecckpt::Engine &engine, const Case &one) {
    Run done;
    std::vector<const std::uint8_t *> inputs;
    std::vector<std::uint8_t *> copies, outputs;
    for (std::uint32_t j = 0; j < one.input_count; ++j) {
        done.inputs.emplace_back(one.length, (one.shift + j) % 64, poison);
        if (one.length) std::memcpy(done.inputs[j].bytes(), one.inputs[j].data(), one.length);
        inputs.push_back(done.inputs[j].bytes());
        done.copies.emplace_back(one.copies ? one.length : 0, one.shift, poison);
        copies.push_back(j % 3 == 2 ? nullptr : done.copies[j].bytes());
    }
    for (std::uint32_t r = 0; r < one.output_count; ++r) {
        done.outputs.emplace_back(one.length, one.shift, poison);
        outputs.push_back(done.outputs[r].bytes());
    }
    done.input_sums.assign(one.input_count * one.rows(), 0xAAAAAAAA);
    done.output_sums.assign(one.output_count * one.rows(), 0xAAAAAAAA);
    const ecckpt::CodingJob job = {
        .inputs = inputs.data(),
        .input_count = one.input_count,
        .coded_count = one.coded_count,
        .copies = one.copies ? copies.data() : nullptr,
        .outputs = outputs.data(),
        .output_count = one.output_count,
        .coefficients = one.coefficients.data(),
        .length = one.length,
        .block_bytes = one.block_bytes,
        .input_checksums = one.checksums ? done.input_sums.data() : nullptr,
        .output_checksums = one.checksums ? done.output_sums.data() : nullptr,
        .threads = one.threads,
    };
    ecckpt::code_fragments(engine, job);
    return done;
}

void must(bool holds, const ecckpt::Engine &engine, const Case &one, const char *what) {
    if (holds) return;
    std::printf(
        "%s: %s differ: %u inputs, %u coded, %u outputs, %u bytes, blocks of %u, shift %u, "
        "%u threads, copies %d, checksums %d\n",
        engine.name, what, one.input_count, one.coded_count, one.output_count, one.length,
        one.block_bytes, one.shift, one.threads, one.copies, one.checksums);
    std::exit(1);
}

void compare(const ecckpt::Engine &engine, const Case &one, const Result &expected) {
    const Run done = run(engine, one);
    for (std::uint32_t r = 0; r < one.output_count; ++r)
        must(done.outputs[r].is(expected.outputs[r], poison), engine, one, "outputs");
    for (std::uint32_t j = 0; one.copies && j < one.input_count; ++j)
        must(done.copies[j].is(j % 3 == 2 ? Bytes(one.length, poison) : one.inputs[j], poison),
             engine, one, "copies");
    if (!one.checksums) return;
    must(done.input_sums == expected.input_sums, engine, one, "checksums of inputs");
    must(done.output_sums == expected.output_sums, engine, one, "checksums of outputs");
}

Sums span_sums(const ecckpt::Engine &engine, const Case &one, std::uint32_t threads) {
    std::vector<ecckpt::Span> spans;
    for (const Bytes &input : one.inputs)
        spans.push_back({
            .address = reinterpret_cast<std::int64_t>(input.data()),
            .length = static_cast<std::int64_t>(input.size()),
        });
    Sums sums(spans.size());
    ecckpt::checksum_spans(engine, spans.data(), spans.size(), sums.data(), threads);
    return sums;
}

// -- vectors --------------------------------------------------------------------------------------

// Reads the file of cases. All numbers are 32 bits, in the byte order of this machine.
class Reader {
public:
    explicit Reader(const char *path) : file_(std::fopen(path, "rb"), &std::fclose) {
        if (!file_) std::exit(2);
    }

    std::uint32_t number() {
        std::uint32_t value;
        read(&value, 4);
        return value;
    }

    Bytes bytes(std::size_t count) {
        Bytes found(count);
        read(found.data(), count);
        return found;
    }

    Sums sums(std::size_t count) {
        Sums found(count);
        read(found.data(), 4 * count);
        return found;
    }

private:
    void read(void *target, std::size_t count) {
        if (count && std::fread(target, count, 1, file_.get()) != 1) std::exit(2);
    }

    std::unique_ptr<std::FILE, int (*)(std::FILE *)> file_;
};

std::size_t check_vectors(const ecckpt::Engine &engine, const char *path) {
    Reader reader(path);
    const std::size_t count = reader.number();
    for (std::size_t at = 0; at < count; ++at) {
        Case one = {};
        one.input_count = reader.number();
        one.coded_count = reader.number();
        one.output_count = reader.number();
        one.length = reader.number();
        one.block_bytes = reader.number();
        one.coefficients = reader.bytes(one.coded_count * one.output_count);
        for (std::uint32_t j = 0; j < one.input_count; ++j)
            one.inputs.push_back(reader.bytes(one.length));
        Result expected;
        for (std::uint32_t r = 0; r < one.output_count; ++r)
            expected.outputs.push_back(reader.bytes(one.length));
        expected.input_sums = reader.sums(one.input_count * one.rows());
        expected.output_sums = reader.sums(one.output_count * one.rows());
        for (const std::uint32_t shift : {0u, 1u, 37u}) {
            one.shift = shift;
            one.threads = 1 + shift % 3;
            one.checksums = true;
            one.copies = shift != 1;
            compare(engine, one, expected);
            one.checksums = false;
            one.copies = !one.copies;
            compare(engine, one, expected);
        }
    }
    return count;
}

// -- random cases ---------------------------------------------------------------------------------

std::size_t check_random(const ecckpt::Engine &engine, std::uint32_t seed, std::size_t count) {
    std::mt19937 random(seed);
    const auto below = [&random](std::uint32_t end) { return random() % end; };
    for (std::size_t at = 0; at < count; ++at) {
        const bool large = below(20) == 0;  // large enough for streaming stores and for threads
        Case one = {};
        one.coded_count = 1 + (below(4) ? below(12) : below(70));
        one.input_count = one.coded_count + below(3);
        one.output_count = below(4) ? below(6) : below(20);
        one.length = large ? (3u << 20) / one.input_count + below(5000) : below(3000);
        one.block_bytes = 1 + (below(2) ? below(1 << 20) : below(400));
        if (large && one.block_bytes < 1000) one.block_bytes *= 1000;
        one.shift = below(2) ? 0 : below(64);
        one.threads = 1 + below(5);
        one.copies = below(2);
        one.checksums = below(3);
        one.coefficients.resize(one.coded_count * one.output_count);
        for (std::uint8_t &c : one.coefficients) c = static_cast<std::uint8_t>(random());
        for (std::uint32_t j = 0; j < one.input_count; ++j) {
            one.inputs.emplace_back(one.length);
            for (std::uint8_t &byte : one.inputs.back()) byte = static_cast<std::uint8_t>(random());
        }
        Case plain = one;
        plain.threads = 1;
        const Run reference = run(ecckpt::scalar_engine, plain);
        Result expected = {
            .outputs = {},
            .input_sums = reference.input_sums,
            .output_sums = reference.output_sums,
        };
        for (const Buffer &output : reference.outputs) expected.outputs.push_back(output.content());
        compare(engine, one, expected);
        must(span_sums(engine, one, one.threads) == span_sums(ecckpt::scalar_engine, one, 1),
             engine, one, "checksums of ranges");
    }
    return count;
}

}  // namespace

int main(int count, char **words) {
    const std::string mode = count > 2 ? words[1] : "";
    if (!(mode == "vectors" && count == 3) && !(mode == "random" && count == 4)) return 2;
    const ecckpt::Engine *found[ecckpt::max_engines];
    const std::size_t engines = ecckpt::usable_engines(found);
    for (std::size_t i = 0; i < engines; ++i) {
        const std::size_t cases =
            mode == "vectors"
                ? check_vectors(*found[i], words[2])
                : check_random(*found[i], static_cast<std::uint32_t>(std::atoi(words[2])),
                               static_cast<std::size_t>(std::atoi(words[3])));
        std::printf("%s: %zu cases\n", found[i]->name, cases);
    }
}
