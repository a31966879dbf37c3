// Both parties of a garbled circuit in one place.
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "deepseal/half_gates.hpp"
#include "draw.hpp"

namespace deepseal::testing {

inline constexpr Block session_seed{0x5eed5eed5eed5eed, 0x0123456789abcdef};

// One session's garbler and evaluator, with the same or with different kernels.
struct Parties {
  Block offset;
  std::shared_ptr<const Delta> delta;
  std::shared_ptr<Garbler> garbler;
  std::shared_ptr<Evaluator> evaluator;

  Parties(const Kernels& kernels, Block value) : Parties(kernels, kernels, value) {}
  Parties(const Kernels& garbling, const Kernels& evaluating, Block value)
      : offset{value.low | 1, value.high},
        delta(std::make_shared<Delta>(value)),
        garbler(std::make_shared<Garbler>(delta, SessionKeys(garbling, session_seed))),
        evaluator(std::make_shared<Evaluator>(SessionKeys(evaluating, session_seed))) {}
};

struct Garbled {
  std::vector<Block> tables;
  std::vector<Block> outputs;  // zero labels
};

// Garbles with room for `piece` tables at a time; `chunk` lanes side by side, 0 for all.
inline Garbled garble(const Parties& parties, std::shared_ptr<const Plan> plan, std::size_t lanes,
                      std::span<const Block> zero, std::size_t piece, std::size_t chunk = 0) {
  Garbling garbling(parties.garbler, std::move(plan), lanes, zero, chunk);
  Garbled result;
  std::vector<Block> room(table_blocks * piece);
  while (const std::size_t n = garbling.next(room))
    result.tables.insert(result.tables.end(), room.begin(), room.begin() + static_cast<std::ptrdiff_t>(table_blocks * n));
  const std::span<const Block> outputs = garbling.outputs();
  result.outputs.assign(outputs.begin(), outputs.end());
  return result;
}

// Evaluates `piece` tables at a time; active labels of the outputs.
inline std::vector<Block> evaluate(const Parties& parties, std::shared_ptr<const Plan> plan, std::size_t lanes,
                                   std::span<const Block> active, std::span<const Block> tables, std::size_t piece,
                                   std::size_t chunk = 0) {
  Evaluation evaluation(parties.evaluator, std::move(plan), lanes, active, chunk);
  while (!tables.empty()) {
    const std::size_t size = std::min(table_blocks * piece, tables.size());
    evaluation.next(tables.first(size));
    tables = tables.subspan(size);
  }
  const std::span<const Block> outputs = evaluation.outputs();
  return {outputs.begin(), outputs.end()};
}

}  // namespace deepseal::testing
