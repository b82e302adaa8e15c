#include "replica_job.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/cluster/session.h"
#include "byteps/recovery/worker/server_replacement.h"
#include "tests/support/recovering_server.h"
#include "world.h"

namespace byteps {
namespace simulation {
namespace {

// Node of a fault that concerns the scheduler.
constexpr int kScheduler = -1000;
constexpr double kMostDelayS = kOpTimeoutS / 2;
// Silent nodes are removed well before the sums that wait for them time out, despite delayed
// threads.
constexpr double kSilentS = kPeerTimeoutS / 2;

}  // namespace

ReplicaJob::ReplicaJob() {
  MakePlan();
  BeginProbes(plan_.disturbed, [this](int probe, int reached) { OnProbe(probe, reached); });
}

ReplicaJob::~ReplicaJob() { EndProbes(); }

void ReplicaJob::MakePlan() {
  plan_.replicas = 2 + static_cast<int>(Random(3));
  plan_.ranks = 1 + static_cast<int>(Random(2));
  plan_.servers = 1 + static_cast<int>(Random(2));
  plan_.steps = 2 + static_cast<int>(Random(8));
  plan_.settings = Random(Settings().size());
  plan_.disturbed = Random(2) == 0;
  plan_.patient = Random(2) == 0;
  plan_.replaces = Random(2) == 0;
  plan_.returns = Random(2) == 0;
  plan_.backups = plan_.replaces && plan_.servers > 1 && plan_.steps % 2 == 0;
  most_lives_ = 1 + static_cast<int>(Random(4));
  if (plan_.backups) plan_.servers += static_cast<int>(Random(2));
  // Without a copy, the state of a replaced server would be lost.
  const bool has_optimizer =
      plan_.backups ? Random(4) > 0 : !plan_.replaces && plan_.steps % 2 == 1;
  if (has_optimizer) plan_.parameters = 1 + plan_.steps * 997;
  const uint64_t tensors = 1 + Random(3);
  for (uint64_t i = 0; i < tensors; ++i) plan_.counts.push_back(1 + Random(5000));
  const uint64_t faults = Random(5);
  // Two replicas die only if there is no other fault, because others may wait for each of them.
  const bool deaths_alone = Random(3) == 0;
  for (uint64_t i = 0; i < faults; ++i) {
    Fault fault;
    static constexpr Fault::Kind kKinds[] = {Fault::kKill,  Fault::kKill,  Fault::kPause,
                                             Fault::kReset, Fault::kDelay, Fault::kStick};
    fault.kind = kKinds[Random(std::size(kKinds))];
    fault.at_s = static_cast<double>(Random(40'000)) * 1e-6;
    if (i > 0 && Random(2) == 0) fault.at_s = static_cast<double>(Random(9'000)) * 1e-3;
    const uint64_t when = Random(4);
    if (when == 0) fault.at_reached = 1 + static_cast<int>(Random(100));
    if (when == 1) fault.at_probe = static_cast<int>(Random(kNumProbes));
    // Half of the jobs spare replica 0, the other half the last replica.
    const int most = (plan_.replicas - 1) * plan_.ranks;
    fault.node = static_cast<int>(Random(most)) + (plan_.disturbed ? plan_.ranks : 0);
    fault.peer = 1 + static_cast<int>(Random(plan_.servers));
    fault.seconds = static_cast<double>(1 + Random(140)) * (Random(2) ? 0.002 : 0.1);
    // The scheduler cannot see that a single link is stuck: sums then time out after kOpTimeoutS.
    if (fault.kind == Fault::kDelay) fault.seconds = std::min(fault.seconds, kMostDelayS);
    // Without a quorum, no more than half of the replicas can be removed.
    if (fault.kind == Fault::kStick && !plan_.patient) fault.node = plan_.disturbed ? most : 0;
    if (plan_.replaces && Random(2) == 0) {
      static constexpr Fault::Kind kOfServers[] = {Fault::kKill, Fault::kKill, Fault::kPause,
                                                   Fault::kReset};
      fault.kind = kOfServers[Random(plan_.backups ? 4 : 3)];
      fault.node = -1 - static_cast<int>(Random(plan_.servers));
      using ps::Probe;
      static constexpr Probe kCopied[] = {
          Probe::kRoundCopied,   Probe::kRoundCopied, Probe::kStepCopied,   Probe::kStepCopied,
          Probe::kVerdictCopied, Probe::kStateCopied, Probe::kHeldForBackup};
      if (plan_.backups && plan_.parameters > 0 && Random(4) > 0) {
        fault.at_probe = static_cast<int>(kCopied[Random(std::size(kCopied))]);
      }
    }
    if (plan_.returns && (i == 0 || deaths_alone)) {
      fault.kind = Fault::kKill;
      fault.node = kScheduler;
      using ps::Probe;
      static constexpr Probe kPhases[] = {
          Probe::kReplicaRemoved, Probe::kReplicaWaits, Probe::kReplicaWaits,
          Probe::kReplicaAdmitted, Probe::kJoinerExpected, Probe::kJoinerExpected,
          Probe::kReplicaJoined, Probe::kLateRemoved, Probe::kLinkReported, Probe::kSaysGoodbye,
          Probe::kLastLeaves, Probe::kNodeReturns,
          // In jobs whose servers are replaced
          Probe::kServerLost, Probe::kServerLost, Probe::kServerReplaced, Probe::kServerReplaced,
          Probe::kReplacedAgain, Probe::kSumGiven};
      const size_t phases = std::size(kPhases) - (plan_.replaces ? 0 : 6);
      if (Random(4) > 0) fault.at_probe = static_cast<int>(kPhases[Random(phases)]);
    }
    faults_.push_back(fault);
  }
}

NodeSettings ReplicaJob::SettingsOf(ps::Node::Role role, int number, int rank) const {
  NodeSettings settings;
  settings.role = role;
  settings.number = number;
  settings.rank = rank;
  settings.workers = plan_.workers();
  settings.servers = plan_.servers;
  settings.replicas = plan_.replicas;
  settings.peer_timeout_s = kSilentS;
  settings.start_timeout_s = kStartTimeoutS;
  settings.replace_servers_s = plan_.replaces ? kReplaceS : 0;
  settings.backups = plan_.backups;
  settings.scheduler_return_s = plan_.returns ? kReturnS : 0;
  return settings;
}

const core::Config& ReplicaJob::settings() const {
  if (plan_.backups) return BackupSettings(plan_.servers, plan_.patient)[plan_.settings];
  return ReplicaSettings(plan_.patient, plan_.replaces, plan_.returns)[plan_.settings];
}

void ReplicaJob::Count(const ps::MembershipEvent& event) {
  if (event.kind == ps::MembershipEvent::kServerReplaced) ++replaced_;
  const bool is_removal = event.kind == ps::MembershipEvent::kReplicas &&
                          event.replicas.news.find("was removed") != std::string::npos;
  removed_ += is_removal ? 1 : 0;
}

void ReplicaJob::Serve(int number) {
  Kept& kept = kept_[number];
  SimulatedChannel channel(&network_, SettingsOf(kept.role, number, 0));
  std::unique_ptr<core::SumServer> server;
  if (kept.role == ps::Node::SERVER) {
    server = std::make_unique<core::RecoveringServer>(settings(), &channel);
  }
  ServingNode::Hear hear;
  if (!server) hear = [this](const ps::MembershipEvent& event) { Count(event); };
  const auto node = std::make_shared<ServingNode>(server.get(), std::move(hear));
  bool by_order = false;
  try {
    channel.Start(node.get());
    if (server) server->SetRank(channel.rank());
    kept.served = true;
    if (server) serving_.insert(number);
    started_ += server ? 1 : 0;
    if (!server) scheduler_ = node;
    kept.error = node->AwaitEnd(&by_order);
  } catch (const std::exception& e) {
    kept.error = e.what();
  }
  serving_.erase(number);
  if (!server) scheduler_.reset();
  channel.Stop();
}

void ReplicaJob::RunScheduler() {
  Serve(0);
  while (std::exchange(dies_, false)) {
    ++returns_;
    kept_[0].error.clear();
    std::this_thread::sleep_for(std::chrono::milliseconds(1 + Random(kMostAwayMs)));
    network_.Revive(0);
    Serve(0);
  }
}

void ReplicaJob::RunMember(Life* life, int place, Inside* inside) {
  core::Worker worker;
  const int rank = life->replica * plan_.ranks + place;
  ReplicaMember member(&plan_, rank, life->number, &worker, inside, &witness_);
  try {
    core::Launch launch;
    launch.rank = rank;
    launch.size = plan_.workers();
    launch.replicas = plan_.replicas;
    worker.Start(settings(), launch, plan_.servers,
                 std::make_unique<SimulatedChannel>(
                     &network_, SettingsOf(ps::Node::WORKER, life->nodes[place], rank)),
                 MakeLossPolicy(settings(), plan_.servers));
    ++started_;
    member.Run();
  } catch (const std::exception& e) {
    life->errors[place] = e.what();
    inside->Break();
  }
  worker.Stop(false, life->errors[place]);
  // A member that was hit by a fault may have ended with a server that only it knew.
  if (life->errors[place].empty() && !life->is_broken) witness_.Ended(place, member.state());
}

void ReplicaJob::RunReplica(int replica) {
  for (int number = 1; number <= most_lives_; ++number) {
    lives_.push_back(std::make_unique<Life>());
    Life* const life = lives_.back().get();
    life->replica = replica;
    life->number = number;
    life->errors.resize(plan_.ranks);
    Inside inside(plan_.ranks);
    life->inside = &inside;
    std::vector<std::thread> ranks;
    for (int place = 0; place < plan_.ranks; ++place) life->nodes.push_back(next_node_++);
    now_[replica] = life;
    for (int place = 0; place < plan_.ranks; ++place) {
      ranks.emplace_back([=, this, &inside] { RunMember(life, place, &inside); });
      pthread_setname_np(ranks.back().native_handle(), "worker");
      std::this_thread::sleep_for(std::chrono::microseconds(1 + Random(3000)));
    }
    for (auto& rank : ranks) rank.join();
    now_.erase(replica);
    const auto& errors = life->errors;
    if (std::all_of(errors.begin(), errors.end(), [](const auto& e) { return e.empty(); })) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(Random(300)));
  }
}

void ReplicaJob::Run() {
  std::thread chaos([this] { BreakThings(); });
  pthread_setname_np(chaos.native_handle(), "faults");
  std::vector<std::thread> kept, replicas;
  for (int number = 0; number <= plan_.servers; ++number) {
    kept_[number].role = number == 0 ? ps::Node::SCHEDULER : ps::Node::SERVER;
    kept.emplace_back([=, this] { number == 0 ? RunScheduler() : Serve(number); });
    pthread_setname_np(kept.back().native_handle(), number == 0 ? "scheduler" : "server");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  next_node_ = 1 + plan_.servers;
  for (int replica = 0; replica < plan_.replicas; ++replica) {
    replicas.emplace_back([=, this] { RunReplica(replica); });
    pthread_setname_np(replicas.back().native_handle(), "launcher");
  }
  for (auto& replica : replicas) replica.join();
  for (size_t i = 1; i < kept.size(); ++i) kept[i].join();
  // A scheduler that restarted after the end of the job waits for another job.
  std::this_thread::sleep_for(std::chrono::milliseconds(returns_ > 0 || dies_ ? 5000 : 0));
  if (const std::shared_ptr<ServingNode> last = scheduler_; last && returns_ > 0) last->End(false);
  kept[0].join();
  {
    std::lock_guard<std::mutex> lock(mu_);
    over_ = true;
  }
  cond_.notify_all();
  chaos.join();
  for (auto& spare : spares_) spare.join();
}

// ------------------------------------------------------------------ faults

void ReplicaJob::OnProbe(int probe, int reached) {
  const auto is_due = [=](const Fault& fault) {
    return fault.IsAtProbe() &&
           (fault.at_probe >= 0 ? fault.at_probe == probe : fault.at_reached <= reached);
  };
  if (std::none_of(faults_.begin(), faults_.end(), is_due)) return;
  // Another thread carries out the fault, because this one may hold any lock.
  std::copy_if(faults_.begin(), faults_.end(), std::back_inserter(due_), is_due);
  std::erase_if(faults_, is_due);
  cond_.notify_all();
}

void ReplicaJob::BreakThings() {
  const auto begun = std::chrono::steady_clock::now();
  std::unique_lock<std::mutex> lock(mu_);
  while (!over_) {
    const double now =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
    double next = 1000;
    for (auto it = faults_.begin(); it != faults_.end();) {
      if (it->IsInTime() && it->at_s <= now) {
        due_.push_back(*it);
        it = faults_.erase(it);
        continue;
      }
      if (it->IsInTime()) next = std::min(next, it->at_s - now);
      ++it;
    }
    if (due_.empty()) {
      cond_.wait_for(lock, std::chrono::duration<double>(next));
      continue;
    }
    Fault fault = due_.back();
    due_.pop_back();
    // A replica can be removed only once all are present and servers have the optimizer state. The
    // scheduler may die only once all nodes know that.
    const bool has_state = plan_.parameters == 0 || witness_.loaded >= plan_.workers();
    const bool has_begun =
        witness_.begun() && has_state && started_ >= plan_.workers() + plan_.servers;
    if (!has_begun) {
      fault.at_reached = 0;
      fault.at_probe = -1;
      fault.at_s = now + 0.002;
      faults_.push_back(fault);
      continue;
    }
    Break(fault);
  }
}

void ReplicaJob::BreakScheduler() {
  const std::shared_ptr<ServingNode> scheduler = scheduler_;
  if (!scheduler || dies_ || returns_ == 2) return;
  dies_ = true;
  network_.Kill(0);
  scheduler->End(false);
}

void ReplicaJob::StartSpare() {
  const int number = next_node_++;
  kept_[number].is_spare = true;
  spares_.emplace_back([=, this] {
    // In half of the jobs, starting a server takes longer than others wait for a late node.
    const uint64_t longest = plan_.steps % 4 < 2 ? 300 : 6000;
    std::this_thread::sleep_for(std::chrono::milliseconds(Random(longest)));
    Serve(number);
  });
  pthread_setname_np(spares_.back().native_handle(), "server");
}

void ReplicaJob::BreakServer(const Fault& fault) {
  if (serving_.empty()) return;
  if (fault.kind == Fault::kReset) {
    // The scheduler then ends one of the two servers.
    if (serving_.size() < 2) return;
    const int one = *serving_.begin(), other = *std::next(serving_.begin());
    kept_[one].is_broken = kept_[other].is_broken = true;
    ++broken_servers_;
    StartSpare();
    return network_.Reset(one, other);
  }
  const int index = (-1 - fault.node) % static_cast<int>(serving_.size());
  const int node = *std::next(serving_.begin(), index);
  kept_[node].is_broken = true;
  ++broken_servers_;
  serving_.erase(node);
  // A launcher notices the end, and starts another server, which waits if this server survives.
  StartSpare();
  fault.kind == Fault::kKill ? network_.Kill(node) : network_.Pause(node, fault.seconds);
}

void ReplicaJob::Break(const Fault& fault) {
  if (fault.node == kScheduler) return BreakScheduler();
  if (fault.node < 0) return BreakServer(fault);
  const auto found = now_.find(fault.node / plan_.ranks);
  if (found == now_.end()) return;
  Life* const life = found->second;
  life->is_broken = true;
  const int node = life->nodes[fault.node % plan_.ranks];
  switch (fault.kind) {
    case Fault::kKill:
      return network_.Kill(node);
    case Fault::kPause:
      return network_.Pause(node, fault.seconds);
    case Fault::kStick:
      return life->inside->Stick(fault.seconds);
    case Fault::kReset:
      // The server is blamed if most replicas report it.
      if (plan_.replaces) {
        kept_[fault.peer].is_broken = true;
        StartSpare();
      }
      return network_.Reset(node, fault.peer);
    default:
      return network_.Delay(node, fault.peer, fault.seconds);
  }
}

// ------------------------------------------------------------------ conditions

bool ReplicaJob::MayLoseState() const { return plan_.parameters > 0 && broken_servers_ > 1; }

std::string ReplicaJob::Verdict() const {
  if (!witness_.wrong().empty()) return witness_.wrong();
  if (ps::NumBrokenInvariants() > 0) return ps::BrokenInvariants().last;
  bool any_well = false;
  for (const auto& life : lives_) {
    const auto& errors = life->errors;
    const bool well =
        std::all_of(errors.begin(), errors.end(), [](const auto& e) { return e.empty(); });
    any_well |= well;
    if (well || life->is_broken || life->number > 1) continue;
    if (MayLoseState() && std::any_of(errors.begin(), errors.end(), IsOfLostState)) return "";
    return "replica " + std::to_string(life->replica) +
           " failed, though nothing happened to it: " + errors[0] + " / " + errors.back();
  }
  if (!any_well) return "no replica ended well";
  for (const auto& [number, kept] : kept_) {
    const bool may_fail = kept.is_broken || (kept.is_spare && !kept.served);
    if (!kept.error.empty() && !may_fail) {
      return "the scheduler or a server failed: " + kept.error;
    }
  }
  return "";
}

std::string ReplicaJob::Describe() const {
  std::string text = std::to_string(plan_.replicas) + " replicas of " +
                     std::to_string(plan_.ranks) + ", " + std::to_string(plan_.servers) +
                     " servers, " + std::to_string(plan_.steps) + " steps, settings " +
                     std::to_string(plan_.settings) + (plan_.disturbed ? ", disturbed" : "") +
                     (plan_.patient ? ", with a quorum" : "") +
                     (plan_.replaces ? ", servers are replaced" : "") +
                     (plan_.backups ? ", which have copies" : "") +
                     (plan_.returns ? ", the scheduler returns" : "") +
                     (plan_.parameters > 0 ? ", with an optimizer on the servers" : "");
  for (const Fault& fault : faults_) text += "\n  still to come: " + fault.Describe();
  for (const auto& life : lives_) {
    text += "\n  replica " + std::to_string(life->replica) + ", life " +
            std::to_string(life->number) + (life->is_broken ? ", broken" : "") + ":";
    for (const auto& error : life->errors) text += " [" + (error.empty() ? "well" : error) + "]";
  }
  for (const auto& [number, kept] : kept_) {
    text += "\n  kept " + std::to_string(number) + (kept.is_broken ? ", broken" : "") +
            (kept.is_spare ? ", spare: " : ": ") + (kept.error.empty() ? "well" : kept.error);
  }
  return text;
}

// ------------------------------------------------------------------ observations

void Witness::SawSum(int step, int tensor, int place, size_t partition, uint32_t lacks) {
  const auto [it, is_new] =
      lists_.emplace(std::pair(std::pair(step, tensor), std::pair(place, partition)), lacks);
  if (!is_new && it->second != lacks) {
    Wrong("members got different sums of step " + std::to_string(step));
  }
  if (is_new && lacks != 0) ++short_sums;
}

void Witness::Pushes(int rank, int life, int step) {
  const auto [it, is_new] = lives_.emplace(std::pair(rank, step), life);
  if (!is_new && it->second != life) {
    Wrong("two lives of rank " + std::to_string(rank) + " push step " + std::to_string(step));
  }
}

int Witness::LifeAt(int rank, int step) const {
  const auto it = lives_.find({rank, step});
  return it == lives_.end() ? 0 : it->second;
}

void Witness::Ended(int rank, uint64_t state) {
  const auto [it, is_new] = states_.emplace(rank, state);
  if (!is_new && it->second != state) Wrong("replicas end with different states");
}

void Witness::Wrong(const std::string& what) {
  if (wrong_.empty()) wrong_ = what;
}

}  // namespace simulation
}  // namespace byteps
