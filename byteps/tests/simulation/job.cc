#include "job.h"

#include <algorithm>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/cluster/session.h"
#include "byteps/engine/worker.h"
#include "byteps/recovery/worker/server_replacement.h"
#include "tests/support/recovering_server.h"
#include "world.h"

namespace byteps {
namespace simulation {
namespace {

// Seconds for the other nodes to notice that the last worker has ended.
constexpr double kAfterwardsS = 40;

}  // namespace

Job::Job(Plan plan, bool breaks_invariant)
    : plan_(std::move(plan)),
      breaks_invariant_(breaks_invariant),
      config_((plan_.backups ? BackupSettings(plan_.servers, false) : Settings())[plan_.settings]) {
  for (const Fault& fault : plan_.faults) {
    if (fault.IsAtProbe() && fault.kind != Fault::kQuit) at_probes_.push_back(fault);
  }
  if (plan_.on_gpu >= 0) gpu_ = std::make_unique<Gpu>();
  for (const Fault& fault : plan_.faults) {
    if (fault.at_wait < 0) continue;
    ListenToWaits([this, fault](const Wait& wait) { return OnWait(wait, fault); });
  }
  BeginProbes(plan_.disturbed, [this](int probe, int reached) { OnProbe(probe, reached); });
}

Job::~Job() { EndProbes(); }

void Job::Run() {
  std::thread chaos([this] { BreakInTime(); });
  pthread_setname_np(chaos.native_handle(), "faults");
  std::thread at_probes([this] { BreakAtProbes(); });
  pthread_setname_np(at_probes.native_handle(), "faults at probes");
  std::vector<std::thread> kept;
  Start(&kept, ps::Node::SCHEDULER, 0, 0, 0);
  for (int i = 0; i < plan_.servers; ++i) Start(&kept, ps::Node::SERVER, i, 0, 0);
  int workers = plan_.workers;
  for (int generation = 1;; ++generation) {
    generations_ = generation;
    const size_t first = records_.size();
    std::vector<std::thread> threads;
    for (int i = 0; i < workers; ++i) {
      Start(&threads, ps::Node::WORKER, i, workers, generation);
    }
    for (auto& thread : threads) thread.join();
    const bool went_well = std::all_of(records_.begin() + static_cast<long>(first), records_.end(),
                                       [](const auto& record) {
                                         const bool is_spare = record->role != ps::Node::WORKER;
                                         return is_spare || record->error.empty();
                                       });
    ended_well_ = went_well;
    if (went_well || !plan_.keep || generation == kMaxGenerations) break;
    // A launcher notices nodes that ended, and starts new ones.
    std::this_thread::sleep_for(std::chrono::milliseconds(100 + Random(1000)));
    for (int i = 0; i < plan_.servers; ++i) {
      if (IsGone(1 + i)) Start(&kept, ps::Node::SERVER, i, 0, 0);
    }
    workers = 1 + static_cast<int>(Random(3));
  }
  for (double waited = 0; waited < kAfterwardsS && !records_[0]->done; waited += 0.5) {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
  }
  if (!records_[0]->done) {
    if (network_.admitted() > 0 && !returned_) {
      wrong_ = "the scheduler still waits, though workers had come";
    }
    if (users_.count(0)) std::shared_ptr<ServingNode>(users_[0])->End(false);
  }
  for (auto& thread : kept) thread.join();
  {
    std::lock_guard<std::mutex> lock(due_mu_);
    over_ = true;
  }
  due_cond_.notify_all();
  chaos.join();
  at_probes.join();
  for (auto& spare : spares_.threads) spare.join();
  gpu_.reset();
}

uint64_t Job::WantedSums() const {
  uint64_t partitions = 0;
  const auto add = [&partitions](size_t count) {
    partitions += (count * sizeof(float) + kPartitionBytes - 1) / kPartitionBytes;
  };
  for (int round = 0; round < plan_.rounds; ++round) {
    for (int i = 0; i < plan_.tensors; ++i) add(plan_.CountAt(i, round));
    if (plan_.updates) add(plan_.parameters);
  }
  return partitions + plan_.burst;
}

bool Job::IsHarmless() const {
  return std::all_of(plan_.faults.begin(), plan_.faults.end(), [this](const Fault& fault) {
    const bool wakes = fault.kind == Fault::kWake || fault.kind == Fault::kHoldUp;
    return wakes || Returns(fault);
  });
}

std::string Job::Verdict() const {
  if (!wrong_.empty()) return wrong_;
  if (ps::NumBrokenInvariants() > 0) return ps::BrokenInvariants().last;
  if (plan_.backups && MustGoOn() && !ended_well_)
    return "one server was lost, and the job with it";
  for (size_t node = 0; node < records_.size(); ++node) {
    const std::string& error = records_[node]->error;
    if (error.empty() || IsVictim(static_cast<int>(node))) continue;
    // A spare server ended with an error, because it found no vacant rank.
    if (spares_.numbers.count(static_cast<int>(node)) > 0) continue;
    // Several servers were lost, among them neighbors.
    if (plan_.backups && broken_.size() > 1 && LostState()) continue;
    if (IsHarmless()) return NameOf(node) + " failed, though nothing broke for good: " + error;
    if (!NamesACause(error)) return NameOf(node) + " blames what did not break: " + error;
  }
  // A paused node is not lost for good, and a killed one is replaced.
  const bool may_go_on = !ended_scheduler_ && plan_.keep;
  if (may_go_on && !ended_well_) return "no generation of the job ended well";
  if (!IsHarmless() || plan_.backups || WantedSums() == sums_) return "";
  return "the servers made " + std::to_string(sums_) + " sums, not " + std::to_string(WantedSums());
}

std::string Job::Describe() const {
  std::string text = plan_.Describe();
  for (size_t i = 0; i < records_.size(); ++i) {
    text += "\n  " + NameOf(i) + ": " +
            (!records_[i]->done           ? "has not ended"
             : records_[i]->error.empty() ? "ended well"
                                          : records_[i]->error);
  }
  return text;
}

bool Job::failed() const {
  return std::any_of(records_.begin(), records_.end(),
                     [](const auto& record) { return !record->error.empty(); });
}

// ------------------------------------------------------------------- nodes

void ServingNode::OnMessage(core::Message* message) {
  if (server_ != nullptr) server_->OnMessage(message);
}

void ServingNode::TellServer(const ps::MembershipEvent& event) {
  using Event = ps::MembershipEvent;
  if (event.kind == Event::kNodeLeft) server_->OnWorkerGone(event.rank, event.reason);
  if (event.kind == Event::kServerLost) server_->OnServerLost(event.rank);
  if (event.kind == Event::kServerReplaced) server_->OnServerReplaced(event.rank);
  if (event.kind == Event::kReplicas) server_->SetAbsent(event.replicas.AbsentRanks());
}

void ServingNode::OnEvent(const ps::MembershipEvent& event) {
  using Event = ps::MembershipEvent;
  if (hear_) hear_(event);
  if (server_ != nullptr) TellServer(event);
  const bool is_end = event.kind == Event::kFailed || event.kind == Event::kEnded;
  if (!is_end || event.next_generation > 0) return;  // the scheduler goes on
  std::lock_guard<std::mutex> lock(mu_);
  if (event.kind == Event::kFailed && failure_.empty()) failure_ = event.reason;
  ended_ = true;
  cond_.notify_all();
}

void ServingNode::End(bool by_order) {
  std::lock_guard<std::mutex> lock(mu_);
  by_order_ = by_order && !ended_;
  ended_ = true;
  cond_.notify_all();
}

std::string ServingNode::AwaitEnd(bool* by_order) {
  std::unique_lock<std::mutex> lock(mu_);
  cond_.wait(lock, [this] { return ended_; });
  *by_order = by_order_;
  return failure_;
}

NodeSettings Job::SettingsOf(ps::Node::Role role, int number, int rank, int workers) const {
  NodeSettings settings;
  settings.role = role;
  settings.number = number;
  settings.rank = rank;
  settings.workers = workers;
  settings.servers = plan_.servers;
  settings.peer_timeout_s = kPeerTimeoutS;
  settings.start_timeout_s = kStartTimeoutS;
  settings.keep = plan_.keep && role != ps::Node::WORKER;
  settings.keep_timeout_s = kKeepTimeoutS;
  settings.scheduler_return_s = plan_.returns ? kReturnS : 0;
  settings.replace_servers_s = plan_.backups ? kReplaceS : 0;
  settings.backups = plan_.backups;
  return settings;
}

void Job::Start(std::vector<std::thread>* threads, ps::Node::Role role, int rank, int workers,
                int generation) {
  const int number = static_cast<int>(records_.size());
  records_.push_back(std::make_unique<NodeRecord>());
  records_.back()->role = role;
  records_.back()->rank = rank;
  const bool worker = role == ps::Node::WORKER;
  const int place = role == ps::Node::SCHEDULER ? 0 : worker ? 1 + plan_.servers + rank : 1 + rank;
  at_place_[place] = number;
  threads->emplace_back([=, this] {
    BelongTo(number);
    worker ? RunWorker(number, rank, workers, generation) : RunNode(role, number);
  });
  const char* const name = worker ? "worker" : role == ps::Node::SERVER ? "server" : "scheduler";
  pthread_setname_np(threads->back().native_handle(), name);
  // The scheduler starts first; nodes that do not find it retry, as a van does.
  std::this_thread::sleep_for(std::chrono::microseconds(1 + Random(5000)));
}

bool Job::IsGone(int place) const {
  const int number = at_place_.at(place);
  return records_[number]->done || killed_.count(number) > 0;
}

void Job::RunNode(ps::Node::Role role, int number) {
  std::string error;
  for (bool rejoin = false;; rejoin = true) {
    NodeSettings settings = SettingsOf(role, number, 0, plan_.workers);
    settings.rejoin = rejoin;
    bool again = false;
    error = ServeOnce(settings, &again);
    if (number == 0 && std::exchange(dies_, false)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1 + Random(kMostAwayMs)));
      returned_ = true;
      network_.Revive(0);
      continue;
    }
    if (error.empty() || !again || role == ps::Node::SCHEDULER || !plan_.keep) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  records_[number]->error = error;
  records_[number]->done = true;
}

std::string Job::ServeOnce(const NodeSettings& settings, bool* again) {
  SimulatedChannel channel(&network_, settings);
  std::unique_ptr<core::SumServer> server;
  if (settings.role == ps::Node::SERVER) {
    server = std::make_unique<core::RecoveringServer>(config_, &channel);
  }
  const auto user = std::make_shared<ServingNode>(server.get());
  users_[settings.number] = user;
  std::string error;
  bool by_order = false;
  try {
    channel.Start(user.get());
    if (server) {
      ++started_;
      server->SetRank(channel.rank());
      if (plan_.backups) at_place_[1 + channel.rank()] = settings.number;
      if (spares_.numbers.count(settings.number) > 0) ++spares_.served;
    }
    error = user->AwaitEnd(&by_order);
    if (by_order) channel.StopByOrder("stopped by SIGTERM");
    *again = !by_order;
  } catch (const core::JobFailedError& e) {
    error = e.what();
    *again = true;
  } catch (const std::exception& e) {
    error = e.what();
  }
  users_.erase(settings.number);
  channel.Stop();
  if (!server) return error;
  for (const core::Metric& metric : server->Metrics()) {
    if (metric.name == "byteps_server_sums_total") sums_ += static_cast<uint64_t>(metric.value);
  }
  return error;
}

void Job::RunWorker(int number, int rank, int workers, int generation) {
  const auto node = std::make_shared<WorkerOfNode>();
  records_[number]->worker = node;
  core::Worker& worker = node->worker;
  std::string error;
  Gpu* const gpu = rank == plan_.on_gpu ? gpu_.get() : nullptr;
  int rounds = plan_.rounds;
  for (const Fault& fault : plan_.faults) {
    const bool quits = fault.kind == Fault::kQuit && fault.node == 1 + plan_.servers + rank;
    if (!quits || generation > 1) continue;
    rounds = fault.after_rounds;
    broken_.insert(number);
  }
  WorkerScript script(&plan_, {generation, rank, workers, rounds}, &worker, gpu);
  try {
    std::unique_lock<std::mutex> starting(node->mu);
    core::Launch launch;
    launch.rank = rank;
    launch.size = workers;
    worker.Start(config_, launch, plan_.servers,
                 std::make_unique<SimulatedChannel>(
                     &network_, SettingsOf(ps::Node::WORKER, number, rank, workers)),
                 MakeLossPolicy(config_, plan_.servers));
    starting.unlock();
    ++started_;
    BPS_INVARIANT_NOTED("nothing is broken on purpose", !breaks_invariant_,
                        "the simulation was told to");
    script.Run();
  } catch (const std::exception& e) {
    error = e.what();
  }
  node->Stop();
  if (node->is_stopped) error.clear();
  records_[number]->worker.reset();
  if (gpu != nullptr) gpu->AwaitIdle();
  if (!script.wrong().empty()) wrong_ = script.wrong();
  records_[number]->error = error;
  records_[number]->done = true;
}

}  // namespace simulation
}  // namespace byteps
