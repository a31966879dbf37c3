// The engine for Python: labels, tables and keys are uint8 arrays whose last dimension is 16 bytes; secrets stay here.
#include "engine.hpp"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstring>
#include <limits>
#include <optional>

#include "deepseal/half_gates.hpp"
#include "deepseal/linear_ot.hpp"
#include "deepseal/ot_keys.hpp"
#include "deepseal/softspoken.hpp"
#include "deepseal/universal_hash.hpp"

namespace py = pybind11;

namespace deepseal {
namespace {

using Bytes = py::array_t<std::uint8_t, py::array::c_style>;
using Words = py::array_t<std::uint64_t, py::array::c_style>;
using Indices = py::array_t<std::uint32_t, py::array::c_style>;

Block block_of(const py::bytes& bytes) {
  const std::string_view view = bytes;
  if (view.size() != sizeof(Block)) throw std::invalid_argument("expected 16 bytes, found " + std::to_string(view.size()));
  Block block;
  std::memcpy(&block, view.data(), sizeof block);
  return block;
}

void check_contiguous(const py::buffer_info& info) {
  auto expected = info.itemsize;
  for (std::size_t i = info.shape.size(); i-- > 0; expected *= info.shape[i])
    if (info.shape[i] > 1 && info.strides[i] != expected)
      throw std::invalid_argument("expected contiguous memory, found strides");
}

// A view of contiguous memory as blocks; copied only where it is not aligned.
class Blocks {
 public:
  explicit Blocks(const py::buffer& buffer) : info_(buffer.request()) {
    check_contiguous(info_);
    const auto size = static_cast<std::size_t>(info_.size * info_.itemsize);
    if (size % sizeof(Block) != 0) throw std::invalid_argument("expected whole blocks of 16 bytes, found " + std::to_string(size) + " bytes");
    const auto* data = static_cast<const Block*>(info_.ptr);
    if (reinterpret_cast<std::uintptr_t>(data) % alignof(Block) != 0) {
      copy_.resize(size / sizeof(Block));
      std::memcpy(copy_.data(), info_.ptr, size);
      data = copy_.data();
    }
    view_ = {data, size / sizeof(Block)};
  }

  std::span<const Block> view() const { return view_; }

 private:
  py::buffer_info info_;
  std::vector<Block> copy_;
  std::span<const Block> view_;
};

Block* blocks_in(Bytes& array) { return reinterpret_cast<Block*>(array.mutable_data()); }

Bytes new_blocks(std::vector<py::ssize_t> shape) {
  shape.push_back(sizeof(Block));
  return Bytes(shape);
}

Bytes to_array(std::span<const Block> blocks) {
  Bytes result = new_blocks({static_cast<py::ssize_t>(blocks.size())});
  std::memcpy(result.mutable_data(), blocks.data(), blocks.size_bytes());
  return result;
}

std::uint64_t checked(std::uint64_t use) {
  if (use >= std::uint64_t{1} << 56) throw std::invalid_argument("expected a use below 2^56, found " + std::to_string(use));
  return use;
}

py::ssize_t signed_size(std::size_t size) { return static_cast<py::ssize_t>(size); }

void require(bool condition, const char* expected, std::size_t found) {
  if (!condition) throw std::invalid_argument(std::string("expected ") + expected + ", found " + std::to_string(found));
}

template <class T>
std::span<const T> span_of(const py::array_t<T, py::array::c_style>& array) {
  return {array.data(), static_cast<std::size_t>(array.size())};
}

// The caller's array, if it has room for n blocks and nothing else, or a new one.
Bytes labels_or(const std::optional<Bytes>& given, std::size_t n) {
  if (!given) return new_blocks({signed_size(n)});
  require(static_cast<std::size_t>(given->size()) == n * sizeof(Block), "16 bytes for each label",
          static_cast<std::size_t>(given->size()));
  require(reinterpret_cast<std::uintptr_t>(given->data()) % alignof(Block) == 0, "an array aligned to 16 bytes", n);
  return *given;
}

// The caller's array for tables of one block each.
Block* tables_in(Bytes& tables, std::size_t n) {
  const auto size = static_cast<std::size_t>(tables.size());
  require(size == n * sizeof(Block), "16 bytes of table for each gate", size);
  require(reinterpret_cast<std::uintptr_t>(tables.data()) % alignof(Block) == 0, "an array aligned to 16 bytes", n);
  return blocks_in(tables);
}

// A replay, the caller's input labels, which it reads until its end, and the array of the results.
template <class Run>
class Held {
 public:
  template <class Party>
  Held(const std::shared_ptr<Party>& party, const std::shared_ptr<Plan>& plan, std::size_t lanes, const py::buffer& labels,
       std::size_t chunk, const std::optional<Bytes>& out)
      : labels_(labels),
        results_(out ? labels_or(out, plan->outputs().size() * lanes)
                     : new_blocks({signed_size(plan->outputs().size()), signed_size(lanes)})),
        run_(party, plan, lanes, labels_.view(), chunk, {blocks_in(results_), plan->outputs().size() * lanes}) {}

