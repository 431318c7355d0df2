// What changed between two images of weights, and back (the layout is that of weights/delta.py). Units are of 2 or 4 bytes.
#pragma once

#include <cstdint>

namespace laminar_delta {

constexpr int64_t kUnits = 1 << 16;  // per block: an offset inside it has 16 bits

// Compares `units` of `fresh` with `image` and makes `image` equal to it; returns how many differed. mask: a bit per unit, 32 to a word;
// counts: differing units per block. While they are `most` at most, their values are moved to the front of `fresh`, and while they are
// `most_offsets` at most, their places inside their blocks go to `offsets`; with more of them `fresh` is of no use afterwards. A negative
// `most` leaves `fresh` as it is.
int64_t encode(uint8_t* fresh, uint8_t* image, int64_t units, int64_t unit_bytes, uint32_t* mask, uint32_t* counts, uint16_t* offsets,
               int64_t most, int64_t most_offsets);

// Copies `units` from `base` to `target` with `changed` of them replaced by `values`. Their places: mask, or counts and offsets (mask is
// null then). False when those are not the places of so many units; the target is of no use then.
bool apply(const uint8_t* base, uint8_t* target, int64_t units, int64_t unit_bytes, const uint8_t* values, int64_t changed,
           const uint32_t* mask, const uint32_t* counts, const uint16_t* offsets);

}  // namespace laminar_delta
