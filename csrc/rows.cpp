// Python's view: laminar_hpc._rows, on the limited API of 3.11: operations of a model whose result for a row follows from that row alone, added up
// in one fixed order, however many rows there are, wherever they lie and however many threads share them. Called by weights/kernels/fixed_order.py,
// which checks shapes; addresses are taken as they are, strides are in elements. The interpreter is released.
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <system_error>
#include <thread>
#include <vector>

namespace {

#define INLINE inline __attribute__((always_inline))

constexpr int64_t kLanes = 16;
constexpr double kOfThread = 1 << 18;  // multiplications that are worth a thread

using Lanes = float __attribute__((vector_size(64)));
using Image = float __attribute__((vector_size(64), aligned(4), may_alias));  // as it lies in memory
#if defined(__clang__)
#define PERMUTED(x, ...) __builtin_shufflevector(x, x, __VA_ARGS__)
#else
using Places = int32_t __attribute__((vector_size(64)));
#define PERMUTED(x, ...) __builtin_shuffle(x, Places{__VA_ARGS__})
#endif

struct Product {
  const float* x;
  int64_t x_stride;
  const float* w;
  int64_t w_stride;
  const float* bias;
  float* out;
  int64_t out_stride, rows, columns, inner;
};

// Query t has `lengths[t]` keys, the last of them its own, in the slots that begin at slots + sequences[t] * slots_stride.
struct Attention {
  const float *q, *k, *v;
  float* out;
  const int64_t *slots, *sequences, *lengths;
  int64_t slots_stride, q_stride, k_stride, v_stride, out_stride, heads, kv_heads, dim, v_dim, window;
  float scale;
};

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
// Both add a product with one rounding, in as many lanes, and give the same bits.
#pragma GCC push_options
#pragma GCC target("arch=skylake-avx512,prefer-vector-width=512")
namespace wide {
#define TILE 4
#include "rows_kernels.h"
#undef TILE
}  // namespace wide
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=haswell")
namespace narrow {
#define TILE 2
#include "rows_kernels.h"
#undef TILE
}  // namespace narrow
#pragma GCC pop_options
#define FITS(feature) __builtin_cpu_supports(feature)
#define CHOSEN(function) (FITS("avx512vl") ? wide::function : FITS("avx2") && FITS("fma") ? narrow::function : any::function)
#else
#define CHOSEN(function) any::function
#endif
namespace any {
#define TILE 2
#include "rows_kernels.h"
#undef TILE
}  // namespace any

uint32_t mixed_in(uint32_t h, uint32_t k) {  // MurmurHash3's step
  k *= 0xcc9e2d51u;
  k = (k << 15 | k >> 17) * 0x1b873593u;
  h ^= k;
  return (h << 13 | h >> 19) * 5 + 0xe6546b64u;
}

// MurmurHash3 (32 bits, seed 0) of a seed, a position and a column, as SGLang's sampler has it.
uint32_t hashed(uint64_t seed, uint32_t position, uint32_t column) {
  uint32_t h = mixed_in(mixed_in(mixed_in(mixed_in(0, static_cast<uint32_t>(seed)), static_cast<uint32_t>(seed >> 32)), position), column);
  h ^= 16;
  h = (h ^ h >> 16) * 0x85ebca6bu;
  h = (h ^ h >> 13) * 0xc2b2ae35u;
  return h ^ h >> 16;
}

// The column that is first in a race of exponential variables with rates `weights`: it is drawn with a probability proportional to its rate.
int64_t first_of(const float* weights, int64_t columns, uint64_t seed, uint32_t position) {
  int64_t winner = 0;
  double least = std::numeric_limits<double>::infinity();
  for (int64_t column = 0; column < columns; ++column) {
    if (!(weights[column] > 0)) continue;
    const double u = hashed(seed, position, static_cast<uint32_t>(column)) / 4294967295.0;
    const double time = std::max(-std::log(u), 0x1p-32) / weights[column];
    if (time < least) {
      least = time;
      winner = column;
    }
  }
  return winner;
}

// Calls `run(begin, end)` for parts of 0 .. count.
template <typename Run>
void shared(int64_t count, double work, int64_t threads, const Run& run) {
  const auto worth = static_cast<int64_t>(std::min(work / kOfThread, 1e6));
  const int64_t parts = std::max<int64_t>(1, std::min({threads, count, worth}));
  std::vector<std::thread> others;
  for (int64_t number = 1; number < parts; ++number) {
    try {
      others.emplace_back(run, count * number / parts, count * (number + 1) / parts);
    } catch (const std::system_error&) {  // no more threads: this one does it
      run(count * number / parts, count * (number + 1) / parts);
    }
  }
  run(0, count / parts);
  for (auto& other : others) other.join();
}

template <typename T>
T* address(unsigned long long number) {
  return reinterpret_cast<T*>(number);
}

PyObject* none() {
  Py_INCREF(Py_None);
  return Py_None;
}

PyObject* py_product(PyObject*, PyObject* args) {
  unsigned long long x, w, bias, out;
  long long x_stride, w_stride, out_stride, rows, columns, inner, threads;
  if (!PyArg_ParseTuple(args, "KLKLKKLLLLL", &x, &x_stride, &w, &w_stride, &bias, &out, &out_stride, &rows, &columns, &inner, &threads))
    return nullptr;
  const Product p = {address<float>(x), x_stride, address<float>(w), w_stride, address<float>(bias), address<float>(out), out_stride, rows,
                     columns, inner};
  const double work = static_cast<double>(rows) * static_cast<double>(columns) * static_cast<double>(inner);
  PyThreadState* state = PyEval_SaveThread();
  if (rows > columns) {
    shared(rows, work, threads, [&p](int64_t begin, int64_t end) { CHOSEN(multiply)(p, begin, end, 0, p.columns); });
  } else {
    shared(columns, work, threads, [&p](int64_t begin, int64_t end) { CHOSEN(multiply)(p, 0, p.rows, begin, end); });
  }
  PyEval_RestoreThread(state);
  return none();
}

PyObject* py_attend(PyObject*, PyObject* args) {
  unsigned long long q, k, v, out, slots, sequences, lengths;
  long long slots_stride, q_stride, k_stride, v_stride, out_stride, heads, kv_heads, dim, v_dim, window, queries, longest, threads;
  float scale;
  if (!PyArg_ParseTuple(args, "KKKKKKKLLLLLLLLLLfLLL", &q, &k, &v, &out, &slots, &sequences, &lengths, &slots_stride, &q_stride, &k_stride,
                        &v_stride, &out_stride, &heads, &kv_heads, &dim, &v_dim, &window, &scale, &queries, &longest, &threads))
    return nullptr;
  const Attention a = {address<float>(q),       address<float>(k),       address<float>(v), address<float>(out), address<int64_t>(slots),
                       address<int64_t>(sequences), address<int64_t>(lengths), slots_stride, q_stride, k_stride, v_stride, out_stride, heads,
                       kv_heads, dim, v_dim, window, scale};
  const double work = static_cast<double>(queries) * static_cast<double>(longest) * static_cast<double>(heads * (dim + v_dim));
  PyThreadState* state = PyEval_SaveThread();
  shared(queries, work, threads, [&a, longest](int64_t begin, int64_t end) {
    std::vector<float> weights(static_cast<size_t>(longest)), mixed(static_cast<size_t>(a.v_dim));
    CHOSEN(attend)(a, begin, end, weights.data(), mixed.data());
  });
  PyEval_RestoreThread(state);
  return none();
}

PyObject* py_draw(PyObject*, PyObject* args) {
  unsigned long long weights, seeds, positions, out;
  long long rows, columns, threads;
  if (!PyArg_ParseTuple(args, "KKKKLLL", &weights, &seeds, &positions, &out, &rows, &columns, &threads)) return nullptr;
  PyThreadState* state = PyEval_SaveThread();
  shared(rows, 20.0 * static_cast<double>(rows) * static_cast<double>(columns), threads, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      address<int64_t>(out)[row] = first_of(address<float>(weights) + row * columns, columns, address<uint64_t>(seeds)[row],
                                            static_cast<uint32_t>(address<int64_t>(positions)[row]));
  });
  PyEval_RestoreThread(state);
  return none();
}

