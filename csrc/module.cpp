// Python's view: laminar_hpc._kv, on the limited API of 3.11. Called by engine/kv/native.py's users, which check shapes and dtypes; here only what
// could reach outside a buffer is checked. The interpreter is released while bytes move.
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "ring.h"
#ifdef LAMINAR_CUDA
#include "device.h"
#endif

using namespace laminar_kv;

namespace {

// A buffer argument ("y*" or "w*") that is given back at the end of its scope.
struct Buffer {
  Py_buffer view = {};
  ~Buffer() {
    if (view.obj) PyBuffer_Release(&view);
  }
  uint8_t* bytes() const { return static_cast<uint8_t*>(view.buf); }
};

class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

PyObject* wrong(const char* text) {
  PyErr_SetString(PyExc_ValueError, text);
  return nullptr;
}

// (planes, slots, (pool_slots, stride, row_bytes, rows_per_chunk, threads, isa, streaming)): the start of most calls' arguments.
struct PlanArguments {
  Buffer planes, slots;
  long long pool_slots, stride, row_bytes, rows_per_chunk;
  int threads, isa, streaming;
  Plan plan;

  bool valid() {
    if (planes.view.len % 8 || slots.view.len % 8 || !planes.view.len || !slots.view.len) return false;
    const auto* first = static_cast<const int64_t*>(slots.view.buf);
    const int64_t tokens = slots.view.len / 8, plane_count = planes.view.len / 8;
    if (pool_slots < 1 || row_bytes < 1 || stride < row_bytes || rows_per_chunk < 1 || threads < 1 || threads > 256) return false;
    if (isa < 0 || isa > 3 || rows_per_chunk > INT64_MAX / 4 / row_bytes || tokens > INT32_MAX / plane_count) return false;
    if (!std::all_of(first, first + tokens, [this](int64_t slot) { return slot >= 0 && slot < pool_slots; })) return false;
    plan = {{static_cast<const uint64_t*>(planes.view.buf), plane_count, stride, row_bytes, first, tokens},
            rows_per_chunk,
            threads,
            static_cast<Isa>(isa),
            streaming != 0};
    return true;
  }
};

#define PLAN_FORMAT "y*y*(LLLLiip)"
#define PLAN_PLACES(a)                                                                                                         \
  &(a).planes.view, &(a).slots.view, &(a).pool_slots, &(a).stride, &(a).row_bytes, &(a).rows_per_chunk, &(a).threads, &(a).isa, \
      &(a).streaming

constexpr const char* kBadPlan = "slots outside the pool, or numbers that make no sense";

PyObject* py_pack(PyObject*, PyObject* args) {
  PlanArguments a;
  Buffer out;
  if (!PyArg_ParseTuple(args, PLAN_FORMAT "w*", PLAN_PLACES(a), &out.view)) return nullptr;
  if (!a.valid()) return wrong(kBadPlan);
  if (out.view.len / a.plan.record_stride() < a.plan.chunks()) return wrong("the buffer is too small for the records");
  {
    Unlocked unlocked;
    pack(a.plan, out.bytes());
  }
  Py_RETURN_NONE;
}

PyObject* py_unpack(PyObject*, PyObject* args) {
  PlanArguments a;
  Buffer in;
  if (!PyArg_ParseTuple(args, PLAN_FORMAT "y*", PLAN_PLACES(a), &in.view)) return nullptr;
  if (!a.valid()) return wrong(kBadPlan);
  if (in.view.len / a.plan.record_stride() < a.plan.chunks()) return wrong("the buffer is too small for the records");
  int64_t bad;
  {
    Unlocked unlocked;
    bad = unpack(a.plan, in.bytes());
  }
  return PyLong_FromLongLong(bad);
}

PyObject* py_pack_chunk(PyObject*, PyObject* args) {
  PlanArguments a;
  Buffer out;
  long long number;
  if (!PyArg_ParseTuple(args, PLAN_FORMAT "Lw*", PLAN_PLACES(a), &number, &out.view)) return nullptr;
  if (!a.valid() || number < 0 || number >= a.plan.chunks()) return wrong(kBadPlan);
  if (out.view.len < kHeadBytes + a.plan.bytes(number)) return wrong("the buffer is too small for the record");
  {
    Unlocked unlocked;
    write_record(a.plan, number, out.bytes());
  }
  Py_RETURN_NONE;
}

PyObject* py_unpack_chunk(PyObject*, PyObject* args) {
  PlanArguments a;
  Buffer in;
  long long number;
  if (!PyArg_ParseTuple(args, PLAN_FORMAT "Ly*", PLAN_PLACES(a), &number, &in.view)) return nullptr;
  if (!a.valid() || number < 0 || number >= a.plan.chunks()) return wrong(kBadPlan);
  bool good = in.view.len >= kHeadBytes + a.plan.bytes(number);
  if (good) {
    Unlocked unlocked;
    good = read_record(a.plan, number, in.bytes());
  }
  return PyBool_FromLong(good);
}

// The parts of the shared file, by offset: (own state, peer state, sequences, records, slots, fd, peer's byte, seconds).
struct RingArguments {
  Buffer memory;
  long long own, peer, sequences, records, slots, peer_byte;
  int fd;
  double seconds;
  Ring ring;

