#pragma once

#include <pybind11/pybind11.h>

namespace deepseal {

void bind_engine(pybind11::module_& m);

}  // namespace deepseal
