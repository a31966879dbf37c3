// deepseal._emp: our netlists on an installed EMP toolkit. Built only with DEEPSEAL_EMP=ON; see emp.cmake.
#include <emp-sh2pc/emp-sh2pc.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "emp_bench.hpp"
#include "emp_channel.hpp"

namespace py = pybind11;

namespace deepseal::emp_engine {
namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

enum Op : std::uint8_t { op_xor = 0, op_and = 1, op_not = 2, op_const = 3, op_copy = 4 };

struct Circuit {
  std::span<const std::uint8_t> ops;
  std::span<const std::uint32_t> a;
  std::span<const std::uint32_t> b;
  std::span<const std::uint32_t> output_wires;
  std::vector<std::pair<std::size_t, int>> inputs;  // width and EMP's number of the owner
  std::size_t input_bits = 0;
};

template <typename T>
std::span<const T> view(const Array<T>& array) {
  if (array.ndim() != 1) throw std::invalid_argument("expected arrays of one dimension");
  return {array.data(), static_cast<std::size_t>(array.size())};
}

// Everything is checked before EMP sees it: EMP checks nothing.
void check(const Circuit& circuit) {
  const std::size_t gates = circuit.ops.size();
  if (circuit.a.size() != gates || circuit.b.size() != gates) throw std::invalid_argument("expected ops, a, b of one length");
  if (circuit.input_bits + gates > std::numeric_limits<std::uint32_t>::max()) {
    throw std::invalid_argument("expected fewer than 2^32 wires");
  }
  for (std::size_t i = 0; i < gates; ++i) {
    const std::size_t wires = circuit.input_bits + i;
    const std::uint8_t op = circuit.ops[i];
    const bool good = op == op_const ? circuit.a[i] <= 1
                                     : op <= op_copy && circuit.a[i] < wires && (op > op_and || circuit.b[i] < wires);
    if (!good) throw std::invalid_argument("expected known gates with operands on earlier wires; gate " + std::to_string(i));
  }
  for (const std::uint32_t wire : circuit.output_wires) {
    if (wire >= circuit.input_bits + gates) throw std::invalid_argument("expected outputs on existing wires");
  }
}

template <typename Party>
std::vector<bool> play(Party& party, int role, const Circuit& circuit, std::span<const std::uint8_t> bits) {
  ::emp::BlockVec wires(circuit.input_bits + circuit.ops.size());
  std::size_t wire = 0;
  std::size_t used = 0;
  for (const auto& [width, owner] : circuit.inputs) {
    auto own = std::make_unique<bool[]>(width);  // zeros where the value is the other party's
    if (owner == role) {
      for (std::size_t i = 0; i < width; ++i) own[i] = bits[used++] != 0;
    }
    if (width != 0) party.feed(wires.data() + wire, owner, own.get(), width);
    wire += width;
  }
  for (std::size_t i = 0; i < circuit.ops.size(); ++i) {
    ::emp::block* out = wires.data() + wire + i;
    const ::emp::block* left = wires.data() + circuit.a[i];
    switch (circuit.ops[i]) {
      case op_xor:
        party.Party::xor_gate(out, left, wires.data() + circuit.b[i]);
        break;
      case op_and:
        party.Party::and_gate(out, left, wires.data() + circuit.b[i]);
        break;
      case op_not:
        party.Party::not_gate(out, left);
        break;
      case op_const:
        party.Party::public_label(out, circuit.a[i] != 0);
        break;
      default:
        *out = *left;
    }
  }
  const std::size_t count = circuit.output_wires.size();
  ::emp::BlockVec labels(count);
  for (std::size_t i = 0; i < count; ++i) labels[i] = wires[circuit.output_wires[i]];
  auto clear = std::make_unique<bool[]>(count);
  party.reveal(clear.get(), ::emp::PUBLIC, labels.data(), count);
  return std::vector<bool>(clear.get(), clear.get() + count);
}

py::dict run(const Array<std::uint8_t>& ops, const Array<std::uint32_t>& a, const Array<std::uint32_t>& b,
             const Array<std::uint32_t>& output_wires, const std::vector<std::size_t>& widths,
             const std::vector<bool>& garbler_owns, const Array<std::uint8_t>& bits, int fd, const std::string& role,
             double timeout) {
  const int me = party_of(role);
  Circuit circuit{view(ops), view(a), view(b), view(output_wires), {}, 0};
  if (widths.size() != garbler_owns.size()) throw std::invalid_argument("expected one owner per input value");
  std::size_t mine = 0;
  for (std::size_t i = 0; i < widths.size(); ++i) {
    if (widths[i] > std::numeric_limits<std::int32_t>::max()) throw std::invalid_argument("expected narrower inputs");
    const int owner = garbler_owns[i] ? ::emp::ALICE : ::emp::BOB;
    circuit.inputs.emplace_back(widths[i], owner);
    circuit.input_bits += widths[i];
    if (owner == me) mine += widths[i];
  }
  check(circuit);
  const auto own = view(bits);
  if (own.size() != mine) throw std::invalid_argument("expected one bit per own input wire");

  std::vector<bool> out;
  double setup = 0, seconds = 0;
  std::uint64_t sent = 0, received = 0;
  {
    const py::gil_scoped_release release;
    ::emp::set_test_mode(false);  // its environment variable makes every seed predictable
    const Timer timer;
    SocketChannel io(fd, timeout);
    with_party(me, &io, [&](auto& party) {
      io.flush();
      setup = timer.seconds();
      out = play(party, me, circuit, own);
    });
    io.finish();
    seconds = timer.seconds();
    sent = io.bytes_sent;
    received = io.bytes_recv;
  }
  Array<std::uint8_t> output(static_cast<py::ssize_t>(out.size()));
  std::copy(out.begin(), out.end(), output.mutable_data());
  py::dict result;
  result["output"] = output;
  result["bytes_sent"] = sent;
  result["bytes_received"] = received;
  result["setup_seconds"] = setup;
  result["seconds"] = seconds;
  return result;
}

}  // namespace
}  // namespace deepseal::emp_engine

