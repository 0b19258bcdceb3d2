/// The codecs' part of the module.
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings.h"
#include "check.h"
#include "codec.h"

namespace py = pybind11;

namespace offload {
namespace {

using Sizes = std::vector<std::int64_t>;

TensorLayout layout_of(const char* function, const std::string& dtype, const Sizes& shape,
                       const Sizes& strides) {
    OFFLOAD_CHECK(shape.size() == strides.size(), function, ": expected a stride for each of ",
                  shape.size(), " dimensions, got ", strides.size(),
                  ". Pass the tensor's own shape and strides.");
    TensorLayout layout;
    layout.dtype = dtype_of(function, dtype);
    layout.dims = static_cast<int>(shape.size());
    OFFLOAD_CHECK(shape.size() <= kMaxDims, function, ": expected at most ", kMaxDims,
                  " dimensions, got ", shape.size(), ". Flatten some of them first.");
    std::copy(shape.begin(), shape.end(), layout.shape);
    std::copy(strides.begin(), strides.end(), layout.stride);
    return layout;
}

/// A host codec runs on the calling thread, so only what that thread did is done.
void check_host(const char* function, int device, StreamHandle stream) {
    OFFLOAD_CHECK(device == -1, function, ": expected a CUDA index or -1 for the CPU, got ", device,
                  ". Only copies know other host devices.");
    OFFLOAD_CHECK(stream == kCallerStream, function, ": expected stream 0 on the CPU, got ", stream,
                  ". Host codecs run on the calling thread.");
}

/// Gives the interpreter lock up for work that takes longer than to get it back. Small tensors keep
/// it: beside busy threads that would cost them milliseconds.
std::unique_ptr<py::gil_scoped_release> released_for(Codec codec, const TensorLayout& layout) {
    constexpr std::size_t kLargeBytes = 64 << 10;
    const bool large = encoded_bytes(codec, layout) >= kLargeBytes;
    return large ? std::make_unique<py::gil_scoped_release>() : nullptr;
}

void encode(int device, const std::string& codec, const std::string& dtype, std::uintptr_t address,
            const Sizes& shape, const Sizes& strides, std::uintptr_t encoded_address,
            StreamHandle stream, std::optional<std::uint64_t> seed, int threads) {
    const Codec with = codec_of("encode", codec);
    const TensorLayout layout = layout_of("encode", dtype, shape, strides);
    const auto* const source = reinterpret_cast<const void*>(address);
    auto* const encoded = reinterpret_cast<void*>(encoded_address);
    if (device >= 0) {
        encode_cuda(device, with, layout, source, encoded, stream, seed);
        return;
    }
    check_host("encode", device, stream);
    const auto released = released_for(with, layout);
    encode_host(with, layout, source, encoded, seed, threads);
}

void decode(int device, const std::string& codec, const std::string& dtype,
            std::uintptr_t encoded_address, std::uintptr_t address, const Sizes& shape,
            const Sizes& strides, StreamHandle stream, int threads) {
    const Codec with = codec_of("decode", codec);
    const TensorLayout layout = layout_of("decode", dtype, shape, strides);
    const auto* const encoded = reinterpret_cast<const void*>(encoded_address);
    auto* const destination = reinterpret_cast<void*>(address);
    if (device >= 0) {
        decode_cuda(device, with, layout, encoded, destination, stream);
        return;
    }
    check_host("decode", device, stream);
    const auto released = released_for(with, layout);
    decode_host(with, layout, encoded, destination, threads);
}

}  // namespace

void bind_codec(py::module_& module) {
    module.def(
        "encoded_bytes",
        [](const std::string& codec, const std::string& dtype, const Sizes& shape) {
            const Sizes strides(shape.size(), 0);  // they do not matter
            return encoded_bytes(codec_of("encoded_bytes", codec),
                                 layout_of("encoded_bytes", dtype, shape, strides));
        },
        py::arg("codec"), py::arg("dtype"), py::arg("shape"));
    module.def("encode", &encode, py::arg("device"), py::arg("codec"), py::arg("dtype"),
               py::arg("address"), py::arg("shape"), py::arg("strides"), py::arg("encoded_address"),
               py::arg("stream"), py::arg("seed") = py::none(), py::arg("threads") = 0);
    module.def("decode", &decode, py::arg("device"), py::arg("codec"), py::arg("dtype"),
               py::arg("encoded_address"), py::arg("address"), py::arg("shape"), py::arg("strides"),
               py::arg("stream"), py::arg("threads") = 0);
}

}  // namespace offload
