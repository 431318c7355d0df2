// One request's KV rows, copied between the pools' slots and the chunks of a move, with each chunk's sums made on the way.
#pragma once

#include <cstdint>

namespace laminar_kv {

// The sums of weights/kernels/sums.py over little-endian 32-bit words, modulo 2**64: of the words, and of (index + 1) * word.
struct Sums {
  uint64_t words = 0;
  uint64_t indexed = 0;
  bool operator==(const Sums& other) const { return words == other.words && indexed == other.indexed; }
};

enum class Isa : int { kBest = 0, kPortable = 1, kAvx2 = 2, kAvx512 = 3 };

// Resolves kBest; what this CPU lacks becomes the best that it has.
Isa usable(Isa wanted);

// Where a request's rows lie. Row p * tokens + t is slot slots[t] of plane p; a plane is one layer's K or V pool.
struct Rows {
  const uint64_t* planes;  // addresses, one per plane
  int64_t plane_count;
  int64_t stride;     // bytes from a slot to the next
  int64_t row_bytes;  // bytes copied of a slot
  const int64_t* slots;
  int64_t tokens;
  int64_t total() const { return plane_count * tokens; }
};

// Sums of a contiguous image, zero-padded to whole words.
Sums sums_of(const uint8_t* image, int64_t bytes);

// Copies rows [first, first + count) into `image`, or from it into the pools; returns the sums of the image. `streaming` bypasses the
// caches for what is written; visible to other threads on return.
Sums gather(const Rows& rows, int64_t first, int64_t count, uint8_t* image, Isa isa, bool streaming);
Sums scatter(const Rows& rows, int64_t first, int64_t count, const uint8_t* image, Isa isa, bool streaming);

}  // namespace laminar_kv
