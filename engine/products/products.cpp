// y = x·Wᵀ + bias for weights packed once: in blocks of 32 levels (4 or 8 bits) or 64 (13 bits), or in bfloat16, or in float.
//
// Weights lie in panels of 16 outputs. What one row of x gets is computed in an order that depends on its own numbers
// alone: batch-mates, threads and the split of the work change no bit.
//
// Level weights: w = scale · level + least, 32 levels along the input sharing both (GGUF's Q4_1 and Q8_0). Activations
// are rounded to 8 bits for each row and block; a block's scale is a whole multiple of the row's unit. Dot products inside
// a block are exact integers, and one float step adds a block to the sum. A panel's block holds, for each 4 inputs, 16
// outputs x 4 bytes (the tile of the dpbusd instruction); of 4-bit levels the low halves are inputs 0 to 15, the high ones
// 16 to 31. Scales of weights are in half precision.
//
// Levels of 13 bits stand for bfloat16 where the processor multiplies no such numbers itself: one instruction multiplies 16
// pairs of integers where it multiplies 8 floats. 64 weights share a unit, a power of 2: those of bfloat16 are exact but the
// ones below a sixteenth of the largest, which err by 1/4095 of it at most, an eighth of what the largest may err in
// bfloat16. Activations have 14 bits, in units of their row and block. 64 products fit in 32 bits: 64 · 4095 · 8191 < 2³¹.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define HAS_AVX2
#endif
#if defined(HAS_AVX2) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define HAS_VNNI
#endif

namespace {

constexpr int PANEL = 16;              // outputs side by side
constexpr int BLOCK = 32;              // inputs that share a scale
constexpr int LEVELS = BLOCK * PANEL;  // of a panel's block
constexpr int WIDE = 64;               // the same, of levels of 13 bits
constexpr int WIDE_BITS = 13;          // what Python calls them
constexpr int WIDE_PEAK = 4095;        // of such a weight
constexpr int WIDE_ROUND = 8191;       // of an activation that it is multiplied by
constexpr int WIDE_TILE = 6;           // rows, as FLOAT_TILE
constexpr int WIDE_DEPTH = 12;         // blocks of a panel that stay in the first cache
constexpr int WIDE_ROWS = 60;          // as MOST_ROWS
constexpr int WIDE_ROW = 2 * WIDE + 4; // bytes of a row's rounded block: levels, scale
constexpr long WIDE_BYTES = 2 * WIDE * PANEL + 2 * PANEL;  // of a panel's block: pairs of levels by output, scales in bfloat16
constexpr int ROW = BLOCK + 8;         // bytes of a row's rounded block: levels, multiple, sum of levels times that
constexpr int MOST_ROWS = 120;         // rows that share one unpacking of a panel
constexpr int FLOAT_ROWS = 48;         // the same for float weights, whose activations are wider
constexpr int FLOAT_TILE = 6;          // rows whose sums live in registers together: 6 x 16 floats are 12 of AVX2's 16
constexpr int FLOAT_DEPTH = 384;       // inputs of a panel that stay in the first cache
constexpr int DEPTH = 24;              // blocks of an unpacked panel that stay in the first cache
constexpr int MULTIPLES = 32767;       // of its row's unit that a block's scale may be
constexpr float TINY = 1e-30f;         // a row of nothing larger rounds to nothing: its unit would lose digits
constexpr long PARTS = 16;             // of the panels, for each thread
constexpr long PART = 1 << 20;         // multiplications that are worth a part
constexpr long SERIAL = 1 << 19;       // multiplications below which waking threads costs more than it saves
constexpr long FEW = 1 << 13;          // numbers that one thread prepares sooner than threads can wait for each other

struct bf16 { uint16_t bits; };
typedef float v8f __attribute__((vector_size(32)));
typedef uint32_t v8u __attribute__((vector_size(32)));
typedef uint16_t v8h __attribute__((vector_size(16)));

// What Python passes: `bits` is 4, 8 or 13 (levels), 16 (bfloat16) or 32 (float). `gated` is 0 or 1: then panels are in turn of
// gates and of what they let through, and a row's result is silu(gate) times that, half as many numbers as outputs.
struct Weights {
    const uint8_t* data;
    const float* bias;  // or null
    long outputs, inputs, bits, gated;
    long results() const { return outputs >> gated; }
    long panels() const { return (outputs + PANEL - 1) / PANEL; }
    long blocks() const { return inputs / BLOCK; }
};

inline float widen(float x) { return x; }
inline float widen(bf16 x) { const uint32_t u = uint32_t(x.bits) << 16; float f; std::memcpy(&f, &u, 4); return f; }
inline v8f load8(const float* p) { v8f v; std::memcpy(&v, p, sizeof v); return v; }
inline v8f load8(const bf16* p) {
#ifdef HAS_AVX2  // left alone, GCC widens the halves of a register one by one
    const v8u u = (v8u)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)) << 16;
#else
    v8h h;
    std::memcpy(&h, p, sizeof h);
    const v8u u = __builtin_convertvector(h, v8u) << 16;
#endif
    v8f v;
    std::memcpy(&v, &u, sizeof v);
    return v;
}
inline void store8(float* p, v8f v) { std::memcpy(p, &v, sizeof v); }
inline void store8(bf16* p, v8f v) {  // to nearest, ties to even
    v8u u;
    std::memcpy(&u, &v, sizeof u);
    u = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
#ifdef HAS_AVX2
    const __m128i low = _mm256_castsi256_si128((__m256i)u), high = _mm256_extracti128_si256((__m256i)u, 1);
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(low, high));
#else
    const v8h h = __builtin_convertvector(u, v8h);
    std::memcpy(p, &h, sizeof h);
#endif
}

// x / (1 + e^-x). The exponential is a polynomial of least relative error, below 1e-7, times a power of 2.
inline v8f silu(v8f x) {
    typedef int32_t v8i __attribute__((vector_size(32)));
    x = x < -80.0f ? v8f{} : x;  // as good as 0, where the exponential would be too large; not-a-number stays one
    v8f t = x * -1.44269504088896341f;
    const v8i in = ~(t < -126.0f);
    t = in ? t : v8f{} - 126.0f;
    const v8f shifted = t + 12582912.0f;  // 1.5 * 2^23: the low bits are the nearest integer
    const v8f r = t - (shifted - 12582912.0f);
    v8f p = 1.5345811810e-4f * r + 1.3399931217e-3f;
    p = p * r + 9.6184889578e-3f;
    p = p * r + 5.5503287770e-2f;
    p = p * r + 2.4022646891e-1f;
    p = p * r + 6.9314720574e-1f;
    p = p * r + 1.0f;
    v8i exponent, bits;
    std::memcpy(&exponent, &shifted, sizeof exponent);
    std::memcpy(&bits, &p, sizeof bits);
    bits = (bits + (exponent << 23)) & in;
    std::memcpy(&p, &bits, sizeof p);
    return x / (1.0f + p);
}

