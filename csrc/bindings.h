/// What the files that know Python share: each binds its part of the module.
#pragma once

#include <pybind11/pybind11.h>

namespace offload {

void bind_codec(pybind11::module_& module);

}  // namespace offload
