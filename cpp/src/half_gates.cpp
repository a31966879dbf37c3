#include "deepseal/half_gates.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace deepseal {
namespace {

constexpr std::size_t wide = 16;    // lanes from which a gate alone fills the registers
constexpr std::size_t group = 256;  // tables gathered at once where it does not

// The runs of gates that share a key, of which there are `length` in an epoch.
template <class Run>
void by_epoch(std::uint64_t first, std::size_t n, const Run& run, std::uint64_t length = epoch_gates) {
  for (std::size_t i = 0; i < n;) {
    const std::uint64_t gate = first + i;
    const std::size_t size = std::min<std::size_t>(n - i, length - gate % length);
    run(gate / length, gate, i, size);
    i += size;
  }
}

// The same for half gates, of which two take the place of a gate, in pieces that fit into `Hashes`.
template <class Run>
void by_halves(std::uint64_t first_gate, std::size_t n, const Run& run) {
  by_epoch(
      2 * first_gate, n,
      [&](std::uint64_t epoch, std::uint64_t half, std::size_t i, std::size_t size) {
        for (std::size_t j = 0; j < size; j += group)
          run(epoch, tweak(Domain::gate, 0, half + j), i + j, std::min(group, size - j));
      },
      2 * epoch_gates);
}

// Room for the hashes of a piece, wiped at its end.
struct Hashes {
  Block zero[group];
  Block one[group];
  ~Hashes() { wipe(this, sizeof *this); }

  // H of both labels of each wire, under one tweak each.
  void of(const Kernels& kernels, const AesKey& key, Block delta, const Block* labels, Block first, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) one[i] = labels[i] ^ delta;
    kernels.hash(key, labels, first, zero, n);
    kernels.hash(key, one, first, one, n);
  }
};

}  // namespace

void active_labels(const Kernels& kernels, Block seed, Block* active, std::size_t n) {
  AesKey key;
  kernels.expand(seed, key);
  kernels.stream(key, tweak(Domain::prg, 0, 0), active, n);
  wipe(&key, sizeof key);
}

Garbler::Garbler(std::shared_ptr<const Delta> delta, const SessionKeys& session)
    : delta_(std::move(delta)), kernels_(session.kernels()), permutation_(session, Domain::gate) {
  if (delta_->garbles_.test_and_set())
    throw std::logic_error("expected a fresh delta, found one that a garbler has already");
}

void Garbler::own_labels(Block seed, const std::uint8_t* bits, Block* zero, std::size_t n) const {
  active_labels(kernels_, seed, zero, n);
  offset(zero, bits, zero, n);
}

void Garbler::offset(const Block* labels, const std::uint8_t* bits, Block* out, std::size_t n) const {
  for (std::size_t i = 0; i < n; ++i) out[i] = labels[i] ^ (mask(bits[i]) & delta_->value_);
}

bool Garbler::decode(const Block* zero, const Block* active, std::uint8_t* bits, std::size_t n) const {
  std::uint64_t wrong = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const Block difference = zero[i] ^ active[i];
    const Block rest = difference ^ (mask(difference.low) & delta_->value_);
    wrong |= rest.low | rest.high;
    bits[i] = static_cast<std::uint8_t>(difference.low & 1);
  }
  return wrong == 0;
}

void Garbler::take(const Block* a, const Block* b, Block* c, Block* tables, std::size_t n) {
  by_epoch(gates_, n, [&](std::uint64_t epoch, std::uint64_t gate, std::size_t i, std::size_t size) {
    kernels_.garble(permutation_.at(epoch), delta_->value_, a + i, b + i, c + i, tables + table_blocks * i, gate, size);
  });
  gates_ += n;
}

void Garbler::and_own(const Block* a, const std::uint8_t* b, Block* c, Block* tables, std::size_t n) {
  const Exclusive only(busy_);
  const Block delta = delta_->value_;
  Hashes h;
  by_halves(gates_, n, [&](std::uint64_t epoch, Block first, std::size_t i, std::size_t size) {
    h.of(kernels_, permutation_.at(epoch), delta, a + i, first, size);
    for (std::size_t j = 0; j < size; ++j) {
      const Block table = h.zero[j] ^ h.one[j] ^ (mask(b[i + j]) & delta);
      c[i + j] = h.zero[j] ^ (mask(a[i + j].low) & table);
      tables[i + j] = table;
    }
  });
  gates_ += (n + 1) / 2;
}