inline float half(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
    float f;
    if (rest >= 0x7c00) {
        const uint32_t u = sign | 0x7f800000 | (rest << 13);
        std::memcpy(&f, &u, 4);
        return f;
    }
    const uint32_t u = rest << 13;
    std::memcpy(&f, &u, 4);
    f *= 0x1p112f;  // from half's exponent bias to float's; exact, also for subnormal halves
    return sign ? -f : f;
}

// ---- rounding activations

// Largest size in a block of SIZE; not-a-number where one of its numbers isn't finite.
template <int SIZE, class T>
inline float block_peak(const T* x) {
#ifdef HAS_AVX2
    __m256 peak = _mm256_setzero_ps(), odd = _mm256_setzero_ps();
    for (int i = 0; i < SIZE / 8; i++) {
        const __m256 v = (__m256)load8(x + 8 * i);
        peak = _mm256_max_ps(peak, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v));
        odd = _mm256_fmadd_ps(v, _mm256_setzero_ps(), odd);
    }
    __m128 top = _mm_max_ps(_mm256_castps256_ps128(peak), _mm256_extractf128_ps(peak, 1));
    top = _mm_max_ps(top, _mm_movehl_ps(top, top));
    const float largest = _mm_cvtss_f32(_mm_max_ss(top, _mm_movehdup_ps(top)));
    const bool finite = _mm256_movemask_ps(_mm256_cmp_ps(odd, odd, _CMP_UNORD_Q)) == 0;
#else
    float largest = 0, odd = 0;
    for (int i = 0; i < SIZE; i++) {
        largest = std::max(largest, std::fabs(widen(x[i])));
        odd += widen(x[i]) * 0.0f;
    }
    const bool finite = odd == 0;
#endif
    return finite ? largest : NAN;
}

// A block's levels, and their sum.
template <class T>
inline int32_t round_block(const T* x, float inverse, int8_t* levels) {
#ifdef HAS_AVX2
    __m256i n[4];
    for (int i = 0; i < 4; i++) n[i] = _mm256_cvtps_epi32(_mm256_mul_ps((__m256)load8(x + 8 * i), _mm256_set1_ps(inverse)));
    const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(n[0], n[1]), _mm256_packs_epi32(n[2], n[3]));
    const __m256i bytes = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i*)levels, bytes);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
    const __m256i quads = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(quads), _mm256_extracti128_si256(quads, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
#else
    int32_t sum = 0;
    for (int i = 0; i < BLOCK; i++) sum += levels[i] = int8_t(std::nearbyint(widen(x[i]) * inverse));
    return sum;
#endif
}

// Of a row's blocks: what they are multiples of, and by what their numbers are multiplied. All zero for a row of nothing, or
// of what is no number.
inline float scale_blocks(const float* peaks, float peak, long blocks, float* multiples, float* inverses) {
    const bool any = peak > TINY;
    const float unit = peak / float(127 * MULTIPLES), to_multiples = any ? MULTIPLES / peak : 0.0f;
    for (long b = 0; b < blocks; b++) {
        const float multiple = std::ceil(any ? peaks[b] * to_multiples : 0.0f);
        multiples[b] = multiple < float(MULTIPLES) ? multiple : float(MULTIPLES);
        inverses[b] = multiple > 0.0f ? 1.0f / (unit * multiples[b]) : 0.0f;
    }
    return peak == peak ? unit : NAN;
}

// Rounds `count` rows, block by block: [rows x 32 levels | rows x multiple | rows x multiple·sum of levels]. The multiple is a
// float, or twice in 16 bits. A row that isn't all finite has no levels and a unit that is no number, so that it isn't lost.
template <bool TWICE, class T>
void round_rows(const T* x, long inputs, int count, uint8_t* out, float* units) {
    static thread_local std::vector<float> facts;
    const long blocks = inputs / BLOCK;
    if (long(facts.size()) < 3 * blocks) facts.resize(3 * blocks);
    float *peaks = facts.data(), *multiples = peaks + blocks, *inverses = multiples + blocks;
    for (int r = 0; r < count; r++, x += inputs) {
        float peak = 0;
        for (long b = 0; b < blocks; b++) {
            peaks[b] = block_peak<BLOCK>(x + b * BLOCK);
            peak = peak != peak || peaks[b] <= peak ? peak : peaks[b];  // once it is no number it stays none
        }
        units[r] = scale_blocks(peaks, peak, blocks, multiples, inverses);
        uint8_t* at = out + r * BLOCK;
        for (long b = 0; b < blocks; b++, at += count * ROW) {
            const float sum = multiples[b] * float(peak == peak ? round_block(x + b * BLOCK, inverses[b], (int8_t*)at) : 0);
            if (peak != peak) std::memset(at, 0, BLOCK);
            const uint32_t twice = uint32_t(multiples[b]) * 0x10001u;
            uint8_t* facts_at = at + count * BLOCK - r * (BLOCK - 4);
            std::memcpy(facts_at, TWICE ? (const void*)&twice : &multiples[b], 4);
            std::memcpy(facts_at + count * 4, &sum, 4);
        }
    }
}

// The nearest of 14-bit levels.
template <class T>
inline void round_wide_block(const T* x, float inverse, uint8_t* levels) {
#ifdef HAS_AVX2
    for (int i = 0; i < WIDE; i += 16) {
        const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps((__m256)load8(x + i), _mm256_set1_ps(inverse)));
        const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps((__m256)load8(x + i + 8), _mm256_set1_ps(inverse)));
        const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
        _mm256_storeu_si256((__m256i*)(levels + 2 * i), both);
    }
#else
    for (int i = 0; i < WIDE; i++) {
        const int16_t level = int16_t(std::nearbyint(widen(x[i]) * inverse));
        std::memcpy(levels + 2 * i, &level, 2);
    }
#endif
}