  bool valid(int64_t record_stride) {
    const int64_t length = memory.view.len;
    const auto inside = [length](int64_t start, int64_t bytes) { return start >= 0 && start % 4 == 0 && bytes <= length - start; };
    if (slots < 1 || slots > 65536 || !inside(own, 4) || !inside(peer, 4) || !inside(sequences, 64 * slots)) return false;
    if (records < 0 || records > length || (length - records) / record_stride < slots) return false;
    uint8_t* const base = memory.bytes();
    ring = {base + own, base + peer, base + sequences, base + records, slots, fd, peer_byte, seconds};
    return true;
  }
};

#define RING_FORMAT "w*(LLLLLiLd)"
#define RING_PLACES(r) \
  &(r).memory.view, &(r).own, &(r).peer, &(r).sequences, &(r).records, &(r).slots, &(r).fd, &(r).peer_byte, &(r).seconds

PyObject* through_ring(PyObject* args, Outcome (*pass)(const Plan&, const Ring&)) {
  PlanArguments a;
  RingArguments r;
  if (!PyArg_ParseTuple(args, PLAN_FORMAT RING_FORMAT, PLAN_PLACES(a), RING_PLACES(r))) return nullptr;
  if (!a.valid()) return wrong(kBadPlan);
  if (!r.valid(a.plan.record_stride())) return wrong("the ring does not lie inside its memory");
  Outcome outcome;
  {
    Unlocked unlocked;
    outcome = pass(a.plan, r.ring);
  }
  return Py_BuildValue("iL", static_cast<int>(outcome.end), static_cast<long long>(outcome.chunk));
}

PyObject* py_send(PyObject*, PyObject* args) { return through_ring(args, ring_send); }
PyObject* py_receive(PyObject*, PyObject* args) { return through_ring(args, ring_receive); }

PyObject* py_wait(PyObject*, PyObject* args) {
  RingArguments r;
  unsigned int state;
  if (!PyArg_ParseTuple(args, RING_FORMAT "I", RING_PLACES(r), &state)) return nullptr;
  if (!r.valid(1)) return wrong("the ring does not lie inside its memory");
  End end;
  {
    Unlocked unlocked;
    end = ring_wait(r.ring, state);
  }
  uint32_t now;
  std::memcpy(&now, r.ring.peer_state, 4);
  return Py_BuildValue("iI", static_cast<int>(end), now);
}

PyObject* py_say(PyObject*, PyObject* args) {
  RingArguments r;
  unsigned int state;
  if (!PyArg_ParseTuple(args, RING_FORMAT "I", RING_PLACES(r), &state)) return nullptr;
  if (!r.valid(1)) return wrong("the ring does not lie inside its memory");
  ring_say(r.ring, state);
  Py_RETURN_NONE;
}

// The first position of `slots` outside the pool, breaking the page rule, or (distinct) named before; -1 if there is none.
PyObject* py_misfit(PyObject*, PyObject* args) {
  Buffer list;
  long long pool_slots, page;
  int distinct;
  if (!PyArg_ParseTuple(args, "y*LLp", &list.view, &pool_slots, &page, &distinct)) return nullptr;
  if (list.view.len % 8 || pool_slots < 0 || page < 1) return wrong(kBadPlan);
  const auto* slots = static_cast<const int64_t*>(list.view.buf);
  const int64_t count = list.view.len / 8;
  std::vector<bool> named(distinct ? static_cast<size_t>(pool_slots) : 0);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t slot = slots[i];
    bool bad = slot < 0 || slot >= pool_slots || (i % page ? slot != slots[i - 1] + 1 : slot % page != 0);
    if (!bad && distinct) {
      bad = named[static_cast<size_t>(slot)];
      named[static_cast<size_t>(slot)] = true;
    }
    if (bad) return PyLong_FromLongLong(i);
  }
  return PyLong_FromLong(-1);
}

