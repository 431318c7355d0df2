#include "device.h"

#include <cuda_runtime.h>

#include <cstring>

namespace laminar_kv {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kRows = 4;  // of a warp at once
static_assert(kHandleBytes == sizeof(cudaIpcMemHandle_t), "CUDA's handle has another size");

// What `value`, at byte `offset` of its chunk, adds to the sums over little-endian 32-bit words.
__device__ void add(uint4 value, int64_t offset, uint64_t& words, uint64_t& indexed) {
  const uint64_t index = offset / 4 + 1;
  const uint64_t sum = static_cast<uint64_t>(value.x) + value.y + value.z + value.w;
  words += sum;
  indexed += index * sum + value.y + 2ull * value.z + 3ull * value.w;
}

__device__ void add(uint16_t value, int64_t offset, uint64_t& words, uint64_t& indexed) {
  const uint64_t placed = static_cast<uint64_t>(value) << (offset % 4 * 8);  // half a word
  words += placed;
  indexed += (offset / 4 + 1) * placed;
}

__device__ uint64_t over_block(uint64_t value) {
  __shared__ uint64_t of_warps[kWarps];
  for (int step = 16; step; step /= 2) value += __shfl_down_sync(~0u, value, step);
  __syncthreads();  // the last call's readers are done
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0;
  if (threadIdx.x == 0)
    for (int warp = 0; warp < kWarps; ++warp) value += of_warps[warp];
  return value;
}

// A block per chunk. A warp takes kRows rows at once, all loads before the first store, and its lanes neighbouring
// items, so that every access is whole lines. `total` fits 32 bits: divisions of 64 are twenty instructions more.
template <bool kGather, typename Item>
__global__ void __launch_bounds__(kThreads) move_rows(DeviceRows rows, uint8_t* image, uint64_t* sums) {
  const uint32_t tokens = static_cast<uint32_t>(rows.tokens), total = static_cast<uint32_t>(rows.plane_count) * tokens;
  const uint32_t per_chunk = static_cast<uint32_t>(rows.rows_per_chunk), first = blockIdx.x * per_chunk;
  const uint32_t count = min(per_chunk, total - first);
  const int per_row = static_cast<int>(rows.row_bytes / static_cast<int64_t>(sizeof(Item)));
  uint64_t words = 0, indexed = 0;
  for (uint32_t r = threadIdx.x / 32; r < count; r += kWarps * kRows) {
    const Item* from[kRows];
    Item* to[kRows];
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const uint32_t row = first + min(r + k * kWarps, count - 1);
      Item* const slot = reinterpret_cast<Item*>(rows.planes[row / tokens] + rows.slots[row % tokens] * rows.stride);
      Item* const inside = reinterpret_cast<Item*>(image + row * rows.row_bytes);
      from[k] = kGather ? slot : inside;
      to[k] = kGather ? inside : slot;
    }
    for (int i = threadIdx.x % 32; i < per_row; i += 32) {
      Item value[kRows];
#pragma unroll
      for (int k = 0; k < kRows; ++k) value[k] = from[k][i];
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const uint32_t row = r + k * kWarps;
        if (row >= count) break;
        to[k][i] = value[k];
        add(value[k], row * rows.row_bytes + i * static_cast<int64_t>(sizeof(Item)), words, indexed);
      }
    }
  }
  words = over_block(words);
  indexed = over_block(indexed);
  if (threadIdx.x == 0) {
    sums[2 * blockIdx.x] = words;
    sums[2 * blockIdx.x + 1] = indexed;
  }
}

// Wide items need aligned rows; torch's allocations are, unless K and V share a tensor in an odd way.
template <bool kGather>
int launch(const DeviceRows& rows, void* image, uint64_t* sums, void* stream) {
  const int64_t total = rows.plane_count * rows.tokens;
  if (total == 0) return cudaSuccess;
  if (total > INT32_MAX) return cudaErrorInvalidValue;
  const auto blocks = static_cast<unsigned>((total + rows.rows_per_chunk - 1) / rows.rows_per_chunk);
  auto* const bytes = static_cast<uint8_t*>(image);
  const auto queue = static_cast<cudaStream_t>(stream);
  const bool wide = rows.row_bytes % 16 == 0 && rows.stride % 16 == 0 && reinterpret_cast<uintptr_t>(image) % 16 == 0;
  if (wide)
    move_rows<kGather, uint4><<<blocks, kThreads, 0, queue>>>(rows, bytes, sums);
  else if (rows.row_bytes % 2 == 0)
    move_rows<kGather, uint16_t><<<blocks, kThreads, 0, queue>>>(rows, bytes, sums);
  else
    return cudaErrorInvalidValue;
  return cudaGetLastError();
}

// An error that is returned shall not be found again by whoever looks for the last error of a launch.
int cleared(cudaError_t error) {
  if (error) cudaGetLastError();
  return error;
}

}  // namespace

int device_gather(const DeviceRows& rows, void* image, uint64_t* sums, void* stream) { return launch<true>(rows, image, sums, stream); }

int device_scatter(const DeviceRows& rows, const void* image, uint64_t* sums, void* stream) {
  return launch<false>(rows, const_cast<void*>(image), sums, stream);  // only read when scattering
}

int device_share(size_t bytes, void** memory, uint8_t* handle) {
  if (const cudaError_t error = cudaMalloc(memory, bytes)) return cleared(error);
  cudaIpcMemHandle_t made;
  if (const cudaError_t error = cudaIpcGetMemHandle(&made, *memory)) {
    cudaFree(*memory);
    return cleared(error);
  }
  std::memcpy(handle, &made, sizeof made);
  return cudaSuccess;
}

int device_map(const uint8_t* handle, void** memory) {
  cudaIpcMemHandle_t given;
  std::memcpy(&given, handle, sizeof given);
  return cleared(cudaIpcOpenMemHandle(memory, given, cudaIpcMemLazyEnablePeerAccess));
}

int device_unmap(void* memory) { return cudaIpcCloseMemHandle(memory); }

const char* device_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

}  // namespace laminar_kv
