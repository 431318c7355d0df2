// Inner loops of rows.cpp, which includes this once for each kind of processor, in a namespace of its own: GCC makes one instruction of an operation
// on all lanes only where the target is known from the start. TILE: rows and columns that share their loads.

INLINE Lanes loaded(const float* from) { return *reinterpret_cast<const Image*>(from); }

INLINE Lanes rest(const float* from, int64_t count) {  // zeros add nothing
  Lanes some = {};
  for (int64_t i = 0; i < count; ++i) some[i] = from[i];
  return some;
}

// Lanes i and i + 8 are added, then i and i + 4, i + 2, i + 1.
INLINE float folded(Lanes x) {
  x += PERMUTED(x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  x += PERMUTED(x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  x += PERMUTED(x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  return x[0] + x[1];
}

// out[i][j] = the sum over k of x[i][k] * w[j][k], and bias[j]. Lane l adds up k = l, l + 16, l + 32 ...
template <int M, int N>
INLINE void tile(const float* x, int64_t x_stride, const float* w, int64_t w_stride, const float* bias, float* out, int64_t out_stride,
                 int64_t inner) {
  Lanes sums[M][N] = {};
  int64_t k = 0;
  for (; k + kLanes <= inner; k += kLanes) {
    Lanes a[M];
    for (int i = 0; i < M; ++i) a[i] = loaded(x + i * x_stride + k);
    for (int j = 0; j < N; ++j) {
      const Lanes b = loaded(w + j * w_stride + k);
      for (int i = 0; i < M; ++i) sums[i][j] += a[i] * b;
    }
  }
  if (k < inner) {
    for (int j = 0; j < N; ++j) {
      const Lanes b = rest(w + j * w_stride + k, inner - k);
      for (int i = 0; i < M; ++i) sums[i][j] += rest(x + i * x_stride + k, inner - k) * b;
    }
  }
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; ++j) {
      const float sum = folded(sums[i][j]);
      out[i * out_stride + j] = bias ? sum + bias[j] : sum;
    }
}

template <int N>
INLINE void columns_of(const Product& p, int64_t j, int64_t begin, int64_t end) {
  int64_t i = begin;
  const float *w = p.w + j * p.w_stride, *bias = p.bias ? p.bias + j : nullptr;
  for (; i + TILE <= end; i += TILE)
    tile<TILE, N>(p.x + i * p.x_stride, p.x_stride, w, p.w_stride, bias, p.out + i * p.out_stride + j, p.out_stride, p.inner);
  for (; i < end; ++i) tile<1, N>(p.x + i * p.x_stride, p.x_stride, w, p.w_stride, bias, p.out + i * p.out_stride + j, p.out_stride, p.inner);
}

void multiply(const Product& p, int64_t row, int64_t row_end, int64_t column, int64_t column_end) {
  int64_t j = column;
  for (; j + TILE <= column_end; j += TILE) columns_of<TILE>(p, j, row, row_end);
  for (; j < column_end; ++j) columns_of<1>(p, j, row, row_end);
}

void attend(const Attention& a, int64_t begin, int64_t end, float* weights, float* mixed) {
  for (int64_t t = begin; t < end; ++t) {
    const int64_t first = a.window > 0 ? std::max<int64_t>(0, a.lengths[t] - a.window) : 0, keys = a.lengths[t] - first;
    const int64_t* const slots = a.slots + a.sequences[t] * a.slots_stride + first;
    for (int64_t head = 0; head < a.heads; ++head) {
      const int64_t kv_head = head / (a.heads / a.kv_heads);
      const float *const q = a.q + t * a.q_stride + head * a.dim, *const k = a.k + kv_head * a.dim, *const v = a.v + kv_head * a.v_dim;
      float top = -std::numeric_limits<float>::infinity();
      for (int64_t j = 0; j < keys; ++j) {
        tile<1, 1>(q, 0, k + slots[j] * a.k_stride, 0, nullptr, weights + j, 0, a.dim);
        weights[j] *= a.scale;
        top = std::max(top, weights[j]);
      }
      Lanes sums = {};
      for (int64_t j = 0; j < keys; ++j) weights[j] = std::exp(weights[j] - top);
      int64_t whole = 0;
      for (; whole + kLanes <= keys; whole += kLanes) sums += loaded(weights + whole);
      sums += rest(weights + whole, keys - whole);
      std::fill(mixed, mixed + a.v_dim, 0.0f);
      for (int64_t j = 0; j < keys; ++j) {
        const float* const row = v + slots[j] * a.v_stride;
        for (int64_t d = 0; d < a.v_dim; ++d) mixed[d] += weights[j] * row[d];
      }
      const float total = folded(sums);
      float* const out = a.out + t * a.out_stride + head * a.v_dim;
      for (int64_t d = 0; d < a.v_dim; ++d) out[d] = mixed[d] / total;
    }
  }
}
