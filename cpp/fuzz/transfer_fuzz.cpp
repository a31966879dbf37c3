// An OT sender gets arbitrary openings and corrections, an OT receiver arbitrary messages. They are refused exactly if
// their length is wrong; a correction changes q by delta's bits of its tree and nothing else, a message is taken mod 2^l.
#include <stdexcept>

#include "bytes.hpp"
#include "deepseal/ot_keys.hpp"
#include "deepseal/universal_hash.hpp"
#include "transfer.hpp"
#include "yao.hpp"

using namespace deepseal;
using namespace deepseal::testing;

namespace {

unsigned bit_of(const std::uint8_t* bytes, std::size_t place) { return bytes[place / 8] >> place % 8 & 1; }
unsigned bit_of(Block block, std::size_t place) {
  return (place < 64 ? block.low >> place : block.high >> (place - 64)) & 1;
}

// Now and then another length than the right one.
std::size_t bent(fuzzing::Bytes& bytes, std::size_t length) {
  const auto change = bytes.take<std::int8_t>();
  return change > 100 && length > 0 ? length - 1 : change < -100 ? length + 1 : length;
}

void correlated(fuzzing::Bytes& bytes, const SessionKeys& session, Draw& draw) {
  const unsigned k = bytes.take<std::uint8_t>() % 10;
  const Dealt dealt(draw);
  const bool possible = k >= 1 && k <= 8;
  const std::size_t expected = possible ? Trees(k).opening_blocks() : 0;
  const std::vector<Block> opening = bytes.many<Block>(bent(bytes, expected));
  std::unique_ptr<CotSender> sender, reference;
  try {
    sender = std::make_unique<CotSender>(session, k, dealt.delta, dealt.keys, opening);
  } catch (const std::invalid_argument&) {
    EXPECT(!possible || opening.size() != expected);
    return;
  }
  EXPECT(possible && opening.size() == expected);
  reference = std::make_unique<CotSender>(session, k, dealt.delta, dealt.keys, opening);

  const Trees trees(k);
  const std::vector<Block> sums = bytes.many<Block>(bent(bytes, 2 * trees.count()));
  try {
    EXPECT(sender->leaf_checks(sums).size() == 2 * (trees.count() - 1) * (std::size_t{1} << k) +
                                                   2 * (std::size_t{1} << trees.depth(trees.count() - 1)));
    EXPECT(sums.size() == 2 * trees.count());
  } catch (const std::invalid_argument&) {
    EXPECT(sums.size() != 2 * trees.count());
  }
  for (int batch = 0; batch < 2; ++batch) {
    const std::size_t n = bytes.below(k <= 4 ? 5000 : 600);
    const std::size_t blocks = (n + 127) / 128;
    const std::vector<Block> corrections = bytes.many<Block>(bent(bytes, trees.count() * blocks));
    std::vector<Block> q(n), without(n);
    bool refused = false;
    try {
      sender->extend(corrections, n, q.data());
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    EXPECT(refused == (corrections.size() != trees.count() * blocks));
    EXPECT(refused == (corrections.size() != sender->correction_blocks(n)));
    if (refused) continue;
    reference->extend(std::vector<Block>(corrections.size()), n, without.data());
    EXPECT(sender->used() == reference->used());
    if (n % 128 == 0 && n >= 256) {  // an expectation is linear in the receiver's hash of its choices
      const Block seed = draw.block(), choices = bytes.take<Block>();
      const auto none = expected_rows(session.kernels(), seed, q, *dealt.delta, {});
      const auto rows = expected_rows(session.kernels(), seed, q, *dealt.delta, choices);
      for (unsigned row = 0; row < 128; ++row)
        EXPECT((rows[row] ^ none[row]) == (dealt.offset_bit(row) == 1 ? choices : Block{}));
    }
    // Corrections lie in runs of 32 blocks: tree after tree in each of them.
    const std::size_t i = n == 0 ? 0 : bytes.below(static_cast<std::uint32_t>(n));
    const std::size_t run = i / 128 / 32 * 32;
    const std::size_t length = std::min<std::size_t>(32, blocks - run);
    for (unsigned place = 0; n > 0 && place < 128; ++place) {
      const std::size_t at = run * trees.count() + place / k * length + (i / 128 - run);
      EXPECT(bit_of(q[i] ^ without[i], place) == (bit_of(corrections[at], i % 128) & dealt.offset_bit(place)));
    }
  }
}

void ring(fuzzing::Bytes& bytes, const SessionKeys& session, Draw& draw) {
  const unsigned bits = bytes.take<std::uint8_t>() % 66;
  const std::size_t width = bytes.below(80);
  std::unique_ptr<RingOt> ring;
  try {
    ring = std::make_unique<RingOt>(session, bits, width);
  } catch (const std::invalid_argument&) {
    EXPECT(bits < 1 || bits > 64 || width < 1);
    return;
  }
  const std::size_t n = bytes.below(20);
  const std::vector<Block> keys = draw.blocks(n);
  const std::vector<std::uint8_t> choices = draw.bits(n), none(n);
  const std::vector<std::uint8_t> message = bytes.many<std::uint8_t>(bent(bytes, n * ring->row_bytes()));
  std::vector<std::uint64_t> shares(n * width), own(n * width);
  try {
    ring->receive(keys, choices.data(), message, shares.data());
  } catch (const std::invalid_argument&) {
    EXPECT(message.size() != n * ring->row_bytes());
    return;
  }
  EXPECT(message.size() == n * ring->row_bytes());
  ring->receive(keys, none.data(), message, own.data());
  const std::uint64_t most = bits == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << bits) - 1;
  for (std::size_t i = 0; i < n; ++i)
    for (std::size_t j = 0; j < width; ++j) {
      std::uint64_t sent = 0;
      for (unsigned b = 0; b < bits; ++b)
        sent |= std::uint64_t{bit_of(message.data() + i * ring->row_bytes(), j * bits + b)} << b;
      const std::uint64_t expected = own[i * width + j] + (choices[i] == 1 ? sent : 0);
      EXPECT(shares[i * width + j] == (expected & most));
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzzing::Bytes bytes(data, size);
  const auto flags = bytes.take<std::uint8_t>();
  const auto& known = available_kernels();
  const SessionKeys session(*(flags / 4 == 0 ? known.back() : known.front()), session_seed);
  Draw draw(bytes.take<std::uint8_t>());
  if (flags % 4 == 0)
    correlated(bytes, session, draw);
  else
    ring(bytes, session, draw);
  return 0;
}