// In place, of `count` values, by the C library's functions: a vector of them may be rounded otherwise than a single one.
PyObject* py_map(PyObject*, PyObject* args) {
  unsigned long long values;
  long long count, threads;
  int function;
  if (!PyArg_ParseTuple(args, "CKLL", &function, &values, &count, &threads)) return nullptr;
  float* const x = address<float>(values);
  PyThreadState* state = PyEval_SaveThread();
  shared(count, 8.0 * static_cast<double>(count), threads, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      x[i] = function == 'e' ? std::exp(x[i]) : function == 'l' ? std::log(x[i]) : function == 't' ? std::tanh(x[i]) : std::erf(x[i]);
  });
  PyEval_RestoreThread(state);
  return none();
}

PyMethodDef kMethods[] = {
    {"product", py_product, METH_VARARGS, "product(x, x_stride, w, w_stride, bias or 0, out, out_stride, rows, columns, inner, threads)"},
    {"attend", py_attend, METH_VARARGS,
     "attend(q, k, v, out, slots, sequences, lengths, strides of slots, q, k, v and out, heads, kv_heads, dim, v_dim, window or 0, scale, "
     "queries, longest, threads)"},
    {"draw", py_draw, METH_VARARGS, "draw(weights, seeds, positions, out, rows, columns, threads)"},
    {"map", py_map, METH_VARARGS, "map('e'xp | 'l'og | 't'anh | e'r'f, values, count, threads)"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT, "_rows", "Operations of rows in a fixed order.", 0, kMethods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

extern "C" PyMODINIT_FUNC PyInit__rows() { return PyModule_Create(&kModule); }
