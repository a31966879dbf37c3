#include "deepseal/softspoken.hpp"

#include <algorithm>
#include <stdexcept>

#include "test.hpp"
#include "transfer.hpp"

using namespace deepseal;
using deepseal::testing::Dealt;
using deepseal::testing::Draw;

namespace {

constexpr Block seed{7, 8};
const std::size_t sizes[] = {0, 1, 127, 128, 129, 5000};

struct Batch {
  std::vector<std::uint8_t> bits;
  std::vector<Block> t;
  std::vector<Block> corrections;
};

Batch extend(CotReceiver& receiver, std::vector<std::uint8_t> bits) {
  Batch batch{std::move(bits), {}, {}};
  batch.t.resize(batch.bits.size());
  batch.corrections.resize(receiver.correction_blocks(batch.bits.size()));
  receiver.extend(batch.bits.data(), batch.bits.size(), batch.t.data(), batch.corrections.data());
  return batch;
}

std::vector<Block> extend(CotSender& sender, const Batch& batch) {
  std::vector<Block> q(batch.bits.size());
  sender.extend(batch.corrections, q.size(), q.data());
  return q;
}

// t ^ q ^ x delta: zero for each OT that worked.
std::vector<Block> errors(const Batch& batch, const std::vector<Block>& q, Block offset) {
  std::vector<Block> result(q.size());
  for (std::size_t i = 0; i < q.size(); ++i) result[i] = batch.t[i] ^ q[i] ^ (mask(batch.bits[i]) & offset);
  return result;
}

bool all_zero(const std::vector<Block>& blocks) {
  return std::ranges::all_of(blocks, [](Block x) { return x == Block{}; });
}

}  // namespace

TEST_CASE("trees share out the 128 bits of delta") {
  for (unsigned k = 1; k <= 8; ++k) {
    const Trees trees(k);
    unsigned bits = 0;
    for (unsigned tree = 0; tree < trees.count(); ++tree) bits += trees.depth(tree);
    CHECK(bits == 128);
    CHECK(trees.opening_blocks() == 2 * (128 - trees.count()));
  }
  CHECK_THROWS_AS(Trees(0), std::invalid_argument);
  CHECK_THROWS_AS(Trees(9), std::invalid_argument);
}

TEST_CASE("t = q ^ x delta for every k and size, batch after batch") {
  Draw draw(1);
  for (unsigned k = 1; k <= 8; ++k) {
    CAPTURE(k);
    const Dealt dealt(draw);
    const SessionKeys session(kernels(), seed);
    CotReceiver receiver(session, k, dealt.pairs);
    CotSender sender(session, k, dealt.delta, dealt.keys, receiver.opening());
    std::uint64_t used = 0;
    for (const std::size_t n : sizes) {
      CAPTURE(n);
      const Batch batch = extend(receiver, draw.bits(n));
      CHECK(batch.corrections.size() == sender.correction_blocks(n));
      CHECK(batch.corrections.size() == (n + 127) / 128 * ((128 + k - 1) / k));
      CHECK(all_zero(errors(batch, extend(sender, batch), dealt.offset)));
      used += (n + 127) / 128 * 128;
      CHECK(receiver.used() == used);
      CHECK(sender.used() == used);
    }
  }
}

TEST_CASE("all kernels give the same bytes, and the two sides may have different ones") {
  Draw draw(2);
  const Dealt dealt(draw);
  const std::vector<std::uint8_t> bits = draw.bits(700);
  for (const unsigned k : {1u, 3u, 8u}) {
    CotReceiver reference(SessionKeys(kernels("portable"), seed), k, dealt.pairs);
    const Batch expected = extend(reference, bits);
    for (const Kernels* tested : available_kernels()) {
      CAPTURE(tested->name);
      const SessionKeys session(*tested, seed);
      CotReceiver receiver(session, k, dealt.pairs);
      CHECK(std::ranges::equal(receiver.opening(), reference.opening()));
      const Batch batch = extend(receiver, bits);
      CHECK(batch.t == expected.t);
      CHECK(batch.corrections == expected.corrections);
      CotSender sender(session, k, dealt.delta, dealt.keys, reference.opening());
      CHECK(all_zero(errors(expected, extend(sender, expected), dealt.offset)));
    }
  }
}

TEST_CASE("whole batches one after another are one large batch") {
  Draw draw(3);
  const Dealt dealt(draw);
  const std::vector<std::uint8_t> bits = draw.bits(128 * 40);
  for (const unsigned k : {2u, 5u}) {
    const SessionKeys session(kernels(), seed);
    CotReceiver whole(session, k, dealt.pairs), parts(session, k, dealt.pairs);
    const Batch expected = extend(whole, bits);
    std::vector<Block> t;
    for (const auto& [from, to] : {std::pair{0, 128}, {128, 640}, {640, 5120}}) {
      const Batch part = extend(parts, {bits.begin() + from, bits.begin() + to});
      t.insert(t.end(), part.t.begin(), part.t.end());
    }
    CHECK(t == expected.t);
  }
}

