#include "copy.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace laminar_kv {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kAhead = 8192;  // bytes of the pool fetched before they are needed: slots lie apart, so the hardware cannot guess them

// With a = sum of x[i] and b = sum of the running sums of n values, the sum of i * x[i] is n * a - b (i from 0, modulo 2**64).
uint64_t sum_times_index(uint64_t a, uint64_t b, uint64_t n) { return n * a - b; }

// Rows in the order of the image: the address of each, and of the one that will be needed `ahead` rows later.
class Walk {
 public:
  Walk(const Rows& rows, int64_t first)
      : rows_(rows), plane_(first / rows.tokens), token_(first % rows.tokens), ahead_(std::max<int64_t>(1, kAhead / rows.row_bytes)) {}
  uint8_t* row() const { return at(plane_, token_); }
  const uint8_t* later() const {
    const int64_t token = token_ + ahead_;
    if (token < rows_.tokens) return at(plane_, token);
    const int64_t next = token - rows_.tokens;
    return next < rows_.tokens && plane_ + 1 < rows_.plane_count ? at(plane_ + 1, next) : row();
  }
  void step() {
    if (++token_ == rows_.tokens) token_ = 0, ++plane_;
  }

 private:
  uint8_t* at(int64_t plane, int64_t token) const {
    return reinterpret_cast<uint8_t*>(rows_.planes[plane]) + rows_.slots[token] * rows_.stride;
  }
  const Rows& rows_;
  int64_t plane_, token_, ahead_;
};

// Rows of any size and alignment: plain copies, then one pass for the sums while the chunk is in the cache.
template <bool kGather>
Sums copy_any(const Rows& rows, int64_t first, int64_t count, uint8_t* image) {
  Walk walk(rows, first);
  for (int64_t r = 0; r < count; ++r, walk.step()) {
    uint8_t* inside = image + r * rows.row_bytes;
    if (kGather)
      std::memcpy(inside, walk.row(), rows.row_bytes);
    else
      std::memcpy(walk.row(), inside, rows.row_bytes);
  }
  return sums_of(image, count * rows.row_bytes);
}

#if defined(__x86_64__)

// Rows of whole cache lines. Per 64-bit lane, a is the sum and b the sum of running sums of its even (e) and odd (o) words.
template <bool kGather, bool kStream>
__attribute__((target("avx512f"))) Sums copy_avx512(const Rows& rows, int64_t first, int64_t count, uint8_t* image) {
  const __m512i low = _mm512_set1_epi64(0xffffffff);
  __m512i ae = _mm512_setzero_si512(), ao = ae, be = ae, bo = ae;
  Walk walk(rows, first);
  for (int64_t r = 0; r < count; ++r, walk.step()) {
    uint8_t* inside = image + r * rows.row_bytes;
    uint8_t* const slot = walk.row();
    const uint8_t* from = kGather ? slot : inside;
    uint8_t* to = kGather ? inside : slot;
    const char* later = reinterpret_cast<const char*>(walk.later());
#pragma GCC unroll 4
    for (int64_t i = 0; i < rows.row_bytes; i += kLine) {
      const __m512i v = _mm512_loadu_si512(from + i);
      if (kGather) _mm_prefetch(later + i, _MM_HINT_T1);
      if (kStream)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), v);
      else
        _mm512_storeu_si512(to + i, v);
      ae = _mm512_add_epi64(ae, _mm512_and_si512(v, low));
      ao = _mm512_add_epi64(ao, _mm512_srli_epi64(v, 32));
      be = _mm512_add_epi64(be, ae);
      bo = _mm512_add_epi64(bo, ao);
    }
  }
  if (kStream) _mm_sfence();
  alignas(64) uint64_t lanes[4][8];
  _mm512_store_si512(lanes[0], ae);
  _mm512_store_si512(lanes[1], ao);
  _mm512_store_si512(lanes[2], be);
  _mm512_store_si512(lanes[3], bo);
  const uint64_t steps = static_cast<uint64_t>(count * rows.row_bytes / 64);
  Sums sums;
  for (uint64_t word = 0; word < 16; ++word) {
    const uint64_t a = lanes[word % 2][word / 2], b = lanes[2 + word % 2][word / 2];
    sums.words += a;
    sums.indexed += (word + 1) * a + 16 * sum_times_index(a, b, steps);
  }
  return sums;
}