// Rounds `count` rows, block by block: [rows x 64 levels of 16 bits | rows x scale]. A block that isn't all finite has no
// levels, and a scale that is no number.
template <class T>
void round_wide(const T* x, long inputs, int count, uint8_t* out) {
    for (int r = 0; r < count; r++)
        for (long b = 0; b < inputs / WIDE; b++, x += WIDE) {
            uint8_t* at = out + b * count * WIDE_ROW;
            const float peak = block_peak<WIDE>(x), scale = peak <= TINY ? 0.0f : peak * (1.0f / WIDE_ROUND);
            if (peak > TINY) round_wide_block(x, WIDE_ROUND / peak, at + r * 2 * WIDE);
            else std::memset(at + r * 2 * WIDE, 0, 2 * WIDE);
            std::memcpy(at + count * 2 * WIDE + 4 * r, &scale, 4);
        }
}

// ---- the inner loops: sums[R][16] += a panel's blocks times R rounded rows

// What a tile asks memory for while it computes, bit by bit: its share of the weights that come next. Else the first tile of
// those would wait for all of them, and the others would leave memory idle.
struct Ahead {
    static constexpr long LINE = 64;
    const char* at;
    long step;  // bytes from one time to the next
    void ask() {
        __builtin_prefetch(at, 0, 2);
        __builtin_prefetch(at + LINE, 0, 2);  // a step may be longer than a line
        at += step;
    }
    void ask_for(long lines) {
        for (long i = 0; i < lines; i++, at += LINE) __builtin_prefetch(at, 0, 2);
    }
};

constexpr long packed_bytes(int bits) { return bits == 4 ? LEVELS / 2 + 4 * PANEL : LEVELS + 2 * PANEL; }

struct Plain {
    static constexpr int DIRECT = 1 << 30;  // never unpacks
    static constexpr int tile(int) { return 4; }
    static constexpr bool twice(int) { return false; }  // how a row's multiples are given
    static constexpr long unpacked_bytes(int) { return 1; }
    static void unpack(const uint8_t*, int, uint8_t*, long) {}

    template <bool PACKED, int BITS, int R>
    static void add(const uint8_t* w, const uint8_t* a, float* sums, long blocks, Ahead) {
        for (long b = 0; b < blocks; b++, w += packed_bytes(BITS), a += R * ROW)
            for (int r = 0; r < R; r++) {
                float scale, sum;
                std::memcpy(&scale, a + R * BLOCK + r * 4, 4);
                std::memcpy(&sum, a + R * (BLOCK + 4) + r * 4, 4);
                for (int o = 0; o < PANEL; o++) sums[r * PANEL + o] += one<BITS>(w, (const int8_t*)a + r * BLOCK, o, scale, sum);
            }
    }

    template <int R>
    static void add_wide(const uint8_t* w, const uint8_t* a, float* sums, long blocks, long, Ahead) {
        for (long b = 0; b < blocks; b++, w += WIDE_BYTES, a += R * WIDE_ROW)
            for (int r = 0; r < R; r++)
                for (int o = 0; o < PANEL; o++) {
                    int32_t dot = 0;
                    for (int k = 0; k < WIDE; k++) {
                        int16_t weight, level;
                        std::memcpy(&weight, w + k / 2 * 4 * PANEL + 4 * o + k % 2 * 2, 2);
                        std::memcpy(&level, a + (r * WIDE + k) * 2, 2);
                        dot += int32_t(weight) * level;
                    }
                    bf16 unit;
                    float scale;
                    std::memcpy(&unit, w + 2 * WIDE * PANEL + 2 * o, 2);
                    std::memcpy(&scale, a + R * 2 * WIDE + 4 * r, 4);
                    sums[r * PANEL + o] += float(dot) * (widen(unit) * scale);
                }
    }

    template <int BITS>
    static float one(const uint8_t* w, const int8_t* a, int o, float scale, float sum) {
        uint16_t halves[2];
        std::memcpy(halves, w + (BITS == 4 ? LEVELS / 2 : LEVELS) + 2 * o, 2);
        int32_t dot = 0;
        for (int k = 0; k < BLOCK; k++) {
            const uint8_t byte = w[(BITS == 4 ? k % 16 / 4 : k / 4) * 64 + o * 4 + k % 4];
            dot += (BITS == 8 ? byte - 128 : k < 16 ? byte & 15 : byte >> 4) * a[k];
        }
        if (BITS == 8) return float(dot) * (half(halves[0]) * scale);
        std::memcpy(halves + 1, w + LEVELS / 2 + 2 * PANEL + 2 * o, 2);
        return float(dot) * (half(halves[0]) * scale) + half(halves[1]) * sum;
    }
};

