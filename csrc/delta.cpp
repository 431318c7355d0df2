#include "delta.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace laminar_delta {
namespace {

constexpr int kWord = 32;  // units per word of the mask

// Bit i: whether unit i of `count` (32 at most) differs.
template <typename Unit>
uint32_t differing(const Unit* a, const Unit* b, int64_t count) {
#if defined(__SSE2__)
  if (count == kWord) {
    uint32_t equal = 0;
    const auto load = [](const Unit* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); };
    for (int part = 0; part < kWord; part += 16) {
      const Unit *x = a + part, *y = b + part;
      __m128i low, high;  // 8 units each, as 16-bit words of ones where equal
      if constexpr (sizeof(Unit) == 2) {
        low = _mm_cmpeq_epi16(load(x), load(y));
        high = _mm_cmpeq_epi16(load(x + 8), load(y + 8));
      } else {
        low = _mm_packs_epi32(_mm_cmpeq_epi32(load(x), load(y)), _mm_cmpeq_epi32(load(x + 4), load(y + 4)));
        high = _mm_packs_epi32(_mm_cmpeq_epi32(load(x + 8), load(y + 8)), _mm_cmpeq_epi32(load(x + 12), load(y + 12)));
      }
      equal |= static_cast<uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(low, high))) << part;
    }
    return ~equal;
  }
#endif
  uint32_t bits = 0;
  for (int64_t i = 0; i < count; ++i) bits |= static_cast<uint32_t>(a[i] != b[i]) << i;
  return bits;
}

template <typename Unit>
int64_t encode_units(Unit* fresh, Unit* image, int64_t units, uint32_t* mask, uint32_t* counts, uint16_t* offsets, int64_t most,
                     int64_t most_offsets) {
  int64_t changed = 0;
  Unit* values = fresh;
  for (int64_t block = 0; block * kUnits < units; ++block) {
    const int64_t begin = block * kUnits, count = std::min(kUnits, units - begin), words = (count + kWord - 1) / kWord;
    Unit *const now = fresh + begin, *const before = image + begin;
    uint32_t* const bits = mask + begin / kWord;
    int64_t here = 0;
    for (int64_t w = 0; w < words; ++w) {
      bits[w] = differing<Unit>(now + w * kWord, before + w * kWord, std::min<int64_t>(kWord, count - w * kWord));
      here += __builtin_popcount(bits[w]);
    }
    counts[block] = static_cast<uint32_t>(here);
    const int64_t already = changed;
    changed += here;
    if (!here) continue;
    if (changed > most || 4 * here > count) std::memcpy(before, now, static_cast<size_t>(count) * sizeof(Unit));
    if (changed > most) continue;
    const bool places = changed <= most_offsets;
    uint16_t* at = offsets + already;
    for (int64_t w = 0; w < words; ++w) {
      for (uint32_t left = bits[w]; left; left &= left - 1) {
        const int64_t i = w * kWord + __builtin_ctz(left);
        before[i] = now[i];
        *values++ = now[i];  // never beyond what has been read
        if (places) *at++ = static_cast<uint16_t>(i);
      }
    }
  }
  return changed;
}

template <typename Unit>
bool apply_units(const Unit* base, Unit* target, int64_t units, const Unit* values, int64_t changed, const uint32_t* mask,
                 const uint32_t* counts, const uint16_t* offsets) {
  int64_t done = 0;
  for (int64_t block = 0; block * kUnits < units; ++block) {
    const int64_t begin = block * kUnits, count = std::min(kUnits, units - begin);
    Unit* const here = target + begin;
    std::memcpy(here, base + begin, static_cast<size_t>(count) * sizeof(Unit));
    if (!mask) {
      const int64_t end = done + counts[block];
      if (end > changed) return false;
      for (; done < end; ++done) {
        if (offsets[done] >= count) return false;
        here[offsets[done]] = values[done];
      }
      continue;
    }
    for (int64_t w = 0; w * kWord < count; ++w) {
      uint32_t left = mask[begin / kWord + w];
      if (done + __builtin_popcount(left) > changed) return false;
      if (count - w * kWord < kWord && left >> (count - w * kWord)) return false;
      for (; left; left &= left - 1) here[w * kWord + __builtin_ctz(left)] = values[done++];
    }
  }
  return done == changed;
}

}  // namespace

int64_t encode(uint8_t* fresh, uint8_t* image, int64_t units, int64_t unit_bytes, uint32_t* mask, uint32_t* counts, uint16_t* offsets,
               int64_t most, int64_t most_offsets) {
  if (unit_bytes == 2)
    return encode_units(reinterpret_cast<uint16_t*>(fresh), reinterpret_cast<uint16_t*>(image), units, mask, counts, offsets, most,
                        most_offsets);
  return encode_units(reinterpret_cast<uint32_t*>(fresh), reinterpret_cast<uint32_t*>(image), units, mask, counts, offsets, most,
                      most_offsets);
}

bool apply(const uint8_t* base, uint8_t* target, int64_t units, int64_t unit_bytes, const uint8_t* values, int64_t changed,
           const uint32_t* mask, const uint32_t* counts, const uint16_t* offsets) {
  if (unit_bytes == 2)
    return apply_units(reinterpret_cast<const uint16_t*>(base), reinterpret_cast<uint16_t*>(target), units,
                       reinterpret_cast<const uint16_t*>(values), changed, mask, counts, offsets);
  return apply_units(reinterpret_cast<const uint32_t*>(base), reinterpret_cast<uint32_t*>(target), units,
                     reinterpret_cast<const uint32_t*>(values), changed, mask, counts, offsets);
}

}  // namespace laminar_delta
