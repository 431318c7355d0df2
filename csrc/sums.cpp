// Python's view: laminar_hpc._sums, on the limited API of 3.11: copies whose check sums (weights/kernels/sums.py) are made on the way, in one pass
// over memory, and what changed between two images (delta.h). Called by weights/kernels/host.py, weights/kernels/sums.py and weights/delta.py, which check
// shapes; addresses are taken as they are. The interpreter is released.
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "delta.h"

namespace {

struct Sums {
  uint64_t words = 0;
  uint64_t indexed = 0;  // of (index + 1) * word, modulo 2**64
};

constexpr int64_t kBlock = 1 << 15;  // words: 128 KB stay in the second-level cache between the copy and the sums
constexpr int64_t kStreamed = 1 << 16;  // words of a row from which on the copy goes past the caches
constexpr int64_t kOfThread = 1 << 19;  // words, 2 MB, that are worth a thread

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define EVERY_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define EVERY_CPU
#endif

using Lanes = uint64_t __attribute__((vector_size(64)));
using Image = uint64_t __attribute__((vector_size(64), aligned(4), may_alias));  // as it lies in memory

// Per lane of 64 bits, `a` adds up its low (or high) words and `b` the running sums of `a`: with n steps, the sum of step * word is
// n * a - b, modulo 2**64.
Sums folded(const Lanes& low_a, const Lanes& high_a, const Lanes& low_b, const Lanes& high_b, int64_t steps) {
  Sums sums;
  for (uint64_t lane = 0; lane < 8; ++lane) {
    for (uint64_t high = 0; high < 2; ++high) {
      const uint64_t a = high ? high_a[lane] : low_a[lane], b = high ? high_b[lane] : low_b[lane];
      sums.words += a;
      sums.indexed += (2 * lane + high + 1) * a + 16 * (static_cast<uint64_t>(steps) * a - b);
    }
  }
  return sums;
}

// `count` words, of which the first has index 0.
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
  Sums sums = folded(low_a, high_a, low_b, high_b, steps);
  for (int64_t i = 16 * steps; i < count; ++i) {
    sums.words += words[i];
    sums.indexed += static_cast<uint64_t>(i + 1) * words[i];
  }
  return sums;
}

#ifdef __SSE2__
// As sums_of_block, and copies on the way, past the caches: without that the processor reads a line before it writes it. `to` begins at a
// whole 16 bytes; `count` is a multiple of 16.
EVERY_CPU Sums stream_block(uint32_t* to, const uint32_t* words, int64_t count) {
  Lanes low_a = {}, high_a = {}, low_b = {}, high_b = {};
  const int64_t steps = count / 16;
  for (int64_t i = 0; i < steps; ++i) {
    const Lanes image = *reinterpret_cast<const Image*>(words + 16 * i);
    for (int part = 0; part < 4; ++part) {
      const auto* const from = reinterpret_cast<const __m128i*>(words + 16 * i + 4 * part);
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + 16 * i + 4 * part), _mm_loadu_si128(from));
    }
    low_a += image & 0xffffffffu;
    high_a += image >> 32;
    low_b += low_a;
    high_b += high_a;
  }
  return folded(low_a, high_a, low_b, high_b, steps);
}
#endif

void add(Sums& all, const Sums& part, int64_t first) {
  all.words += part.words;
  all.indexed += part.indexed + static_cast<uint64_t>(first) * part.words;
}

// One row of `count` words, the first of index 0, to `to` unless that is null.
Sums move_row(uint32_t* to, const uint32_t* from, int64_t count) {
  Sums all;
  int64_t done = 0;
#ifdef __SSE2__
  if (to && count >= kStreamed) {
    while (reinterpret_cast<uintptr_t>(to + done) % 16) {
      to[done] = from[done];
      add(all, {from[done], from[done]}, done);
      ++done;
    }
    const int64_t streamed = (count - done) / 16 * 16;
    add(all, stream_block(to + done, from + done, streamed), done);
    _mm_sfence();  // whoever is told that the copy is made must see it
    done += streamed;
  }
#endif
  for (; done < count; done += std::min(kBlock, count - done)) {
    const int64_t size = std::min(kBlock, count - done);
    const uint32_t* image = from + done;
    if (to) {
      std::memcpy(to + done, image, static_cast<size_t>(4 * size));
      image = to + done;
    }
    add(all, sums_of_block(image, size), done);
  }
  return all;
}

