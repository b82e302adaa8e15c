// Python module of the engine. Tensors are passed as addresses, so the module needs neither torch's
// headers nor its ABI, and works with every torch.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "byteps/base/block_codec.h"
#include "byteps/base/config.h"
#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/base/process.h"
#include "byteps/cluster/session.h"
#include "byteps/device/device.h"
#include "byteps/device/device_copies.h"
#include "byteps/engine/worker.h"
#include "byteps/net/link/counters.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/link/registration_cache.h"
#include "byteps/net/link/server_nics.h"
#include "byteps/observe/histogram.h"
#include "byteps/observe/metrics.h"
#include "byteps/recovery/worker/server_replacement.h"
#include "byteps/torch/c_parts.h"

// Processes that embedded mode has started next to this rank (launcher/embedded.py). This class
// ends them.
//
// The processes end by themselves when every worker has left. So this code first waits for them,
// and ends the rest together with this process. The exit status of this process says whether the
// job succeeded. Python's exit handlers do not get the status, so a handler of the C library calls
// this code when Python is gone.

namespace nb = nanobind;

namespace byteps {
namespace core {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kLook = std::chrono::milliseconds(10);

// A child as a tuple: title, process id, log.
using ChildTuple = std::tuple<std::string, int, std::string>;

struct Children {
  const pid_t parent;
  std::vector<ChildTuple> running;
  const std::string folder;  // folder of the log files
  const Clock::duration patience;
  const Clock::duration grace;
  bool any_failed = false;

  // Waits until all children have ended, or until `deadline`, or until `grace` after the first
  // failure.
  void Await(Clock::time_point deadline, bool expected) {
    while (true) {
      const bool failed_before = any_failed;
      running.erase(std::remove_if(running.begin(), running.end(),
                                   [&](const ChildTuple& c) { return HasEnded(c, expected); }),
                    running.end());
      const auto now = Clock::now();
      if (any_failed && !failed_before) deadline = std::min(deadline, now + grace);
      if (running.empty() || now >= deadline) return;
      // The wait is ended by the last child; deadline: Await's.
      std::this_thread::sleep_for(kLook);
    }
  }

  bool HasEnded(const ChildTuple& child, bool expected) {
    const auto& [title, pid, log] = child;
    int status = 0;
    const pid_t ended = waitpid(pid, &status, WNOHANG);
    // If waitpid fails, a Python thread has already collected the process, and reported its end.
    if (ended != pid) return ended < 0;
    if (status == 0 || expected) return true;
    any_failed = true;
    const std::string how = WIFSIGNALED(status)
                                ? "signal " + std::to_string(WTERMSIG(status))
                                : "exit status " + std::to_string(WEXITSTATUS(status));
    ps::WriteLogLine('E', __FILE__, __LINE__,
                     "embedded " + title + " ended with " + how + "; its log is " + log);
    return true;
  }

  void End(int exit_status) {
    Await(Clock::now() + (exit_status == 0 ? patience : std::min(patience, grace)), false);
    for (const int number : {SIGTERM, SIGKILL}) {
      for (const auto& child : running) kill(std::get<1>(child), number);
      Await(Clock::now() + grace, true);
    }
    std::error_code ignored;
    if (!any_failed) std::filesystem::remove_all(folder, ignored);
  }
};

bool EndChildrenAtExit(std::vector<ChildTuple> running, std::string folder, double patience_s,
                       double grace_s) {
#ifdef __GLIBC__
  const auto duration = [](double seconds) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  };
  const auto end = [](int status, void* children) {
    auto* const own_children = static_cast<Children*>(children);
    if (getpid() == own_children->parent) own_children->End(status);
  };
  return on_exit(end, new Children{getpid(), std::move(running), std::move(folder),
                                   duration(patience_s), duration(grace_s)}) == 0;
#else
  return false;
#endif
}

}  // namespace

void DefineChildren(nb::module_* m) {
  m->def("end_children_at_exit", &EndChildrenAtExit, nb::arg("running"), nb::arg("folder"),
         nb::arg("patience_s"), nb::arg("grace_s"));
}

// The worker is never destroyed, because its threads may be running when the interpreter ends.
// Normally Python's atexit handler stops it before.
Worker* GetWorker() {
  if (ps::IsForkedCopy()) {
    throw Error(
        "this process was forked from a worker of a BytePS job and is no worker itself: call "
        "byteps in the worker, or start this process by 'spawn' (multiprocessing) to join a job of "
        "its own");
  }
  static auto* worker = new Worker();
  return worker;
}

