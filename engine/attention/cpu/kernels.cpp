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
#include <vector>
#ifdef __AVX2__
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
constexpr int MAX_HEAD = 256;
constexpr long SERIAL = 1 << 14; // elements below which waking threads costs more than it saves

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
inline float load1(const float* p) { return *p; }
inline float load1(const bf16* p) { uint32_t u = uint32_t(p->bits) << 16; float f; std::memcpy(&f, &u, 4); return f; }
inline void store1(float* p, float f) { *p = f; }
inline void store1(bf16* p, float f) {
    uint32_t u;
    std::memcpy(&u, &f, 4);
    p->bits = uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline vf splat(float x) { return x - vf{}; }
inline float sum(vf v) { float s = 0; for (int i = 0; i < LANES; i++) s += v[i]; return s; }
inline float largest(vf v) { float m = v[0]; for (int i = 1; i < LANES; i++) m = std::max(m, v[i]); return m; }

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
    float top[TILE], mass[TILE];
    long limit[TILE];                        // keys that a query may see
};

// The scores of M queries with GROUP keys, at s[m * KEYS]. Few queries wait for memory: they ask early for these keys'
// values and for the keys after them, each GROUP * dim numbers, which no hardware foresees from block to block.
template <int M, class T>
inline void scores(const float* q, const T* keys, const T* values, const T* next, long dim, long stride, float* s) {
    vf acc[M][SPAN] = {};
    for (long d = 0; d < dim; d++, keys += stride) {
        if (M <= 4 && (sizeof(T) == 4 || d % 2 == 0)) {  // once a cache line; a round's values are too many for the first cache
            __builtin_prefetch(values + d * GROUP, 0, 2);
            __builtin_prefetch(next + d * stride);
        }
        vf k[SPAN];
        for (int i = 0; i < SPAN; i++) k[i] = load(keys + i * LANES);
        for (int m = 0; m < M; m++)
            for (int i = 0; i < SPAN; i++) acc[m][i] += q[m * dim + d] * k[i];
    }
    for (int m = 0; m < M; m++)
        for (int i = 0; i < SPAN; i++) store(s + m * KEYS + i * LANES, acc[m][i]);
}

// One query's scores of a round, `seen` of `count` keys visible, become weights; what it has so far shrinks to match.
inline void soften(Queries& tile, int m, float* s, long seen, long count, long dim) {
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
    const float before = tile.top[m], now = std::max(before, largest(peak));
    vf total{};
    for (long k = 0; k < count; k += LANES) {
        const vf p = power2(load(s + k) - now);
        total += p;
        store(s + k, p);
    }
    const float shrink = before == now ? 1.0f : power2(splat(before - now))[0];
    tile.mass[m] = tile.mass[m] * shrink + sum(total);
    tile.top[m] = now;
    if (shrink != 1.0f)
        for (long d = 0; d < dim; d += LANES) store(tile.out + m * dim + d, load(tile.out + m * dim + d) * shrink);
}

// Adds the weighted values of keys begin to end, for M queries and D vectors of each value at a time.
template <int M, int D, class T>
inline void add_values(float* out, const float* s, const T* data, const Layout& at, const int32_t* table, long head,
                       long begin, long end) {
    for (long d = 0; d < at.dim; d += D * LANES) {
        vf acc[M][D];
        for (int m = 0; m < M; m++)
            for (int i = 0; i < D; i++) acc[m][i] = load(out + m * at.dim + d + i * LANES);
        for (long k = begin; k < end;) {
            const T* v = data + at.values(table[k / at.block_size], head) + (k % at.block_size) * at.dim + d;
            const long stop = std::min(end, k + at.block_size - k % at.block_size);
            for (; k < stop; k++, v += at.dim) {
                vf value[D];
                for (int i = 0; i < D; i++) value[i] = load(v + i * LANES);
                for (int m = 0; m < M; m++)
                    for (int i = 0; i < D; i++) acc[m][i] += s[m * KEYS + (k - begin)] * value[i];
            }
        }
        for (int m = 0; m < M; m++)
            for (int i = 0; i < D; i++) store(out + m * at.dim + d + i * LANES, acc[m][i]);
    }
}

// Vectors of a value that M queries take at a time: a power of two, at most 32 floats, so that accumulators, values and a
// weight fit 16 registers.
constexpr int value_vectors(int m) {
    int vectors = 32 / LANES;
    while (vectors > 1 && (m + 1) * vectors >= 16) vectors /= 2;
    return vectors;
}

