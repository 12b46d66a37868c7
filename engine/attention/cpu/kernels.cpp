// The operations of engine/attention/contract.py for a CPU, in float or bfloat16, accumulating in float.
//
// Vectors are a compiler extension (GCC, Clang), and exactly one register wide: 16 floats with AVX-512, 8 with AVX2, 4
// with SSE or NEON. (Wider ones are kept in memory by GCC and cost ten times as much.) Inside a block keys lie
// transposed, [head_dim][block_size], so that keys are lanes and a score needs no horizontal sum. Every query's numbers
// are summed in an order that depends on its own context alone: batch-mates, chunk size and threads change no bit.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>
#ifdef __AVX__
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int GROUP = 16;        // keys whose scores are made together; block sizes are multiples of it
constexpr int SPAN = GROUP / LANES;
constexpr int MICRO = 12 / SPAN; // queries at a time: MICRO * SPAN accumulators, keys and a query fit 16 registers
constexpr int KEYS = 128;        // keys per round of the online softmax; a multiple of GROUP
constexpr int TILE = 24;         // queries that share one pass over the keys
constexpr int PADDED_TILE = 32;  // the same in whole vectors
constexpr int MAX_HEAD = 256;
constexpr long SERIAL = 1 << 14; // elements below which waking threads costs more than it saves

// Of loops over registers: left alone, GCC unrolls them too late to keep arrays out of memory.
#define UNROLL _Pragma("GCC unroll 32")

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
struct bf16 { uint16_t bits; };

inline vf load(const float* p) { vf v; std::memcpy(&v, p, sizeof v); return v; }
inline vf load(const bf16* p) {
#if defined(__AVX2__) && !defined(__AVX512F__)  // left alone, GCC widens the halves of a register one by one
    const vu u = (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)) << 16;
#else
    vh h;
    std::memcpy(&h, p, sizeof h);
    const vu u = __builtin_convertvector(h, vu) << 16;
#endif
    vf v;
    std::memcpy(&v, &u, sizeof v);
    return v;
}
inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
inline void store(bf16* p, vf v) {  // to nearest, ties to even
    vu u;
    std::memcpy(&u, &v, sizeof u);
    u = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m128i low = _mm256_castsi256_si128((__m256i)u), high = _mm256_extracti128_si256((__m256i)u, 1);
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(low, high));
#else
    vh h = __builtin_convertvector(u, vh);
    std::memcpy(p, &h, sizeof h);
#endif
}

// N vectors of numbers side by side. With AVX2, bfloat16 is fastest in pairs of vectors, first those at even places, then those
// at odd ones: two operations for 16 numbers, none of which moves anything. `in_order` puts such pairs in order.
constexpr int PAIR = 2;
#if defined(__AVX2__) && !defined(__AVX512F__)
template <class T> constexpr bool PAIRED = std::is_same_v<T, bf16>;
alignas(32) const uint32_t HIGH_HALVES[8] = {0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
                                             0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};
inline void load_pair(const bf16* p, vf* v) {
    const __m256i u = _mm256_loadu_si256((const __m256i*)p);
    __m256i odd;
    asm("vpand %2, %1, %0" : "=x"(odd) : "x"(u), "m"(HIGH_HALVES));  // left alone, GCC takes a register that sums need
    v[0] = (vf)_mm256_slli_epi32(u, 16);
    v[1] = (vf)odd;
}
inline void order_pair(vf* v) {
    const __m256 low = _mm256_unpacklo_ps(v[0], v[1]), high = _mm256_unpackhi_ps(v[0], v[1]);
    v[0] = _mm256_permute2f128_ps(low, high, 0x20);
    v[1] = _mm256_permute2f128_ps(low, high, 0x31);
}
#else
template <class T> constexpr bool PAIRED = false;
template <class T> inline void load_pair(const T*, vf*) {}
inline void order_pair(vf*) {}
#endif
template <int N, class T>
inline void load_some(const T* p, vf* v) {
    static_assert(!PAIRED<T> || N % PAIR == 0);
    if constexpr (PAIRED<T>)
        UNROLL for (int i = 0; i < N; i += PAIR) load_pair(p + i * LANES, v + i);
    else
        UNROLL for (int i = 0; i < N; i++) v[i] = load(p + i * LANES);
}
template <int N, class T>
inline void in_order(vf* v) {
    if constexpr (PAIRED<T>)
        UNROLL for (int i = 0; i < N; i += PAIR) order_pair(v + i);
}