#ifdef HAS_AVX2
inline __m256 halves8(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline __m256i bytes32(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline __m256i spread4(const uint8_t* p) { int32_t i; std::memcpy(&i, p, 4); return _mm256_set1_epi32(i); }
inline __m256 spread(const uint8_t* p) { float f; std::memcpy(&f, p, 4); return _mm256_set1_ps(f); }
inline __m256i low4(__m256i v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
inline __m256i high4(__m256i v) { return low4(_mm256_srli_epi16(v, 4)); }

// Keeps a sum in its register: left alone, GCC computes all products of a block first and spills them.
inline void pin(__m256i& v) { asm("" : "+x"(v)); }
// Keeps the sums in memory between blocks: left alone, GCC carries copies of them along on the stack as well.
inline void pin(float*& p) { asm("" : "+r"(p)); }

// The float step of 8 outputs: sums + dot · scale + least · sum of the row's levels.
inline void add8(float* sums, __m256i dot, __m256 scale, __m256 least, __m256 row_sum) {
    const __m256 s = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, _mm256_loadu_ps(sums));
    _mm256_storeu_ps(sums, _mm256_fmadd_ps(least, row_sum, s));
}

// 4 bits are the unsigned side of maddubs: 8 products of a pair are at most 8·2·15·127 = 30480, so a block is summed in 16 bits.
// As the multiples of rows have 15 bits, one instruction multiplies such sums by them and adds two: at most 2·30480·32767.
// 8 bits, around 128, are two such halves: 16·high + low - 128.
struct Avx2 {
    static constexpr int DIRECT = 5;
    static constexpr int tile(int bits) { return bits == 4 ? 5 : 4; }
    static constexpr bool twice(int bits) { return bits == 4; }
    static constexpr long unpacked_bytes(int bits) { return LEVELS * (bits / 4) + 8 * PANEL; }

    // Levels as bytes (8 bits: low halves, then high ones), then scale and least as floats.
    static void unpack(const uint8_t* w, int bits, uint8_t* out, long blocks) {
        const long levels = bits == 4 ? LEVELS / 2 : LEVELS;
        for (long b = 0; b < blocks; b++, w += packed_bytes(bits), out += unpacked_bytes(bits)) {
            for (long i = 0; i < levels; i += 32) {
                const __m256i v = bytes32(w + i);
                _mm256_storeu_si256((__m256i*)(out + i), low4(v));
                _mm256_storeu_si256((__m256i*)(out + levels + i), high4(v));
            }
            float* floats = (float*)(out + 2 * levels);
            for (int p = 0; p < 2; p++) {
                const __m256 scale = halves8(w + levels + 16 * p);
                _mm256_storeu_ps(floats + 8 * p, scale);
                _mm256_storeu_ps(floats + PANEL + 8 * p, bits == 4 ? halves8(w + levels + 2 * PANEL + 16 * p)
                                                                   : _mm256_mul_ps(scale, _mm256_set1_ps(-128)));
            }
        }
    }

    template <bool PACKED, int BITS>
    static void scales(const uint8_t* w, int p, __m256& scale, __m256& least) {
        constexpr long levels = BITS == 4 ? LEVELS / 2 : LEVELS;
        if (PACKED) {
            scale = halves8(w + levels + 16 * p);
            least = BITS == 4 ? halves8(w + levels + 2 * PANEL + 16 * p) : _mm256_mul_ps(scale, _mm256_set1_ps(-128));
        } else {
            scale = _mm256_loadu_ps((const float*)(w + 2 * levels) + 8 * p);
            least = _mm256_loadu_ps((const float*)(w + 2 * levels) + PANEL + 8 * p);
        }
    }

    template <bool PACKED, int BITS, int R>
    static void add(const uint8_t* w, const uint8_t* a, float* sums, long blocks, Ahead ahead) {
        if constexpr (BITS == 4) {
            four<PACKED, R>(w, a, sums, blocks, ahead);
        } else {
            eight<PACKED, R, 0, R < 2 ? R : 2>(w, a, sums, blocks, ahead);
            if constexpr (R > 2) eight<PACKED, R, 2, R - 2>(w, a, sums + 2 * PANEL, blocks, ahead);
        }
    }

    template <bool PACKED, int R>
    [[gnu::noinline]] static void four(const uint8_t* w, const uint8_t* a, float* sums, long blocks, Ahead ahead) {
        for (long b = 0; b < blocks; b++, w += PACKED ? packed_bytes(4) : unpacked_bytes(4), a += R * ROW) {
            ahead.ask();
            pin(sums);
            __m256i s[R][2];
#pragma GCC unroll 8
            for (int q = 0; q < 8; q++) {
                __m256i v[2];
#pragma GCC unroll 2
                for (int p = 0; p < 2; p++)
                {
                    v[p] = !PACKED ? bytes32(w + q * 64 + 32 * p)
                           : q % 2 ? high4(bytes32(w + q / 2 * 64 + 32 * p)) : low4(bytes32(w + q / 2 * 64 + 32 * p));
                    pin(v[p]);
                }
#pragma GCC unroll 5
                for (int r = 0; r < R; r++) {
                    const __m256i x = spread4(a + r * BLOCK + 4 * (!PACKED ? q : q % 2 ? 4 + q / 2 : q / 2));
#pragma GCC unroll 2
                    for (int p = 0; p < 2; p++) {
                        const __m256i pair = _mm256_maddubs_epi16(v[p], x);
                        s[r][p] = q ? _mm256_add_epi16(s[r][p], pair) : pair;
                        pin(s[r][p]);
                    }
                }
            }
            __m256 scale[2], least[2];
            scales<PACKED, 4>(w, 0, scale[0], least[0]);
            scales<PACKED, 4>(w, 1, scale[1], least[1]);
#pragma GCC unroll 5
            for (int r = 0; r < R; r++) {
                const __m256i multiple = spread4(a + R * BLOCK + 4 * r);
                const __m256 row_sum = spread(a + R * (BLOCK + 4) + 4 * r);
#pragma GCC unroll 2
                for (int p = 0; p < 2; p++)
                    add8(sums + r * PANEL + 8 * p, _mm256_madd_epi16(s[r][p], multiple), scale[p], least[p], row_sum);
            }
        }
    }

    static __m256i add_pairs(__m256i sum, __m256i w, __m256i x) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
        return _mm256_dpwssd_epi32(sum, w, x);
#else
        return _mm256_add_epi32(sum, _mm256_madd_epi16(w, x));
#endif
    }

    template <int R>
    [[gnu::noinline]] static void add_wide(const uint8_t* w, const uint8_t* a, float* sums, long blocks, long lines,
                                           Ahead ahead) {
        for (long b = 0; b < blocks; b++, w += WIDE_BYTES, a += R * WIDE_ROW) {
            ahead.ask_for(lines);
            pin(sums);
            __m256i s[R][2];
#pragma GCC unroll 32
            for (int q = 0; q < WIDE / 2; q++) {
                __m256i v[2] = {bytes32(w + q * 64), bytes32(w + q * 64 + 32)};
                pin(v[0]);
                pin(v[1]);
#pragma GCC unroll 6
                for (int r = 0; r < R; r++) {
                    const __m256i x = spread4(a + r * 2 * WIDE + 4 * q);
#pragma GCC unroll 2
                    for (int p = 0; p < 2; p++) {
                        s[r][p] = q ? add_pairs(s[r][p], v[p], x) : _mm256_madd_epi16(v[p], x);
                        pin(s[r][p]);
                    }
                }
            }
#pragma GCC unroll 2
            for (int p = 0; p < 2; p++) {
                const __m256 unit = (__m256)load8((const bf16*)(w + 2 * WIDE * PANEL) + 8 * p);
#pragma GCC unroll 6
                for (int r = 0; r < R; r++) {
                    const __m256 scale = _mm256_mul_ps(unit, spread(a + R * 2 * WIDE + 4 * r));
                    float* at = sums + r * PANEL + 8 * p;
                    _mm256_storeu_ps(at, _mm256_fmadd_ps(_mm256_cvtepi32_ps(s[r][p]), scale, _mm256_loadu_ps(at)));
                }
            }
        }
    }

    // Rows FIRST to FIRST + COUNT of R.
    template <bool PACKED, int R, int FIRST, int COUNT>
    [[gnu::noinline]] static void eight(const uint8_t* w, const uint8_t* a, float* sums, long blocks, Ahead ahead) {
        for (long b = 0; b < blocks; b++, w += PACKED ? packed_bytes(8) : unpacked_bytes(8), a += R * ROW) {
            ahead.ask();
            pin(sums);
            __m256i low[COUNT][2], high[COUNT][2];
#pragma GCC unroll 8
            for (int q = 0; q < 8; q++) {
                __m256i l[2], h[2];
#pragma GCC unroll 2
                for (int p = 0; p < 2; p++) {
                    const __m256i v = bytes32(w + q * 64 + 32 * p);
                    l[p] = PACKED ? low4(v) : v;
                    h[p] = PACKED ? high4(v) : bytes32(w + LEVELS + q * 64 + 32 * p);
                    pin(l[p]);
                    pin(h[p]);
                }
#pragma GCC unroll 2
                for (int r = 0; r < COUNT; r++) {
                    const __m256i x = spread4(a + (FIRST + r) * BLOCK + 4 * q);
#pragma GCC unroll 2
                    for (int p = 0; p < 2; p++) {
                        const __m256i pl = _mm256_maddubs_epi16(l[p], x), ph = _mm256_maddubs_epi16(h[p], x);
                        low[r][p] = q ? _mm256_add_epi16(low[r][p], pl) : pl;
                        high[r][p] = q ? _mm256_add_epi16(high[r][p], ph) : ph;
                        pin(low[r][p]);
                        pin(high[r][p]);
                    }
                }
            }
#pragma GCC unroll 2
            for (int p = 0; p < 2; p++) {
                __m256 scale, least;
                scales<PACKED, 8>(w, p, scale, least);
#pragma GCC unroll 2
                for (int r = 0; r < COUNT; r++) {
                    const __m256i dot = _mm256_add_epi32(_mm256_madd_epi16(low[r][p], _mm256_set1_epi16(1)),
                                                         _mm256_madd_epi16(high[r][p], _mm256_set1_epi16(16)));
                    const __m256 both = _mm256_mul_ps(scale, spread(a + R * BLOCK + 4 * (FIRST + r)));
                    add8(sums + r * PANEL + 8 * p, dot, both, least, spread(a + R * (BLOCK + 4) + 4 * (FIRST + r)));
                }
            }
        }
    }
};
#endif

#ifdef HAS_VNNI
// dpbusd multiplies unsigned levels by signed ones and sums fours in 32 bits; 8-bit levels lie around 128.
struct Vnni {
    static constexpr int DIRECT = 8;
    static constexpr int tile(int) { return 8; }
    static constexpr bool twice(int) { return false; }
    static constexpr long unpacked_bytes(int) { return LEVELS + 8 * PANEL; }

    template <int R>
    static void add_wide(const uint8_t* w, const uint8_t* a, float* sums, long blocks, long lines, Ahead ahead) {
        Avx2::add_wide<R>(w, a, sums, blocks, lines, ahead);
    }

    static __m512 scale_of(const uint8_t* w, long levels) {
        return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(w + levels)));
    }
    template <int BITS>
    static __m512 least_of(const uint8_t* w, __m512 scale) {
        if (BITS == 8) return _mm512_mul_ps(scale, _mm512_set1_ps(-128));
        return scale_of(w, LEVELS / 2 + 2 * PANEL);
    }
    static __m512i low4(__m512i v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
    static __m512i levels_of(const uint8_t* w, int q) {  // of packed 4-bit levels
        const __m512i v = _mm512_loadu_si512(w + q % 4 * 64);
        return low4(q < 4 ? v : _mm512_srli_epi16(v, 4));
    }

    static void unpack(const uint8_t* w, int bits, uint8_t* out, long blocks) {
        for (long b = 0; b < blocks; b++, w += packed_bytes(bits), out += unpacked_bytes(bits)) {
            for (int q = 0; q < 8; q++)
                _mm512_storeu_si512(out + q * 64, bits == 4 ? levels_of(w, q) : _mm512_loadu_si512(w + q * 64));
            const __m512 scale = scale_of(w, bits == 4 ? LEVELS / 2 : LEVELS);
            _mm512_storeu_ps((float*)(out + LEVELS), scale);
            _mm512_storeu_ps((float*)(out + LEVELS) + PANEL, bits == 4 ? least_of<4>(w, scale) : least_of<8>(w, scale));
        }
    }

    template <bool PACKED, int BITS, int R>
    [[gnu::noinline]] static void add(const uint8_t* w, const uint8_t* a, float* sums, long blocks, Ahead ahead) {
        for (long b = 0; b < blocks; b++, w += PACKED ? packed_bytes(BITS) : unpacked_bytes(BITS), a += R * ROW) {
            ahead.ask();
            __m512i s[R];
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) s[r] = _mm512_setzero_si512();
#pragma GCC unroll 8
            for (int q = 0; q < 8; q++) {
                const __m512i v = PACKED && BITS == 4 ? levels_of(w, q) : _mm512_loadu_si512(w + q * 64);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    int32_t x;
                    std::memcpy(&x, a + r * BLOCK + 4 * q, 4);
                    s[r] = _mm512_dpbusd_epi32(s[r], v, _mm512_set1_epi32(x));
                    asm("" : "+v"(s[r]));  // see pin
                }
            }
            const __m512 scale = PACKED ? scale_of(w, BITS == 4 ? LEVELS / 2 : LEVELS) : _mm512_loadu_ps(w + LEVELS);
            const __m512 least = PACKED ? least_of<BITS>(w, scale) : _mm512_loadu_ps(w + LEVELS + 4 * PANEL);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                float row_scale, row_sum;
                std::memcpy(&row_scale, a + R * BLOCK + 4 * r, 4);
                std::memcpy(&row_sum, a + R * (BLOCK + 4) + 4 * r, 4);
                const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(row_scale));
                const __m512 t = _mm512_fmadd_ps(_mm512_cvtepi32_ps(s[r]), both, _mm512_loadu_ps(sums + r * PANEL));
                _mm512_storeu_ps(sums + r * PANEL, _mm512_fmadd_ps(least, _mm512_set1_ps(row_sum), t));
            }
        }
    }
};
#endif

