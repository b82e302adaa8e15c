// Python's classes and functions for parameters that servers update, and for replicas
// (server_optimizer.py).
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "byteps/base/process.h"
#include "byteps/base/wire.h"
#include "byteps/torch/c_parts.h"

namespace nb = nanobind;

namespace byteps {
namespace core {
namespace {

// Tuples from Python: (beta1, beta2, eps, nesterov); (end, group, counted); (number, grad_scale,
// skip, [(rate, decay)]).
using GroupTuple = std::tuple<double, double, double, bool>;
using SegmentTuple = std::tuple<uint64_t, uint32_t, bool>;
using StepTuple = std::tuple<uint64_t, double, bool, std::vector<std::pair<double, double>>>;

std::string Packed(const StepTuple& tuple) {
  UpdateStep step;
  std::vector<std::pair<double, double>> rates;
  std::tie(step.number, step.grad_scale, step.skip, rates) = tuple;
  for (const auto& rate : rates) step.rates.push_back({rate.first, rate.second});
  return step.Pack();
}

std::string Packed(uint8_t verdict) {
  if (verdict > static_cast<uint8_t>(Verdict::kDrop)) throw UsageError("there is no such verdict");
  return std::string(1, static_cast<char>(verdict));
}

UpdateRule RuleOf(bool is_adamw, const std::vector<GroupTuple>& groups,
                  const std::vector<SegmentTuple>& segments, const std::string& held,
                  bool speculative, bool counts_zeros) {
  UpdateRule rule;
  rule.algorithm = is_adamw ? UpdateRule::kAdamW : UpdateRule::kSgd;
  for (const auto& [beta1, beta2, eps, nesterov] : groups) {
    rule.groups.push_back({beta1, beta2, eps, nesterov});
  }
  for (const auto& [end, group, counted] : segments) rule.segments.push_back({end, group, counted});
  if (!ParseDType(held, &rule.held) || !IsHeld(rule.held)) {
    throw UsageError("servers cannot update parameters of the type " + held);
  }
  rule.speculative = speculative;
  rule.counts_zeros = counts_zeros;
  return rule;
}

TensorSpec WithRule(const SpecTuple& tuple, UpdateRule rule) {
  TensorSpec spec = std::apply(Spec, tuple);
  spec.rule = std::make_shared<const UpdateRule>(std::move(rule));
  return spec;
}

// A tensor of gradients and parameters that servers update. Its functions start an operation and
// return its handle.
class UpdatedTensor {
 public:
  UpdatedTensor(const SpecTuple& spec, bool is_adamw, const std::vector<GroupTuple>& groups,
                const std::vector<SegmentTuple>& segments, const std::string& held,
                bool speculative, bool counts_zeros)
      : known_(
            WithRule(spec, RuleOf(is_adamw, groups, segments, held, speculative, counts_zeros))) {
    GetWorker()->Declare({known_.spec()});
  }

  int64_t PushStep(uintptr_t gradients, uintptr_t parameters, const StepTuple& step,
                   uint8_t verdict, uintptr_t stream) const {
    return Start(kPushStep, gradients, parameters, Packed(verdict) + Packed(step), stream);
  }
  int64_t PushNorm(uintptr_t gradients, uintptr_t sums, uint8_t verdict, uintptr_t stream) const {
    return Start(kPushNorm, gradients, sums, Packed(verdict), stream);
  }
  int64_t PushTry(uintptr_t gradients, uintptr_t parameters, uintptr_t sums, const StepTuple& step,
                  uint8_t verdict, uintptr_t stream) const {
    return Start(kPushTry, gradients, parameters, Packed(verdict) + Packed(step), stream, sums);
  }
  int64_t Step(uintptr_t parameters, const StepTuple& step, uintptr_t stream) const {
    return Start(kStep, 0, parameters, Packed(step), stream);
  }
  int64_t Load(uint32_t slot, uintptr_t values) const {
    return Start(kLoadState, values, 0, Slot(slot), 0);
  }
  // Reads elements [begin, end) of a slot into `values`.
  int64_t Read(uint32_t slot, uint64_t begin, uint64_t end, uintptr_t values,
               uint8_t verdict) const {
    PushPullRequest request;
    request.pull_begin = begin * sizeof(float);
    request.pull_end = end * sizeof(float);
    // Address at which the whole slot would begin. Only the wanted part of it exists.
    const uintptr_t output = values - request.pull_begin;
    return Start(kReadState, 0, output, Packed(verdict) + Slot(slot), 0, 0, std::move(request));
  }
  uint64_t NumPartitions() const {
    const TensorSpec& spec = known_.spec();
    const uint64_t size = GetWorker()->PartitionBytes(spec.dtype, spec.bytes, spec.piece_of, true);
    return (spec.bytes + size - 1) / size;
  }

 private:
  static std::string Slot(uint32_t slot) {
    WireWriter out;
    out.Put(slot);
    return out.Take();
  }

  int64_t Start(int op, uintptr_t input, uintptr_t output, std::string detail, uintptr_t stream,
                uintptr_t sums = 0, PushPullRequest request = {}) const {
    request.input = reinterpret_cast<const void*>(input);
    request.output = reinterpret_cast<void*>(output);
    request.stream = reinterpret_cast<DeviceStream>(stream);
    request.op = op;
    request.sums = reinterpret_cast<GradientSums*>(sums);
    request.detail = std::move(detail);
    return known_.PushPull(std::move(request));
  }