void Garbler::and_peer(const Block* a, const Block* b, Block* c, Block* tables, std::size_t n) {
  const Exclusive only(busy_);
  Hashes h;
  by_halves(gates_, n, [&](std::uint64_t epoch, Block first, std::size_t i, std::size_t size) {
    h.of(kernels_, permutation_.at(epoch), delta_->value_, b + i, first, size);
    for (std::size_t j = 0; j < size; ++j) {
      // With b = 0 the evaluator finds H(b0); with b = 1, H(b1), from where the table leads to H(b0) ^ a.
      tables[i + j] = h.zero[j] ^ h.one[j] ^ a[i + j];
      c[i + j] = h.zero[j];
    }
  });
  gates_ += (n + 1) / 2;
}

void Garbler::invert(const Block* a, Block* c, std::size_t n) const {
  for (std::size_t i = 0; i < n; ++i) c[i] = a[i] ^ delta_->value_;
}

Block Garbler::label_of(bool bit) const { return mask(bit) & delta_->value_; }

void Evaluator::take(const Block* a, const Block* b, const Block* tables, Block* c, std::size_t n) {
  by_epoch(gates_, n, [&](std::uint64_t epoch, std::uint64_t gate, std::size_t i, std::size_t size) {
    kernels_.evaluate(permutation_.at(epoch), a + i, b + i, tables + table_blocks * i, c + i, gate, size);
  });
  gates_ += n;
}

void Evaluator::and_peer(const Block* a, const Block* tables, Block* c, std::size_t n) {
  const Exclusive only(busy_);
  Hashes h;
  by_halves(gates_, n, [&](std::uint64_t epoch, Block first, std::size_t i, std::size_t size) {
    kernels_.hash(permutation_.at(epoch), a + i, first, h.zero, size);
    for (std::size_t j = 0; j < size; ++j) c[i + j] = h.zero[j] ^ (mask(a[i + j].low) & tables[i + j]);
  });
  gates_ += (n + 1) / 2;
}

void Evaluator::and_own(const Block* a, const Block* b, const std::uint8_t* bits, const Block* tables, Block* c,
                        std::size_t n) {
  const Exclusive only(busy_);
  Hashes h;
  by_halves(gates_, n, [&](std::uint64_t epoch, Block first, std::size_t i, std::size_t size) {
    kernels_.hash(permutation_.at(epoch), b + i, first, h.zero, size);
    for (std::size_t j = 0; j < size; ++j)
      c[i + j] = h.zero[j] ^ (mask(bits[i + j]) & (tables[i + j] ^ a[i + j]));
  });
  gates_ += (n + 1) / 2;
}

Replay::Replay(std::shared_ptr<const Plan> plan, std::size_t lanes, std::span<const Block> labels, std::size_t chunk,
               std::span<Block> outputs)
    : plan_(std::move(plan)),
      inputs_(labels),
      all_(lanes),
      chunk_(chunk == 0 ? lanes : std::min(chunk, lanes)),
      left_(plan_->and_gates() * lanes),
      outputs_(outputs) {
  if (lanes == 0 || lanes >> 32 != 0 || labels.size() != plan_->inputs() * lanes)  // no product overflows
    throw std::invalid_argument("expected 1 to 2^32 - 1 lanes and a label for each input and lane, found " +
                                std::to_string(labels.size()) + " labels for " + std::to_string(lanes) + " lanes");
  const std::size_t results = plan_->outputs().size() * lanes;
  if (outputs.empty()) {
    own_outputs_.resize(results);
    outputs_ = own_outputs_;
  }
  if (outputs_.size() != results)
    throw std::invalid_argument("expected room for " + std::to_string(results) + " labels, found " +
                                std::to_string(outputs_.size()));
  temporaries_ = std::make_unique_for_overwrite<Block[]>(plan_->temporaries() * chunk_);
  scratch_.resize(3 * (group + wide));
  lanes_ = chunk_;
}

Replay::~Replay() {
  wipe(temporaries_.get(), plan_->temporaries() * chunk_ * sizeof(Block));
  wipe(scratch_.data(), scratch_.size() * sizeof(Block));
  wipe(own_outputs_.data(), own_outputs_.size() * sizeof(Block));
}

// Inputs and outputs are rows of all lanes, temporary labels rows of this chunk's. No step writes an input.
Block* Replay::labels_of(std::uint32_t slot) noexcept {
  if (slot < plan_->inputs()) return const_cast<Block*>(&inputs_[slot * all_ + start_]);
  slot -= plan_->inputs();
  const auto outputs = static_cast<std::uint32_t>(plan_->outputs().size());
  if (slot < outputs) return &outputs_[slot * all_ + start_];
  return &temporaries_[(slot - outputs) * lanes_];
}