// ---- sharing out the work

// Room for what the threads of a call share; it only grows.
template <class E>
E* scratch(size_t size) {
    static thread_local std::vector<E> held;
    if (held.size() < size) held.resize(size);
    return held.data();
}

// Rows in equal tiles, or nearly so, of `most` at the most.
struct Tiles {
    long rows;
    int most;
    int count() const { return int((rows + most - 1) / most); }
    long start(int t) const { return rows * t / count(); }
    int rows_of(int t) const { return int(start(t + 1) - start(t)); }
};

// Runs prepare(first row, rows) for the tiles of all groups of rows, and when all are done body(first row, rows, first panel,
// end) for groups of rows and parts of the panels. Threads take both as they get done: one that a neighbour keeps off its core
// holds up no more than the part it has. All groups come for a part before the next part does: its weights come from memory
// once.
template <class Prepare, class Body>
void share(long rows, int tile, int group, const Weights& w, Prepare prepare, Body body) {
    const long whole = (group + tile - 1) / tile;  // tiles of a whole group
    const long groups = (rows + group - 1) / group, panels = w.panels() >> w.gated, work = rows * w.outputs * w.inputs;
    const long threads = work > SERIAL ? omp_get_max_threads() : 1;
    const long parts = threads == 1 ? 1 : std::min(panels, threads * std::clamp(work / groups / threads / PART, 1L, PARTS));
    const auto prepare_tile = [&](long i) {
        const long first = i / whole * group, t = i % whole;
        const Tiles tiles{std::min<long>(group, rows - first), tile};
        if (t < tiles.count()) prepare(first + tiles.start(t), tiles.rows_of(t));
    };
    const bool few = rows * w.inputs <= FEW;
    for (long i = 0; i < groups * whole && few; i++) prepare_tile(i);
#pragma omp parallel if (threads > 1)
    {
        if (!few) {
#pragma omp for schedule(dynamic)
            for (long i = 0; i < groups * whole; i++) prepare_tile(i);
        }
#pragma omp for schedule(dynamic) nowait
        for (long i = 0; i < groups * parts; i++) {
            const long first = i % groups * group, part = i / groups;
            body(first, std::min<long>(group, rows - first), panels * part / parts << w.gated,
                 panels * (part + 1) / parts << w.gated);
        }
    }
}