inline float load1(const float* p) { return *p; }
inline float load1(const bf16* p) { uint32_t u = uint32_t(p->bits) << 16; float f; std::memcpy(&f, &u, 4); return f; }
inline void store1(float* p, float f) { *p = f; }
inline void store1(bf16* p, float f) {
    uint32_t u;
    std::memcpy(&u, &f, 4);
    p->bits = uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline vf splat(float x) { return x - vf{}; }
#if defined(__AVX__) && !defined(__AVX512F__)  // left alone, GCC takes the numbers of a register one by one
inline float largest(vf v) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
inline float sum(vf v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
#else
inline float sum(vf v) { float s = 0; for (int i = 0; i < LANES; i++) s += v[i]; return s; }
inline float largest(vf v) { float m = v[0]; for (int i = 1; i < LANES; i++) m = std::max(m, v[i]); return m; }
#endif

inline vi lanes() { vi v; for (int i = 0; i < LANES; i++) v[i] = i; return v; }

// 2^x for x < 128 with a relative error below 1e-7 (a polynomial of least relative error on [-0.5, 0.5]); 0 below -126.
inline vf power2(vf x) {
    const vi in = ~(x < -126.0f);  // not-a-number stays one
    x = in ? x : splat(-126.0f);
    const vf shifted = x + 12582912.0f;  // 1.5 * 2^23: the low bits are the nearest integer
    const vf r = x - (shifted - 12582912.0f);
    vf p = splat(1.5345811810e-4f);
    p = p * r + 1.3399931217e-3f;
    p = p * r + 9.6184889578e-3f;
    p = p * r + 5.5503287770e-2f;
    p = p * r + 2.4022646891e-1f;
    p = p * r + 6.9314720574e-1f;
    p = p * r + 1.0f;
    vi exponent, bits;
    std::memcpy(&exponent, &shifted, sizeof exponent);
    std::memcpy(&bits, &p, sizeof bits);
    bits = (bits + (exponent << 23)) & in;
    std::memcpy(&p, &bits, sizeof p);
    return p;
}
constexpr float LOG2_E = 1.44269504088896341f;

template <class T>
void add_rms_norm(float* residual, const T* delta, const float* weight, T* out, long rows, long width, float eps,
                  int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > SERIAL)
    for (long r = 0; r < rows; r++) {
        float* x = residual + r * width;
        vf squares{};
        for (long i = 0; i < width; i += LANES) {
            vf v = load(x + i);
            if (delta) {
                v += load(delta + r * width + i);
                store(x + i, v);
            }
            squares += v * v;
        }
        const float scale = 1.0f / std::sqrt(sum(squares) / width + eps);
        for (long i = 0; i < width; i += LANES) store(out + r * width + i, load(x + i) * scale * load(weight + i));
    }
}

template <class T>
void silu_mul(const T* gate_up, T* out, long rows, long width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > SERIAL)
    for (long r = 0; r < rows; r++) {
        const T *gate = gate_up + r * 2 * width, *up = gate + width;
        for (long i = 0; i < width; i += LANES) {
            vf g = load(gate + i);
            g = g / (1.0f + power2((g < -80.0f ? splat(-80.0f) : g) * -LOG2_E));
            store(out + r * width + i, g * load(up + i));
        }
    }
}

// Where one layer of one kv head of a block lies.
struct Layout {
    long heads, kv_heads, dim, block_size, block_stride, layer_offset;
    long width() const { return (heads + 2 * kv_heads) * dim; }
    long keys(long block, long head) const { return block * block_stride + layer_offset + head * block_size * dim; }
    long values(long block, long head) const { return keys(block, head) + kv_heads * block_size * dim; }
};

template <class T>
void rotate_and_store(T* qkv, const float* rotary, const int32_t* positions, const int64_t* slots, T* data, Layout at,
                      long tokens, int threads) {
    const long half = at.dim / 2, rotated = at.heads + at.kv_heads;
#pragma omp parallel for num_threads(threads) if (tokens * at.width() > SERIAL)
    for (long t = 0; t < tokens; t++) {
        const float *cosine = rotary + positions[t] * at.dim, *sine = cosine + half;
        const long block = slots[t] / at.block_size, offset = slots[t] % at.block_size;
        T* row = qkv + t * at.width();
        for (long h = 0; h < rotated; h++) {
            T *first = row + h * at.dim, *second = first + half;
            for (long i = 0; i < half; i++) {
                const float a = load1(first + i), b = load1(second + i);
                store1(first + i, a * cosine[i] - b * sine[i]);
                store1(second + i, b * cosine[i] + a * sine[i]);
            }
        }
        for (long h = 0; h < at.kv_heads; h++) {
            const T* key = row + (at.heads + h) * at.dim;
            T* column = data + at.keys(block, h) + offset;
            for (long i = 0; i < at.dim; i++) column[i * at.block_size] = key[i];
            std::memcpy(data + at.values(block, h) + offset * at.dim, row + (rotated + h) * at.dim, at.dim * sizeof(T));
        }
    }
}

