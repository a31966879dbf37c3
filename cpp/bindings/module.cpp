#include <pybind11/pybind11.h>

#include "deepseal/cpu.hpp"
#include "engine.hpp"

namespace py = pybind11;

PYBIND11_MODULE(_native, m) {
  m.doc() = "DeepSeal's native engine.";

  m.def(
      "cpu_features",
      [] {
        const auto& features = deepseal::cpu_features();
        py::dict result;
        for (const auto& [name, flag] : deepseal::cpu_feature_names) result[py::str(name)] = features.*flag;
        return result;
      },
      "The instruction sets that the native engine can use on this machine, by name.");
  m.def("architecture", &deepseal::architecture, "The processor family that this module was compiled for.");
  m.def("compiler", &deepseal::compiler, "The C++ compiler that built this module, with its version.");
  deepseal::bind_engine(m);
}
