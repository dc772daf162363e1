// What memory allows: the accesses of an encoding kernel without its arithmetic. The bench compiles
// this where it runs. Reads k streams in columns of 128 bytes, prefetching each of them `ahead`
// bytes, copies them if asked, and stores m sums of some of what was read.

#include <cstddef>
#include <cstdint>
#include <immintrin.h>

namespace {

template <std::size_t m>
void columns(const std::uint8_t *const *inputs, std::size_t k, std::uint8_t *const *outputs,
             std::uint8_t *const *copies, std::size_t length, std::size_t ahead) {
    __m512i unused = _mm512_setzero_si512();
    for (std::size_t at = 0; at + 128 <= length; at += 128) {
        __m512i sums[m ? 2 * m : 2];
        for (__m512i &sum : sums) sum = _mm512_setzero_si512();
        for (std::size_t j = 0; j < k; ++j) {
            const std::uint8_t *input = inputs[j] + at;
            for (std::size_t i = 0; i < 2; ++i) {
                _mm_prefetch(reinterpret_cast<const char *>(input + ahead + 64 * i), _MM_HINT_T0);
                const __m512i x = _mm512_loadu_si512(input + 64 * i);
                if (copies) _mm512_stream_si512(reinterpret_cast<__m512i *>(copies[j] + at) + i, x);
                __m512i &sum = sums[m ? j % m * 2 + i : i];
                sum = _mm512_xor_si512(sum, x);
            }
        }
        for (std::size_t r = 0; r < m; ++r)
            for (std::size_t i = 0; i < 2; ++i)
                _mm512_stream_si512(reinterpret_cast<__m512i *>(outputs[r] + at) + i,
                                    sums[2 * r + i]);
        if (m == 0) unused = _mm512_xor_si512(unused, _mm512_xor_si512(sums[0], sums[1]));
    }
    const volatile long long kept = _mm512_reduce_add_epi64(unused);
    (void)kept;
    _mm_sfence();
}

}  // namespace

extern "C" int traffic(const std::uint8_t *const *inputs, std::size_t k,
                       std::uint8_t *const *outputs, std::size_t m, std::uint8_t *const *copies,
                       std::size_t length, std::size_t ahead) {
    switch (m) {
        case 0: columns<0>(inputs, k, outputs, copies, length, ahead); return 0;
        case 1: columns<1>(inputs, k, outputs, copies, length, ahead); return 0;
        case 2: columns<2>(inputs, k, outputs, copies, length, ahead); return 0;
        case 4: columns<4>(inputs, k, outputs, copies, length, ahead); return 0;
        case 8: columns<8>(inputs, k, outputs, copies, length, ahead); return 0;
        default: return 1;
    }
}