PYBIND11_MODULE(_emp, m) {
  namespace engine = deepseal::emp_engine;
  m.doc() = "An installed EMP toolkit as a second engine. Its faults end the process: call it in a child process only.";
  m.attr("HEADERS") = DEEPSEAL_EMP_HEADERS;
  m.attr("NATIVE") = DEEPSEAL_EMP_NATIVE != 0;
  m.attr("STATUSES") = py::dict(py::arg("hung_up") = static_cast<int>(engine::hung_up),
                                py::arg("stalled") = static_cast<int>(engine::stalled),
                                py::arg("broken") = static_cast<int>(engine::broken),
                                py::arg("wrong_answer") = static_cast<int>(engine::wrong_answer));
  m.def("run", &engine::run, py::kw_only(), py::arg("ops"), py::arg("a"), py::arg("b"), py::arg("output_wires"),
        py::arg("widths"), py::arg("garbler_owns"), py::arg("bits"), py::arg("fd"), py::arg("role"), py::arg("timeout"),
        "One party's run of a netlist over a connected socket. Both parties learn the output bits.");
  m.def("delta_leaks", &engine::delta_leaks, py::arg("trials"),
        "In how many of the trials the tables of AND(a, b) and AND(a, c), garbled one after the other, reveal delta.");
  m.def("bench_memory", &engine::bench_memory, py::arg("gates"), "Seconds to garble and to evaluate, in memory.");
  m.def("bench_and", &engine::bench_and, py::kw_only(), py::arg("fd"), py::arg("role"), py::arg("gates"),
        py::arg("timeout"), py::arg("own_channel"), "Garble, send, evaluate wide layers; set-up is timed apart.");
  m.def("bench_cot", &engine::bench_cot, py::kw_only(), py::arg("fd"), py::arg("role"), py::arg("count"),
        py::arg("kind"), py::arg("timeout"), py::arg("own_channel"), "Random correlated OTs, semi-honest.");
  m.def("bench_base_ot", &engine::bench_base_ot, py::kw_only(), py::arg("fd"), py::arg("role"), py::arg("kind"),
        py::arg("timeout"), py::arg("own_channel"), "128 base OTs.");
}