// A panel's sums of `rows` rows, at sums, times the rows' units (null: 1), into the results. With gates, of two panels: the
// other's sums are at `passing`.
template <class T>
void write(const Weights& w, long panel, const float* sums, const float* passing, const float* units, T* out, long rows) {
    const long first = panel * PANEL, count = std::min<long>(PANEL, w.outputs - first), width = w.results();
    alignas(32) float bias[2 * PANEL] = {};
    if (w.bias) std::copy(w.bias + first, w.bias + std::min(first + (PANEL << w.gated), w.outputs), bias);
    for (long r = 0; r < rows; r++) {
        const float unit = units ? units[r] : 1.0f;
        T whole[PANEL], *place = out + r * width + (first >> w.gated), *target = count == PANEL ? place : whole;
        for (int i = 0; i < PANEL; i += 8) {
            v8f v = load8(sums + r * PANEL + i) * unit + load8(bias + i);
            if (w.gated) v = silu(v) * (load8(passing + r * PANEL + i) * unit + load8(bias + PANEL + i));
            store8(target + i, v);
        }
        if (count < PANEL) std::copy(whole, whole + count, place);
    }
}

template <class V, bool PACKED, int BITS>
void add_tile(int rows, const uint8_t* w, const uint8_t* a, float* sums, long blocks, Ahead ahead) {
    switch (rows) {
        case 1: return V::template add<PACKED, BITS, 1>(w, a, sums, blocks, ahead);
        case 2: return V::template add<PACKED, BITS, 2>(w, a, sums, blocks, ahead);
        case 3: return V::template add<PACKED, BITS, 3>(w, a, sums, blocks, ahead);
        case 4: return V::template add<PACKED, BITS, 4>(w, a, sums, blocks, ahead);
    }
    if constexpr (V::tile(BITS) >= 5)
        if (rows == 5) return V::template add<PACKED, BITS, 5>(w, a, sums, blocks, ahead);
    if constexpr (V::tile(BITS) == 8) switch (rows) {
        case 6: return V::template add<PACKED, BITS, 6>(w, a, sums, blocks, ahead);
        case 7: return V::template add<PACKED, BITS, 7>(w, a, sums, blocks, ahead);
        case 8: return V::template add<PACKED, BITS, 8>(w, a, sums, blocks, ahead);
    }
}

// Panels [first, end) of some rows: add(panel, sums) computes one, and what it found is written.
template <class T, class Add>
void each_panel(const Weights& w, long first, long end, const float* units, T* out, int rows, Add add) {
    alignas(64) float both[2][MOST_ROWS * PANEL];  // of a panel, or of a gate's and the one it lets through
    for (long p = first; p < end; p++) {
        float* sums = both[p & w.gated];
        std::fill(sums, sums + rows * PANEL, 0.0f);
        add(p, sums);
        if ((p & w.gated) == w.gated) write(w, p - w.gated, both[0], both[1], units, out, rows);
    }
}

// Up to MOST_ROWS rows, rounded in tiles, times panels [first, end).
template <class V, int BITS, class T>
void levels_of_rows(const Weights& w, const uint8_t* rounded, const float* units, T* out, int rows, long first, long end) {
    alignas(64) static thread_local uint8_t panel[DEPTH * V::unpacked_bytes(BITS)];
    const long blocks = w.blocks();
    const Tiles tiles{rows, V::tile(BITS)};
    each_panel(w, first, end, units, out, rows, [&](long p, float* sums) {
        const uint8_t* packed = w.data + p * blocks * packed_bytes(BITS);
        if (rows <= V::DIRECT) {
            const Ahead ahead{(const char*)packed + 8 * packed_bytes(BITS), packed_bytes(BITS)};
            for (int t = 0; t < tiles.count(); t++)
                add_tile<V, true, BITS>(tiles.rows_of(t), packed, rounded + tiles.start(t) * blocks * ROW,
                                        sums + tiles.start(t) * PANEL, blocks, ahead);
        } else {
            const long step = packed_bytes(BITS) / tiles.count() + 1;
            for (long b = 0; b < blocks; b += DEPTH) {
                const long depth = std::min<long>(DEPTH, blocks - b);
                V::unpack(packed + b * packed_bytes(BITS), BITS, panel, depth);
                const char* next = (const char*)packed + (b + depth) * packed_bytes(BITS);
                for (int t = 0; t < tiles.count(); t++) {
                    const int count = tiles.rows_of(t);
                    add_tile<V, false, BITS>(count, panel, rounded + (tiles.start(t) * blocks + b * count) * ROW,
                                             sums + tiles.start(t) * PANEL, depth, {next + t * depth * step, step});
                }
            }
        }
    });
}

