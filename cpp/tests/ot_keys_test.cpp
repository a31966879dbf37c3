#include "deepseal/ot_keys.hpp"

#include <algorithm>
#include <stdexcept>
#include <unordered_set>

#include "draw.hpp"
#include "test.hpp"
#include "textbook_aes.hpp"

using namespace deepseal;
using deepseal::testing::Draw;
using deepseal::testing::textbook_aes;

namespace {

constexpr Block seed{9, 10};

struct Correlated {
  Block offset;
  Delta delta;
  std::vector<std::uint8_t> bits;
  std::vector<Block> q;
  std::vector<Block> t;

  Correlated(Draw& draw, std::size_t n) : Correlated(draw, n, draw.block()) {}
  Correlated(Draw& draw, std::size_t n, Block value)
      : offset{value.low | 1, value.high}, delta(value), bits(draw.bits(n)), q(draw.blocks(n)), t(q) {
    for (std::size_t i = 0; i < n; ++i) t[i] ^= mask(bits[i]) & offset;
  }
};

std::vector<Block> pairs_of(OtKeys& keys, const Correlated& ots, std::uint64_t use, std::uint64_t first) {
  std::vector<Block> result(2 * ots.q.size());
  keys.pairs(ots.delta, ots.q.data(), use, first, result.data(), ots.q.size());
  return result;
}

std::vector<Block> chosen_of(OtKeys& keys, const Correlated& ots, std::uint64_t use, std::uint64_t first) {
  std::vector<Block> result(ots.t.size());
  keys.chosen(ots.t.data(), use, first, result.data(), ots.t.size());
  return result;
}

// Bit `place` of the packed row.
bool bit_at(const std::uint8_t* row, std::size_t place) { return (row[place / 8] >> place % 8 & 1) != 0; }

}  // namespace

TEST_CASE("the receiver's key is the chosen one of the sender's two, never the other") {
  Draw draw(1);
  for (const Kernels* tested : available_kernels())
    for (const std::size_t n : {0, 1, 511, 512, 513, 1500}) {
      CAPTURE(tested->name);
      CAPTURE(n);
      const SessionKeys session(*tested, seed);
      OtKeys sender(session), receiver(SessionKeys(kernels("portable"), seed));
      const Correlated ots(draw, n);
      const std::uint64_t use = draw.word() >> 8;
      const std::uint64_t first = draw.word() >> 20;
      const std::vector<Block> pairs = pairs_of(sender, ots, use, first);
      const std::vector<Block> chosen = chosen_of(receiver, ots, use, first);
      bool right = true;
      for (std::size_t i = 0; i < n; ++i)
        right = right && chosen[i] == pairs[2 * i + ots.bits[i]] && !(chosen[i] == pairs[2 * i + 1 - ots.bits[i]]);
      CHECK(right);
    }
}

TEST_CASE("keys by their definition: the tweak has domain, use and index; the key changes every 8,192 OTs") {
  Draw draw(2);
  for (const auto domain : {Domain::ot, Domain::payload}) {
    const auto number = static_cast<std::uint64_t>(domain);
    OtKeys keys(SessionKeys(kernels(), seed), domain);
    const Correlated ots(draw, 600);
    const std::uint64_t first = 3 * 8192 - 300;
    const std::vector<Block> pairs = pairs_of(keys, ots, 77, first);
    bool right = true;
    for (std::size_t i = 0; i < 600; ++i) {
      const std::uint64_t index = first + i;
      const Block key = textbook_aes(seed, Block{1 + index / 8192, number});
      const auto hash = [&](Block x) {
        const Block inner = textbook_aes(key, x);
        return textbook_aes(key, inner ^ Block{index, number << 56 | 77}) ^ inner;
      };
      right = right && pairs[2 * i] == hash(ots.q[i]) && pairs[2 * i + 1] == hash(ots.q[i] ^ ots.offset);
    }
    CHECK(right);
  }
}