// A round for M queries of each of `heads` kv heads that lie side by side: all heads of a block before the next block, since
// what memory takes longest for is a new place.
template <int M, class T>
void round_of(Queries& tile, int first, const T* data, const Layout& at, const int32_t* table, long head, long heads,
              long begin, long end, long last) {
    alignas(64) float s[TILE * KEYS];
    const long count = (end - begin + GROUP - 1) / GROUP * GROUP, dim = at.dim;
    const auto keys = [&](long k, long h) { return data + at.keys(table[k / at.block_size], h) + k % at.block_size; };
    for (long k = begin; k < end; k += GROUP)
        for (long h = 0; h < heads; h++) {
            const T* values = data + at.values(table[k / at.block_size], head + h) + k % at.block_size * dim;
            const T* next = keys(k + GROUP < last ? k + GROUP : k, head + h);
            scores<M>(tile.q + (first + h * M) * dim, keys(k, head + h), values, next, dim, at.block_size,
                      s + h * M * KEYS + (k - begin));
        }
    for (int m = 0; m < M * heads; m++)
        soften(tile, first + m, s + m * KEYS, tile.limit[first + m] - begin, count, dim);
    const long stretch = heads > 1 ? GROUP : KEYS;
    for (long k = begin; k < end; k += stretch)
        for (long h = 0; h < heads; h++)
            add_values<M, value_vectors(M)>(tile.out + (first + h * M) * dim, s + h * M * KEYS + (k - begin), data, at,
                                            table, head + h, k, std::min(end, k + stretch));
}

// For 1 to MICRO queries.
template <int M, class T>
void round_of_any(int count, Queries& tile, int first, const T* data, const Layout& at, const int32_t* table, long head,
                  long heads, long begin, long end, long last) {
    if constexpr (M > 1)
        if (count < M) return round_of_any<M - 1>(count, tile, first, data, at, table, head, heads, begin, end, last);
    round_of<M>(tile, first, data, at, table, head, heads, begin, end, last);
}

// Tokens of a row, and kv heads; of several heads only when the queries of one fit one pass.
struct Unit { int32_t row, first, count, head, heads; };

template <class T>
void attend(const Unit& unit, Queries& tile, const T* qkv, T* out, const int32_t* starts, const int32_t* contexts,
            const int32_t* table, const T* data, const Layout& at) {
    const long group = at.heads / at.kv_heads, begin = starts[unit.row], tokens = starts[unit.row + 1] - begin;
    const float scale = LOG2_E / std::sqrt(float(at.dim));
    const int each = unit.count * group, count = each * unit.heads;
    const auto token_of = [&](int m) { return unit.first + m % each / group; };
    const auto head_of = [&](int m) { return (unit.head + m / each) * group + m % group; };
    for (int m = 0; m < count; m++) {
        const T* q = qkv + (begin + token_of(m)) * at.width() + head_of(m) * at.dim;
        for (long d = 0; d < at.dim; d += LANES) {
            store(tile.q + m * at.dim + d, load(q + d) * scale);
            store(tile.out + m * at.dim + d, vf{});
        }
        tile.top[m] = -INFINITY;
        tile.mass[m] = 0;
        tile.limit[m] = contexts[unit.row] - tokens + token_of(m) + 1;
    }
    const long last = tile.limit[count - 1];
    for (long k = 0; k < last; k += KEYS)
        for (int m = 0; m < each; m += MICRO)
            round_of_any<MICRO>(std::min(MICRO, each - m), tile, m, data, at, table, unit.head, unit.heads, k,
                                std::min(last, k + KEYS), last);
    for (int m = 0; m < count; m++) {
        const float inverse = 1.0f / tile.mass[m];
        T* target = out + ((begin + token_of(m)) * at.heads + head_of(m)) * at.dim;
        for (long d = 0; d < at.dim; d += LANES) store(target + d, load(tile.out + m * at.dim + d) * inverse);
    }
}

template <class T>
void attention(const T* qkv, T* out, const int32_t* starts, const int32_t* contexts, const int32_t* tables, long rows,
               long table_width, const T* data, Layout at, int threads) {
    const int group = at.heads / at.kv_heads, per_tile = std::max<int>(1, TILE / group);
    // Heads of one token that share a pass; each its own where there are too few rows to go round.
    const int together = group <= MICRO && rows >= 2 * threads ? std::min<int>(at.kv_heads, TILE / group) : 1;
    std::vector<Unit> units;
    long work = 0;
    for (int r = 0; r < rows; r++) {
        const int tokens = starts[r + 1] - starts[r], heads = tokens == 1 ? together : 1;
        work += long(tokens) * contexts[r] * at.dim;
        for (int first = tokens - 1 - (tokens - 1) % per_tile; first >= 0; first -= per_tile)  // the longest first
            for (int h = 0; h < at.kv_heads; h += heads)
                units.push_back({r, first, std::min(per_tile, tokens - first), h, std::min<int>(heads, at.kv_heads - h)});
    }
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