  Run& run() noexcept { return run_; }

  const Bytes& results() {
    static_cast<void>(run_.outputs());
    return results_;
  }

 private:
  Blocks labels_;
  Bytes results_;
  Run run_;
};

void bind_netlists(py::module_& m) {
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan", "A netlist with constants folded, dead gates dropped, wires in slots.")
      .def(py::init([](std::uint32_t inputs, const Bytes& ops, const Indices& a, const Indices& b, const Indices& outputs,
                       const std::string& order) {
             if (order != "given" && order != "depth") throw std::invalid_argument("expected order given or depth, found " + order);
             const NetlistView view{inputs, span_of(ops), span_of(a), span_of(b), span_of(outputs)};
             const py::gil_scoped_release release;
             return std::make_shared<Plan>(view, order == "depth" ? Order::depth : Order::given);
           }),
           py::arg("inputs"), py::arg("ops"), py::arg("a"), py::arg("b"), py::arg("outputs"), py::arg("order"))
      .def_property_readonly("inputs", &Plan::inputs)
      .def_property_readonly("outputs", [](const Plan& plan) { return plan.outputs().size(); })
      .def_property_readonly("and_gates", &Plan::and_gates)
      .def_property_readonly("depth", &Plan::depth)
      .def_property_readonly("slots", &Plan::slots)
      .def_property_readonly("temporaries", &Plan::temporaries);
}

void bind_session(py::module_& m) {
  py::class_<SessionKeys>(m, "Session", "The public permutations of a session, from its 16-byte seed.")
      .def(py::init([](const py::bytes& seed, const std::string& name) { return SessionKeys(kernels(name), block_of(seed)); }),
           py::arg("seed"), py::arg("kernels") = "")
      .def_property_readonly("kernels", [](const SessionKeys& session) { return std::string(session.kernels().name); });

  py::class_<Delta, std::shared_ptr<Delta>>(m, "Delta", "The secret offset. Nothing returns it.")
      .def(py::init<>())
      .def("__reduce_ex__", [](const Delta&, int) -> py::object { throw py::type_error("expected a value that may leave the process, found a secret"); })
      .def_static("from_bytes", [](const py::bytes& value) { return std::make_shared<Delta>(block_of(value)); }, "For repeatable tests.")
      .def(
          "choose",
          [](const Delta& delta, const Bytes& zeros, const Bytes& ones) {
            require(zeros.ndim() == 2 && zeros.shape(0) == 128, "128 rows", static_cast<std::size_t>(zeros.shape(0)));
            require(ones.ndim() == 2 && ones.shape(0) == 128 && ones.shape(1) == zeros.shape(1), "rows of the same length",
                    static_cast<std::size_t>(ones.size()));
            Bytes out({zeros.shape(0), zeros.shape(1)});
            delta.choose(zeros.data(), ones.data(), static_cast<std::size_t>(zeros.shape(1)), out.mutable_data());
            return out;
          },
          "Row i of `ones` where bit i of delta is 1, of `zeros` elsewhere, without a branch.");
}

void bind_gates(py::module_& m) {
  py::class_<Garbler, std::shared_ptr<Garbler>>(m, "Garbler", "Delta and the session's counter of gates.")
      .def(py::init([](std::shared_ptr<Delta> delta, const SessionKeys& session) {
             return std::make_shared<Garbler>(std::move(delta), session);
           }),
           py::arg("delta").none(false), py::arg("session"))
      .def_property_readonly("gates", &Garbler::gates)
      .def(
          "own_labels",
          [](const Garbler& garbler, const py::bytes& seed, const Bytes& bits) {
            Bytes zero = new_blocks({bits.size()});
            garbler.own_labels(block_of(seed), bits.data(), blocks_in(zero), static_cast<std::size_t>(bits.size()));
            return zero;
          },
          py::arg("seed"), py::arg("bits"), "Zero labels (n, 16) of own bits whose active labels come from the seed.")
      .def(
          "offset",
          [](const Garbler& garbler, const py::buffer& labels, const Bytes& bits) {
            const Blocks in(labels);
            require(in.view().size() == static_cast<std::size_t>(bits.size()), "a bit for each label", in.view().size());
            Bytes out = new_blocks({bits.size()});
            garbler.offset(in.view().data(), bits.data(), blocks_in(out), in.view().size());
            return out;
          },
          py::arg("labels"), py::arg("bits"), "label ^ bit delta")
      .def(
          "and_own",
          [](Garbler& garbler, const py::buffer& a, const Bytes& bits, Bytes& tables, const std::optional<Bytes>& out) {
            const Blocks in(a);
            const std::size_t n = in.view().size();
            require(static_cast<std::size_t>(bits.size()) == n, "a bit for each label", static_cast<std::size_t>(bits.size()));
            Bytes c = labels_or(out, n);
            Block* room = tables_in(tables, n);
            Block* to = blocks_in(c);
            const py::gil_scoped_release release;
            garbler.and_own(in.view().data(), bits.data(), to, room, n);
            return c;
          },
          py::arg("a"), py::arg("bits"), py::arg("tables").noconvert(), py::arg("out").noconvert() = py::none(),
          "Zero labels of a and our bits; 16 bytes of table for each go into the array given.")
      .def(
          "and_peer",
          [](Garbler& garbler, const py::buffer& a, const py::buffer& b, Bytes& tables, const std::optional<Bytes>& out) {
            const Blocks in(a), known(b);
            const std::size_t n = in.view().size();
            require(known.view().size() == n, "two labels for each gate", known.view().size());
            Bytes c = labels_or(out, n);
            Block* room = tables_in(tables, n);
            Block* to = blocks_in(c);
            const py::gil_scoped_release release;
            garbler.and_peer(in.view().data(), known.view().data(), to, room, n);
            return c;
          },
          py::arg("a"), py::arg("b"), py::arg("tables").noconvert(), py::arg("out").noconvert() = py::none(),
          "Zero labels of a and b, whose bits the evaluator knows.")
      .def(
          "decode",
          [](const Garbler& garbler, const py::buffer& zero, const py::buffer& active) -> py::object {
            const Blocks known(zero), got(active);
            require(known.view().size() == got.view().size(), "an active label for each wire", got.view().size());
            Bytes bits({signed_size(known.view().size())});
            if (!garbler.decode(known.view().data(), got.view().data(), bits.mutable_data(), known.view().size())) return py::none();
            return bits;
          },
          py::arg("zero"), py::arg("active"), "The bits of active labels; None if one is neither of its wire's labels.")
      .def(
          "garbling",
          [](const std::shared_ptr<Garbler>& garbler, const std::shared_ptr<Plan>& plan, std::size_t lanes, const py::buffer& zero, std::size_t chunk, const std::optional<Bytes>& out) {
            return std::make_unique<Held<Garbling>>(garbler, plan, lanes, zero, chunk, out);
          },
          py::arg("plan").none(false), py::arg("lanes"), py::arg("zero"), py::arg("chunk") = 0, py::arg("out").noconvert() = py::none(),
          "Garble a netlist on `lanes` inputs, `chunk` at a time (0: all); zero labels (inputs, lanes, 16).");

  py::class_<Held<Garbling>>(m, "Garbling", "Produces tables.")
      .def_property_readonly("tables_left", [](Held<Garbling>& held) { return held.run().tables_left(); })
      .def(
          "next",
          [](Held<Garbling>& held, const py::buffer& buffer) {
            const py::buffer_info info = buffer.request(true);
            check_contiguous(info);
            const auto size = static_cast<std::size_t>(info.size * info.itemsize);
            require(reinterpret_cast<std::uintptr_t>(info.ptr) % alignof(Block) == 0, "a buffer aligned to 16 bytes", size);
            const std::span<Block> room(static_cast<Block*>(info.ptr), size / sizeof(Block));
            const py::gil_scoped_release release;
            return held.run().next(room) * table_blocks * sizeof(Block);
          },
          py::arg("buffer"), "Write the next tables, as many as fit; the number of bytes.")
      .def("outputs", &Held<Garbling>::results);

  py::class_<Evaluator, std::shared_ptr<Evaluator>>(m, "Evaluator", "The session's counter of gates, at the evaluator.")
      .def(py::init([](const SessionKeys& session) { return std::make_shared<Evaluator>(session); }), py::arg("session"))
      .def_property_readonly("gates", &Evaluator::gates)
      .def(
          "and_peer",
          [](Evaluator& evaluator, const py::buffer& a, const py::buffer& tables, const std::optional<Bytes>& out) {
            const Blocks in(a), rows(tables);
            const std::size_t n = in.view().size();
            require(rows.view().size() == n, "16 bytes of table for each gate", rows.view().size());
            Bytes c = labels_or(out, n);
            Block* to = blocks_in(c);
            const py::gil_scoped_release release;
            evaluator.and_peer(in.view().data(), rows.view().data(), to, n);
            return c;
          },
          py::arg("a"), py::arg("tables"), py::arg("out").noconvert() = py::none(), "Active labels of a and the garbler's bits.")
      .def(
          "and_own",
          [](Evaluator& evaluator, const py::buffer& a, const py::buffer& b, const Bytes& bits, const py::buffer& tables,
             const std::optional<Bytes>& out) {
            const Blocks in(a), known(b), rows(tables);
            const std::size_t n = in.view().size();
            require(known.view().size() == n && static_cast<std::size_t>(bits.size()) == n, "two labels and a bit for each gate",
                    known.view().size());
            require(rows.view().size() == n, "16 bytes of table for each gate", rows.view().size());
            Bytes c = labels_or(out, n);
            Block* to = blocks_in(c);
            const py::gil_scoped_release release;
            evaluator.and_own(in.view().data(), known.view().data(), bits.data(), rows.view().data(), to, n);
            return c;
          },
          py::arg("a"), py::arg("b"), py::arg("bits"), py::arg("tables"), py::arg("out").noconvert() = py::none(),
          "Active labels of a and b, whose bits we know.")
      .def(
          "evaluation",
          [](const std::shared_ptr<Evaluator>& evaluator, const std::shared_ptr<Plan>& plan, std::size_t lanes, const py::buffer& active, std::size_t chunk, const std::optional<Bytes>& out) {
            return std::make_unique<Held<Evaluation>>(evaluator, plan, lanes, active, chunk, out);
          },
          py::arg("plan").none(false), py::arg("lanes"), py::arg("active"), py::arg("chunk") = 0, py::arg("out").noconvert() = py::none(),
          "Evaluate a netlist; active labels (inputs, lanes, 16), chunks as the garbler's.");

  py::class_<Held<Evaluation>>(m, "Evaluation", "Consumes tables.")
      .def_property_readonly("tables_left", [](Held<Evaluation>& held) { return held.run().tables_left(); })
      .def(
          "next",
          [](Held<Evaluation>& held, const py::buffer& tables) {
            const Blocks view(tables);
            const py::gil_scoped_release release;
            held.run().next(view.view());
          },
          py::arg("tables"), "Take the next tables.")
      .def("outputs", &Held<Evaluation>::results);

  m.def(
      "active_labels",
      [](const SessionKeys& session, const py::bytes& seed, std::size_t n) {
        Bytes out = new_blocks({signed_size(n)});
        active_labels(session.kernels(), block_of(seed), blocks_in(out), n);
        return out;
      },
      py::arg("session"), py::arg("seed"), py::arg("n"), "Active labels (n, 16) of the garbler's bits, from its seed.");
}

void bind_transfer(py::module_& m) {
  py::class_<CotReceiver>(m, "CotReceiver", "SoftSpoken correlated OT, the side with the choice bits.")
      .def(py::init([](const SessionKeys& session, unsigned k, const py::buffer& pairs) {
             return std::make_unique<CotReceiver>(session, k, Blocks(pairs).view());
           }),
           py::arg("session"), py::arg("k"), py::arg("pairs"))
      .def_property_readonly("used", &CotReceiver::used)
      .def_property_readonly(
          "opening", [](const CotReceiver& receiver) { return to_array(receiver.opening()); },
          "What the sender needs to open its trees, (n, 16).")
      .def_property_readonly(
          "leaf_checks", [](const CotReceiver& receiver) { return to_array(receiver.leaf_checks()); },
          "Two blocks a leaf, (2 n, 16), for the check of the trees.")
      .def(
          "extend",
          [](CotReceiver& receiver, const Bytes& bits, const std::optional<Bytes>& out, const std::optional<Bytes>& corrections) {
            const auto n = static_cast<std::size_t>(bits.size());
            Bytes t = labels_or(out, n);
            Bytes sent = labels_or(corrections, receiver.correction_blocks(n));
            Block* to = blocks_in(t);
            Block* too = blocks_in(sent);
            {
              const py::gil_scoped_release release;
              receiver.extend(bits.data(), n, to, too);
            }
            return py::make_tuple(t, sent);
          },
          py::arg("bits"), py::arg("out").noconvert() = py::none(), py::arg("corrections").noconvert() = py::none(),
          "t (n, 16) and the corrections to send, for n choice bits; into the arrays given, if any.");

  py::class_<CotSender>(m, "CotSender", "SoftSpoken correlated OT, the side with delta.")
      .def(py::init([](const SessionKeys& session, unsigned k, std::shared_ptr<Delta> delta, const py::buffer& keys,
                       const py::buffer& opening) {
             return std::make_unique<CotSender>(session, k, std::move(delta), Blocks(keys).view(), Blocks(opening).view());
           }),
           py::arg("session"), py::arg("k"), py::arg("delta").none(false), py::arg("keys"), py::arg("opening"))
      .def_property_readonly("used", &CotSender::used)
      .def(
          "correction_bytes", [](const CotSender& sender, std::size_t n) { return sizeof(Block) * sender.correction_blocks(n); },
          py::arg("n"), "Bytes that the receiver sends for n OTs.")
      .def(
          "extend",
          [](CotSender& sender, const py::buffer& corrections, std::size_t n, const std::optional<Bytes>& out) {
            const Blocks in(corrections);
            require(in.view().size() == sender.correction_blocks(n), "corrections for these OTs in blocks", in.view().size());
            Bytes q = labels_or(out, n);
            Block* to = blocks_in(q);
            {
              const py::gil_scoped_release release;
              sender.extend(in.view(), n, to);
            }
            return q;
          },
          py::arg("corrections"), py::arg("n"), py::arg("out").noconvert() = py::none(),
          "q (n, 16), with t = q ^ x delta; into the array given, if any.")
      .def(
          "leaf_checks", [](const CotSender& sender, const py::buffer& sums) { return to_array(sender.leaf_checks(Blocks(sums).view())); },
          py::arg("sums"), "The receiver's, if it was honest, from its sums of each tree (trees, 2, 16).");

  m.def(
      "hash_rows",
      [](const SessionKeys& session, const py::bytes& seed, const py::buffer& t, const Bytes& bits) {
        const Blocks in(t);
        require(in.view().size() == static_cast<std::size_t>(bits.size()), "a bit for each OT", in.view().size());
        const RowHashes hashes = hash_rows(session.kernels(), block_of(seed), in.view(), bits.data());
        return py::make_tuple(to_array(hashes.rows), to_array(std::span(&hashes.choices, 1)));
      },
      py::arg("session"), py::arg("seed"), py::arg("t"), py::arg("bits"),
      "Hashes of the rows of t (128, 16) and of the choice bits (1, 16), for the check of the corrections.");
  m.def(
      "expected_rows",
      [](const SessionKeys& session, const py::bytes& seed, const py::buffer& q, const Delta& delta, const py::bytes& choices) {
        return to_array(expected_rows(session.kernels(), block_of(seed), Blocks(q).view(), delta, block_of(choices)));
      },
      py::arg("session"), py::arg("seed"), py::arg("q"), py::arg("delta"), py::arg("choices"),
      "What the rows of an honest receiver hash to (128, 16).");

  py::class_<OtKeys>(m, "OtKeys", "Random OT: correlated OT behind a hash.")
      .def(py::init([](const SessionKeys& session) { return OtKeys(session); }), py::arg("session"))
      .def(
          "chosen",
          [](OtKeys& hash, const py::buffer& t, std::uint64_t first, std::uint64_t use) {
            const Blocks in(t);
            Bytes out = new_blocks({signed_size(in.view().size())});
            Block* to = blocks_in(out);
            const py::gil_scoped_release release;
            hash.chosen(in.view().data(), checked(use), first, to, in.view().size());
            return out;
          },
          py::arg("t"), py::arg("first"), py::arg("use"), "The receiver's keys (n, 16) of OTs first, first + 1, ...")
      .def(
          "pairs",
          [](OtKeys& hash, const Delta& delta, const py::buffer& q, std::uint64_t first, std::uint64_t use) {
            const Blocks in(q);
            Bytes out = new_blocks({signed_size(in.view().size()), 2});
            Block* to = blocks_in(out);
            const py::gil_scoped_release release;
            hash.pairs(delta, in.view().data(), checked(use), first, to, in.view().size());
            return out;
          },
          py::arg("delta"), py::arg("q"), py::arg("first"), py::arg("use"), "The sender's keys (n, 2, 16).");

  py::class_<RingOt>(m, "RingOt", "Correlated OT over the integers modulo 2^bits, vectors of `width`.")
      .def(py::init([](const SessionKeys& session, unsigned bits, std::size_t width) { return RingOt(session, bits, width); }),
           py::arg("session"), py::arg("bits"), py::arg("width"))
      .def_property_readonly("row_bytes", &RingOt::row_bytes)
      .def(
          "send",
          [](const RingOt& ring, const py::buffer& keys, const Words& values) {
            const Blocks in(keys);
            require(values.ndim() == 2 && static_cast<std::size_t>(values.shape(0)) * 2 == in.view().size(), "a row of values for each OT",
                    static_cast<std::size_t>(values.size()));
            Words shares({values.shape(0), values.shape(1)});
            Bytes message({values.shape(0), signed_size(ring.row_bytes())});
            std::uint64_t* own = shares.mutable_data();
            std::uint8_t* to = message.mutable_data();
            const auto all = span_of(values);
            {
              const py::gil_scoped_release release;
              ring.send(in.view(), all, own, to);
            }
            return py::make_tuple(shares, message);
          },
          py::arg("keys"), py::arg("values"), "Shares s (n, width) and the message, for keys (n, 2, 16) and values (n, width).")
      .def(
          "receive",
          [](const RingOt& ring, const py::buffer& keys, const Bytes& choices, const Bytes& message) {
            const Blocks in(keys);
            require(in.view().size() == static_cast<std::size_t>(choices.size()), "a choice for each OT", static_cast<std::size_t>(choices.size()));
            Words shares({choices.size(), signed_size(ring.width())});
            std::uint64_t* own = shares.mutable_data();
            const auto all = span_of(message);
            {
              const py::gil_scoped_release release;
              ring.receive(in.view(), choices.data(), all, own);
            }
            return shares;
          },
          py::arg("keys"), py::arg("choices"), py::arg("message"), "Shares r = s + choice value (n, width), for keys (n, 16).");
}

using Integers = py::array_t<std::int64_t, py::array::c_style>;

// Labels (source bits, samples, source elements, 16) of one sample: bit b of element i at [b stride + i].
struct SampleLabels {
  SampleLabels(const LinearOt& linear, const Blocks& labels, std::size_t sample)
      : stride(labels.view().size() / linear.source_bits()), data(labels.view().data() + sample * linear.shape().sources()) {
    require(labels.view().size() % linear.source_bits() == 0 && sample < std::numeric_limits<std::uint32_t>::max() &&
                (sample + 1) * linear.shape().sources() <= stride,
            "labels of each bit, sample and source element", labels.view().size());
  }

