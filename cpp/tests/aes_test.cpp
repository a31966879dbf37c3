#include "deepseal/aes.hpp"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <string>

#include "deepseal/session.hpp"
#include "draw.hpp"
#include "test.hpp"
#include "textbook_aes.hpp"

using namespace deepseal;
using deepseal::testing::block_of;
using deepseal::testing::bytes_of;
using deepseal::testing::Bytes16;
using deepseal::testing::Draw;
using deepseal::testing::textbook_aes;

namespace {

constexpr std::size_t most = 70;  // more than two registers' worth of every kernel
constexpr Block guard{0x1122334455667788, 0x99aabbccddeeff00};

AesKey expanded(const Kernels& kernels, Block key) {
  AesKey result;
  kernels.expand(key, result);
  return result;
}

Bytes16 encrypt(const Kernels& kernels, const Bytes16& key, const Bytes16& x) {
  const Block in = block_of(x);
  Block out;
  kernels.encrypt(expanded(kernels, block_of(key)), &in, &out, 1);
  return bytes_of(out);
}

// pi(pi(x) ^ t) ^ pi(x)
Block tmmo(Block key, Block x, Block t) {
  const Block inner = textbook_aes(key, x);
  return textbook_aes(key, inner ^ t) ^ inner;
}

bool untouched(const std::vector<Block>& out, std::size_t from) {
  return std::all_of(out.begin() + static_cast<std::ptrdiff_t>(from), out.end(), [](Block x) { return x == guard; });
}

}  // namespace

TEST_CASE("kernels: portable is last, names are unique, the first is the default, unknown names are refused") {
  std::set<std::string_view> names;
  for (const Kernels* known : available_kernels()) {
    names.insert(known->name);
    CHECK(&kernels(known->name) == known);
  }
  CHECK(names.size() == available_kernels().size());
  CHECK(available_kernels().back()->name == "portable");
  CHECK(&kernels() == available_kernels().front());
  CHECK_THROWS_AS(kernels("rot13"), std::invalid_argument);
}

TEST_CASE("FIPS 197: the examples of appendix B and C.1, the last round key of appendix A.1") {
  const Bytes16 key_b = {0x2b, 0x7e, 0x15, 0x16, 0x28, 0xae, 0xd2, 0xa6, 0xab, 0xf7, 0x15, 0x88, 0x09, 0xcf, 0x4f, 0x3c};
  const Bytes16 in_b = {0x32, 0x43, 0xf6, 0xa8, 0x88, 0x5a, 0x30, 0x8d, 0x31, 0x31, 0x98, 0xa2, 0xe0, 0x37, 0x07, 0x34};
  const Bytes16 out_b = {0x39, 0x25, 0x84, 0x1d, 0x02, 0xdc, 0x09, 0xfb, 0xdc, 0x11, 0x85, 0x97, 0x19, 0x6a, 0x0b, 0x32};
  const Bytes16 last = {0xd0, 0x14, 0xf9, 0xa8, 0xc9, 0xee, 0x25, 0x89, 0xe1, 0x3f, 0x0c, 0xc8, 0xb6, 0x63, 0x0c, 0xa6};
  Bytes16 key_c, in_c;
  for (std::size_t i = 0; i < 16; ++i) {
    key_c[i] = static_cast<std::uint8_t>(i);
    in_c[i] = static_cast<std::uint8_t>(0x11 * i);
  }
  const Bytes16 out_c = {0x69, 0xc4, 0xe0, 0xd8, 0x6a, 0x7b, 0x04, 0x30, 0xd8, 0xcd, 0xb7, 0x80, 0x70, 0xb4, 0xc5, 0x5a};

  CHECK(textbook_aes(key_b, in_b) == out_b);
  CHECK(textbook_aes(key_c, in_c) == out_c);
  for (const Kernels* tested : available_kernels()) {
    CAPTURE(tested->name);
    CHECK(encrypt(*tested, key_b, in_b) == out_b);
    CHECK(encrypt(*tested, key_c, in_c) == out_c);
    CHECK(bytes_of(expanded(*tested, block_of(key_b)).round[10]) == last);
  }
}

// Round 1 substitutes x ^ key: with key 0, block v holds the value v at all 16 places.
TEST_CASE("all values of the S-box, at each place of a block and in the key schedule") {
  for (const Kernels* tested : available_kernels()) {
    CAPTURE(tested->name);
    std::vector<Block> in(256), out(256), expected(256);
    bool schedule = true;
    for (std::size_t v = 0; v < 256; ++v) {
      Bytes16 all;
      all.fill(static_cast<std::uint8_t>(v));
      in[v] = block_of(all);
      expected[v] = textbook_aes(Block{}, in[v]);
      const auto rounds = deepseal::testing::textbook_round_keys(all);
      const AesKey key = expanded(*tested, in[v]);
      for (std::size_t i = 0; i < 11; ++i) schedule = schedule && key.round[i] == block_of(rounds[i]);
    }
    tested->encrypt(expanded(*tested, Block{}), in.data(), out.data(), in.size());
    CHECK(out == expected);
    CHECK(schedule);
  }
}

