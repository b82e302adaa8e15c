// Replicas of a model, for Python: who is there, who waits, and what a late one goes on from.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "byteps/engine/worker.h"
#include "byteps/torch/c_parts.h"

namespace py = pybind11;

namespace byteps {
namespace core {

void DefineReplicas(py::module_* m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  m->def(
      "replicas",
      [] {
        const ps::ReplicaView view = GetWorker()->Replicas();
        return std::make_tuple(view.epoch, view.present, view.waiting, view.lives, view.news);
      },
      "(epoch, a '1' for each that is present, a '1' for each that waits, the life of each, what "
      "has changed); without any where the scheduler has told nothing yet.",
      Unlocked());
  m->def(
      "is_late", [] { return GetWorker()->IsLate(); },
      "Whether this worker's replica came to a job that runs.", Unlocked());
  m->def(
      "awaited", [] { return GetWorker()->Awaited(); },
      "Tensors of which others wait for the next push of this worker.", Unlocked());
  m->def("say_ready", [] { GetWorker()->SayReady(); }, Unlocked());
  m->def(
      "ask_to_admit", [](int replica, int life) { GetWorker()->AskToAdmit(replica, life); },
      py::arg("replica"), py::arg("life"), Unlocked());
  m->def(
      "take_missing", [] { return GetWorker()->TakeMissing(); },
      "Ranks whose values sums have lacked, since this was called last.", Unlocked());
  m->def("rounds", [] { return GetWorker()->Rounds(); }, Unlocked());
  m->def(
      "set_rounds",
      [](const std::map<std::string, uint32_t>& rounds) { GetWorker()->SetRounds(rounds); },
      py::arg("rounds"), Unlocked());
}

}  // namespace core
}  // namespace byteps