// A run of queries of one sequence and one kv head, and its running softmax.
struct Queries {
    alignas(64) float q[TILE * MAX_HEAD];    // scaled by log2(e)/sqrt(dim): scores are exponents of 2
    alignas(64) float out[TILE * MAX_HEAD];
    alignas(64) float top[PADDED_TILE];
    float mass[TILE];
    long limit[TILE];                        // keys that a query may see
};

// The scores of M queries with GROUP keys, at s[m * KEYS]. Few queries wait for memory: they ask early for these keys'
// values and for the keys after them, each GROUP * dim numbers, which no hardware foresees from block to block.
template <int M, class T>
[[gnu::noinline]] void scores(const float* q, const T* keys, const T* values, const T* next, long dim, long stride, float* s) {
    vf acc[M][SPAN];
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int i = 0; i < SPAN; i++) acc[m][i] = vf{};
    for (long d = 0; d < dim; d++, keys += stride) {
        if (M <= 4 && (sizeof(T) == 4 || d % 2 == 0)) {  // once a cache line; a round's values are too many for the first cache
            __builtin_prefetch(values + d * GROUP, 0, 2);
            __builtin_prefetch(next + d * stride);
        }
        vf k[SPAN];
        load_some<SPAN>(keys, k);
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int i = 0; i < SPAN; i++) acc[m][i] += q[m * dim + d] * k[i];
    }
    UNROLL for (int m = 0; m < M; m++) {
        in_order<SPAN, T>(acc[m]);
        UNROLL for (int i = 0; i < SPAN; i++) store(s + m * KEYS + i * LANES, acc[m][i]);
    }
}

// The largest of `count` scores, of which the first `seen` are visible; the others become weightless.
inline float peak_of(float* s, long seen, long count) {
    const vf lane = __builtin_convertvector(lanes(), vf);
    vf peak = splat(-INFINITY);
    for (long k = 0; k < count; k += LANES) {
        vf v = load(s + k);
        if (k + LANES > seen) {
            v = lane + float(k) < float(seen) ? v : splat(-INFINITY);
            store(s + k, v);
        }
        peak = v > peak ? v : peak;
    }
    return largest(peak);
}

// Scores become weights; returns their sum.
inline float weigh(float* s, float top, long count) {
    vf total{};
    for (long k = 0; k < count; k += LANES) {
        const vf p = power2(load(s + k) - top);
        total += p;
        store(s + k, p);
    }
    return sum(total);
}

// Where the keys and values of one kv head lie, a round's GROUPs of them; other heads' lie `head_stride` further each.
template <class T>
struct Round {
    const T *keys[KEYS / GROUP + 1], *values[KEYS / GROUP];  // one more, to be asked for early
    long begin, end, dim, stride, head_stride;

    Round(const T* data, const Layout& at, const int32_t* table, long head, long begin, long last)
        : begin(begin), end(std::min(last, begin + KEYS)), dim(at.dim), stride(at.block_size), head_stride(at.block_size * at.dim) {
        for (long g = 0; g <= KEYS / GROUP; g++) {
            const long k = std::min(begin + g * GROUP, (last - 1) / GROUP * GROUP), block = table[k / at.block_size];
            keys[g] = data + at.keys(block, head) + k % at.block_size;
            if (g < KEYS / GROUP) values[g] = data + at.values(block, head) + k % at.block_size * dim;
        }
    }
};

// Adds to M queries the weighted values of keys first to end of a round, D vectors of each value at a time.
template <int M, int D, class T>
[[gnu::noinline]] void add_values(float* out, const float* s, const Round<T>& round, long head, long first, long end) {
    constexpr int AT_ONCE = std::min(D, PAIR);
    const long dim = round.dim;
    for (long d = 0; d < dim; d += D * LANES) {
        vf acc[M][D];
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int i = 0; i < D; i++) acc[m][i] = load(out + m * dim + d + i * LANES);
        for (long k = first; k < end;) {
            const T* v = round.values[k / GROUP] + head * round.head_stride + d;
            for (const long stop = std::min(end, k + GROUP); k < stop; k++, v += dim) {
                UNROLL for (int i = 0; i < D; i += AT_ONCE) {
                    vf value[AT_ONCE];
                    load_some<AT_ONCE>(v + i * LANES, value);
                    UNROLL for (int m = 0; m < M; m++)
                        UNROLL for (int j = 0; j < AT_ONCE; j++) acc[m][i + j] += s[m * KEYS + k] * value[j];
                }
            }
        }
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int i = 0; i < D; i++) store(out + m * dim + d + i * LANES, acc[m][i]);
    }
}

