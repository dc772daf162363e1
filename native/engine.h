// The interface of an engine: one implementation of the coding loop for one instruction set.
//
// `code` makes outputs out of inputs, takes the CRC32C of both and copies the inputs in the same
// pass. `copy` copies bytes with stores that bypass the caches. All engines give the same bytes.
//
// A file that implements an engine uses no templates or inline functions of the standard library.
// The compiler would emit them as weak symbols with that file's instructions, and the linker might
// choose these for the whole program.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#define ECCKPT_X86 1
#else
#define ECCKPT_X86 0
#endif

#if defined(__aarch64__)
#define ECCKPT_ARM 1
#else
#define ECCKPT_ARM 0
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernels read bytes as little-endian words"
#endif

namespace ecckpt {

constexpr std::size_t max_fragments = 256;
constexpr std::size_t line_bytes = 64;  // a cache line

// One pass over the same `length` bytes, at `offset`, of every input and every output.
// output[r] = sum over j < coded_count of coefficients[r * coded_count + j] * input[j],
// in GF(2^8) / 0x11D.
struct Pass {
    const std::uint8_t *const *inputs;
    std::size_t input_count;  // 1 .. max_fragments
    std::size_t coded_count;  // inputs from here on are checksummed and copied, but not coded
    // One target per input; nullptr: this input is not copied. No input is copied: nullptr.
    std::uint8_t *const *copies;
    std::uint8_t *const *outputs;
    std::size_t output_count;  // 0 .. Engine::pass_outputs
    std::size_t offset;
    std::size_t length;
    const std::uint8_t *coefficients;
    // The pass reads each CRC32C as that of the bytes before this pass (0: there are none), appends
    // its bytes and writes the result back. nullptr: no checksums. With checksums of inputs there
    // are always checksums of outputs.
    std::uint32_t *input_crcs;
    std::uint32_t *output_crcs;
    // Whether stores to outputs and copies bypass the caches. The caller sets it if the data will
    // not be read soon; each of these buffers then starts, at `offset`, on a cache line.
    bool streaming;
};

struct Engine {
    const char *name;
    std::size_t pass_outputs;  // how many outputs one pass can make: their sums fit the registers
    bool (*supported)();       // whether CPU and OS have every feature the file is compiled with
    void (*code)(const Pass &);
    // Copies between buffers that do not overlap. The caller fences: the stores may be weakly
    // ordered.
    void (*copy)(const std::uint8_t *source, std::uint8_t *target, std::size_t length);
};

extern const Engine scalar_engine;
#if ECCKPT_X86
extern const Engine avx2_engine;
extern const Engine gfni_engine;
#endif
#if ECCKPT_ARM
extern const Engine neon_engine;
#endif

// -- dispatch.cpp ---------------------------------------------------------------------------------

constexpr std::size_t max_engines = 3;

// Fills `found` with the engines that this machine can run, best first, and returns how many.
std::size_t usable_engines(const Engine *found[max_engines]);

// Waits until other threads can see the streaming stores of this one.
void fence_streaming_stores();

}  // namespace ecckpt