template <class V, int BITS, class T>
void times_levels(const Weights& w, const T* x, T* out, long rows) {
    const long size = w.blocks() * ROW;
    uint8_t* rounded = scratch<uint8_t>(rows * size);
    float* units = scratch<float>(rows);
    share(rows, V::tile(BITS), MOST_ROWS, w,
          [&](long row, int count) {
              round_rows<V::twice(BITS)>(x + row * w.inputs, w.inputs, count, rounded + row * size, units + row);
          },
          [&](long row, int count, long first, long end) {
              levels_of_rows<V, BITS>(w, rounded + row * size, units + row, out + row * w.results(), count, first, end);
          });
}

// ---- levels of 13 bits

template <class V>
void add_wide_tile(int rows, const uint8_t* w, const uint8_t* a, float* sums, long blocks, long lines, Ahead ahead) {
    switch (rows) {
        case 1: return V::template add_wide<1>(w, a, sums, blocks, lines, ahead);
        case 2: return V::template add_wide<2>(w, a, sums, blocks, lines, ahead);
        case 3: return V::template add_wide<3>(w, a, sums, blocks, lines, ahead);
        case 4: return V::template add_wide<4>(w, a, sums, blocks, lines, ahead);
        case 5: return V::template add_wide<5>(w, a, sums, blocks, lines, ahead);
        default: return V::template add_wide<6>(w, a, sums, blocks, lines, ahead);
    }
}

// All tiles of a group, times a panel.
template <class V>
void wide_of_rows(const uint8_t* panel, const uint8_t* rounded, long blocks, float* sums, int rows) {
    const Tiles tiles{rows, WIDE_TILE};
    // Of the weights that come next, for each tile and block; one tile alone goes on to them by itself.
    const long lines = tiles.count() > 1 ? WIDE_BYTES / Ahead::LINE / tiles.count() + 1 : 0;
    for (long b = 0; b < blocks; b += WIDE_DEPTH) {
        const long depth = std::min<long>(WIDE_DEPTH, blocks - b);
        const char* next = (const char*)panel + (b + depth) * WIDE_BYTES;
        for (int t = 0; t < tiles.count(); t++) {
            const int count = tiles.rows_of(t);
            add_wide_tile<V>(count, panel + b * WIDE_BYTES, rounded + (tiles.start(t) * blocks + b * count) * WIDE_ROW,
                             sums + tiles.start(t) * PANEL, depth, lines, {next + depth * WIDE_BYTES * t / tiles.count(), 0});
        }
    }
}

template <class V, class T>
void times_wide(const Weights& w, const T* x, T* out, long rows) {
    const long blocks = w.inputs / WIDE, size = blocks * WIDE_ROW;
    uint8_t* rounded = scratch<uint8_t>(rows * size);
    share(rows, WIDE_TILE, WIDE_ROWS, w,
          [&](long row, int count) { round_wide(x + row * w.inputs, w.inputs, count, rounded + row * size); },
          [&](long row, int count, long first, long end) {
              each_panel(w, first, end, nullptr, out + row * w.results(), count, [&](long p, float* sums) {
                  wide_of_rows<V>(w.data + p * blocks * WIDE_BYTES, rounded + row * size, blocks, sums, count);
              });
          });
}

// ---- float weights

// 16 weights of one input. In bfloat16, lane i of 8 holds output i in its low half and i + 8 in its high one.
inline void weights16(const float* w, long k, v8f& first, v8f& second) {
    first = load8(w + k * PANEL);
    second = load8(w + k * PANEL + 8);
}
inline void weights16(const bf16* w, long k, v8f& first, v8f& second) {
    v8u u;
    std::memcpy(&u, w + k * PANEL, sizeof u);
    const v8u low = u << 16, high = u & 0xffff0000u;
    std::memcpy(&first, &low, sizeof low);
    std::memcpy(&second, &high, sizeof high);
}

// Adds R rows of x times `depth` inputs of a panel, and looks ahead once `every` so many inputs.
template <int R, class W>
void add_floats(const W* w, const float* x, long stride, float* sums, long depth, long every, Ahead ahead) {
    v8f s[R][2];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
        s[r][0] = load8(sums + r * PANEL);
        s[r][1] = load8(sums + r * PANEL + 8);
    }
    for (long k = 0; k < depth;) {
        ahead.ask();
        for (const long stop = std::min(depth, k + every); k < stop; k++) {
            v8f first, second;
            weights16(w, k, first, second);
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                s[r][0] += x[r * stride + k] * first;
                s[r][1] += x[r * stride + k] * second;
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
        store8(sums + r * PANEL, s[r][0]);
        store8(sums + r * PANEL + 8, s[r][1]);
    }
}

template <class W>
void add_floats_any(int rows, const W* w, const float* x, long stride, float* sums, long depth, long every, Ahead ahead) {
    switch (rows) {
        case 1: return add_floats<1>(w, x, stride, sums, depth, every, ahead);
        case 2: return add_floats<2>(w, x, stride, sums, depth, every, ahead);
        case 3: return add_floats<3>(w, x, stride, sums, depth, every, ahead);
        case 4: return add_floats<4>(w, x, stride, sums, depth, every, ahead);
        case 5: return add_floats<5>(w, x, stride, sums, depth, every, ahead);
        default: return add_floats<6>(w, x, stride, sums, depth, every, ahead);
    }
}

// All tiles of a group, times a panel.
template <class W>
void floats_of_rows(const W* panel, const float* x, long inputs, float* sums, int rows) {
    constexpr long BYTES = PANEL * sizeof(W);
    const Tiles tiles{rows, FLOAT_TILE};
    const long every = tiles.count() * Ahead::LINE / BYTES;
    for (long k = 0; k < inputs; k += FLOAT_DEPTH) {
        const long depth = std::min<long>(FLOAT_DEPTH, inputs - k);
        const char* next = (const char*)(panel + (k + depth) * PANEL);
        for (int t = 0; t < tiles.count(); t++)
            add_floats_any(tiles.rows_of(t), panel + k * PANEL, x + tiles.start(t) * inputs + k, inputs,
                           sums + tiles.start(t) * PANEL, depth, every,
                           {next + depth * BYTES * t / tiles.count(), Ahead::LINE});
    }
}