TEST_CASE("encrypt, stream and hash are what they are defined as, for each size, and write no further") {
  Draw draw(1);
  for (const Kernels* tested : available_kernels()) {
    CAPTURE(tested->name);
    for (std::size_t n = 0; n <= most; ++n) {
      CAPTURE(n);
      const Block secret = draw.block();
      const AesKey key = expanded(*tested, secret);
      const Block first = draw.block();
      const std::vector<Block> x = draw.blocks(n);
      std::vector<Block> encrypted(n + 8, guard), streamed(n + 8, guard), hashed(n + 8, guard);
      tested->encrypt(key, x.data(), encrypted.data(), n);
      tested->stream(key, first, streamed.data(), n);
      tested->hash(key, x.data(), first, hashed.data(), n);
      bool equal = true;
      for (std::size_t i = 0; i < n; ++i) {
        const Block count{first.low + i, first.high};
        equal = equal && encrypted[i] == textbook_aes(secret, x[i]) && streamed[i] == textbook_aes(secret, count) &&
                hashed[i] == tmmo(secret, x[i], count);
      }
      CHECK(equal);
      CHECK((untouched(encrypted, n) && untouched(streamed, n) && untouched(hashed, n)));
    }
  }
}

TEST_CASE("counters wrap in the low 64 bits and leave the high ones alone") {
  const Block secret{3, 4};
  const Block first{~std::uint64_t{0} - 2, 0x0200000000000007};
  const Block x[8] = {};
  for (const Kernels* tested : available_kernels()) {
    CAPTURE(tested->name);
    Block streamed[8], hashed[8];
    tested->stream(expanded(*tested, secret), first, streamed, 8);
    tested->hash(expanded(*tested, secret), x, first, hashed, 8);
    for (std::size_t i = 0; i < 8; ++i) {
      const Block count{first.low + i, first.high};
      CHECK(streamed[i] == textbook_aes(secret, count));
      CHECK(hashed[i] == tmmo(secret, Block{}, count));
    }
  }
}

TEST_CASE("hash and encrypt in place") {
  Draw draw(2);
  for (const Kernels* tested : available_kernels())
    for (const std::size_t n : {1, 7, 8, 9, 31, 32, 33, 70}) {
      CAPTURE(tested->name);
      CAPTURE(n);
      const AesKey key = expanded(*tested, draw.block());
      const std::vector<Block> x = draw.blocks(n);
      std::vector<Block> apart(n), place = x;
      tested->hash(key, x.data(), Block{5, 6}, apart.data(), n);
      tested->hash(key, place.data(), Block{5, 6}, place.data(), n);
      CHECK(place == apart);
      place = x;
      tested->encrypt(key, x.data(), apart.data(), n);
      tested->encrypt(key, place.data(), place.data(), n);
      CHECK(place == apart);
    }
}

TEST_CASE("garble and evaluate: all kernels write what the portable ones write, in place too, and no further") {
  Draw draw(3);
  const Kernels& portable = kernels("portable");
  for (const Kernels* tested : available_kernels())
    for (std::size_t n = 0; n <= most; ++n) {
      CAPTURE(tested->name);
      CAPTURE(n);
      const Block secret = draw.block();
      const Block delta{draw.word() | 1, draw.word()};
      const std::uint64_t first = draw.word();
      const std::vector<Block> a = draw.blocks(n), b = draw.blocks(n);
      std::vector<Block> c(n), tables(2 * n), active(n);
      portable.garble(expanded(portable, secret), delta, a.data(), b.data(), c.data(), tables.data(), first, n);
      portable.evaluate(expanded(portable, secret), a.data(), b.data(), tables.data(), active.data(), first, n);

      const AesKey key = expanded(*tested, secret);
      std::vector<Block> own(n + 8, guard), own_tables(2 * n + 8, guard), own_active(n + 8, guard);
      tested->garble(key, delta, a.data(), b.data(), own.data(), own_tables.data(), first, n);
      tested->evaluate(key, a.data(), b.data(), tables.data(), own_active.data(), first, n);
      CHECK((untouched(own, n) && untouched(own_tables, 2 * n) && untouched(own_active, n)));
      own.resize(n), own_tables.resize(2 * n), own_active.resize(n);
      CHECK(own == c);
      CHECK(own_tables == tables);
      CHECK(own_active == active);

      std::vector<Block> left = a, right = b;
      tested->garble(key, delta, left.data(), b.data(), left.data(), own_tables.data(), first, n);
      tested->garble(key, delta, a.data(), right.data(), right.data(), own_tables.data(), first, n);
      CHECK((left == c && right == c && own_tables == tables));
      left = a, right = b;
      tested->evaluate(key, left.data(), b.data(), tables.data(), left.data(), first, n);
      tested->evaluate(key, a.data(), right.data(), tables.data(), right.data(), first, n);
      CHECK((left == active && right == active));
    }
}

TEST_CASE("a tweak is domain, use and index; each in its own bits") {
  CHECK(tweak(Domain::payload, 0x00ffffffffffffff, 9) == Block{9, 0x04ffffffffffffff});
  CHECK(tweak(Domain::key, 0, ~std::uint64_t{0}) == Block{~std::uint64_t{0}, 0});
}

TEST_CASE("a session's keys: AES under the seed of domain and epoch; a permutation moves on and back") {
  const Block seed{0x0123456789abcdef, 0xfedcba9876543210};
  for (const Kernels* tested : available_kernels()) {
    CAPTURE(tested->name);
    const SessionKeys session(*tested, seed);
    Permutation gates(session, Domain::gate);
    for (const std::uint64_t epoch : {0, 1, 2, 1, 0, 77}) {
      const Block key = textbook_aes(seed, Block{epoch, 1});
      CHECK(session.derive(Domain::gate, epoch).round[0] == key);
      CHECK(gates.at(epoch).round[0] == key);
    }
    CHECK(session.derive(Domain::ot, 5).round[0] == textbook_aes(seed, Block{5, 2}));
  }
}
