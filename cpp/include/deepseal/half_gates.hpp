// Yao's garbled circuits with half gates and free XOR, without any input or output: the garbler produces batches of
// tables, the evaluator consumes them.
//
// S. Zahur, M. Rosulek, D. Evans, "Two halves make a whole", Eurocrypt 2015; V. Kolesnikov, T. Schneider, "Improved
// garbled circuit: free XOR gates and applications", ICALP 2008. A table is 32 bytes: the garbler's half, then the
// evaluator's. Where one party knows a factor in the clear, that party's half is left out: a table of 16 bytes.
// Semi-honest parties.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "deepseal/plan.hpp"
#include "deepseal/secret.hpp"
#include "deepseal/session.hpp"

namespace deepseal {

// Bytes of a table, and gates under one key.
inline constexpr std::size_t table_blocks = 2;
inline constexpr std::uint64_t epoch_gates = 4096;

// Delta and the counter of gates, which never goes back: one garbler a session.
class Garbler {
 public:
  // Throws std::logic_error for a delta that another garbler has.
  Garbler(std::shared_ptr<const Delta> delta, const SessionKeys& session);

  std::uint64_t gates() const noexcept { return gates_; }

  // Zero labels of the garbler's own bits: the active ones are expanded from a seed that the evaluator gets, too.
  void own_labels(Block seed, const std::uint8_t* bits, Block* zero, std::size_t n) const;

  // out[i] = label[i] ^ bit[i] delta
  void offset(const Block* labels, const std::uint8_t* bits, Block* out, std::size_t n) const;

  // n gates c = a and b; a, b and c are zero labels, a table is one block. `and_own`: b is bits that we know, which have
  // no labels (the generator's half gate). `and_peer`: b is bits that the evaluator knows (the evaluator's half gate).
  // They take the tweaks of (n + 1) / 2 gates. `c` may be `a`.
  void and_own(const Block* a, const std::uint8_t* b, Block* c, Block* tables, std::size_t n);
  void and_peer(const Block* a, const Block* b, Block* c, Block* tables, std::size_t n);

  // Whether each active label is one of the wire's two, and which: bits[i] in {0, 1}. False if any is neither.
  bool decode(const Block* zero, const Block* active, std::uint8_t* bits, std::size_t n) const;

 private:
  friend class Garbling;
  void take(const Block* a, const Block* b, Block* c, Block* tables, std::size_t n);
  void invert(const Block* a, Block* c, std::size_t n) const;
  Block label_of(bool bit) const;

  std::shared_ptr<const Delta> delta_;
  const Kernels& kernels_;
  Permutation permutation_;
  std::uint64_t gates_ = 0;
  std::atomic_flag busy_;
};

class Evaluator {
 public:
  explicit Evaluator(const SessionKeys& session)
      : kernels_(session.kernels()), permutation_(session, Domain::gate) {}

  std::uint64_t gates() const noexcept { return gates_; }

  // The garbler's `and_own`, and its `and_peer`, of whose b we know the bits and have the active labels.
  void and_peer(const Block* a, const Block* tables, Block* c, std::size_t n);
  void and_own(const Block* a, const Block* b, const std::uint8_t* bits, const Block* tables, Block* c, std::size_t n);

 private:
  friend class Evaluation;
  void take(const Block* a, const Block* b, const Block* tables, Block* c, std::size_t n);

  const Kernels& kernels_;
  Permutation permutation_;
  std::uint64_t gates_ = 0;
  std::atomic_flag busy_;
};

// Active labels of the garbler's bits, from the seed that it sent.
void active_labels(const Kernels& kernels, Block seed, Block* active, std::size_t n);

// A netlist replayed on `lanes` independent inputs, `chunk` of them at a time; the labels of a wire lie side by side.
// Resumable between any two tables, so that memory depends neither on the number of gates nor, but for inputs and
// outputs, on that of lanes. Tables come chunk by chunk, gate by gate, lane by lane.
class Replay {
 public:
  // labels: (inputs, lanes), and outputs: (outputs, lanes), where the results go, must stay in place until the end; no
  // outputs: the replay keeps its own. chunk: 0 takes all lanes at once.
  // Throws std::invalid_argument where they have another size.
  Replay(std::shared_ptr<const Plan> plan, std::size_t lanes, std::span<const Block> labels, std::size_t chunk,
         std::span<Block> outputs);

  ~Replay();
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;

  std::size_t lanes() const noexcept { return all_; }
  std::size_t tables_left() const noexcept { return left_; }
  bool done() const noexcept { return start_ == all_; }

 protected:
  // Runs on until `capacity` tables are through, and further over free gates. `gates(a, b, c, offset, n)` is one run of
  // independent AND gates whose tables start at `offset`; `invert(a, c, n)` a NOT; `one` a constant 1.
  template <class Gates, class Invert>
  std::size_t run(std::size_t capacity, const Gates& gates, const Invert& invert, Block one, const Kernels& kernels);

  std::span<const Block> collected() const;

 private:
  void collect(Block one);
  Block* labels_of(std::uint32_t slot) noexcept;
  template <class Gates>
  std::size_t gather(std::size_t capacity, std::size_t offset, const Gates& gates);

  std::shared_ptr<const Plan> plan_;
  std::span<const Block> inputs_;
  std::size_t all_;
  std::size_t chunk_;
  std::size_t left_;
  std::size_t start_ = 0;  // first lane of the chunk
  std::size_t lanes_ = 0;  // lanes of the chunk
  std::size_t position_ = 0;
  std::size_t lane_ = 0;
  std::unique_ptr<Block[]> temporaries_;  // (temporaries, lanes of the chunk)
  std::vector<Block> scratch_;            // (3, a group of gates)
  std::vector<Block> own_outputs_;
  std::span<Block> outputs_;
};

class Garbling : public Replay {
 public:
  // zero: zero labels of the inputs, (inputs, lanes)
  Garbling(std::shared_ptr<Garbler> garbler, std::shared_ptr<const Plan> plan, std::size_t lanes,
           std::span<const Block> zero, std::size_t chunk = 0, std::span<Block> outputs = {})
      : Replay(std::move(plan), lanes, zero, chunk, outputs), garbler_(std::move(garbler)) {}

  // Writes the next tables, as many as fit; the number written. 0 only at the end.
  std::size_t next(std::span<Block> tables);

  // Zero labels, (outputs, lanes). Throws std::logic_error before the end.
  std::span<const Block> outputs();

 private:
  std::shared_ptr<Garbler> garbler_;
};

class Evaluation : public Replay {
 public:
  // active: active labels of the inputs, (inputs, lanes)
  Evaluation(std::shared_ptr<Evaluator> evaluator, std::shared_ptr<const Plan> plan, std::size_t lanes,
             std::span<const Block> active, std::size_t chunk = 0, std::span<Block> outputs = {})
      : Replay(std::move(plan), lanes, active, chunk, outputs), evaluator_(std::move(evaluator)) {}

  // Takes the next tables. Throws std::invalid_argument for more of them than are left, or for half ones.
  void next(std::span<const Block> tables);

  // Active labels, (outputs, lanes). Throws std::logic_error before the end.
  std::span<const Block> outputs();

 private:
  std::shared_ptr<Evaluator> evaluator_;
};

}  // namespace deepseal