PyObject* py_sums(PyObject*, PyObject* args) {
  Buffer image;
  if (!PyArg_ParseTuple(args, "y*", &image.view)) return nullptr;
  const Sums sums = sums_of(image.bytes(), image.view.len);
  return Py_BuildValue("KK", static_cast<unsigned long long>(sums.words), static_cast<unsigned long long>(sums.indexed));
}

// memcpy in as many threads as the moves have: what the bench holds them against.
PyObject* py_memcpy(PyObject*, PyObject* args) {
  Buffer to, from;
  int threads;
  if (!PyArg_ParseTuple(args, "w*y*i", &to.view, &from.view, &threads)) return nullptr;
  if (to.view.len != from.view.len || threads < 1 || threads > 256) return wrong("buffers of unequal size, or no threads");
  {
    Unlocked unlocked;
    const int64_t part = (to.view.len / threads + 4096) / 64 * 64;
    std::vector<std::thread> others;
    const auto copy = [&](int64_t start) {
      const int64_t length = std::min<int64_t>(part, to.view.len - start);
      if (length > 0) std::memcpy(to.bytes() + start, from.bytes() + start, static_cast<size_t>(length));
    };
    for (int i = 1; i < threads; ++i) others.emplace_back(copy, i * part);
    copy(0);
    for (std::thread& other : others) other.join();
  }
  Py_RETURN_NONE;
}

#ifdef LAMINAR_CUDA

PyObject* cuda_failed(int code) {
  PyErr_Format(PyExc_RuntimeError, "CUDA error %d: %s", code, device_error(code));
  return nullptr;
}

void* address(unsigned long long number) { return reinterpret_cast<void*>(static_cast<uintptr_t>(number)); }

// Addresses on the GPU and a stream as numbers, as torch gives them; engine/kv/device.py has checked what they are of.
PyObject* on_device(PyObject* args, bool gathers) {
  unsigned long long planes, slots, image, sums, stream;
  long long plane_count, tokens, stride, row_bytes, rows_per_chunk;
  if (!PyArg_ParseTuple(args, "KLKLLLLKKK", &planes, &plane_count, &slots, &tokens, &stride, &row_bytes, &rows_per_chunk, &image, &sums, &stream))
    return nullptr;
  if (plane_count < 1 || tokens < 1 || row_bytes < 1 || stride < row_bytes || rows_per_chunk < 1) return wrong(kBadPlan);
  const DeviceRows rows = {static_cast<const uint64_t*>(address(planes)), plane_count, stride, row_bytes,
                           static_cast<const int64_t*>(address(slots)),   tokens,      rows_per_chunk};
  auto* const kept = static_cast<uint64_t*>(address(sums));
  const int code = gathers ? device_gather(rows, address(image), kept, address(stream)) : device_scatter(rows, address(image), kept, address(stream));
  if (code) return cuda_failed(code);
  Py_RETURN_NONE;
}

PyObject* py_device_gather(PyObject*, PyObject* args) { return on_device(args, true); }
PyObject* py_device_scatter(PyObject*, PyObject* args) { return on_device(args, false); }

