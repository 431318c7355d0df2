#include "ring.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <ctime>

namespace laminar_kv {
namespace {

using Clock = std::chrono::steady_clock;
using Word = std::atomic<uint32_t>;
static_assert(sizeof(Word) == 4 && Word::is_always_lock_free, "a word in shared memory is its own atomic");

constexpr int kSpins = 200;                  // a few microseconds, for a peer that is about to be ready
constexpr long kPollNanoseconds = 20000000;  // between two looks at the peer's life and at the clock

Word& word(uint8_t* address) { return *reinterpret_cast<Word*>(address); }

void say(Word& place, uint32_t value) {
  place.store(value, std::memory_order_release);
  syscall(SYS_futex, &place, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool peer_alive(const Ring& ring) {
  if (ring.fd < 0) return true;
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = ring.peer_byte;
  lock.l_len = 1;
  return fcntl(ring.fd, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

// Waits until `ready(value of place)`. A peer that has left, or a stop by another thread of this side, ends it too.
template <typename Ready>
End await(const Ring& ring, Word& place, Ready ready, const std::atomic<bool>* stop, bool watch) {
  for (int i = 0; i < kSpins; ++i) {
    if (ready(place.load(std::memory_order_acquire))) return End::kOk;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  const auto limit = Clock::now() + std::chrono::duration<double>(ring.seconds);
  for (;;) {
    const uint32_t seen = place.load(std::memory_order_acquire);
    if (ready(seen)) return End::kOk;
    if (stop && stop->load()) return End::kPeerGone;
    const timespec pause = {0, kPollNanoseconds};
    const bool woken = syscall(SYS_futex, &place, FUTEX_WAIT, seen, &pause, nullptr, 0) == 0;
    if (woken) continue;
    const uint32_t peer = word(ring.peer_state).load(std::memory_order_acquire);
    const bool alive = !watch || peer_alive(ring);
    if (ready(place.load(std::memory_order_acquire))) return End::kOk;  // the last thing that the peer did
    if (peer >= kGone) return End::kPeerGone;
    if (!alive) return End::kPeerDied;
    if (Clock::now() > limit) return End::kTimeout;
  }
}

// All chunks in the plan's threads: `full` is what a record's sequence must be odd (1) or even (0) for; `handle` gets number and record.
template <typename Handle>
Outcome pass(const Plan& plan, const Ring& ring, uint32_t full, Handle handle) {
  std::atomic<int64_t> next{0}, where{-1};
  std::atomic<int> end{0};
  std::atomic<bool> stop{false};
  const auto fail = [&](End why, int64_t number) {
    int none = 0;
    if (end.compare_exchange_strong(none, static_cast<int>(why))) where = number;
    stop = true;
  };
  in_threads(static_cast<int>(std::min<int64_t>(plan.threads, plan.chunks())), [&] {
    for (int64_t number; !stop && (number = next++) < plan.chunks();) {
      const int64_t slot = number % ring.slots;
      const uint32_t wanted = 2 * static_cast<uint32_t>(number / ring.slots) + full;
      Word& sequence = word(ring.sequences + 64 * slot);
      const End waited = await(ring, sequence, [wanted](uint32_t value) { return value == wanted; }, &stop, true);
      if (waited != End::kOk) return fail(waited, number);
      if (!handle(number, ring.records + slot * plan.record_stride())) return fail(End::kBadChunk, number);
      say(sequence, wanted + 1);
    }
  });
  return {static_cast<End>(end.load()), where};
}

}  // namespace

Outcome ring_send(const Plan& plan, const Ring& ring) {
  return pass(plan, ring, 0, [&plan](int64_t number, uint8_t* record) {
    write_record(plan, number, record);
    return true;
  });
}

Outcome ring_receive(const Plan& plan, const Ring& ring) {
  return pass(plan, ring, 1, [&plan](int64_t number, const uint8_t* record) { return read_record(plan, number, record); });
}

End ring_wait(const Ring& ring, uint32_t state) {
  const auto changed = [state](uint32_t value) { return value != state; };
  return await(ring, word(ring.peer_state), changed, nullptr, state != kAbsent);
}

void ring_say(const Ring& ring, uint32_t state) { say(word(ring.own_state), state); }

}  // namespace laminar_kv
