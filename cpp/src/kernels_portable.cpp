// AES without instructions for it, bitsliced: 64 bytes (four blocks) lie in eight 64-bit planes, plane b holding bit b of
// every byte, so that nothing is looked up by a secret; two such groups go through the rounds at once. The S-box is the circuit of Boyar and Peralta, "A small
// depth-16 circuit for the AES S-box" (SEC 2012), with 128 gates.
#include <array>

#include "kernels.hpp"

namespace deepseal {
namespace {

using Words = std::array<std::uint64_t, 8>;
using Plane = std::uint64_t __attribute__((vector_size(16)));
using Planes = std::array<Plane, 8>;

// An 8 x 8 bit matrix a word: byte i, bit j becomes byte j, bit i.
std::uint64_t transpose(std::uint64_t x) {
  std::uint64_t t = (x ^ x >> 7) & 0x00aa00aa00aa00aa;
  x ^= t ^ t << 7;
  t = (x ^ x >> 14) & 0x0000cccc0000cccc;
  x ^= t ^ t << 14;
  t = (x ^ x >> 28) & 0x00000000f0f0f0f0;
  return x ^ t ^ t << 28;
}

// Bit p of plane b is bit b of byte p.
Words to_planes(const Words& words) {
  Words planes{};
  for (unsigned word = 0; word < 8; ++word) {
    const std::uint64_t bits = transpose(words[word]);
    for (unsigned b = 0; b < 8; ++b) planes[b] |= (bits >> 8 * b & 0xff) << 8 * word;
  }
  return planes;
}

Words from_planes(const Words& planes) {
  Words words{};
  for (unsigned word = 0; word < 8; ++word) {
    std::uint64_t bits = 0;
    for (unsigned b = 0; b < 8; ++b) bits |= (planes[b] >> 8 * word & 0xff) << 8 * b;
    words[word] = transpose(bits);
  }
  return words;
}

template <class T>
void sub_bytes(std::array<T, 8>& q) {
  const T u0 = q[7], u1 = q[6], u2 = q[5], u3 = q[4], u4 = q[3], u5 = q[2], u6 = q[1], u7 = q[0];
  // Linear map into the tower field.
  const T y14 = u3 ^ u5, y13 = u0 ^ u6, y9 = u0 ^ u3, y8 = u0 ^ u5, t0 = u1 ^ u2;
  const T y1 = t0 ^ u7, y4 = y1 ^ u3, y12 = y13 ^ y14, y2 = y1 ^ u0, y5 = y1 ^ u6, y3 = y5 ^ y8;
  const T t1 = u4 ^ y12, y15 = t1 ^ u5, y20 = t1 ^ u1, y6 = y15 ^ u7, y10 = y15 ^ t0;
  const T y11 = y20 ^ y9, y7 = u7 ^ y11, y17 = y10 ^ y11, y19 = y10 ^ y8, y16 = t0 ^ y11;
  const T y21 = y13 ^ y16, y18 = u0 ^ y16;
  // Inversion in GF(2^8).
  const T t2 = y12 & y15, t3 = y3 & y6, t4 = t3 ^ t2, t5 = y4 & u7, t6 = t5 ^ t2;
  const T t7 = y13 & y16, t8 = y5 & y1, t9 = t8 ^ t7, t10 = y2 & y7, t11 = t10 ^ t7;
  const T t12 = y9 & y11, t13 = y14 & y17, t14 = t13 ^ t12, t15 = y8 & y10, t16 = t15 ^ t12;
  const T t17 = t4 ^ t14, t18 = t6 ^ t16, t19 = t9 ^ t14, t20 = t11 ^ t16;
  const T t21 = t17 ^ y20, t22 = t18 ^ y19, t23 = t19 ^ y21, t24 = t20 ^ y18;
  const T t25 = t21 ^ t22, t26 = t21 & t23, t27 = t24 ^ t26, t28 = t25 & t27, t29 = t28 ^ t22;
  const T t30 = t23 ^ t24, t31 = t22 ^ t26, t32 = t31 & t30, t33 = t32 ^ t24, t34 = t23 ^ t33;
  const T t35 = t27 ^ t33, t36 = t24 & t35, t37 = t36 ^ t34, t38 = t27 ^ t36, t39 = t29 & t38;
  const T t40 = t25 ^ t39, t41 = t40 ^ t37, t42 = t29 ^ t33, t43 = t29 ^ t40, t44 = t33 ^ t37;
  const T t45 = t42 ^ t41;
  const T z0 = t44 & y15, z1 = t37 & y6, z2 = t33 & u7, z3 = t43 & y16, z4 = t40 & y1, z5 = t29 & y7;
  const T z6 = t42 & y11, z7 = t45 & y17, z8 = t41 & y10, z9 = t44 & y12, z10 = t37 & y3;
  const T z11 = t33 & y4, z12 = t43 & y13, z13 = t40 & y5, z14 = t29 & y2, z15 = t42 & y9;
  const T z16 = t45 & y14, z17 = t41 & y8;
  // Linear map back, with the affine constant 0x63.
  const T t46 = z15 ^ z16, t47 = z10 ^ z11, t48 = z5 ^ z13, t49 = z9 ^ z10, t50 = z2 ^ z12;
  const T t51 = z2 ^ z5, t52 = z7 ^ z8, t53 = z0 ^ z3, t54 = z6 ^ z7, t55 = z16 ^ z17, t56 = z12 ^ t48;
  const T t57 = t50 ^ t53, t58 = z4 ^ t46, t59 = z3 ^ t54, t60 = t46 ^ t57, t61 = z14 ^ t57;
  const T t62 = t52 ^ t58, t63 = t49 ^ t58, t64 = z4 ^ t59, t65 = t61 ^ t62, t66 = z1 ^ t63;
  const T s3 = t53 ^ t66, t67 = t64 ^ t65;
  q[7] = t59 ^ t63;
  q[6] = ~(t64 ^ s3);
  q[5] = ~(t55 ^ t67);
  q[4] = s3;
  q[3] = t51 ^ t66;
  q[2] = t47 ^ t65;
  q[1] = ~(t56 ^ t62);
  q[0] = ~(t48 ^ t60);
}

// Byte 4 c + r of a block is row r of column c; row r moves r columns.
void shift_rows(Planes& q) {
  for (Plane& x : q) {
    const Plane row1 = x & 0x2222222222222222;
    const Plane row2 = x & 0x4444444444444444;
    const Plane row3 = x & 0x8888888888888888;
    x = (x & 0x1111111111111111) | (row1 >> 4 & 0x0222022202220222) | (row1 << 12 & 0x2000200020002000) |
        (row2 >> 8 & 0x0044004400440044) | (row2 << 8 & 0x4400440044004400) | (row3 >> 12 & 0x0008000800080008) |
        (row3 << 4 & 0x8880888088808880);
  }
}

Plane next_row(Plane x) { return (x >> 1 & 0x7777777777777777) | (x << 3 & 0x8888888888888888); }
Plane second_row(Plane x) { return (x >> 2 & 0x3333333333333333) | (x << 2 & 0xcccccccccccccccc); }

// A column a, b, c, d becomes 2 a + 3 b + c + d = 2 (a + b) + b + (c + d), and so on for each row.
void mix_columns(Planes& q) {
  Planes next, sum;
  for (unsigned b = 0; b < 8; ++b) {
    next[b] = next_row(q[b]);
    sum[b] = q[b] ^ next[b];
  }
  for (unsigned b = 0; b < 8; ++b) {
    Plane doubled = b == 0 ? sum[7] : sum[b - 1];
    if (b == 1 || b == 3 || b == 4) doubled ^= sum[7];
    q[b] = doubled ^ next[b] ^ second_row(sum[b]);
  }
}

void add_round_key(Planes& q, const std::uint64_t (&planes)[8]) {
  for (unsigned b = 0; b < 8; ++b) q[b] ^= planes[b];
}

Words words_of(const Block* x) {
  return {x[0].low, x[0].high, x[1].low, x[1].high, x[2].low, x[2].high, x[3].low, x[3].high};
}

void encrypt_eight(const AesKey& key, Block (&x)[8]) {
  const Words groups[2] = {to_planes(words_of(x)), to_planes(words_of(x + 4))};
  Planes q;
  for (unsigned b = 0; b < 8; ++b) q[b] = Plane{groups[0][b], groups[1][b]};
  add_round_key(q, key.planes[0]);
  for (unsigned round = 1; round < 11; ++round) {
    sub_bytes(q);
    shift_rows(q);
    if (round < 10) mix_columns(q);
    add_round_key(q, key.planes[round]);
  }
  for (unsigned group = 0; group < 2; ++group) {
    Words planes;
    for (unsigned b = 0; b < 8; ++b) planes[b] = q[b][group];
    const Words words = from_planes(planes);
    for (unsigned i = 0; i < 4; ++i) x[4 * group + i] = {words[2 * i], words[2 * i + 1]};
  }
}

std::uint32_t sub_word(std::uint32_t word) {
  Words q = to_planes({word, 0, 0, 0, 0, 0, 0, 0});
  sub_bytes(q);
  return static_cast<std::uint32_t>(from_planes(q)[0]);
}

struct Vector {
  static constexpr std::size_t blocks = 1;
  static constexpr std::size_t garbled = 2;
  static constexpr std::size_t evaluated = 4;
  static constexpr std::size_t streamed = 8;