PyObject* py_device_share(PyObject*, PyObject* args) {
  long long bytes;
  if (!PyArg_ParseTuple(args, "L", &bytes)) return nullptr;
  if (bytes < 1) return wrong("no bytes to share");
  void* memory;
  uint8_t handle[kHandleBytes];
  if (const int code = device_share(static_cast<size_t>(bytes), &memory, handle)) return cuda_failed(code);
  return Py_BuildValue("Ky#", static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(memory)), reinterpret_cast<char*>(handle),
                       static_cast<Py_ssize_t>(kHandleBytes));
}

PyObject* py_device_map(PyObject*, PyObject* args) {
  Buffer handle;
  if (!PyArg_ParseTuple(args, "y*", &handle.view)) return nullptr;
  if (handle.view.len != static_cast<Py_ssize_t>(kHandleBytes)) return wrong("not a handle of CUDA IPC");
  void* memory;
  if (const int code = device_map(handle.bytes(), &memory)) return cuda_failed(code);
  return PyLong_FromUnsignedLongLong(reinterpret_cast<uintptr_t>(memory));
}

PyObject* py_device_unmap(PyObject*, PyObject* args) {
  unsigned long long memory;
  if (!PyArg_ParseTuple(args, "K", &memory)) return nullptr;
  if (const int code = device_unmap(address(memory))) return cuda_failed(code);
  Py_RETURN_NONE;
}

#endif

PyObject* py_isa(PyObject*, PyObject*) { return PyLong_FromLong(static_cast<int>(usable(Isa::kBest))); }

PyMethodDef kMethods[] = {
    {"pack", py_pack, METH_VARARGS, "pack(planes, slots, plan, out): all chunks' records, one stride apart"},
    {"unpack", py_unpack, METH_VARARGS, "unpack(planes, slots, plan, records) -> number of a bad chunk, or -1"},
    {"pack_chunk", py_pack_chunk, METH_VARARGS, "pack_chunk(planes, slots, plan, number, out): one chunk's record"},
    {"unpack_chunk", py_unpack_chunk, METH_VARARGS, "unpack_chunk(planes, slots, plan, number, record) -> whether it was as expected"},
    {"send", py_send, METH_VARARGS, "send(planes, slots, plan, memory, ring) -> (end, chunk)"},
    {"receive", py_receive, METH_VARARGS, "receive(planes, slots, plan, memory, ring) -> (end, chunk)"},
    {"wait", py_wait, METH_VARARGS, "wait(memory, ring, state) -> (end, the peer's state)"},
    {"say", py_say, METH_VARARGS, "say(memory, ring, state)"},
    {"misfit", py_misfit, METH_VARARGS, "misfit(slots, pool_slots, page_size, distinct) -> position, or -1"},
    {"sums", py_sums, METH_VARARGS, "sums(image) -> (sum of words, sum of (index + 1) * word)"},
    {"memcpy", py_memcpy, METH_VARARGS, "memcpy(to, from, threads)"},
    {"isa", py_isa, METH_NOARGS, "isa() -> 1 portable, 2 AVX2, 3 AVX-512: the best of this CPU"},
#ifdef LAMINAR_CUDA
    {"device_gather", py_device_gather, METH_VARARGS, "device_gather(planes, plane_count, slots, tokens, stride, row_bytes, rows_per_chunk, image, sums, stream)"},
    {"device_scatter", py_device_scatter, METH_VARARGS, "device_scatter(as device_gather)"},
    {"device_share", py_device_share, METH_VARARGS, "device_share(bytes) -> (address, handle); never freed, as others may have mapped it"},
    {"device_map", py_device_map, METH_VARARGS, "device_map(handle) -> address"},
    {"device_unmap", py_device_unmap, METH_VARARGS, "device_unmap(address)"},
#endif
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT, "_kv", "KV-cache pages of a request: gather, scatter, transfer.", 0, kMethods,
                       nullptr, nullptr, nullptr, nullptr};

}  // namespace

extern "C" PyMODINIT_FUNC PyInit__kv() { return PyModule_Create(&kModule); }