namespace {

bool IsInitialized() { return !ps::IsForkedCopy() && GetWorker()->started(); }

// The queue is never destroyed: the worker's threads may be running when the interpreter ends.
EndedQueue* Ended() {
  static auto* queue = new EndedQueue();
  return queue;
}

Launch launch;
// Settings of the last Init. The environment may have changed since then.
std::optional<Config> settings_of_init;

Config Settings(const GivenSettings& given = {}) {
  return IsInitialized() && settings_of_init ? *settings_of_init : Config::FromEnvironment(given);
}

// Returns a setting as Python's int, float, bool or str, by its type in the table.
nb::object TypedSetting(const std::string& name, const GivenSettings& given) {
  const Config config = Settings(given);
  switch (Config::TypeOf(name)) {
    case Variable::kInt:
      return nb::int_(config.Int(name));
    case Variable::kFloat:
      return nb::float_(config.Float(name));
    case Variable::kBool:
      return nb::bool_(config.Bool(name));
    case Variable::kString:
    case Variable::kChoice:
      break;
  }
  return nb::str(config.String(name).c_str());
}

// Returns counters and gauges as numbers, and histograms as tuples: upper bounds of the buckets,
// cumulative counts, total count, sum.
nb::dict Metrics() {
  std::vector<Metric> metrics;
  {
    nb::gil_scoped_release unlocked;
    metrics = GetWorker()->Metrics();
  }
  nb::dict out;
  for (const Metric& metric : metrics) {
    const Histogram::Reading& h = metric.histogram;
    if (metric.kind == Metric::kHistogram) {
      out[metric.name.c_str()] = nb::make_tuple(Histogram::kBounds, h.cumulative, h.count, h.sum);
    } else if (metric.name.find("_seconds_") != std::string::npos) {
      out[metric.name.c_str()] = metric.value;
    } else {
      out[metric.name.c_str()] = static_cast<uint64_t>(metric.value);
    }
  }
  return out;
}

// Returns a dictionary per NIC.
nb::list Nics() {
  nb::list out;
  for (const auto& reading : ps::ReadNicCounters()) {
    nb::dict nic;
    nic["nic"] = reading.nic;
    nic["bytes_sent"] = reading.bytes_sent;
    nic["bytes_received"] = reading.bytes_received;
    out.append(nic);
  }
  return out;
}

// Returns a dictionary per RDMA endpoint.
nb::list Endpoints() {
  nb::list out;
  for (const auto& e : ps::ReadEndpointCounters()) {
    nb::dict endpoint;
    endpoint["peer"] = e.peer;
    endpoint["plane"] = e.plane;
    endpoint["index"] = e.index;
    endpoint["messages_sent"] = e.messages_sent;
    endpoint["bytes_sent"] = e.bytes_sent;
    endpoint["messages_received"] = e.messages_received;
    endpoint["bytes_received"] = e.bytes_received;
    endpoint["values_in_place"] = e.values_in_place;
    endpoint["bytes_in_place"] = e.bytes_in_place;
    endpoint["values_offered"] = e.values_offered;
    endpoint["values_in_pool"] = e.values_in_pool;
    endpoint["bytes_in_pool"] = e.bytes_in_pool;
    endpoint["values_in_frames"] = e.values_in_frames;
    endpoint["bytes_in_frames"] = e.bytes_in_frames;
    out.append(endpoint);
  }
  return out;
}

void Init(const std::string& gpu, const GivenSettings& given) {
  const Config config = Config::FromEnvironment(given);
  launch = Launch::From(config);
  settings_of_init = config;
  if (!config.IsSet("DMLC_PS_ROOT_URI") || config.Int("DMLC_PS_ROOT_PORT") == 0) {
    throw UsageError("DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT must give the scheduler's address");
  }
  SessionOptions options;
  options.role = Role::kWorker;
  options.rank = launch.rank;
  options.gpu = gpu;
  options.num_workers = launch.size;
  options.num_servers = static_cast<int>(config.Int("DMLC_NUM_SERVER"));
  GetWorker()->Start(config, launch, options.num_servers,
                     std::make_unique<Session>(config, options),
                     MakeLossPolicy(config, options.num_servers));
}

std::vector<uint64_t> BytesPerServer(const std::string& name, const std::string& dtype,
                                     uint64_t bytes, uint64_t piece_of, const Ranks& group,
                                     std::optional<uint64_t> placement) {
  return GetWorker()->BytesPerServer(
      Spec(name, dtype, bytes, piece_of, true, false, group, placement, kCpu, false));
}

uint64_t PartitionBytesOf(const std::string& dtype, uint64_t bytes, uint64_t piece_of) {
  return GetWorker()->PartitionBytes(ParsedDType(dtype), bytes, piece_of);
}

void Declare(const std::vector<SpecTuple>& tuples) {
  std::vector<TensorSpec> specs;
  for (const auto& tuple : tuples) specs.push_back(std::apply(Spec, tuple));
  GetWorker()->Declare(specs);
}

// A coded tensor as a tuple: dtype of the values, count, input, output, first wanted value, end of
// the wanted values, rounding losses.
using CodedTuple =
    std::tuple<std::string, uint64_t, uintptr_t, uintptr_t, uint64_t, uint64_t, uintptr_t>;

CodedValues Coded(const CodedTuple& tuple) {
  const auto& [dtype, count, input, output, begin, end, lost] = tuple;
  CodedValues coded;
  coded.dtype = ParsedDType(dtype);
  if (!IsEncoded(coded.dtype)) {
    throw UsageError("values of " + dtype + " cannot be sent in blocks of few bits");
  }
  coded.count = count;
  coded.begin = begin;
  coded.end = end;
  coded.input = reinterpret_cast<const void*>(input);
  coded.output = reinterpret_cast<void*>(output);
  coded.lost = reinterpret_cast<uint16_t*>(lost);
  return coded;
}

int64_t PushPull(const KnownTensor& tensor, uintptr_t input, uintptr_t output, int priority,
                 std::optional<std::pair<uint64_t, uint64_t>> pull, uintptr_t stream, bool streamed,
                 bool forgets_lost, const std::optional<CodedTuple>& coded) {
  PushPullRequest request;
  request.forgets_lost = forgets_lost;
  if (coded) request.coded = Coded(*coded);
  request.input = reinterpret_cast<const void*>(input);
  request.output = reinterpret_cast<void*>(output);
  request.priority = priority;
  if (pull) {
    request.pull_begin = pull->first;
    request.pull_end = pull->second;
  }
  request.stream = reinterpret_cast<DeviceStream>(stream);
  request.streamed = streamed;
  return tensor.PushPull(std::move(request));
}

void Encode(const std::string& dtype, uintptr_t blocks, const std::string& from, uintptr_t values,
            uint64_t count, uintptr_t lost, std::optional<uint64_t> seed) {
  const Chance chance = {seed.value_or(0), 0};
  EncodeBlocks(ParsedDType(dtype), reinterpret_cast<void*>(blocks), ParsedDType(from),
               reinterpret_cast<const void*>(values), count, reinterpret_cast<uint16_t*>(lost),
               seed ? &chance : nullptr);
}

void Decode(const std::string& dtype, uintptr_t blocks, const std::string& to, uintptr_t values,
            uint64_t count) {
  DecodeBlocks(ParsedDType(dtype), reinterpret_cast<const void*>(blocks), ParsedDType(to),
               reinterpret_cast<void*>(values), count);
}

void AddTo(uintptr_t blocks, const std::string& dtype, uintptr_t held, uint64_t count,
           uintptr_t out) {
  AddDifferences(ParsedDType(dtype), reinterpret_cast<const void*>(blocks),
                 reinterpret_cast<const void*>(held), count, reinterpret_cast<void*>(out));
}

constexpr std::chrono::nanoseconds kLookEvery = std::chrono::milliseconds(100);

// Handles Python signals such as Ctrl-C while it waits. If a handler raises, this throws, and the
// handle stays valid.
void Wait(int64_t handle, uintptr_t stream) {
  while (true) {
    {
      nb::gil_scoped_release unlocked;
      auto* const worker = GetWorker();
      if (worker->WaitFor(handle, reinterpret_cast<DeviceStream>(stream), kLookEvery)) return;
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

// Returns whether the operation ended within `limit_s`. The handle stays valid. Handles signals as
// Wait does.
bool AwaitEnd(int64_t handle, double limit_s) {
  using Clock = std::chrono::steady_clock;
  const auto until = Clock::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::duration<double>(limit_s));
  while (true) {
    const std::chrono::nanoseconds left = until - Clock::now();
    {
      nb::gil_scoped_release unlocked;
      if (GetWorker()->AwaitEnd(
              handle, std::max(std::chrono::nanoseconds(0), std::min(left, kLookEvery)))) {
        return true;
      }
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (left <= kLookEvery) return false;
  }
}

}  // namespace

NB_MODULE(c_lib, m) {
  // Leak warnings are off, because the process may end while Python still holds tensors.
  nb::set_leak_warnings(false);
  m.doc() = "The BytePS engine.  Use byteps.torch.";
  // In Python a failure is also a RuntimeError, and a bad call also a ValueError; both are
  // BytePSErrors. nanobind first asks the translator that was registered last.
  const nb::exception<Error> error(m, "BytePSError", PyExc_RuntimeError);
  nb::exception<UsageError>(m, "BytePSUsageError",
                            nb::make_tuple(error, nb::handle(PyExc_ValueError)));

  nb::class_<Ranks>(m, "Ranks", "A group's ranks, ascending; none: all workers.")
      .def(
          "__init__",
          [](Ranks* ranks, std::vector<uint32_t> values) { new (ranks) Ranks{std::move(values)}; },
          nb::arg("values"))
      .def("__len__", [](const Ranks& ranks) { return ranks.values.size(); })
      .def("lowest",
           [](const Ranks& ranks) { return ranks.values.empty() ? 0 : ranks.values.front(); });
  nb::implicitly_convertible<nb::sequence, Ranks>();

  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  m.def("init", &Init, nb::arg("gpu") = "", nb::arg("given") = GivenSettings(), Unlocked());
  m.def(
      "shutdown",
      [](bool suspend, const std::string& failure) { GetWorker()->Stop(suspend, failure); },
      nb::arg("suspend"), nb::arg("failure") = "", Unlocked());
  // The process references `kept` until it ends.
  m.def(
      "shutdown_at_exit",
      [](nb::object kept) {
        (void)kept.release();
        nb::gil_scoped_release unlocked;
        GetWorker()->StopAtExit();
      },
      nb::arg("kept"));
  m.def("is_initialized", &IsInitialized);
  m.def("is_forked_copy", &ps::IsForkedCopy, "Whether this process was forked from a worker.");
  m.def("has_failed", [] { return GetWorker()->failed(); }, Unlocked());
  m.def(
      "launch",
      [](const GivenSettings& given) {
        const Launch l = Launch::From(Config::FromEnvironment(given));
        return nb::make_tuple(l.rank, l.size, l.local_rank, l.local_size, l.replica, l.replicas);
      },
      nb::arg("given") = GivenSettings());
  nb::class_<KnownTensor>(m, "KnownTensor",
                          "A tensor that is summed again and again: described once.")
      .def(
          "__init__",
          [](KnownTensor* known, const SpecTuple& spec) {
            new (known) KnownTensor(std::apply(Spec, spec));
          },
          nb::arg("spec"))
      .def("push_pull", &PushPull, nb::arg("input"), nb::arg("output"), nb::arg("priority"),
           nb::arg("pull"), nb::arg("stream"), nb::arg("streamed"), nb::arg("forgets_lost"),
           nb::arg("coded"), Unlocked());
  m.def(
      "is_streamed", [](int64_t handle) { return GetWorker()->IsStreamed(handle); },
      nb::arg("handle"), Unlocked());
  nb::class_<Landing>(m, "Landing", "The moment at which sums are in their tensors.")
      .def("query", &Landing::is_done)
      .def(
          "wait",
          [](const Landing& landing, uintptr_t stream) {
            landing.MakeWait(reinterpret_cast<DeviceStream>(stream));
          },
          nb::arg("stream"));
  m.def(
      "land",
      [](int64_t handle, uintptr_t stream) {
        return GetWorker()->Land(handle, reinterpret_cast<DeviceStream>(stream));
      },
      nb::arg("handle"), nb::arg("stream"), Unlocked());
  m.def(
      "landing_of",
      [](int device, uintptr_t stream) {
        return Landing{device,
                       DeviceCopies::Of(device)->Now(reinterpret_cast<DeviceStream>(stream))};
      },
      nb::arg("device"), nb::arg("stream"), Unlocked(), "Of all that a stream was given so far.");
  m.def(
      "make_stream",
      [](int device) {
        const CurrentDevice current(device);
        return reinterpret_cast<uintptr_t>(MakeStream());
      },
      nb::arg("device"), Unlocked(), "A stream of a GPU that nobody else has; never destroyed.");
  m.def("check", [] { GetWorker()->Check(); }, Unlocked());
  m.def("poll", [](int64_t handle) { return GetWorker()->Poll(handle); }, Unlocked());
  m.def("wait", &Wait, nb::arg("handle"), nb::arg("stream") = 0);
  m.def("await_end", &AwaitEnd, nb::arg("handle"), nb::arg("limit_s"));
  m.def(
      "watch",
      [](int64_t handle) { GetWorker()->CallAtEnd(handle, [handle] { Ended()->Push(handle); }); },
      nb::arg("handle"), Unlocked());
  m.def("await_ended", [] { return Ended()->Await(); }, Unlocked());
  m.def("wake", [] { Ended()->Wake(); }, Unlocked());
  m.def("declare", &Declare, nb::arg("tensors"), Unlocked());
  m.def(
      "registers_memory", [] { return GetWorker()->RegistersMemory(); },
      "Of a worker that was started.");
  m.def(
      "add_memory",
      [](uintptr_t address, uint64_t bytes) {
        return ps::RegistrationCache::Add(reinterpret_cast<const void*>(address), bytes);
      },
      nb::arg("address"), nb::arg("bytes"), Unlocked());
  m.def(
      "remove_memory",
      [](uint64_t number) {
        // A forked copy of the process frees storages, too. It must not take a lock that was
        // perhaps held at the fork.
        if (!ps::IsForkedCopy()) ps::RegistrationCache::Remove(number);
      },
      nb::arg("number"), Unlocked());
  m.def("metrics", &Metrics);
  m.def("endpoints", &Endpoints);
  m.def("nics", &Nics);
  m.def(
      "nics_of_server",
      [](const std::string& address) {
        const ps::ServerNics nics = ps::ServerNics::At(address, ps::NicSettings::From(Settings()));
        return std::tuple(nics.mbps, nics.numa_nodes, nics.cores);
      },
      nb::arg("address"));
  m.def("interface_address", &ps::AddressOfInterface, nb::arg("name"));
  m.def("pushpull_speed", [] { return GetWorker()->Speed(); });
  m.def("partition_bytes", &PartitionBytesOf, nb::arg("dtype"), nb::arg("bytes"),
        nb::arg("piece_of"));
  m.def(
      "link_gbps", [] { return GetWorker()->LinkGbps(); },
      "Gbit/s each way of the slowest worker's NIC; 0 where one of them is not known.");
  m.def(
      "server_hosts", [] { return GetWorker()->ServerHosts(); },
      "The address of each server; empty where it is not known.");
  m.def("bytes_per_server", &BytesPerServer, nb::arg("name"), nb::arg("dtype"), nb::arg("bytes"),
        nb::arg("piece_of"), nb::arg("group"), nb::arg("placement"));
  m.def("encode_blocks", &Encode, nb::arg("dtype"), nb::arg("blocks"), nb::arg("from_"),
        nb::arg("values"), nb::arg("count"), nb::arg("lost"), nb::arg("seed"), Unlocked());
  m.def("chance_seed", &ChanceSeed, nb::arg("name"), nb::arg("round"), nb::arg("rank"));
  m.def("decode_blocks", &Decode, nb::arg("dtype"), nb::arg("blocks"), nb::arg("to"),
        nb::arg("values"), nb::arg("count"), Unlocked());
  m.def("add_differences", &AddTo, nb::arg("blocks"), nb::arg("dtype"), nb::arg("held"),
        nb::arg("count"), nb::arg("out"), Unlocked());
  // A placement with this bit puts all partitions on one server.
  m.attr("ON_ONE_SERVER") = kOnOneServer;
  m.def("config", [] { return Settings().Print(); });
  m.def("setting", &TypedSetting, nb::arg("name"), nb::arg("given") = GivenSettings());
  m.def(
      "is_set",
      [](const std::string& name, const GivenSettings& given) {
        return Settings(given).IsSet(name);
      },
      nb::arg("name"), nb::arg("given") = GivenSettings());
  DefineUpdatedTensor(&m);
  DefineReplicas(&m);
  DefineChildren(&m);
  m.def("unknown_variables", [] {
    std::vector<std::string> warnings;
    for (const auto& variable : Config::UnknownVariables()) warnings.push_back(variable.Describe());
    return warnings;
  });
}

}  // namespace core
}  // namespace byteps