TEST_CASE("other uses, indices and domains give other keys for the same OTs; pieces give the same") {
  Draw draw(3);
  const SessionKeys session(kernels(), seed);
  OtKeys keys(session), payload(session, Domain::payload);
  const Correlated ots(draw, 100);
  const std::vector<Block> reference = chosen_of(keys, ots, 5, 50);
  for (const auto& other : {chosen_of(keys, ots, 6, 50), chosen_of(keys, ots, 5, 51), chosen_of(payload, ots, 5, 50)}) {
    bool differ = true;
    for (std::size_t i = 0; i < 100; ++i) differ = differ && !(other[i] == reference[i]);
    CHECK(differ);
  }
  std::vector<Block> pieces(100);
  keys.chosen(ots.t.data() + 37, 5, 87, pieces.data() + 37, 63);
  keys.chosen(ots.t.data(), 5, 50, pieces.data(), 37);
  CHECK(pieces == reference);
}

TEST_CASE("ring: r = s + c v mod 2^l, for every l and several widths") {
  Draw draw(4);
  const std::size_t n = 9;
  for (unsigned bits = 1; bits <= 64; ++bits)
    for (const std::size_t width : {1, 2, 3, 8, 17, 100}) {
      CAPTURE(bits);
      CAPTURE(width);
      const std::uint64_t modulus_mask = bits == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << bits) - 1;
      const RingOt sender(SessionKeys(kernels(), seed), bits, width);
      const RingOt receiver(SessionKeys(kernels("portable"), seed), bits, width);
      CHECK(sender.row_bytes() == (bits * width + 7) / 8);
      const std::vector<Block> keys = draw.blocks(2 * n);
      const std::vector<std::uint8_t> choices = draw.bits(n);
      std::vector<Block> chosen(n);
      for (std::size_t i = 0; i < n; ++i) chosen[i] = keys[2 * i + choices[i]];
      std::vector<std::uint64_t> values(n * width), s(n * width), r(n * width);
      for (std::uint64_t& value : values) value = draw.word();  // taken mod 2^l
      std::vector<std::uint8_t> message(n * sender.row_bytes(), 0xff);
      sender.send(keys, values, s.data(), message.data());
      receiver.receive(chosen, choices.data(), message, r.data());
      bool right = true;
      for (std::size_t i = 0; i < n; ++i)
        for (std::size_t j = 0; j < width; ++j) {
          const std::uint64_t share = s[i * width + j];
          const std::uint64_t expected = share + (choices[i] == 1 ? values[i * width + j] : 0);
          right = right && (share & ~modulus_mask) == 0 && r[i * width + j] == (expected & modulus_mask);
        }
      CHECK(right);
      bool padding = false;
      for (std::size_t i = 0; i < n; ++i)
        for (std::size_t place = bits * width; place < 8 * sender.row_bytes(); ++place)
          padding = padding || bit_at(message.data() + i * sender.row_bytes(), place);
      CHECK(!padding);
    }
}

TEST_CASE("ring: without OTs nothing is sent") {
  const RingOt ring(SessionKeys(kernels(), seed), 13, 4);
  ring.send({}, {}, nullptr, nullptr);
  ring.receive({}, nullptr, {}, nullptr);
}

TEST_CASE("ring: elements and sizes that do not fit are refused") {
  const SessionKeys session(kernels(), seed);
  CHECK_THROWS_AS(RingOt(session, 0, 1), std::invalid_argument);
  CHECK_THROWS_AS(RingOt(session, 65, 1), std::invalid_argument);
  CHECK_THROWS_AS(RingOt(session, 8, 0), std::invalid_argument);
  CHECK_THROWS_AS(RingOt(session, 64, std::size_t{1} << 58), std::invalid_argument);  // a row's bits do not fit 64

  const RingOt ring(session, 10, 3);
  const std::vector<Block> keys(4);
  const std::vector<std::uint64_t> values(9);
  const std::vector<std::uint8_t> message(12), choices(4);
  std::vector<std::uint64_t> shares(12);
  std::vector<std::uint8_t> out(12);
  const auto send = [&](std::size_t k, std::size_t v) {
    ring.send(std::span(keys).first(k), std::span(values).first(v), shares.data(), out.data());
  };
  CHECK_THROWS_AS(send(3, 6), std::invalid_argument);
  CHECK_THROWS_AS(send(4, 5), std::invalid_argument);
  CHECK_THROWS_AS(send(2, 6), std::invalid_argument);
  for (const std::size_t size : {0, 7, 9, 12})
    CHECK_THROWS_AS(ring.receive(std::span(keys).first(2), choices.data(), std::span(message).first(size), shares.data()),
                    std::invalid_argument);
}
