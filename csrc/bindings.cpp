/// The engine's part of the module, and the module. Only `bindings*.cpp` know Python. What may
/// block asks first and gives the interpreter lock up only if it will: getting the lock back costs
/// milliseconds beside busy threads. Workers never take it.
#include "bindings.h"

#include "arena.h"
#include "check.h"
#include "copy_engine.h"
#include "device_host.h"
#include "slot_allocator.h"

namespace py = pybind11;

namespace offload {
namespace {

/// Leaked on purpose (rule 13 of copy_engine.h): views and tickets may outlive every orderly
/// shutdown.
struct Runtime {
    Runtime(std::size_t reserve_bytes, std::size_t cap_bytes)
        : arena(reserve_bytes, cap_bytes), engine(arena) {}

    Arena arena;
    CopyEngine engine;
};

Runtime* runtime_or_null = nullptr;  // guarded by the interpreter lock

Runtime& runtime(const char* function) {
    OFFLOAD_CHECK(runtime_or_null != nullptr, function,
                  ": expected a started engine. Call start first.");
    return *runtime_or_null;
}

HostDevice& host_device_of(const char* function, int device) {
    OFFLOAD_CHECK(device < 0, function, ": expected a host device (-1 and below), got ", device);
    return host_device(-1 - device);
}

Device& device_of(int device) {
    return device >= 0 ? cuda_device(device)
                       : static_cast<Device&>(host_device_of("device_of", device));
}

void* to_pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

void start(std::size_t reserve_bytes, std::size_t cap_bytes) {
    OFFLOAD_CHECK(runtime_or_null == nullptr,
                  "start: expected one call a process, got another. Use set_cap.");
    runtime_or_null = new Runtime(reserve_bytes, cap_bytes);
}

std::shared_ptr<Ticket> offload_bytes(int device, std::uintptr_t address, std::size_t bytes,
                                      StreamHandle compute_stream, bool leaves) {
    CopyEngine& engine = runtime("offload").engine;
    Device& on = device_of(device);
    auto ticket = engine.try_offload(on, to_pointer(address), bytes, compute_stream, leaves);
    if (ticket == nullptr) {
        py::gil_scoped_release release;
        ticket = engine.offload(on, to_pointer(address), bytes, compute_stream, leaves);
    }
    return ticket;
}

std::shared_ptr<Copy> reload_bytes(const Ticket& ticket, std::uintptr_t address,
                                   StreamHandle compute_stream) {
    CopyEngine& engine = runtime("reload").engine;
    auto copy = engine.try_reload(ticket, to_pointer(address), compute_stream);
    if (copy == nullptr) {
        py::gil_scoped_release release;
        copy = engine.reload(ticket, to_pointer(address), compute_stream);
    }
    return copy;
}

std::shared_ptr<Slot> host_slot(const Ticket& ticket) {
    CopyEngine& engine = runtime("host_slot").engine;
    py::gil_scoped_release release;
    return engine.host_slot(ticket);
}

void set_disk(const std::string& directory, std::size_t cap_bytes) {
    Residency& residency = runtime("set_disk").engine.residency();
    py::gil_scoped_release release;
    residency.set_disk(directory.empty() ? nullptr
                                         : std::make_unique<DiskTier>(directory, cap_bytes));
}

void wait_for(Copy& copy, StreamHandle stream) {
    if (copy.would_block(stream)) {
        py::gil_scoped_release release;
        copy.wait(stream);
    } else {
        copy.wait(stream);
    }
}

void synchronize(const Copy& copy) {
    if (copy.done()) {
        copy.synchronize();
    } else {
        py::gil_scoped_release release;
        copy.synchronize();
    }
}

void drain() {
    CopyEngine& engine = runtime("drain").engine;
    if (!engine.drained()) {
        py::gil_scoped_release release;
        engine.drain();
    }
}

void close() {
    if (runtime_or_null == nullptr) {
        return;
    }
    py::gil_scoped_release release;
    try {
        runtime_or_null->engine.close();
        shut_down_host_devices();
    } catch (const EngineUnusable&) {
        // A forked child inherits the exit handler but owns nothing to close.
    }
}

void bind_errors(py::module_& module) {
    const auto define = [&module](const char* name, const char* doc, py::handle base) {
        PyObject* const type = PyErr_NewExceptionWithDoc(
            (std::string("offload._C.") + name).c_str(), doc, base.ptr(), nullptr);
        if (type == nullptr) {
            throw py::error_already_set();
        }
        module.add_object(name, type);
        return py::handle(type);  // keeps its reference: the translator outlives the module
    };
    static const py::handle error =
        define("Error", "Base of what the native module raises.", PyExc_RuntimeError);
    static const py::handle arena_full =
        define("ArenaFull", "The host arena is full: asked_bytes, free_bytes, cap_bytes.", error);
    static const py::handle copy_failed =
        define("CopyFailed", "A copy failed; its ticket or buffer holds no valid bytes.", error);
    static const py::handle engine_unusable =
        define("EngineUnusable", "The engine was closed, or this is a forked child.", error);

    py::register_local_exception_translator([](std::exception_ptr pointer) {
        try {
            std::rethrow_exception(pointer);
        } catch (const ArenaFull& full) {
            const py::object instance = arena_full(full.what());
            instance.attr("asked_bytes") = full.asked_bytes;
            instance.attr("free_bytes") = full.free_bytes;
            instance.attr("cap_bytes") = full.cap_bytes;
            PyErr_SetObject(arena_full.ptr(), instance.ptr());
        } catch (const CopyFailed& failed) {
            PyErr_SetString(copy_failed.ptr(), failed.what());
        } catch (const EngineUnusable& unusable) {
            PyErr_SetString(engine_unusable.ptr(), unusable.what());
        } catch (const Error& other) {
            PyErr_SetString(error.ptr(), other.what());
        }
    });
}

void bind_objects(py::module_& module) {
    py::class_<Slot, std::shared_ptr<Slot>>(
        module, "Slot", py::buffer_protocol(), py::is_final(),
        "Arena memory, through the buffer protocol. Every view keeps the slot from being reused.")
        .def_buffer([](Slot& slot) {
            return py::buffer_info(slot.data(), static_cast<py::ssize_t>(slot.bytes()), false);
        })
        .def_property_readonly("nbytes", &Slot::bytes)
        .def_property_readonly("address", [](const Slot& slot) {
            return reinterpret_cast<std::uintptr_t>(slot.data());
        });
    py::class_<Copy, std::shared_ptr<Copy>>(module, "Copy", py::is_final(),
                                            "One copy that was queued.")
        .def("done", &Copy::done, "True when the copy has run, well or not. Never blocks.")
        .def("settled", &Copy::settled, "True when its copy and stall times will not change.")
        .def("synchronize", &synchronize, "Blocks until it has run. Raises CopyFailed.")
        .def("wait", &wait_for, py::arg("stream"),
             "Work queued on `stream` after this call runs after the copy. Host stream 0 blocks.")
        .def("error", &Copy::error, "Why it failed; empty while it runs and when it went well.")
        .def_property_readonly("nbytes", &Copy::bytes)
        .def_property_readonly("copy_ms", &Copy::copy_ms)
        .def_property_readonly("stall_ms", &Copy::stall_ms);
    py::class_<Ticket, std::shared_ptr<Ticket>>(module, "Ticket", py::is_final(),
                                                "The bytes of one offloaded tensor.")
        .def_property_readonly("nbytes", &Ticket::bytes)
        .def_property_readonly("offload_copy", [](const Ticket& t) { return t.offload_copy(); });
}

void bind_statistics(py::module_& module) {
    py::class_<ArenaStatistics>(module, "ArenaStatistics")
        .def_readonly("cap_bytes", &ArenaStatistics::cap_bytes)
        .def_readonly("committed_bytes", &ArenaStatistics::committed_bytes)
        .def_readonly("pinned_bytes", &ArenaStatistics::pinned_bytes)
        .def_readonly("live_bytes", &ArenaStatistics::live_bytes)
        .def_readonly("live_slots", &ArenaStatistics::live_slots)
        .def_readonly("peak_live_bytes", &ArenaStatistics::peak_live_bytes)
        .def_readonly("peak_committed_bytes", &ArenaStatistics::peak_committed_bytes)
        .def_readonly("pin_refusal", &ArenaStatistics::pin_refusal)
        .def_readonly("pinnable_bytes", &ArenaStatistics::pinnable_bytes)
        .def_readonly("numa_node", &ArenaStatistics::numa_node);
    py::class_<DiskStatistics>(module, "DiskStatistics")
        .def_readonly("directory", &DiskStatistics::directory)
        .def_readonly("direct", &DiskStatistics::direct)
        .def_readonly("cap_bytes", &DiskStatistics::cap_bytes)
        .def_readonly("file_bytes", &DiskStatistics::file_bytes)
        .def_readonly("live_bytes", &DiskStatistics::live_bytes)
        .def_readonly("live_extents", &DiskStatistics::live_extents)
        .def_readonly("peak_live_bytes", &DiskStatistics::peak_live_bytes)
        .def_property_readonly("written_bytes",
                               [](const DiskStatistics& s) { return s.transfers.written_bytes; })
        .def_property_readonly("read_bytes",
                               [](const DiskStatistics& s) { return s.transfers.read_bytes; })
        .def_property_readonly("write_ms",
                               [](const DiskStatistics& s) { return s.transfers.write_ms; })
        .def_property_readonly("read_ms",
                               [](const DiskStatistics& s) { return s.transfers.read_ms; })
        .def_property_readonly("failed_transfers", [](const DiskStatistics& s) {
            return s.transfers.failed_transfers;
        });
    py::class_<ResidencyStatistics>(module, "ResidencyStatistics")
        .def_readonly("spilled_tickets", &ResidencyStatistics::spilled_tickets)
        .def_readonly("fetched_tickets", &ResidencyStatistics::fetched_tickets)
        .def_readonly("evicted_tickets", &ResidencyStatistics::evicted_tickets)
        .def_readonly("write_refusal", &ResidencyStatistics::write_refusal);
    py::class_<EngineStatistics>(module, "EngineStatistics")
        .def_readonly("offloads", &EngineStatistics::offloads)
        .def_readonly("reloads", &EngineStatistics::reloads)
        .def_readonly("offloaded_bytes", &EngineStatistics::offloaded_bytes)
        .def_readonly("reloaded_bytes", &EngineStatistics::reloaded_bytes)
        .def_readonly("failed_copies", &EngineStatistics::failed_copies)
        .def_readonly("in_flight_bytes", &EngineStatistics::in_flight_bytes)
        .def_readonly("peak_in_flight_bytes", &EngineStatistics::peak_in_flight_bytes)
        .def_readonly("back_pressure_ms", &EngineStatistics::back_pressure_ms);
}

void bind_engine(py::module_& module) {
    module.def("built_with_cuda", &built_with_cuda);
    module.def("start", &start, py::arg("reserve_bytes"), py::arg("cap_bytes"));
    module.def("started", [] { return runtime_or_null != nullptr; });
    module.def(
        "enable_pinning",
        [](int device) {
            Arena& arena = runtime("enable_pinning").arena;
            Device& on = device_of(device);
            py::gil_scoped_release release;
            arena.enable_pinning(on);
        },
        py::arg("device"));
    module.def(
        "set_cap", [](std::size_t bytes) { runtime("set_cap").arena.set_cap(bytes); },
        py::arg("cap_bytes"));
    module.def(
        "set_poisoning", [](bool on) { runtime("set_poisoning").arena.set_poisoning(on); },
        py::arg("on"));
    module.def(
        "set_max_in_flight_bytes",
        [](std::size_t bytes) {
            runtime("set_max_in_flight_bytes").engine.set_max_in_flight_bytes(bytes);
        },
        py::arg("nbytes"));
    module.def("offload", &offload_bytes, py::arg("device"), py::arg("address"), py::arg("nbytes"),
               py::arg("compute_stream"), py::arg("leaves") = false);
    module.def("reload", &reload_bytes, py::arg("ticket"), py::arg("address"),
               py::arg("compute_stream"));
    module.def(
        "try_reload",
        [](const Ticket& ticket, std::uintptr_t address, StreamHandle compute_stream) {
            return runtime("try_reload")
                .engine.try_reload(ticket, to_pointer(address), compute_stream);
        },
        py::arg("ticket"), py::arg("address"), py::arg("compute_stream"));
    module.def("host_slot", &host_slot, py::arg("ticket"));
    module.def(
        "tier_of", [](const Ticket& ticket) { return runtime("tier_of").engine.tier_of(ticket); },
        py::arg("ticket"));
    module.def(
        "put_last", [](const Ticket& ticket) { runtime("put_last").engine.put_last(ticket); },
        py::arg("ticket"));
    module.def("set_disk", &set_disk, py::arg("directory"), py::arg("cap_bytes"));
    module.def(
        "allocate",
        [](std::size_t bytes) {
            Arena& arena = runtime("allocate").arena;
            py::gil_scoped_release release;
            return arena.allocate(bytes);
        },
        py::arg("nbytes"));
    module.def("retire", [] { runtime("retire").engine.retire(); });
    module.def("drain", &drain);
    module.def("trim", [] { runtime("trim").arena.trim(); });
    module.def("close", &close);
    module.def("arena_statistics", [] { return runtime("arena_statistics").arena.statistics(); });
    module.def("disk_statistics",
               [] { return runtime("disk_statistics").engine.residency().disk_statistics(); });
    module.def("residency_statistics",
               [] { return runtime("residency_statistics").engine.residency().statistics(); });
    module.def("engine_statistics",
               [] { return runtime("engine_statistics").engine.statistics(); });
    py::class_<SlotAllocator>(module, "SlotAllocator", "The arena's placement logic alone.")
        .def(py::init<std::size_t, std::size_t>(), py::arg("cap_bytes"), py::arg("step_bytes"))
        .def(
            "allocate",
            [](SlotAllocator& allocator, std::size_t bytes) {
                return allocator.allocate(bytes).offset;
            },
            py::arg("nbytes"))
        .def("release", &SlotAllocator::release, py::arg("offset"))
        .def("trim", &SlotAllocator::trim)
        .def_property_readonly("committed_bytes", &SlotAllocator::committed_bytes)
        .def_property_readonly("live_bytes", &SlotAllocator::live_bytes);
}

void bind_faults(py::module_& module) {
    py::class_<Gate>(
        module, "HostGate", py::is_final(),
        "A task on a host stream that blocks it until `open`, or until it is collected.")
        .def(py::init([](int device, StreamHandle stream) {
                 return std::make_unique<Gate>(host_device_of("HostGate", device), stream);
             }),
             py::arg("device"), py::arg("stream"))
        .def("open", &Gate::open)
        .def("reached", &Gate::reached);
    module.def(
        "host_create_stream",
        [](int device) { return host_device_of("host_create_stream", device).create_stream(); },
        py::arg("device"));
    module.def(
        "host_destroy_stream",
        [](int device, StreamHandle stream) {
            HostDevice& on = host_device_of("host_destroy_stream", device);
            py::gil_scoped_release release;
            on.destroy_stream(stream);
        },
        py::arg("device"), py::arg("stream"));
    module.def(
        "host_queues",
        [](int device) {
            const auto streams =
                runtime("host_queues").engine.streams(host_device_of("host_queues", device));
            return py::make_tuple(streams.first, streams.second);
        },
        py::arg("device"));
    module.def(
        "host_fail_next_copies",
        [](int device, int count) {
            host_device_of("host_fail_next_copies", device).fail_next_copies(count);
        },
        py::arg("device"), py::arg("count"));
    module.def(
        "host_refuse_pinning",
        [](int device, const std::string& reason, std::size_t above_bytes) {
            host_device_of("host_refuse_pinning", device).refuse_pinning(reason, above_bytes);
        },
        py::arg("device"), py::arg("reason"), py::arg("above_bytes") = 0);
}

}  // namespace
}  // namespace offload

PYBIND11_MODULE(_C, module) {
    module.doc() = "Native part of offload. Pointers and sizes cross; tensors never do.";
    module.attr("BUILD_VERSION") = OFFLOAD_VERSION;
    module.attr("SOURCE_HASH") = OFFLOAD_SOURCE_HASH;
    offload::bind_errors(module);
    offload::bind_objects(module);
    offload::bind_statistics(module);
    offload::bind_engine(module);
    offload::bind_faults(module);
    offload::bind_codec(module);
}
