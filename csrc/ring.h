// Chunks through a ring of records in memory that two processes share, so that gathering and scattering overlap.
//
// Record i of n holds the chunks i, i + n, i + 2n, ... in turn. Its sequence word is 2 * turn while it is free for the chunk of that turn
// and 2 * turn + 1 while it holds it. Both sides' threads take chunk numbers in order, so every chunk awaited is in some thread's hands.
#pragma once

#include <cstdint>

#include "chunks.h"

namespace laminar_kv {

// States of a side, a word each; what is not listed here is as bad as kGone.
enum Side : uint32_t { kAbsent = 0, kThere = 1, kDone = 2, kGone = 3 };

enum class End : int { kOk = 0, kTimeout = 1, kPeerDied = 2, kPeerGone = 3, kBadChunk = 4 };

struct Ring {
  uint8_t* own_state;   // 32-bit words, aligned
  uint8_t* peer_state;
  uint8_t* sequences;   // a word each, one cache line apart
  uint8_t* records;     // plan.record_stride() apart
  int64_t slots;
  int fd;               // of the shared file; each side holds a lock on its byte as long as it lives (-1: liveness is not watched)
  int64_t peer_byte;    // the offset of the peer's lock
  double seconds;       // of one wait
};

struct Outcome {
  End end;
  int64_t chunk;  // the one awaited or found bad
};

Outcome ring_send(const Plan& plan, const Ring& ring);
Outcome ring_receive(const Plan& plan, const Ring& ring);
// Until the peer's state is no longer `state`.
End ring_wait(const Ring& ring, uint32_t state);
void ring_say(const Ring& ring, uint32_t state);

}  // namespace laminar_kv