template <bool kGather, bool kStream>
__attribute__((target("avx2"))) Sums copy_avx2(const Rows& rows, int64_t first, int64_t count, uint8_t* image) {
  const __m256i low = _mm256_set1_epi64x(0xffffffff);
  __m256i ae = _mm256_setzero_si256(), ao = ae, be = ae, bo = ae;
  Walk walk(rows, first);
  for (int64_t r = 0; r < count; ++r, walk.step()) {
    uint8_t* inside = image + r * rows.row_bytes;
    uint8_t* const slot = walk.row();
    const uint8_t* from = kGather ? slot : inside;
    uint8_t* to = kGather ? inside : slot;
    const char* later = reinterpret_cast<const char*>(walk.later());
    for (int64_t i = 0; i < rows.row_bytes; i += 32) {
      const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
      if (kGather && i % kLine == 0) _mm_prefetch(later + i, _MM_HINT_T1);
      if (kStream)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), v);
      else
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), v);
      ae = _mm256_add_epi64(ae, _mm256_and_si256(v, low));
      ao = _mm256_add_epi64(ao, _mm256_srli_epi64(v, 32));
      be = _mm256_add_epi64(be, ae);
      bo = _mm256_add_epi64(bo, ao);
    }
  }
  if (kStream) _mm_sfence();
  alignas(32) uint64_t lanes[4][4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes[0]), ae);
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes[1]), ao);
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes[2]), be);
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes[3]), bo);
  const uint64_t steps = static_cast<uint64_t>(count * rows.row_bytes / 32);
  Sums sums;
  for (uint64_t word = 0; word < 8; ++word) {
    const uint64_t a = lanes[word % 2][word / 2], b = lanes[2 + word % 2][word / 2];
    sums.words += a;
    sums.indexed += (word + 1) * a + 8 * sum_times_index(a, b, steps);
  }
  return sums;
}

bool lines(const uint8_t* address) { return reinterpret_cast<uintptr_t>(address) % kLine == 0; }

// Streaming stores need aligned lines at what is written.
template <bool kGather>
bool aligned(const Rows& rows, const uint8_t* image) {
  if (kGather) return lines(image);
  const uint64_t* const end = rows.planes + rows.plane_count;
  return rows.stride % kLine == 0 && std::all_of(rows.planes, end, [](uint64_t plane) { return plane % kLine == 0; });
}

#endif

template <bool kGather>
Sums copy(const Rows& rows, int64_t first, int64_t count, uint8_t* image, Isa isa, bool streaming) {
#if defined(__x86_64__)
  isa = usable(isa);
  if (isa != Isa::kPortable && rows.row_bytes % kLine == 0) {
    const bool stream = streaming && aligned<kGather>(rows, image);
    if (isa == Isa::kAvx512)
      return stream ? copy_avx512<kGather, true>(rows, first, count, image) : copy_avx512<kGather, false>(rows, first, count, image);
    return stream ? copy_avx2<kGather, true>(rows, first, count, image) : copy_avx2<kGather, false>(rows, first, count, image);
  }
#endif
  (void)isa, (void)streaming;
  return copy_any<kGather>(rows, first, count, image);
}

}  // namespace

Isa usable(Isa wanted) {
#if defined(__x86_64__)
  static const Isa best = __builtin_cpu_supports("avx512f") ? Isa::kAvx512 : __builtin_cpu_supports("avx2") ? Isa::kAvx2 : Isa::kPortable;
  return wanted == Isa::kBest ? best : std::min(wanted, best);
#else
  (void)wanted;
  return Isa::kPortable;
#endif
}

Sums sums_of(const uint8_t* image, int64_t bytes) {
  uint64_t a = 0, b = 0;
  const int64_t whole = bytes / 4, count = (bytes + 3) / 4;
  uint32_t word = 0;
  for (int64_t i = 0; i < whole; ++i) {
    std::memcpy(&word, image + 4 * i, 4);
    a += word;
    b += a;
  }
  if (whole < count) {
    word = 0;
    std::memcpy(&word, image + 4 * whole, static_cast<size_t>(bytes - 4 * whole));
    a += word;
    b += a;
  }
  return {a, a + sum_times_index(a, b, static_cast<uint64_t>(count))};
}

Sums gather(const Rows& rows, int64_t first, int64_t count, uint8_t* image, Isa isa, bool streaming) {
  return copy<true>(rows, first, count, image, isa, streaming);
}

Sums scatter(const Rows& rows, int64_t first, int64_t count, const uint8_t* image, Isa isa, bool streaming) {
  return copy<false>(rows, first, count, const_cast<uint8_t*>(image), isa, streaming);  // only read when scattering
}

}  // namespace laminar_kv
