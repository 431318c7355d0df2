// Python's view: laminar_hpc._sums, on the limited API of 3.11: copies whose check sums (weights/kernels/sums.py) are made on the way, in one pass
// over memory, and what changed between two images (delta.h). Called by weights/kernels/host.py, weights/kernels/sums.py and weights/delta.py, which check
// shapes; addresses are taken as they are. The interpreter is released.
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "delta.h"

namespace {

struct Sums {
  uint64_t words = 0;
  uint64_t indexed = 0;  // of (index + 1) * word, modulo 2**64
};

constexpr int64_t kBlock = 1 << 15;  // words: 128 KB stay in the second-level cache between the copy and the sums

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define EVERY_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define EVERY_CPU
#endif

using Lanes = uint64_t __attribute__((vector_size(64)));
using Image = uint64_t __attribute__((vector_size(64), aligned(4), may_alias));  // as it lies in memory

// `count` words, of which the first has index 0. Per lane of 64 bits, `a` adds up its low (or high) words and `b` the running sums of
// `a`: with n steps, the sum of step * word is n * a - b, modulo 2**64.
EVERY_CPU Sums sums_of_block(const uint32_t* words, int64_t count) {
  Lanes low_a = {}, high_a = {}, low_b = {}, high_b = {};
  const int64_t steps = count / 16;
  for (int64_t i = 0; i < steps; ++i) {
    const Lanes image = *reinterpret_cast<const Image*>(words + 16 * i);
    low_a += image & 0xffffffffu;
    high_a += image >> 32;
    low_b += low_a;
    high_b += high_a;
  }
  Sums sums;
  for (uint64_t lane = 0; lane < 8; ++lane) {
    for (uint64_t high = 0; high < 2; ++high) {
      const uint64_t a = high ? high_a[lane] : low_a[lane], b = high ? high_b[lane] : low_b[lane];
      sums.words += a;
      sums.indexed += (2 * lane + high + 1) * a + 16 * (static_cast<uint64_t>(steps) * a - b);
    }
  }
  for (int64_t i = 16 * steps; i < count; ++i) {
    sums.words += words[i];
    sums.indexed += static_cast<uint64_t>(i + 1) * words[i];
  }
  return sums;
}

// `rows` of `row_words` words; row r, column c of the whole has index r * index_stride + c. Where `to` is not null, they are copied there
// first, and the sums are those of what stands there afterwards. Strides in bytes.
Sums move(uint8_t* to, int64_t to_stride, const uint8_t* from, int64_t from_stride, int64_t rows, int64_t row_words, int64_t index_stride) {
  Sums all;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < row_words; c += kBlock) {
      const int64_t count = std::min(kBlock, row_words - c);
      const uint8_t* image = from + r * from_stride + 4 * c;
      if (to) {
        uint8_t* const target = to + r * to_stride + 4 * c;
        std::memcpy(target, image, static_cast<size_t>(4 * count));
        image = target;
      }
      const Sums block = sums_of_block(reinterpret_cast<const uint32_t*>(image), count);
      all.words += block.words;
      all.indexed += block.indexed + static_cast<uint64_t>(r * index_stride + c) * block.words;
    }
  }
  return all;
}

PyObject* py_move(PyObject*, PyObject* args) {
  unsigned long long to, from;
  long long to_stride, from_stride, rows, row_words, index_stride;
  if (!PyArg_ParseTuple(args, "KLKLLLL", &to, &to_stride, &from, &from_stride, &rows, &row_words, &index_stride)) return nullptr;
  if (from % 4 || to % 4 || from_stride % 4 || to_stride % 4 || rows < 0 || row_words < 0) {
    PyErr_SetString(PyExc_ValueError, "addresses and strides must be of whole words");
    return nullptr;
  }
  PyThreadState* state = PyEval_SaveThread();
  const Sums sums = move(reinterpret_cast<uint8_t*>(to), to_stride, reinterpret_cast<const uint8_t*>(from), from_stride, rows, row_words,
                         index_stride);
  PyEval_RestoreThread(state);
  return Py_BuildValue("KK", static_cast<unsigned long long>(sums.words), static_cast<unsigned long long>(sums.indexed));
}

template <typename T>
T* address(unsigned long long number) {
  return reinterpret_cast<T*>(number);
}

PyObject* py_encode(PyObject*, PyObject* args) {
  unsigned long long fresh, image, mask, counts, offsets;
  long long units, unit_bytes, most, most_offsets;
  if (!PyArg_ParseTuple(args, "KKLLKKKLL", &fresh, &image, &units, &unit_bytes, &mask, &counts, &offsets, &most, &most_offsets)) {
    return nullptr;
  }
  if (units < 0 || (unit_bytes != 2 && unit_bytes != 4) || fresh % unit_bytes || image % unit_bytes) {
    PyErr_SetString(PyExc_ValueError, "units of 2 or 4 bytes at addresses of whole units are needed");
    return nullptr;
  }
  PyThreadState* state = PyEval_SaveThread();
  const int64_t changed = laminar_delta::encode(address<uint8_t>(fresh), address<uint8_t>(image), units, unit_bytes, address<uint32_t>(mask),
                                                address<uint32_t>(counts), address<uint16_t>(offsets), most, most_offsets);
  PyEval_RestoreThread(state);
  return PyLong_FromLongLong(changed);
}

PyObject* py_apply(PyObject*, PyObject* args) {
  unsigned long long base, target, values, mask, counts, offsets;
  long long units, unit_bytes, changed;
  if (!PyArg_ParseTuple(args, "KKLLKLKKK", &base, &target, &units, &unit_bytes, &values, &changed, &mask, &counts, &offsets)) {
    return nullptr;
  }
  if (units < 0 || (unit_bytes != 2 && unit_bytes != 4) || base % unit_bytes || target % unit_bytes) {
    PyErr_SetString(PyExc_ValueError, "units of 2 or 4 bytes at addresses of whole units are needed");
    return nullptr;
  }
  PyThreadState* state = PyEval_SaveThread();
  const bool fits =
      laminar_delta::apply(address<const uint8_t>(base), address<uint8_t>(target), units, unit_bytes, address<const uint8_t>(values), changed,
                           address<const uint32_t>(mask), address<const uint32_t>(counts), address<const uint16_t>(offsets));
  PyEval_RestoreThread(state);
  return PyBool_FromLong(fits);
}

PyMethodDef kMethods[] = {
    {"encode", py_encode, METH_VARARGS,
     "encode(fresh, image, units, unit_bytes, mask, counts, offsets, most, most_offsets) -> changed units"},
    {"apply", py_apply, METH_VARARGS,
     "apply(base, target, units, unit_bytes, values, changed, mask or 0, counts or 0, offsets or 0) -> whether they fit"},
    {"move", py_move, METH_VARARGS, "move(to or 0, to_stride, from, from_stride, rows, row_words, index_stride) -> (words, indexed)"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT, "_sums", "Copies with check sums.", 0, kMethods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

extern "C" PyMODINIT_FUNC PyInit__sums() { return PyModule_Create(&kModule); }