// `rows` of `row_words` words; row r, column c of the whole has index r * index_stride + c. Where `to` is not null, they are copied there,
// and the sums are those of what is copied. Strides in bytes.
struct Grid {
  uint8_t* to;
  int64_t to_stride;
  const uint8_t* from;
  int64_t from_stride, rows, row_words, index_stride;

  Sums move() const {
    Sums all;
    for (int64_t r = 0; r < rows; ++r) {
      auto* const target = reinterpret_cast<uint32_t*>(to ? to + r * to_stride : nullptr);
      add(all, move_row(target, reinterpret_cast<const uint32_t*>(from + r * from_stride), row_words), r * index_stride);
    }
    return all;
  }

  // Part `number` of `parts`, of a single row its words; `first` becomes the index of the part's first word.
  Grid part(int64_t number, int64_t parts, int64_t& first) const {
    Grid some = *this;
    if (rows == 1) {
      const int64_t begin = row_words * number / parts / 16 * 16;
      const int64_t end = number + 1 == parts ? row_words : row_words * (number + 1) / parts / 16 * 16;
      some.row_words = end - begin;
      some.from += 4 * begin;
      if (to) some.to += 4 * begin;
      first = begin;
    } else {
      const int64_t begin = rows * number / parts;
      some.rows = rows * (number + 1) / parts - begin;
      some.from += begin * from_stride;
      if (to) some.to += begin * to_stride;
      first = begin * index_stride;
    }
    return some;
  }
};

Sums move(const Grid& grid, int64_t threads) {
  const int64_t parts = std::max<int64_t>(1, std::min(threads, grid.rows * grid.row_words / kOfThread));
  std::vector<Sums> sums(static_cast<size_t>(parts));
  std::vector<int64_t> firsts(static_cast<size_t>(parts));
  const auto run = [&](int64_t number) {
    const auto place = static_cast<size_t>(number);
    sums[place] = grid.part(number, parts, firsts[place]).move();
  };
  std::vector<std::thread> others;
  for (int64_t number = 1; number < parts; ++number) {
    try {
      others.emplace_back(run, number);
    } catch (const std::system_error&) {  // no more threads: this one does it
      run(number);
    }
  }
  run(0);
  for (auto& other : others) other.join();
  Sums all;
  for (size_t number = 0; number < sums.size(); ++number) add(all, sums[number], firsts[number]);
  return all;
}

PyObject* py_move(PyObject*, PyObject* args) {
  unsigned long long to, from;
  long long to_stride, from_stride, rows, row_words, index_stride, threads = 1;
  if (!PyArg_ParseTuple(args, "KLKLLLL|L", &to, &to_stride, &from, &from_stride, &rows, &row_words, &index_stride, &threads)) return nullptr;
  if (from % 4 || to % 4 || from_stride % 4 || to_stride % 4 || rows < 0 || row_words < 0) {
    PyErr_SetString(PyExc_ValueError, "addresses and strides must be of whole words");
    return nullptr;
  }
  PyThreadState* state = PyEval_SaveThread();
  const Grid grid = {reinterpret_cast<uint8_t*>(to), to_stride, reinterpret_cast<const uint8_t*>(from), from_stride, rows, row_words,
                     index_stride};
  const Sums sums = move(grid, threads);
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
    {"move", py_move, METH_VARARGS, 
     "move(to or 0, to_stride, from, from_stride, rows, row_words, index_stride, threads=1) -> (words, indexed)"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT, "_sums", "Copies with check sums.", 0, kMethods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

extern "C" PyMODINIT_FUNC PyInit__sums() { return PyModule_Create(&kModule); }
