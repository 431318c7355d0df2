// The extension's core without Python, for the sanitizers: records and rings of many shapes, then records of damaged bytes.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "ring.h"

using namespace laminar_kv;

#define CHECK(what) ((what) ? void() : (std::printf("line %d: %s\n", __LINE__, #what), std::exit(1)))

struct Aligned {
  explicit Aligned(size_t bytes) : size(bytes), data(static_cast<uint8_t*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64))) {
    std::memset(data, 0, (bytes + 63) / 64 * 64);
  }
  ~Aligned() { std::free(data); }
  Aligned(const Aligned&) = delete;
  size_t size;
  uint8_t* data;
};

static void one_shape(int64_t row_bytes, int64_t tokens, int64_t per_chunk, int threads, Isa isa, bool streaming, std::mt19937_64& draw) {
  constexpr int kPlanes = 4;
  constexpr int64_t kPool = 64;
  Aligned from(kPlanes * kPool * row_bytes), to(kPlanes * kPool * row_bytes);
  for (size_t i = 0; i < from.size; ++i) from.data[i] = static_cast<uint8_t>(draw());
  uint64_t sources[kPlanes], targets[kPlanes];
  for (int p = 0; p < kPlanes; ++p) {
    sources[p] = reinterpret_cast<uint64_t>(from.data + p * kPool * row_bytes);
    targets[p] = reinterpret_cast<uint64_t>(to.data + p * kPool * row_bytes);
  }
  std::vector<int64_t> slots(kPool);
  for (int64_t i = 0; i < kPool; ++i) slots[i] = (i * 37 + 5) % kPool;
  const Plan out = {{sources, kPlanes, row_bytes, row_bytes, slots.data(), tokens}, per_chunk, threads, isa, streaming};
  Plan in = out;
  in.rows.planes = targets;
  const auto arrived = [&] {
    for (int p = 0; p < kPlanes; ++p)
      for (int64_t t = 0; t < tokens; ++t) {
        const int64_t at = (p * kPool + slots[t]) * row_bytes;
        CHECK(std::memcmp(from.data + at, to.data + at, row_bytes) == 0);
      }
  };
  Aligned records(out.chunks() * out.record_stride());
  pack(out, records.data);
  CHECK(unpack(in, records.data) == -1);
  arrived();
  for (int i = 0; i < 30; ++i) {  // damaged: the only thing asked is that nothing outside is touched and damage in a head or row is seen
    const int64_t number = static_cast<int64_t>(draw() % out.chunks());
    const size_t at = number * out.record_stride() + draw() % (kHeadBytes + out.bytes(number));
    const uint8_t old = records.data[at];
    records.data[at] ^= static_cast<uint8_t>(1 + draw() % 255);
    CHECK(unpack(in, records.data) == number);
    records.data[at] = old;
  }
  std::memset(to.data, 0, to.size);
  constexpr int64_t kSlots = 3;
  Aligned memory(128 + 64 * kSlots + kSlots * out.record_stride());
  uint8_t* const records_at = memory.data + 128 + 64 * kSlots;
  const Ring sender = {memory.data, memory.data + 64, memory.data + 128, records_at, kSlots, -1, 0, 60.0};
  Ring receiver = sender;
  std::swap(receiver.own_state, receiver.peer_state);
  ring_say(sender, kThere);
  std::thread other([&] {
    ring_say(receiver, kThere);
    CHECK(ring_receive(in, receiver).end == End::kOk);
    ring_say(receiver, kDone);
  });
  CHECK(ring_wait(sender, kAbsent) == End::kOk);
  CHECK(ring_send(out, sender).end == End::kOk);
  CHECK(ring_wait(sender, kThere) == End::kOk);
  other.join();
  arrived();
}

int main() {
  std::mt19937_64 draw(1);
  for (int64_t row_bytes : {2, 10, 64, 96, 128, 1024})
    for (int64_t tokens : {1, 17, 64})
      for (Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512})
        for (bool streaming : {false, true}) one_shape(row_bytes, tokens, 1 + static_cast<int64_t>(draw() % 40), 1 + draw() % 3, isa, streaming, draw);
  std::puts("clean");
}
