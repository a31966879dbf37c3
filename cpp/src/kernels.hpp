// The kernels, written once over a vector V of V::blocks blocks. Included by one source file for each instruction set;
// everything is in an unnamed namespace, so that no file's instructions reach another's.
#pragma once

#include "deepseal/aes.hpp"
#include "deepseal/secret.hpp"
#include "linear_rows.hpp"

namespace deepseal {
namespace {

template <class V, std::size_t K>
DEEPSEAL_INLINE void hash_vectors(const AesKey& key, V (&x)[K], const V (&tweaks)[K]) {
  V::permute(key, x);
  V inner[K];
  for (std::size_t i = 0; i < K; ++i) {
    inner[i] = x[i];
    x[i] = x[i] ^ tweaks[i];
  }
  V::permute(key, x);
  for (std::size_t i = 0; i < K; ++i) x[i] = x[i] ^ inner[i];
}

// The tweaks of the left halves of V::blocks gates from `first` on; those of the right halves are greater by 1.
template <class V>
DEEPSEAL_INLINE V gate_tweaks(std::uint64_t first) {
  return V::count(tweak(Domain::gate, 0, 2 * first), 2);
}

// M vectors of gates, all of them in flight at once.
template <class V, std::size_t M>
DEEPSEAL_INLINE void garble_step(const AesKey& key, V offset, const Block* a, const Block* b, Block* c, Block* tables,
                                 V first) {
  constexpr std::size_t N = V::blocks;
  V x[4 * M];
  V tweaks[4 * M];
  V zero[2 * M];
  for (std::size_t i = 0; i < M; ++i) {
    const V a0 = zero[2 * i] = V::load(a + i * N);
    const V b0 = zero[2 * i + 1] = V::load(b + i * N);
    x[4 * i] = a0;
    x[4 * i + 1] = a0 ^ offset;
    x[4 * i + 2] = b0;
    x[4 * i + 3] = b0 ^ offset;
    tweaks[4 * i] = tweaks[4 * i + 1] = first.advanced(2 * i * N);
    tweaks[4 * i + 2] = tweaks[4 * i + 3] = first.advanced(2 * i * N + 1);
  }
  hash_vectors<V, 4 * M>(key, x, tweaks);
  for (std::size_t i = 0; i < M; ++i) {
    const V a0 = zero[2 * i];
    const V b0 = zero[2 * i + 1];
    const V colour_a = V::spread(a0);
    const V colour_b = V::spread(b0);
    const V generator = x[4 * i] ^ x[4 * i + 1] ^ (colour_b & offset);
    const V evaluator = x[4 * i + 2] ^ x[4 * i + 3] ^ a0;
    V::store_pairs(tables + 2 * i * N, generator, evaluator);
    V::store(c + i * N, x[4 * i] ^ (colour_a & generator) ^ x[4 * i + 2] ^ (colour_b & (evaluator ^ a0)));
  }
}

template <class V, std::size_t M>
DEEPSEAL_INLINE void evaluate_step(const AesKey& key, const Block* a, const Block* b, const Block* tables, Block* c,
                                   V first) {
  constexpr std::size_t N = V::blocks;
  V x[2 * M];
  V tweaks[2 * M];
  V active[2 * M];
  for (std::size_t i = 0; i < M; ++i) {
    x[2 * i] = active[2 * i] = V::load(a + i * N);
    x[2 * i + 1] = active[2 * i + 1] = V::load(b + i * N);
    tweaks[2 * i] = first.advanced(2 * i * N);
    tweaks[2 * i + 1] = first.advanced(2 * i * N + 1);
  }
  hash_vectors<V, 2 * M>(key, x, tweaks);
  for (std::size_t i = 0; i < M; ++i) {
    V generator;
    V evaluator;
    V::load_pairs(tables + 2 * i * N, generator, evaluator);
    const V left = x[2 * i] ^ (V::spread(active[2 * i]) & generator);
    const V right = x[2 * i + 1] ^ (V::spread(active[2 * i + 1]) & (evaluator ^ active[2 * i]));
    V::store(c + i * N, left ^ right);
  }
}

template <class V>
void garble_gates(const AesKey& key, Block delta, const Block* a, const Block* b, Block* c, Block* tables,
                  std::uint64_t first, std::size_t n) {
  constexpr std::size_t step = V::garbled * V::blocks;
  const V offset = V::broadcast(delta);
  V tweaks = gate_tweaks<V>(first);
  std::size_t i = 0;
  for (; i + step <= n; i += step) {
    garble_step<V, V::garbled>(key, offset, a + i, b + i, c + i, tables + 2 * i, tweaks);
    tweaks = tweaks.advanced(2 * step);
  }
  if (i == n) return;
  Block padded[3][step] = {};
  Block rows[2 * step];
  for (std::size_t j = 0; j < n - i; ++j) {
    padded[0][j] = a[i + j];
    padded[1][j] = b[i + j];
  }
  garble_step<V, V::garbled>(key, offset, padded[0], padded[1], padded[2], rows, tweaks);
  for (std::size_t j = 0; j < n - i; ++j) {
    c[i + j] = padded[2][j];
    tables[2 * (i + j)] = rows[2 * j];
    tables[2 * (i + j) + 1] = rows[2 * j + 1];
  }
  wipe(padded, sizeof padded);
}

template <class V>
void evaluate_gates(const AesKey& key, const Block* a, const Block* b, const Block* tables, Block* c,
                    std::uint64_t first, std::size_t n) {
  constexpr std::size_t step = V::evaluated * V::blocks;
  V tweaks = gate_tweaks<V>(first);
  std::size_t i = 0;
  for (; i + step <= n; i += step) {
    evaluate_step<V, V::evaluated>(key, a + i, b + i, tables + 2 * i, c + i, tweaks);
    tweaks = tweaks.advanced(2 * step);
  }
  if (i == n) return;
  Block padded[3][step] = {};
  Block rows[2 * step] = {};
  for (std::size_t j = 0; j < n - i; ++j) {
    padded[0][j] = a[i + j];
    padded[1][j] = b[i + j];
    rows[2 * j] = tables[2 * (i + j)];
    rows[2 * j + 1] = tables[2 * (i + j) + 1];
  }
  evaluate_step<V, V::evaluated>(key, padded[0], padded[1], rows, padded[2], tweaks);
  for (std::size_t j = 0; j < n - i; ++j) c[i + j] = padded[2][j];
  wipe(padded, sizeof padded);
}

template <class V>
void hash_blocks(const AesKey& key, const Block* x, Block first, Block* out, std::size_t n) {
  constexpr std::size_t K = V::streamed;
  constexpr std::size_t step = K * V::blocks;
  Block padded[step] = {};
  V counter = V::count(first, 1);
  for (std::size_t i = 0; i < n; i += step) {
    const std::size_t size = n - i < step ? n - i : step;
    const Block* from = x + i;
    if (size < step) {
      for (std::size_t j = 0; j < size; ++j) padded[j] = x[i + j];
      from = padded;
    }
    V vectors[K];
    V tweaks[K];
    for (std::size_t j = 0; j < K; ++j) {
      vectors[j] = V::load(from + j * V::blocks);
      tweaks[j] = counter.advanced(j * V::blocks);
    }
    counter = counter.advanced(step);
    hash_vectors<V, K>(key, vectors, tweaks);
    Block* to = size < step ? padded : out + i;
    for (std::size_t j = 0; j < K; ++j) V::store(to + j * V::blocks, vectors[j]);
    if (size < step)
      for (std::size_t j = 0; j < size; ++j) out[i + j] = padded[j];
  }
}

// out[i] = AES(x(i)) for vectors made by `vector(i)`, called in order with the index of their first block.
template <class V, class Source>
DEEPSEAL_INLINE void encrypt_from(const AesKey& key, Source vector, Block* out, std::size_t n) {
  constexpr std::size_t K = V::streamed;
  constexpr std::size_t step = K * V::blocks;
  for (std::size_t i = 0; i < n; i += step) {
    V x[K];
    for (std::size_t j = 0; j < K; ++j) x[j] = vector(i + j * V::blocks);
    V::permute(key, x);
    if (i + step <= n) {
      for (std::size_t j = 0; j < K; ++j) V::store(out + i + j * V::blocks, x[j]);
    } else {
      Block padded[step];
      for (std::size_t j = 0; j < K; ++j) V::store(padded + j * V::blocks, x[j]);
      for (std::size_t j = 0; i + j < n; ++j) out[i + j] = padded[j];
    }
  }
}

template <class V>
void stream_blocks(const AesKey& key, Block first, Block* out, std::size_t n) {
  V next = V::count(first, 1);
  const auto counter = [next](std::size_t) mutable {
    const V current = next;
    next = next.advanced(V::blocks);
    return current;
  };
  encrypt_from<V>(key, counter, out, n);
}

template <class V>
void encrypt_blocks(const AesKey& key, const Block* in, Block* out, std::size_t n) {
  const auto read = [&](std::size_t i) {
    if (i + V::blocks <= n) return V::load(in + i);
    Block padded[V::blocks] = {};
    for (std::size_t j = 0; i + j < n; ++j) padded[j] = in[i + j];
    return V::load(padded);
  };
  encrypt_from<V>(key, read, out, n);
}

template <class V>
void stretch_rows(const AesKey& key, const Block* x, std::size_t rows, std::size_t share, Block first, std::size_t n,
                  std::size_t stride, Block* out) {
  constexpr std::size_t K = V::streamed;
  constexpr std::size_t at_once = 32;
  Block inner[at_once];
  V inputs[K] = {};
  V masks[K] = {};
  Block* targets[K];
  std::size_t filled = 0;
  const auto empty = [&] {
    V y[K];
    for (std::size_t i = 0; i < K; ++i) y[i] = inputs[i];
    V::permute(key, y);
    for (std::size_t i = 0; i < filled; ++i) V::store(targets[i], y[i] ^ masks[i]);
    filled = 0;
  };
  for (std::size_t row = 0; row < rows; ++row) {
    if (row % at_once == 0) encrypt_blocks<V>(key, x + row, inner, rows - row < at_once ? rows - row : at_once);
    const V point = V::broadcast(inner[row % at_once]);
    V tweaks = V::count({first.low + row / share * n, first.high}, 1);
    for (std::size_t j = 0; j < n; j += V::blocks) {
      inputs[filled] = point ^ tweaks;
      masks[filled] = point;
      targets[filled] = out + row * stride + j;
      tweaks = tweaks.advanced(V::blocks);
      if (++filled == K) empty();
    }
  }
  if (filled != 0) empty();
  wipe(inner, sizeof inner);
  wipe(masks, sizeof masks);
  wipe(inputs, sizeof inputs);
}

template <class V>
void add_blocks(const Block* a, const Block* b, Block* c, std::size_t n) {
  std::size_t i = 0;
  for (; i + V::blocks <= n; i += V::blocks) V::store(c + i, V::load(a + i) ^ V::load(b + i));
  for (; i < n; ++i) c[i] = a[i] ^ b[i];
}

template <class V>
constexpr Kernels kernels_of(std::string_view name) {
  return {name,
          V::expand,
          add_blocks<V>,
          encrypt_blocks<V>,
          stream_blocks<V>,
          hash_blocks<V>,
          stretch_rows<V>,
          mask_rows<std::uint32_t>,
          mask_rows<std::uint64_t>,
          open_rows<std::uint32_t>,
          open_rows<std::uint64_t>,
          garble_gates<V>,
          evaluate_gates<V>};
}

}  // namespace
}  // namespace deepseal