  const KnownTensor known_;
};

// Loads or reads the rounding losses of a tensor that is summed in blocks with feedback: fp32
// values of whole blocks, on the CPU.
int64_t MoveFeedback(int op, const SpecTuple& spec, uintptr_t values) {
  PushPullRequest request;
  request.tensor = std::apply(Spec, spec);
  request.op = op;
  if (op == kLoadState) {
    request.input = reinterpret_cast<const void*>(values);
  } else {
    request.output = reinterpret_cast<void*>(values);
  }
  return GetWorker()->PushPull(request);
}

}  // namespace

void DefineUpdatedTensor(nb::module_* m) {
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  m->def(
      "load_feedback",
      [](const SpecTuple& spec, uintptr_t values) {
        return MoveFeedback(kLoadState, spec, values);
      },
      nb::arg("spec"), nb::arg("values"), Unlocked());
  m->def(
      "read_feedback",
      [](const SpecTuple& spec, uintptr_t values) {
        return MoveFeedback(kReadState, spec, values);
      },
      nb::arg("spec"), nb::arg("values"), Unlocked());
  m->def(
      "release",
      [](const std::vector<std::string>& names, uint32_t lowest_rank) {
        // A forked copy of the process finalizes objects, too, and must not use the worker.
        if (!ps::IsForkedCopy()) GetWorker()->Release(names, lowest_rank);
      },
      nb::arg("names"), nb::arg("lowest_rank"), Unlocked());
  nb::class_<UpdatedTensor>(*m, "UpdatedTensor")
      .def(nb::init<const SpecTuple&, bool, const std::vector<GroupTuple>&,
                    const std::vector<SegmentTuple>&, const std::string&, bool, bool>(),
           nb::arg("spec"), nb::arg("is_adamw"), nb::arg("groups"), nb::arg("segments"),
           nb::arg("held"), nb::arg("speculative"), nb::arg("counts_zeros"), Unlocked())
      .def("push_step", &UpdatedTensor::PushStep, nb::arg("gradients"), nb::arg("parameters"),
           nb::arg("step"), nb::arg("verdict"), nb::arg("stream"), Unlocked())
      .def("push_norm", &UpdatedTensor::PushNorm, nb::arg("gradients"), nb::arg("sums"),
           nb::arg("verdict"), nb::arg("stream"), Unlocked())
      .def("push_try", &UpdatedTensor::PushTry, nb::arg("gradients"), nb::arg("parameters"),
           nb::arg("sums"), nb::arg("step"), nb::arg("verdict"), nb::arg("stream"), Unlocked())
      .def("step", &UpdatedTensor::Step, nb::arg("parameters"), nb::arg("step"), nb::arg("stream"),
           Unlocked())
      .def("load", &UpdatedTensor::Load, nb::arg("slot"), nb::arg("values"), Unlocked())
      .def("read", &UpdatedTensor::Read, nb::arg("slot"), nb::arg("begin"), nb::arg("end"),
           nb::arg("values"), nb::arg("verdict"), Unlocked())
      .def("num_partitions", &UpdatedTensor::NumPartitions, Unlocked());
}

// Functions about replicas: which ones are present or waiting, and where a joining worker
// continues.

void DefineReplicas(nb::module_* m) {
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  m->def(
      "replicas",
      [] {
        const ps::ReplicaView view = GetWorker()->Replicas();
        return std::make_tuple(view.epoch, view.present, view.waiting, view.ready_epochs,
                               view.donors, view.news);
      },
      "(epoch, a '1' for each that is present, a '1' for each that waits, the ready epoch of each, "
      "its "
      "donor, what has changed); without any where the scheduler has told nothing yet.",
      Unlocked());
  m->def(
      "is_late", [] { return GetWorker()->IsLate(); },
      "Whether this worker's replica came to a job that runs.", Unlocked());
  m->def(
      "awaited", [] { return GetWorker()->Awaited(); },
      "Tensors of which others wait for the next push of this worker.", Unlocked());
  m->def("say_ready", [] { GetWorker()->SayReady(); }, Unlocked());
  m->def(
      "ask_to_admit",
      [](int replica, int ready_epoch) { GetWorker()->AskToAdmit(replica, ready_epoch); },
      nb::arg("replica"), nb::arg("ready_epoch"), Unlocked());
  m->def(
      "take_missing", [] { return GetWorker()->TakeMissing(); },
      "Ranks whose values sums have lacked, since this was called last.", Unlocked());
  // Numbers of releases and of rounds, by tensor.
  using ProgressTuples = std::map<std::string, std::pair<uint32_t, uint32_t>>;
  m->def(
      "rounds",
      [] {
        ProgressTuples tuples;
        for (const auto& [id, at] : GetWorker()->Rounds()) tuples[id] = {at.releases, at.rounds};
        return tuples;
      },
      Unlocked());
  m->def(
      "set_rounds",
      [](const ProgressTuples& tuples) {
        ProgressByTensor progress;
        for (const auto& [id, at] : tuples) progress[id] = {at.first, at.second};
        GetWorker()->SetRounds(progress);
      },
      nb::arg("rounds"), Unlocked());
}

}  // namespace core
}  // namespace byteps