// Vectors of a value that M queries take at a time: a power of two, at most 32 floats, so that accumulators, a pair of values
// and a weight fit 16 registers.
constexpr int value_vectors(int m) {
    int vectors = 32 / LANES;
    while (vectors > 1 && m * vectors + PAIR + 1 > 16) vectors /= 2;
    return vectors;
}

// Calls run(a constant of value `count`), which is 1 to M.
template <int M, class F>
inline void with_constant(int count, F run) {
    if constexpr (M > 1)
        if (count < M) return with_constant<M - 1>(count, run);
    run(std::integral_constant<int, M>{});
}

// The scores of a round become weights, and what each query has so far shrinks to match. A query takes `counts` of the round's
// keys; those it may not see weigh nothing.
template <class T>
void soften(Queries& tile, int queries, const long* counts, float* s, const Round<T>& round) {
    alignas(64) float top[PADDED_TILE], shrink[PADDED_TILE];
    const long dim = round.dim;
    for (int m = 0; m < queries; m++) {
        const long seen = tile.limit[m] - round.begin;
        top[m] = counts[m] > 0 ? std::max(tile.top[m], peak_of(s + m * KEYS, seen, counts[m])) : tile.top[m];
    }
    for (int m = 0; m < queries; m += LANES) store(shrink + m, power2(load(tile.top + m) - load(top + m)));
    for (int m = 0; m < queries; m++) {
        if (counts[m] <= 0) continue;
        if (round.begin > 0 && tile.top[m] != top[m])
            for (long d = 0; d < dim; d += LANES) store(tile.out + m * dim + d, load(tile.out + m * dim + d) * shrink[m]);
        const float total = weigh(s + m * KEYS, top[m], counts[m]);
        tile.mass[m] = round.begin > 0 ? tile.mass[m] * shrink[m] + total : total;
        tile.top[m] = top[m];
    }
}

// A round for `each` queries of each of `heads` kv heads that lie side by side. All queries take a group of keys before the next
// group, and all heads of a block before the next block, since what memory takes longest for is a new place.
template <class T>
void attend_round(Queries& tile, int each, int heads, const Round<T>& round) {
    alignas(64) float s[TILE * KEYS];
    const long dim = round.dim;
    const auto each_run = [&](auto run) {
        for (int h = 0; h < heads; h++)
            for (int m = 0; m < each; m += MICRO) {
                const int count = std::min(MICRO, each - m), at = h * each + m;
                run(h, at, count, std::min(round.end, tile.limit[at + count - 1]) - round.begin);  // the last one sees most
            }
    };
    for (long k = 0; k < round.end - round.begin; k += GROUP)
        each_run([&](int h, int at, int count, long seen) {
            const T *keys = round.keys[k / GROUP] + h * round.head_stride, *next = round.keys[k / GROUP + 1] + h * round.head_stride;
            if (k < seen)
                with_constant<MICRO>(count, [&](auto m) {
                    scores<m>(tile.q + at * dim, keys, round.values[k / GROUP] + h * round.head_stride, next, dim, round.stride,
                              s + at * KEYS + k);
                });
        });
    long counts[TILE];
    each_run([&](int, int at, int count, long seen) {
        std::fill(counts + at, counts + at + count, (seen + GROUP - 1) / GROUP * GROUP);
    });
    soften(tile, each * heads, counts, s, round);
    const long stretch = heads > 1 ? GROUP : KEYS;
    for (long k = 0; k < round.end - round.begin; k += stretch)
        each_run([&](int h, int at, int count, long seen) {
            with_constant<MICRO>(count, [&](auto m) {
                add_values<m, value_vectors(m)>(tile.out + at * dim, s + at * KEYS, round, h, k, std::min(seen, k + stretch));
            });
        });
}

// Tokens of a row, and kv heads; of several heads only when the queries of one fit one pass.
struct Unit { int32_t row, first, count, head, heads; };

