// A request's KV rows on a GPU: gathered from the pools' slots into one image, or scattered out of it, with each chunk's sums. Asynchronous.
#pragma once

#include <cstddef>
#include <cstdint>

namespace laminar_kv {

// As Rows of copy.h, but `planes` and `slots` are arrays in the GPU's memory, and so is what they point to.
struct DeviceRows {
  const uint64_t* planes;
  int64_t plane_count;
  int64_t stride;
  int64_t row_bytes;
  const int64_t* slots;
  int64_t tokens;
  int64_t rows_per_chunk;
};

// `image` holds plane_count * tokens rows one after the other; `sums` two words per chunk, as copy.h's Sums. Both lie on the GPU; so may pinned
// host memory that it can address. Enqueued on `stream` (a cudaStream_t). Return a cudaError_t: 0 when it is under way.
int device_gather(const DeviceRows& rows, void* image, uint64_t* sums, void* stream);
int device_scatter(const DeviceRows& rows, const void* image, uint64_t* sums, void* stream);

// Memory that another process of this machine may map (CUDA IPC). Return a cudaError_t.
constexpr size_t kHandleBytes = 64;
int device_share(size_t bytes, void** memory, uint8_t* handle);
int device_map(const uint8_t* handle, void** memory);
int device_unmap(void* memory);
const char* device_error(int code);

}  // namespace laminar_kv