template <class W, class T>
void times_floats(const Weights& w, const T* x, T* out, long rows) {
    float* wide = scratch<float>(rows * w.inputs);
    share(rows, FLOAT_TILE, FLOAT_ROWS, w,
          [&](long row, int count) {
              for (long i = row * w.inputs; i < (row + count) * w.inputs; i++) wide[i] = widen(x[i]);
          },
          [&](long row, int count, long first, long end) {
              each_panel(w, first, end, nullptr, out + row * w.results(), count, [&](long p, float* sums) {
                  floats_of_rows((const W*)w.data + p * w.inputs * PANEL, wide + row * w.inputs, w.inputs, sums, count);
              });
          });
}

template <class V, class T>
void times_integers(const Weights& w, const T* x, T* out, long rows) {
    if (w.bits == 4) times_levels<V, 4>(w, x, out, rows);
    else if (w.bits == 8) times_levels<V, 8>(w, x, out, rows);
    else times_wide<V>(w, x, out, rows);
}

template <class T>
int product(const Weights& w, const T* x, T* out, long rows, int variant) {
    if (w.bits == 32) times_floats<float>(w, x, out, rows);
    else if (w.bits == 16) times_floats<bf16>(w, x, out, rows);
    else if (variant == 0) times_integers<Plain>(w, x, out, rows);
#ifdef HAS_AVX2
    else if (variant == 1) times_integers<Avx2>(w, x, out, rows);
#endif
#ifdef HAS_VNNI
    else if (variant == 2) times_integers<Vnni>(w, x, out, rows);
#endif
    else return 1;
    return 0;
}

// 64 weights to the nearest multiples of a power of 2 that has room for the largest; a pair of them every 4 * PANEL bytes.
void pack_wide_block(const float* x, uint8_t* levels, uint8_t* unit_at) {
    float peak = 0;
    for (int k = 0; k < WIDE; k++) peak = std::max(peak, std::fabs(x[k]));
    if (peak < TINY) return;
    int exponent;
    std::frexp(peak / (WIDE_PEAK + 0.5f), &exponent);
    const float unit = std::ldexp(1.0f, exponent), inverse = std::ldexp(1.0f, -exponent);
    for (int k = 0; k < WIDE; k++) {
        const int16_t level = int16_t(std::nearbyint(x[k] * inverse));
        std::memcpy(levels + k / 2 * 4 * PANEL + k % 2 * 2, &level, 2);
    }
    uint32_t bits;
    std::memcpy(&bits, &unit, 4);
    const uint16_t high = uint16_t(bits >> 16);
    std::memcpy(unit_at, &high, 2);
}

}  // namespace

// Bit v is set when variant v of the integer loops was compiled: 0 plain, 1 AVX2, 2 AVX-512 VNNI.
extern "C" int variants() {
    int known = 1;
#ifdef HAS_AVX2
    known |= 2;
#endif
#ifdef HAS_VNNI
    known |= 4;
#endif
    return known;
}

// Returns nonzero when the variant isn't there.
extern "C" int product_fp32(const Weights* w, const float* x, float* out, long rows, int variant) {
    return product(*w, x, out, rows, variant);
}
extern "C" int product_bf16(const Weights* w, const bf16* x, bf16* out, long rows, int variant) {
    return product(*w, x, out, rows, variant);
}

// Rows of GGUF blocks, [outputs][blocks], into panels; outputs that pad the last panel are zero.
// Q4_1: half scale, half least, 16 bytes (low halves are inputs 0 to 15). Q8_0: half scale, 32 signed bytes.
extern "C" void pack_levels(const uint8_t* rows, long outputs, long blocks, int bits, uint8_t* out) {
    const long size = bits == 4 ? 20 : 34, head = bits == 4 ? 4 : 2, levels = bits == 4 ? LEVELS / 2 : LEVELS;
    const uint32_t around = bits == 4 ? 0 : 0x80808080;
#pragma omp parallel for
    for (long p = 0; p < (outputs + PANEL - 1) / PANEL; p++)
        for (long b = 0; b < blocks; b++) {
            uint8_t* at = out + (p * blocks + b) * packed_bytes(bits);
            std::memset(at, 0, packed_bytes(bits));
            for (long o = 0; o < PANEL && p * PANEL + o < outputs; o++) {
                const uint8_t* block = rows + ((p * PANEL + o) * blocks + b) * size;
                for (long q = 0; q < levels / 64; q++) {
                    uint32_t four;
                    std::memcpy(&four, block + head + 4 * q, 4);
                    four ^= around;
                    std::memcpy(at + 64 * q + 4 * o, &four, 4);
                }
                std::memcpy(at + levels + 2 * o, block, 2);
                if (bits == 4) std::memcpy(at + levels + 2 * PANEL + 2 * o, block + 2, 2);
            }
        }
}

// [outputs][inputs] floats, or bfloat16 numbers, into panels.
template <class W>
void pack_floats(const W* rows, long outputs, long inputs, W* out) {
#pragma omp parallel for
    for (long p = 0; p < (outputs + PANEL - 1) / PANEL; p++)
        for (long o = 0; o < PANEL; o++) {
            const long place = sizeof(W) == 4 ? o : o % 8 * 2 + o / 8, output = p * PANEL + o;
            for (long k = 0; k < inputs; k++)
                out[(p * inputs + k) * PANEL + place] = output < outputs ? rows[output * inputs + k] : W{};
        }
}
extern "C" void pack_fp32(const float* rows, long outputs, long inputs, float* out) { pack_floats(rows, outputs, inputs, out); }
extern "C" void pack_bf16(const bf16* rows, long outputs, long inputs, bf16* out) { pack_floats(rows, outputs, inputs, out); }

// [outputs][inputs] floats into panels of 13-bit levels, inputs in whole blocks of 64.
extern "C" void pack_wide(const float* rows, long outputs, long inputs, uint8_t* out) {
    const long blocks = inputs / WIDE;
#pragma omp parallel for
    for (long p = 0; p < (outputs + PANEL - 1) / PANEL; p++)
        for (long b = 0; b < blocks; b++) {
            uint8_t* at = out + (p * blocks + b) * WIDE_BYTES;
            std::memset(at, 0, WIDE_BYTES);
            for (long o = 0; o < PANEL && p * PANEL + o < outputs; o++)
                pack_wide_block(rows + (p * PANEL + o) * inputs + b * WIDE, at + 4 * o, at + 2 * WIDE * PANEL + 2 * o);
        }
}
