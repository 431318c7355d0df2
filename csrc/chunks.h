// A request's image cut into chunks: each a record of 64 bytes (what it is, and its sums) with the rows behind them.
#pragma once

#include <cstdint>
#include <functional>

#include "copy.h"

namespace laminar_kv {

constexpr uint32_t kChunkMagic = 0x4b56434b;  // "KCVK"
constexpr int64_t kHeadBytes = 64;

// As engine/kv/frames.py documents it. Little-endian, as is every machine this runs on.
struct ChunkHead {
  uint32_t magic;
  uint32_t number;
  uint64_t bytes;
  uint64_t words;
  uint64_t indexed;
  uint8_t zero[32];
};
static_assert(sizeof(ChunkHead) == kHeadBytes, "a chunk's head is one cache line");

struct Plan {
  Rows rows;
  int64_t rows_per_chunk;
  int threads;
  Isa isa;
  bool streaming;

  int64_t chunks() const { return (rows.total() + rows_per_chunk - 1) / rows_per_chunk; }
  int64_t first(int64_t number) const { return number * rows_per_chunk; }
  int64_t count(int64_t number) const {
    const int64_t rest = rows.total() - first(number);
    return rest < rows_per_chunk ? rest : rows_per_chunk;
  }
  int64_t bytes(int64_t number) const { return count(number) * rows.row_bytes; }
  // From a record to the next: whole cache lines, so that streaming stores are aligned.
  int64_t record_stride() const { return kHeadBytes + (rows_per_chunk * rows.row_bytes + 63) / 64 * 64; }
};

// Runs `work` in `threads` threads, of which the caller is one, and joins them. Started per call: nothing outlives it, and a fork is safe.
// Fewer run where the system gives no more, so `work` must share its work by itself.
void in_threads(int threads, const std::function<void()>& work);

void write_record(const Plan& plan, int64_t number, uint8_t* record);
// False, and the pool's reserved slots are in part overwritten, where the record is not the one expected or its sums differ.
bool read_record(const Plan& plan, int64_t number, const uint8_t* record);

// All chunks, one record_stride apart. unpack returns the lowest number that is bad, or -1.
void pack(const Plan& plan, uint8_t* records);
int64_t unpack(const Plan& plan, const uint8_t* records);

}  // namespace laminar_kv