// What is not in its place yet: constants, inputs, and wires that are several outputs. A constant's active label is 0,
// on both sides, so it costs nothing.
void Replay::collect(Block one) {
  const auto outputs = plan_->outputs();
  for (std::uint32_t i = 0; i < outputs.size(); ++i) {
    Block* to = labels_of(plan_->inputs() + i);
    if (outputs[i].constant)
      std::fill_n(to, lanes_, mask(outputs[i].value) & one);
    else if (const Block* from = labels_of(outputs[i].value); from != to)
      std::copy_n(from, lanes_, to);
  }
}

template <class Gates>
std::size_t Replay::gather(std::size_t capacity, std::size_t offset, const Gates& gates) {
  const auto steps = plan_->steps();
  const std::size_t most = std::min(capacity, group) / lanes_;
  std::size_t end = position_;
  while (end < steps.size() && end - position_ < most && steps[end].op == Op::and_ &&
         steps[end].level == steps[position_].level)
    ++end;
  Block* a = scratch_.data();
  Block* b = a + group + wide;
  Block* c = b + group + wide;
  const std::size_t count = (end - position_) * lanes_;
  for (std::size_t i = 0, step = position_; step < end; ++step)
    for (std::size_t lane = 0; lane < lanes_; ++lane, ++i) {
      a[i] = labels_of(steps[step].a)[lane];
      b[i] = labels_of(steps[step].b)[lane];
    }
  gates(a, b, c, offset, count);
  for (std::size_t i = 0, step = position_; step < end; ++step)
    for (std::size_t lane = 0; lane < lanes_; ++lane, ++i) labels_of(steps[step].c)[lane] = c[i];
  position_ = end;
  return count;
}

template <class Gates, class Invert>
std::size_t Replay::run(std::size_t capacity, const Gates& gates, const Invert& invert, Block one, const Kernels& kernels) {
  const auto steps = plan_->steps();
  std::size_t done = 0;
  while (start_ < all_) {
    if (position_ == steps.size()) {
      collect(one);
      start_ += lanes_;
      lanes_ = std::min(chunk_, all_ - start_);
      position_ = 0;
      continue;
    }
    const bool gathers = lanes_ < wide && plan_->order() == Order::depth;
    const Step& step = steps[position_];
    const Block* a = labels_of(step.a);
    const Block* b = labels_of(step.b);
    Block* c = labels_of(step.c);
    if (step.op == Op::and_) {
      if (done == capacity) break;
      if (gathers && lane_ == 0 && capacity - done >= lanes_) {
        done += gather(capacity - done, done, gates);
        continue;
      }
      const std::size_t size = std::min(lanes_ - lane_, capacity - done);
      gates(a + lane_, b + lane_, c + lane_, done, size);
      done += size;
      lane_ += size;
      if (lane_ < lanes_) break;
      lane_ = 0;
    } else if (step.op == Op::xor_) {
      kernels.add(a, b, c, lanes_);
    } else {
      invert(a, c, lanes_);
    }
    ++position_;
  }
  left_ -= done;
  return done;
}

std::span<const Block> Replay::collected() const {
  if (!done()) throw std::logic_error("expected all tables to be through, found " + std::to_string(left_) + " left");
  return outputs_;
}

std::size_t Garbling::next(std::span<Block> tables) {
  const Exclusive only(garbler_->busy_);
  return run(
      tables.size() / table_blocks,
      [&](const Block* a, const Block* b, Block* c, std::size_t offset, std::size_t n) {
        garbler_->take(a, b, c, tables.data() + table_blocks * offset, n);
      },
      [&](const Block* a, Block* c, std::size_t n) { garbler_->invert(a, c, n); }, garbler_->label_of(true), garbler_->kernels_);
}

std::span<const Block> Garbling::outputs() {
  next({});  // what is free after the last table
  return collected();
}

void Evaluation::next(std::span<const Block> tables) {
  if (tables.size() % table_blocks != 0 || tables.size() / table_blocks > tables_left())
    throw std::invalid_argument("expected at most " + std::to_string(tables_left()) + " tables of 32 bytes, found " +
                                std::to_string(tables.size() * sizeof(Block)) + " bytes");
  const Exclusive only(evaluator_->busy_);
  run(
      tables.size() / table_blocks,
      [&](const Block* a, const Block* b, Block* c, std::size_t offset, std::size_t n) {
        evaluator_->take(a, b, tables.data() + table_blocks * offset, c, n);
      },
      [&](const Block* a, Block* c, std::size_t n) {
        if (a != c) std::copy(a, a + n, c);
      },
      Block{}, evaluator_->kernels_);
}

std::span<const Block> Evaluation::outputs() {
  next({});
  return collected();
}

}  // namespace deepseal