template <class T>
void attend(const Unit& unit, Queries& tile, const T* qkv, T* out, const int32_t* starts, const int32_t* contexts,
            const int32_t* table, const T* data, const Layout& at) {
    const long group = at.heads / at.kv_heads, begin = starts[unit.row], tokens = starts[unit.row + 1] - begin;
    const long dim = at.dim, heads = at.heads, width = at.width(), limit = contexts[unit.row] - tokens + 1;
    const float scale = LOG2_E / std::sqrt(float(dim));
    const int each = unit.count * group, count = each * unit.heads;
    const auto each_query = [&](auto run) {  // in the tile's order: by kv head, token and head
        int m = 0;
        for (int h = unit.head; h < unit.head + unit.heads; h++)
            for (int t = unit.first; t < unit.first + unit.count; t++)
                for (long g = 0; g < group; g++) run(m++, t, h * group + g);
    };
    each_query([&](int m, int token, long head) {
        const T* q = qkv + (begin + token) * width + head * dim;
        for (long d = 0; d < dim; d += LANES) {
            store(tile.q + m * dim + d, load(q + d) * scale);
            store(tile.out + m * dim + d, vf{});
        }
        tile.top[m] = -INFINITY;
        tile.limit[m] = limit + token;
    });
    const long last = tile.limit[count - 1];
    for (long k = 0; k < last; k += KEYS)
        attend_round(tile, each, unit.heads, Round<T>(data, at, table, unit.head, k, last));
    each_query([&](int m, int token, long head) {
        const float inverse = 1.0f / tile.mass[m];
        T* target = out + ((begin + token) * heads + head) * dim;
        for (long d = 0; d < dim; d += PAIR * LANES) {
            vf v[PAIR];
            for (int i = 0; i < PAIR; i++) v[i] = load(tile.out + m * dim + d + i * LANES) * inverse;
            in_order<PAIR, T>(v);
            for (int i = 0; i < PAIR; i++) store(target + d + i * LANES, v[i]);
        }
    });
}

template <class T>
void attention(const T* qkv, T* out, const int32_t* starts, const int32_t* contexts, const int32_t* tables, long rows,
               long table_width, const T* data, Layout at, int threads) {
    const int group = at.heads / at.kv_heads, per_tile = std::max<int>(1, TILE / group);
    // Heads of one token that share a pass; each its own where there are too few rows to go round.
    const int together = group <= MICRO && rows >= 2 * threads ? std::min<int>(at.kv_heads, TILE / group) : 1;
    std::vector<Unit> units;
    long work = 0;
    const auto add = [&](int r, int tokens, int heads) {
        work += long(tokens) * contexts[r] * at.dim;
        for (int first = tokens - 1 - (tokens - 1) % per_tile; first >= 0; first -= per_tile)  // the longest first
            for (int h = 0; h < at.kv_heads; h += heads)
                units.push_back({r, first, std::min(per_tile, tokens - first), h, std::min<int>(heads, at.kv_heads - h)});
    };
    for (const bool chunks : {true, false})  // and chunks before single tokens, so that threads end together
        for (int r = 0; r < rows; r++)
            if (const int tokens = starts[r + 1] - starts[r]; (tokens > 1) == chunks) add(r, tokens, chunks ? 1 : together);
#pragma omp parallel num_threads(threads) if (work > SERIAL)
    {
        static thread_local Queries tile;
#pragma omp for schedule(dynamic)
        for (size_t u = 0; u < units.size(); u++)
            attend(units[u], tile, qkv, out, starts, contexts, tables + units[u].row * table_width, data, at);
    }
}

}  // namespace

#define EXPORT(T, suffix)                                                                                              \
    extern "C" void add_rms_norm_##suffix(float* residual, const T* delta, const float* weight, T* out, long rows,     \
                                          long width, float eps, int threads) {                                        \
        add_rms_norm(residual, delta, weight, out, rows, width, eps, threads);                                         \
    }                                                                                                                  \
    extern "C" void silu_mul_##suffix(const T* gate_up, T* out, long rows, long width, int threads) {                  \
        silu_mul(gate_up, out, rows, width, threads);                                                                  \
    }                                                                                                                  \
    extern "C" void rotate_and_store_##suffix(T* qkv, const float* rotary, const int32_t* positions,                   \
                                              const int64_t* slots, T* data, const Layout* at, long tokens,            \
                                              int threads) {                                                           \
        rotate_and_store(qkv, rotary, positions, slots, data, *at, tokens, threads);                                   \
    }                                                                                                                  \
    extern "C" void attention_##suffix(const T* qkv, T* out, const int32_t* starts, const int32_t* contexts,           \
                                       const int32_t* tables, long rows, long table_width, const T* data,              \
                                       const Layout* at, int threads) {                                                \
        attention(qkv, out, starts, contexts, tables, rows, table_width, data, *at, threads);                          \
    }

EXPORT(float, fp32)
EXPORT(bf16, bf16)