  std::size_t stride;
  const Block* data;
};

void bind_linear(py::module_& m) {
  py::class_<Connections, std::shared_ptr<Connections>>(m, "Connections", "Which source elements of a linear layer meet which outputs.")
      .def(py::init([](const Words& starts, const Indices& targets, std::size_t outputs) {
             const auto s = span_of(starts);
             const auto t = span_of(targets);
             return std::make_shared<Connections>(std::vector(s.begin(), s.end()), std::vector(t.begin(), t.end()), outputs);
           }),
           py::arg("starts"), py::arg("targets"), py::arg("outputs"));

  py::class_<LinearOt>(m, "LinearOt", "A linear layer modulo 2^l on labelled bits, by correlated OT.")
      .def(py::init([](const SessionKeys& session, std::shared_ptr<Connections> shape, unsigned bits, unsigned source_bits,
                       bool is_signed, std::uint64_t use) {
             return std::make_unique<LinearOt>(session, std::move(shape), bits, source_bits, is_signed, use);
           }),
           py::arg("session"), py::arg("connections").none(false), py::arg("bits"), py::arg("source_bits"), py::arg("signed"),
           py::arg("use"))
      .def("message_bytes", &LinearOt::message_bytes, py::arg("first"), py::arg("last"),
           "Bytes that the weight owner sends for these source elements.")
      .def(
          "send",
          [](LinearOt& linear, const Delta& delta, const Integers& weights, std::size_t first, std::size_t last, const py::buffer& labels,
             std::size_t sample, Words& share, Bytes& message) {
            const Blocks blocks(labels);
            const SampleLabels zero(linear, blocks, sample);
            const std::size_t bytes = linear.message_bytes(first, last);
            require(static_cast<std::size_t>(share.size()) == linear.shape().outputs(), "a share of each output",
                    static_cast<std::size_t>(share.size()));
            require(static_cast<std::size_t>(message.size()) >= bytes, "room for the message", static_cast<std::size_t>(message.size()));
            const auto all = span_of(weights);
            std::uint64_t* to = share.mutable_data();
            std::uint8_t* out = message.mutable_data();
            const py::gil_scoped_release release;
            linear.send(delta, all, first, last, zero.data, zero.stride, to, out);
            return bytes;
          },
          py::arg("delta"), py::arg("weights"), py::arg("first"), py::arg("last"), py::arg("labels"), py::arg("sample"),
          py::arg("share").noconvert(), py::arg("message").noconvert(),
          "The weight owner: a weight for each connection and zero labels; its share is subtracted; bytes of the message.")
      .def(
          "receive",
          [](LinearOt& linear, std::size_t first, std::size_t last, const py::buffer& labels, std::size_t sample, const Bytes& message,
             Words& share) {
            const Blocks blocks(labels);
            const SampleLabels active(linear, blocks, sample);
            require(static_cast<std::size_t>(share.size()) == linear.shape().outputs(), "a share of each output",
                    static_cast<std::size_t>(share.size()));
            const auto all = span_of(message);
            std::uint64_t* to = share.mutable_data();
            const py::gil_scoped_release release;
            linear.receive(first, last, active.data, active.stride, all, to);
          },
          py::arg("first"), py::arg("last"), py::arg("labels"), py::arg("sample"), py::arg("message"), py::arg("share").noconvert(),
          "The other party, with active labels; its share is added.");

  m.def(
      "word_bits",
      [](const Words& words, unsigned bits) {
        require(bits >= 1 && bits <= 64, "1 to 64 bits", bits);
        Bytes out({static_cast<py::ssize_t>(bits), words.size()});
        const auto all = span_of(words);
        std::uint8_t* to = out.mutable_data();
        const py::gil_scoped_release release;
        for (unsigned bit = 0; bit < bits; ++bit)
          for (const std::uint64_t word : all) *to++ = static_cast<std::uint8_t>(word >> bit & 1);
        return out;
      },
      py::arg("words"), py::arg("bits"), "Bits (bits, n) of n words, least significant first.");
}

}  // namespace

void bind_engine(py::module_& m) {
  m.def("kernels", [] {
    std::vector<std::string> names;
    for (const Kernels* known : available_kernels()) names.emplace_back(known->name);
    return names;
  }, "Names of the AES kernels that this processor can run, the fastest first.");
  bind_netlists(m);
  bind_session(m);
  bind_gates(m);
  bind_transfer(m);
  bind_linear(m);
}

}  // namespace deepseal
