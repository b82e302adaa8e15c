// Faults of a simulated job, and whether errors name them.
#include <algorithm>
#include <iterator>

#include "job.h"
#include "world.h"

namespace byteps {
namespace simulation {

void Job::BreakInTime() {
  std::vector<Fault> faults;
  for (const Fault& fault : plan_.faults) {
    if (fault.IsInTime()) faults.push_back(fault);
  }
  std::sort(faults.begin(), faults.end(),
            [](const Fault& a, const Fault& b) { return a.at_s < b.at_s; });
  double now = 0;
  for (const Fault& fault : faults) {
    std::this_thread::sleep_for(std::chrono::duration<double>(fault.at_s - now));
    now = fault.at_s;
    Break(fault);
  }
}

void Job::OnProbe(int probe, int reached) {
  const auto is_due = [=](const Fault& fault) {
    return fault.at_probe >= 0 ? fault.at_probe == probe : fault.at_reached <= reached;
  };
  if (std::none_of(at_probes_.begin(), at_probes_.end(), is_due)) return;
  // Another thread carries out the fault, because this one may hold any lock.
  std::copy_if(at_probes_.begin(), at_probes_.end(), std::back_inserter(due_), is_due);
  std::erase_if(at_probes_, is_due);
  due_cond_.notify_all();
}

Waking Job::OnWait(const Wait& wait, const Fault& fault) {
  if (static_cast<int64_t>(wait.number) != fault.at_wait) return Waking::kUsual;
  if (fault.kind == Fault::kWake) return Waking::kAtOnce;
  if (fault.kind == Fault::kHoldUp) return Waking::kLate;
  due_.push_back(fault);
  due_cond_.notify_all();
  return Waking::kUsual;
}

void Job::BreakAtProbes() {
  const auto& faults = plan_.faults;
  const bool ends_wait = std::any_of(faults.begin(), faults.end(),
                                     [](const Fault& fault) { return fault.at_wait >= 0; });
  if (ends_wait) GoFirst();  // so that the wait lasts until then
  std::unique_lock<std::mutex> lock(due_mu_);
  while (!over_) {
    if (due_.empty()) {
      due_cond_.wait(lock);
      continue;
    }
    const Fault fault = due_.back();
    due_.pop_back();
    Break(fault);
  }
}

void Job::BreakScheduler() {
  const auto has_begun = [this] { return started_ == plan_.workers + plan_.servers; };
  for (int i = 0; i < 100 && !has_begun(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const auto found = users_.find(0);
  if (!has_begun() || dies_ || found == users_.end()) return;
  const std::shared_ptr<ServingNode> user = found->second;
  dies_ = true;
  network_.Kill(0);
  user->End(false);
}

void Job::StartSpare() {
  const int number = static_cast<int>(records_.size());
  records_.push_back(std::make_unique<NodeRecord>());
  records_.back()->role = ps::Node::SERVER;
  spares_.numbers.insert(number);
  spares_.threads.emplace_back([this, number] {
    BelongTo(number);
    std::this_thread::sleep_for(std::chrono::milliseconds(Random(400)));
    RunNode(ps::Node::SERVER, number);
  });
  pthread_setname_np(spares_.threads.back().native_handle(), "server");
}

bool IsOfLostState(const std::string& error) {
  return error.find("load the last checkpoint") != std::string::npos ||
         error.find("were never loaded") != std::string::npos;
}

bool Job::LostState() const {
  return std::any_of(records_.begin(), records_.end(),
                     [](const auto& record) { return IsOfLostState(record->error); });
}

bool Job::MustGoOn() const {
  if (spares_.too_early || plan_.faults.size() != 1) return false;
  const Fault& fault = plan_.faults[0];
  return fault.kind == Fault::kKill && fault.node > 0 && fault.node <= plan_.servers;
}

int Job::FindNode(const Fault& fault, int node) const {
  if (fault.at_wait >= 0) return node < static_cast<int>(records_.size()) ? node : -1;
  const auto it = at_place_.find(node);
  return it == at_place_.end() ? -1 : it->second;
}

void Job::Break(const Fault& fault) {
  if (Returns(fault)) return BreakScheduler();
  // If the rank never had a node, the fault has no effect.
  const int number = FindNode(fault, fault.node);
  const int peer = fault.IsOfANode() ? number : FindNode(fault, fault.peer);
  if (number < 0 || peer < 0) return;
  // A worker simply ends at SIGTERM.
  const bool is_worker = records_[number]->role == ps::Node::WORKER;
  const bool ends_alone = fault.kind == Fault::kStop && is_worker && fault.at_wait < 0;
  const auto kind = ends_alone ? Fault::kKill : fault.kind;
  broken_.insert(number);
  if (fault.IsOfANode()) victims_.insert(number);
  broken_.insert(peer);
  const bool ends = kind == Fault::kKill || kind == Fault::kStop;
  ended_scheduler_ = ended_scheduler_ || (ends && number == 0);
  const auto user = users_.find(number);
  spares_.too_early = spares_.too_early || started_ < plan_.workers + plan_.servers;
  if (plan_.backups) StartSpare();
  switch (kind) {
    case Fault::kKill:
      killed_.insert(number);
      return network_.Kill(number);
    case Fault::kStop:
      if (user != users_.end()) std::shared_ptr<ServingNode>(user->second)->End(true);
      if (const auto worker = records_[number]->worker) {
        worker->is_stopped = true;
        worker->Stop();
      }
      return;
    case Fault::kPause:
      return network_.Pause(number, fault.seconds);
    case Fault::kReset:
      return network_.Reset(number, peer);
    default:
      network_.Delay(number, peer, fault.seconds);
  }
}

bool Job::NamesACause(const std::string& error) const {
  // Either all other nodes had ended when this node joined, or no node joined at all.
  if (error.find("cannot be joined: ") != std::string::npos) return true;
  if (network_.admitted() == 0) return true;
  // The restarted scheduler may have ended the job when this node returned. Or it does not know the
  // address of a server that did not return.
  if (plan_.returns && error.find("it did not return within") != std::string::npos) return true;
  if (plan_.returns && error.find("(unknown) did not come") != std::string::npos) {
    return true;
  }
  // The error of the node that gave up has the cause.
  if (plan_.goes_on && error.find(" gave up round ") != std::string::npos) return true;
  if (plan_.releases && error.find(" has released '") != std::string::npos) return true;
  // A node gave up a sum, released its name, and finished before this node used the name again.
  if (plan_.releases && plan_.goes_on && error.find(" left the job while ") != std::string::npos) {
    return true;
  }
  // A node that gave up has left; its own error is checked separately.
  for (size_t node = 0; node < records_.size(); ++node) {
    const std::string left = AddressOf(static_cast<int>(node)) + ") left the job while ";
    if (!records_[node]->error.empty() && error.find(left) != std::string::npos) return true;
  }
  // The workers may have finished, or the launcher given up, just before the loss was noticed.
  if (error.find("no worker came within ") != std::string::npos) return true;
  // The scheduler reports what it observes: to an isolated scheduler, all nodes are silent.
  if (IsVictim(0)) return true;
  for (const int node : broken_) {
    if (error.find("10.0.0." + std::to_string(node) + ":") != std::string::npos ||
        error.find("10.0.0." + std::to_string(node) + ")") != std::string::npos) {
      return true;
    }
    const NodeRecord& record = *records_[node];
    const std::string rank = std::to_string(record.rank);
    if (record.role == ps::Node::WORKER && error.find("worker " + rank) != std::string::npos) {
      return true;
    }
    // Missing nodes have no address yet.
    const size_t missing = error.find("missing: ");
    if (record.role == ps::Node::SERVER && missing != std::string::npos &&
        error.find("server", missing) != std::string::npos) {
      return true;
    }
  }
  return false;
}

std::string Job::NameOf(size_t node) const {
  const NodeRecord& record = *records_[node];
  if (record.role == ps::Node::SCHEDULER) return "the scheduler";
  return (record.role == ps::Node::SERVER ? "server" : "worker " + std::to_string(record.rank)) +
         " at 10.0.0." + std::to_string(node);
}

}  // namespace simulation
}  // namespace byteps
