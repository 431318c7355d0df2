#include "chunks.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

namespace laminar_kv {

void in_threads(int threads, const std::function<void()>& work) {
  std::vector<std::thread> others;
  others.reserve(static_cast<size_t>(threads));
  try {
    for (int i = 1; i < threads; ++i) others.emplace_back(work);
  } catch (const std::system_error&) {  // no more threads to be had: those there are share the work
  }
  work();
  for (std::thread& other : others) other.join();
}

void write_record(const Plan& plan, int64_t number, uint8_t* record) {
  const Sums sums = gather(plan.rows, plan.first(number), plan.count(number), record + kHeadBytes, plan.isa, plan.streaming);
  const ChunkHead head = {
      kChunkMagic, static_cast<uint32_t>(number), static_cast<uint64_t>(plan.bytes(number)), sums.words, sums.indexed, {}};
  std::memcpy(record, &head, sizeof head);
}

bool read_record(const Plan& plan, int64_t number, const uint8_t* record) {
  ChunkHead head;
  std::memcpy(&head, record, sizeof head);
  const bool expected = head.magic == kChunkMagic && head.number == static_cast<uint64_t>(number) &&
                        head.bytes == static_cast<uint64_t>(plan.bytes(number)) &&
                        std::all_of(head.zero, head.zero + sizeof head.zero, [](uint8_t byte) { return byte == 0; });
  return expected && scatter(plan.rows, plan.first(number), plan.count(number), record + kHeadBytes, plan.isa, plan.streaming) ==
                         Sums{head.words, head.indexed};
}

void pack(const Plan& plan, uint8_t* records) {
  std::atomic<int64_t> next{0};
  in_threads(static_cast<int>(std::min<int64_t>(plan.threads, plan.chunks())), [&] {
    for (int64_t number; (number = next++) < plan.chunks();) write_record(plan, number, records + number * plan.record_stride());
  });
}

int64_t unpack(const Plan& plan, const uint8_t* records) {
  std::atomic<int64_t> next{0}, bad{plan.chunks()};
  in_threads(static_cast<int>(std::min<int64_t>(plan.threads, plan.chunks())), [&] {
    for (int64_t number; (number = next++) < plan.chunks();) {
      if (read_record(plan, number, records + number * plan.record_stride())) continue;
      int64_t lowest = bad;
      while (number < lowest && !bad.compare_exchange_weak(lowest, number)) {
      }
      next = plan.chunks();
    }
  });
  return bad == plan.chunks() ? -1 : bad.load();
}

}  // namespace laminar_kv
