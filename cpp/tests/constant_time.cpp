// Secrets must not decide branches or addresses. Valgrind's memcheck reports both for memory that is not initialised, so
// secrets are marked as such (the idea of A. Langley's ctgrind); what a party may know is marked as known again.
//
//   valgrind --error-exitcode=9 constant_time KERNELS       exit code 0: nothing depends on a secret
//   valgrind --error-exitcode=9 constant_time leak          exit code 9: a branch on a secret is seen
//
// It says nothing about instructions whose time depends on their operands, and only about this machine code.
#include <valgrind/memcheck.h>

#include <cstdio>
#include <string_view>
#include <vector>

#include "deepseal/ot_keys.hpp"
#include "deepseal/universal_hash.hpp"
#include "netlists.hpp"
#include "transfer.hpp"
#include "yao.hpp"

using namespace deepseal;
using namespace deepseal::testing;

namespace {

template <class T>
void hide(std::vector<T>& values) {
  VALGRIND_MAKE_MEM_UNDEFINED(values.data(), values.size() * sizeof(T));
}

template <class T>
void reveal(const std::vector<T>& values) {
  VALGRIND_MAKE_MEM_DEFINED(values.data(), values.size() * sizeof(T));
}

Block hidden(Block value) {
  VALGRIND_MAKE_MEM_UNDEFINED(&value, sizeof value);
  return value;
}

// Secret: delta, the seed, labels, bits. Known in the end: whether decoding went well, and the output bits.
bool garbled_circuit(const Kernels& kernels, Order order, std::size_t lanes) {
  Draw draw(lanes);
  const Netlist netlist = draw_netlist(draw, 10, 200, 8);
  const auto plan = std::make_shared<Plan>(netlist.view(), order);
  const std::size_t inputs = netlist.inputs * lanes;
  const std::vector<std::uint8_t> clear_bits = draw.bits(inputs);
  std::vector<std::uint8_t> bits = clear_bits;
  hide(bits);
  const Block seed = hidden(draw.block());
  const Parties parties(kernels, hidden(draw.block()));

  std::vector<Block> zero(inputs), active(inputs);
  parties.garbler->own_labels(seed, bits.data(), zero.data(), inputs);
  active_labels(kernels, seed, active.data(), inputs);
  std::vector<Block> again(inputs);
  parties.garbler->offset(zero.data(), bits.data(), again.data(), inputs);
  Garbled garbled = garble(parties, plan, lanes, zero, 33);
  std::vector<Block> out = evaluate(parties, plan, lanes, active, garbled.tables, 29);
  std::vector<std::uint8_t> result(out.size());
  bool valid = parties.garbler->decode(garbled.outputs.data(), out.data(), result.data(), out.size());

  VALGRIND_MAKE_MEM_DEFINED(&valid, sizeof valid);
  reveal(result);
  for (std::size_t lane = 0; lane < lanes; ++lane) {
    std::vector<std::uint8_t> own(netlist.inputs);
    for (std::size_t i = 0; i < own.size(); ++i) own[i] = clear_bits[i * lanes + lane];
    const std::vector<std::uint8_t> expected = evaluate_clear(netlist, own);
    for (std::size_t i = 0; i < expected.size(); ++i) valid = valid && result[i * lanes + lane] == expected[i];
  }
  return valid;
}

// Secret: delta, labels, the bits of whoever knows them.
bool half_gates(const Kernels& kernels) {
  Draw draw(70);
  const std::size_t n = 70;
  const std::vector<std::uint8_t> clear_x = draw.bits(n), clear_y = draw.bits(n);
  std::vector<std::uint8_t> x = clear_x, y = clear_y;
  std::vector<Block> a = draw.blocks(n), b = draw.blocks(n);
  hide(x), hide(y), hide(a), hide(b);
  const Parties parties(kernels, hidden(draw.block()));
  bool right = true;
  for (const bool ours : {true, false}) {
    std::vector<Block> active_a(n), active_b(n), zero(n), active(n), tables(n);
    parties.garbler->offset(a.data(), x.data(), active_a.data(), n);
    parties.garbler->offset(b.data(), y.data(), active_b.data(), n);
    if (ours) {
      parties.garbler->and_own(a.data(), y.data(), zero.data(), tables.data(), n);
      parties.evaluator->and_peer(active_a.data(), tables.data(), active.data(), n);
    } else {
      parties.garbler->and_peer(a.data(), b.data(), zero.data(), tables.data(), n);
      parties.evaluator->and_own(active_a.data(), active_b.data(), y.data(), tables.data(), active.data(), n);
    }
    std::vector<std::uint8_t> bits(n);
    bool valid = parties.garbler->decode(zero.data(), active.data(), bits.data(), n);
    VALGRIND_MAKE_MEM_DEFINED(&valid, sizeof valid);
    reveal(bits);
    for (std::size_t i = 0; i < n; ++i) valid = valid && bits[i] == (clear_x[i] & clear_y[i]);
    right = right && valid;
  }
  return right;
}

// Secret: delta, the base keys, the choices, all keys, the values. Known: what is sent.
bool transfer(const Kernels& kernels, unsigned k) {
  Draw draw(k);
  const std::size_t n = 384;
  Dealt dealt(draw);
  std::vector<std::uint8_t> choices = draw.bits(n);
  const std::vector<std::uint8_t> clear_choices = choices;
  std::vector<std::uint64_t> values(2 * n);
  for (std::uint64_t& value : values) value = draw.word() & 0x1fff;
  const std::vector<std::uint64_t> clear_values = values;
  hide(dealt.pairs), hide(choices), hide(values);
  const Delta delta(hidden(dealt.offset));
  std::vector<Block> zeros(128), ones(128), keys(128);
  for (std::size_t i = 0; i < 128; ++i) zeros[i] = dealt.pairs[2 * i], ones[i] = dealt.pairs[2 * i + 1];
  delta.choose(reinterpret_cast<const std::uint8_t*>(zeros.data()), reinterpret_cast<const std::uint8_t*>(ones.data()),
               sizeof(Block), reinterpret_cast<std::uint8_t*>(keys.data()));

  const SessionKeys session(kernels, session_seed);
  CotReceiver receiver(session, k, dealt.pairs);
  std::vector<Block> opening(receiver.opening().begin(), receiver.opening().end());
  reveal(opening);
  CotSender sender(session, k, std::make_shared<Delta>(hidden(dealt.offset)), keys, opening);
  std::vector<Block> t(n), q(n), corrections, pairs(2 * n), chosen(n);
  const std::vector<Block> sums(2 * Trees(k).count());
  static_cast<void>(sender.leaf_checks(sums));
  corrections.resize(receiver.correction_blocks(n));
  receiver.extend(choices.data(), n, t.data(), corrections.data());
  reveal(corrections);
  sender.extend(corrections, n, q.data());
  const RowHashes hashes = hash_rows(kernels, draw.block(), t, choices.data());
  static_cast<void>(expected_rows(kernels, draw.block(), q, delta, hashes.choices));
  OtKeys sending(session), receiving(session);
  sending.pairs(delta, q.data(), 1, 0, pairs.data(), n);
  receiving.chosen(t.data(), 1, 0, chosen.data(), n);
  const RingOt ring(session, 13, 2);
  std::vector<std::uint64_t> s(2 * n), r(2 * n);
  std::vector<std::uint8_t> message(n * ring.row_bytes());
  ring.send(pairs, values, s.data(), message.data());
  reveal(message);
  ring.receive(chosen, choices.data(), message, r.data());

  reveal(s), reveal(r);
  bool right = true;
  for (std::size_t i = 0; i < 2 * n; ++i)
    right = right && r[i] == ((s[i] + (clear_choices[i / 2] == 1 ? clear_values[i] : 0)) & 0x1fff);
  return right;
}

}  // namespace

int main(int count, char** arguments) {
  const std::string_view name = count == 2 ? arguments[1] : "";
  if (RUNNING_ON_VALGRIND == 0) {
    std::fprintf(stderr, "expected to run under valgrind, found that this does not: run 'make cpp-constant-time'\n");
    return 2;
  }
  if (name == "leak") {
    const Block secret = hidden({1, 2});
    std::puts((secret.low & 1) == 1 ? "odd" : "even");
    return 0;
  }
  const Kernels& tested = kernels(name);
  bool right = true;
  for (const Order order : {Order::given, Order::depth})
    for (const std::size_t lanes : {1, 3, 20}) right = garbled_circuit(tested, order, lanes) && right;
  right = half_gates(tested) && right;
  for (const unsigned k : {1u, 3u, 8u}) right = transfer(tested, k) && right;
  std::printf("%s: %s\n", arguments[1], right ? "right results" : "WRONG results");
  return right ? 0 : 1;
}