TEST_CASE("a flipped bit of a correction breaks its own OT by the tree's bits of delta, and no other") {
  Draw draw(5);
  for (unsigned k = 1; k <= 8; ++k) {
    CAPTURE(k);
    const Dealt dealt(draw);
    const SessionKeys session(kernels(), seed);
    const Trees trees(k);
    for (int trial = 0; trial < 6; ++trial) {
      CotReceiver receiver(session, k, dealt.pairs);
      CotSender sender(session, k, dealt.delta, dealt.keys, receiver.opening());
      Batch batch = extend(receiver, draw.bits(384));  // three blocks a tree, tree after tree
      const unsigned tree = draw.below(trees.count());
      const std::size_t broken = draw.below(384);
      Block& word = batch.corrections[3 * tree + broken / 128];
      (broken % 128 < 64 ? word.low : word.high) ^= std::uint64_t{1} << broken % 64;
      Block bits_of_tree{};
      for (unsigned i = tree * k; i < tree * k + trees.depth(tree); ++i)
        (i < 64 ? bits_of_tree.low : bits_of_tree.high) |= std::uint64_t{1} << i % 64;
      std::vector<Block> expected(384);
      expected[broken] = bits_of_tree & dealt.offset;
      CHECK(errors(batch, extend(sender, batch), dealt.offset) == expected);
    }
  }
}

TEST_CASE("check of the trees: the sender completes what the receiver has, unless an opening or a sum was wrong") {
  Draw draw(8);
  for (unsigned k = 1; k <= 8; ++k) {
    CAPTURE(k);
    const Dealt dealt(draw);
    const SessionKeys session(kernels(), seed);
    const Trees trees(k);
    const CotReceiver receiver(session, k, dealt.pairs);
    const std::vector<Block> checks(receiver.leaf_checks().begin(), receiver.leaf_checks().end());
    std::vector<Block> sums;
    std::size_t start = 0;
    for (unsigned tree = 0; tree < trees.count(); ++tree) {
      const std::size_t end = start + (std::size_t{2} << trees.depth(tree));
      sums.insert(sums.end(), 2, Block{});
      for (std::size_t i = start; i < end; ++i) sums[2 * tree + i % 2] ^= checks[i];
      start = end;
    }
    REQUIRE(start == checks.size());
    const CotSender sender(session, k, dealt.delta, dealt.keys, receiver.opening());
    CHECK(sender.leaf_checks(sums) == checks);
    std::vector<Block> wrong = sums;
    wrong[draw.below(wrong.size())] ^= Block{1, 0};
    CHECK(sender.leaf_checks(wrong) != checks);
    CHECK_THROWS_AS(sender.leaf_checks(std::span(sums).first(sums.size() - 1)), std::invalid_argument);
    if (k == 1) continue;  // nothing to open
    std::vector<Block> opening(receiver.opening().begin(), receiver.opening().end());
    for (std::size_t i = 0; i < opening.size(); ++i) opening[i] ^= Block{0, 1 + i};
    CHECK(CotSender(session, k, dealt.delta, dealt.keys, opening).leaf_checks(sums) != checks);
  }
}

TEST_CASE("wrong base keys or a wrong opening break the correlation") {
  Draw draw(6);
  const Dealt dealt(draw);
  const SessionKeys session(kernels(), seed);
  CotReceiver receiver(session, 4, dealt.pairs);
  const Batch batch = extend(receiver, draw.bits(256));
  std::vector<Block> keys = dealt.keys;
  keys[77] ^= Block{1, 0};
  CotSender wrong_key(session, 4, dealt.delta, keys, receiver.opening());
  CHECK(!all_zero(errors(batch, extend(wrong_key, batch), dealt.offset)));
  std::vector<Block> opening(receiver.opening().begin(), receiver.opening().end());
  for (Block& block : opening) block ^= Block{0, 1};
  CotSender wrong_opening(session, 4, dealt.delta, dealt.keys, opening);
  CHECK(!all_zero(errors(batch, extend(wrong_opening, batch), dealt.offset)));
}

TEST_CASE("wrong lengths are refused: base keys, openings, corrections; a refused batch uses up nothing") {
  Draw draw(7);
  const Dealt dealt(draw);
  const SessionKeys session(kernels(), seed);
  for (unsigned k = 1; k <= 8; ++k) {
    CAPTURE(k);
    CotReceiver receiver(session, k, dealt.pairs);
    std::vector<Block> opening(receiver.opening().begin(), receiver.opening().end());
    opening.push_back({});
    CHECK_THROWS_AS(CotSender(session, k, dealt.delta, dealt.keys, opening), std::invalid_argument);
    CHECK_THROWS_AS(CotSender(session, k, dealt.delta, std::span(dealt.keys).first(127), receiver.opening()), std::invalid_argument);
    if (k > 1) CHECK_THROWS_AS(CotSender(session, k, dealt.delta, dealt.keys, {}), std::invalid_argument);

    CotSender sender(session, k, dealt.delta, dealt.keys, receiver.opening());
    Batch batch = extend(receiver, draw.bits(129));
    std::vector<Block> q(1000);
    for (const std::size_t n : {0, 128, 257}) CHECK_THROWS_AS(sender.extend(batch.corrections, n, q.data()), std::invalid_argument);
    CHECK_THROWS_AS(sender.extend(std::span(batch.corrections).first(1), 129, q.data()), std::invalid_argument);
    CHECK(sender.used() == 0);
    CHECK(all_zero(errors(batch, extend(sender, batch), dealt.offset)));
  }
  for (const unsigned k : {0u, 9u, 128u}) {
    CHECK_THROWS_AS(CotReceiver(session, k, dealt.pairs), std::invalid_argument);
    CHECK_THROWS_AS(CotSender(session, k, dealt.delta, dealt.keys, {}), std::invalid_argument);
  }
  CHECK_THROWS_AS(CotReceiver(session, 4, std::span(dealt.pairs).first(255)), std::invalid_argument);
  CHECK_THROWS_AS(CotReceiver(session, 4, dealt.keys), std::invalid_argument);
}