  Block value;

  static void expand(Block key, AesKey& expanded) {
    std::uint32_t words[44] = {static_cast<std::uint32_t>(key.low), static_cast<std::uint32_t>(key.low >> 32),
                               static_cast<std::uint32_t>(key.high), static_cast<std::uint32_t>(key.high >> 32)};
    std::uint32_t constant = 1;
    for (unsigned i = 4; i < 44; ++i) {
      std::uint32_t word = words[i - 1];
      if (i % 4 == 0) {
        word = sub_word(word >> 8 | word << 24) ^ constant;
        constant = constant << 1 ^ (constant >> 7) * 0x11b;
      }
      words[i] = words[i - 4] ^ word;
    }
    for (unsigned i = 0; i < 11; ++i) {
      const Block round = {words[4 * i] | std::uint64_t{words[4 * i + 1]} << 32,
                           words[4 * i + 2] | std::uint64_t{words[4 * i + 3]} << 32};
      const Block four[4] = {round, round, round, round};
      const Words planes = to_planes(words_of(four));
      expanded.round[i] = round;
      for (unsigned b = 0; b < 8; ++b) expanded.planes[i][b] = planes[b];
    }
  }

  template <std::size_t K>
  static void permute(const AesKey& key, Vector (&x)[K]) {
    static_assert(K == 8);
    Block eight[8];
    for (std::size_t i = 0; i < 8; ++i) eight[i] = x[i].value;
    encrypt_eight(key, eight);
    for (std::size_t i = 0; i < 8; ++i) x[i].value = eight[i];
  }
  static Vector load(const Block* from) { return {*from}; }
  static void store(Block* to, Vector x) { *to = x.value; }
  static Vector broadcast(const Block& block) { return {block}; }
  static Vector count(Block first, int) { return {first}; }
  Vector advanced(std::uint64_t by) const { return {{value.low + by, value.high}}; }
  static Vector spread(Vector x) { return {mask(x.value.low)}; }
  static void store_pairs(Block* to, Vector x, Vector y) {
    to[0] = x.value;
    to[1] = y.value;
  }
  static void load_pairs(const Block* from, Vector& x, Vector& y) {
    x.value = from[0];
    y.value = from[1];
  }
};

Vector operator^(Vector x, Vector y) { return {x.value ^ y.value}; }
Vector operator&(Vector x, Vector y) { return {x.value & y.value}; }

}  // namespace

extern const Kernels portable_kernels;
constinit const Kernels portable_kernels = kernels_of<Vector>("portable");

}  // namespace deepseal
