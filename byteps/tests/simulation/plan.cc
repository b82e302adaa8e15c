// Choices that a seed makes for a job before it starts.
#include <cstdio>
#include <string>
#include <vector>

#include "byteps/base/protocol.h"
#include "world.h"

namespace byteps {
namespace simulation {

using core::Config;

std::string Fault::Describe() const {
  static const char* const kNames[] = {"kill", "pause", "reset", "delay", "stop",
                                       "",     "quit",  "stick", "wake",  "hold up"};
  char when[64];
  snprintf(when, sizeof(when), "at %.4f s", at_s);
  if (at_reached > 0) snprintf(when, sizeof(when), "at the probe number %d", at_reached);
  if (at_probe >= 0) snprintf(when, sizeof(when), "at %s", NameOfProbe(at_probe).c_str());
  if (at_wait >= 0) {
    snprintf(when, sizeof(when), "at the wait number %lld", static_cast<long long>(at_wait));
  }
  if (kind == kQuit) snprintf(when, sizeof(when), "after %d rounds", after_rounds);
  char text[160];
  snprintf(text, sizeof(text), "%s %s %d-%d for %.2f s", when, kNames[kind], node, peer, seconds);
  return text;
}

std::string Plan::Describe() const {
  std::string text = std::to_string(workers) + " workers, " + std::to_string(servers) +
                     " servers, " + std::to_string(rounds) + " rounds, settings " +
                     std::to_string(settings);
  if (keep) text += ", kept";
  if (returns) text += ", the scheduler returns";
  if (backups) text += ", backups";
  if (goes_on) text += ", goes on";
  if (burst > 0) text += ", a burst of " + std::to_string(burst) + " sums";
  if (updates) text += ", " + std::to_string(parameters) + " parameters";
  if (on_gpu >= 0) text += ", worker " + std::to_string(on_gpu) + " on a GPU";
  if (disturbed) text += ", disturbed";
  if (releases) text += ", releases";
  for (const Fault& fault : faults) text += "\n  " + fault.Describe();
  return text;
}

namespace {

using byteps::core::GivenSettings;

std::vector<Config> MakeSettings(const char* quorum, double replace_s,
                                 double op_timeout_s = kOpTimeoutS,
                                 const GivenSettings& others = {}) {
  std::vector<Config> made;
  const std::string grace = "@" + std::to_string(kGraceS);
  for (const char* deterministic : {"0", "1"}) {
    for (const char* threads : {"1", "2"}) {
      for (const char* window : {"0", "12000"}) {
        GivenSettings given = others;
        given["BYTEPS_REPLACE_SERVERS_S"] = std::to_string(replace_s);
        given["BYTEPS_QUORUM"] = quorum[0] == '0' ? "" : quorum + grace;
        given["BYTEPS_DETERMINISTIC"] = deterministic;
        given["BYTEPS_SERVER_ENGINE_THREAD"] = threads;
        given["BYTEPS_PUSH_THREAD"] = threads;
        given["BYTEPS_SERVER_WINDOW_BYTES"] = window;
        given["BYTEPS_PARTITION_BYTES"] = std::to_string(kPartitionBytes);
        // The pool has few blocks, so that some partitions have to wait.
        given["BYTEPS_PINNED_BYTES"] = std::to_string(3 * kPartitionBytes);
        given["BYTEPS_STREAMED_BYTES"] = std::to_string(4 * kPartitionBytes);
        given["BYTEPS_OP_TIMEOUT_S"] = std::to_string(op_timeout_s);
        given["BYTEPS_PEER_TIMEOUT_S"] = std::to_string(kPeerTimeoutS);
        made.push_back(Config::FromEnvironment(given));
      }
    }
  }
  return made;
}

}  // namespace

const std::vector<Config>& Settings() {
  static const std::vector<Config> all = MakeSettings("0", 0);
  return all;
}

const std::vector<Config>& ReplicaSettings(bool patient, bool replaces, bool returns) {
  static const std::vector<Config> all[] = {MakeSettings("0", 0),
                                            MakeSettings("1", 0),
                                            MakeSettings("0", kReplaceS),
                                            MakeSettings("1", kReplaceS),
                                            MakeSettings("0", 0, kLongOpTimeoutS),
                                            MakeSettings("1", 0, kLongOpTimeoutS),
                                            MakeSettings("0", kReplaceS, kLongOpTimeoutS),
                                            MakeSettings("1", kReplaceS, kLongOpTimeoutS)};
  return all[(returns ? 4 : 0) + (replaces ? 2 : 0) + (patient ? 1 : 0)];
}

const std::vector<Config>& BackupSettings(int servers, bool patient) {
  static const auto make = [](const char* count, const char* quorum) {
    return MakeSettings(quorum, kReplaceS, kLongOpTimeoutS,
                        {{"BYTEPS_BACKUP_STATE", "1"}, {"DMLC_NUM_SERVER", count}});
  };
  static const std::vector<Config> all[] = {make("2", "0"), make("3", "0"), make("2", "1"),
                                            make("3", "1")};
  return all[servers - 2 + (patient ? 2 : 0)];
}

namespace {

Fault MakeFault(const Plan& plan, int number) {
  Fault fault;
  const int nodes = 1 + plan.workers + plan.servers;
  const bool keep = plan.keep;
  fault.kind = static_cast<Fault::Kind>(Random(Fault::kNumKinds));
  fault.at_s = static_cast<double>(Random(40'000)) * 1e-6;
  const uint64_t when = Random(6);
  if (when < 1) fault.at_reached = 1 + static_cast<int>(Random(60));
  if (when == 1 || when == 2) fault.at_probe = static_cast<int>(Random(kNumProbes));
  fault.node = static_cast<int>(Random(nodes));
  fault.peer = static_cast<int>(Random(nodes));
  if (fault.peer == fault.node) fault.peer = (fault.node + 1) % nodes;
  // Some faults happen while the next generation gathers, others while it works.
  if (keep && number > 0) fault.at_s = static_cast<double>(Random(8'000)) * 1e-3;
  // Some faults end before any node notices, some do not.
  fault.seconds = static_cast<double>(1 + Random(140)) * (Random(2) ? 0.002 : 0.1);
  if (plan.workers > 1 && Random(10) == 0) {
    fault.kind = Fault::kQuit;
    fault.node = 1 + plan.servers + static_cast<int>(Random(plan.workers));
    fault.after_rounds = static_cast<int>(Random(plan.rounds));
  } else if (plan.goes_on && Random(2) == 0) {
    // Operations fail, but the job does not.
    fault.kind = Fault::kDelay;
    fault.node = 1 + static_cast<int>(Random(plan.servers));
    fault.peer = 1 + plan.servers + static_cast<int>(Random(plan.workers));
    fault.seconds = static_cast<double>(3 + Random(12));
  } else if (Random(10) == 0) {
    // Connections of a worker that leaves in good order break.
    fault.kind = Fault::kReset;
    fault.at_reached = 0;
    fault.at_probe = static_cast<int>(Random(2) ? ps::Probe::kSaysGoodbye : ps::Probe::kLastLeaves);
    fault.node = 1 + static_cast<int>(Random(plan.servers));
    fault.peer = 1 + plan.servers + static_cast<int>(Random(plan.workers));
  }
  return fault;
}

}  // namespace

bool Plan::Releases(int tensor, int round) const {
  const uint64_t seed[] = {counts[0], static_cast<uint64_t>(tensor), static_cast<uint64_t>(round)};
  return releases && core::HashBytes(seed, sizeof(seed), 1) % 2 == 0;
}

int Plan::LifeAt(int tensor, int round) const {
  int lives = 0;
  for (int before = 0; before < round; ++before) lives += Releases(tensor, before) ? 1 : 0;
  return lives;
}

size_t Plan::CountAt(int tensor, int round) const {
  return LifeAt(tensor, round) % 2 == 0 ? counts[tensor] : 1 + counts[tensor] / 2;
}

Plan MakePlan() {
  Plan plan;
  plan.workers = 1 + static_cast<int>(Random(3));
  plan.servers = 1 + static_cast<int>(Random(2));
  plan.rounds = 1 + static_cast<int>(Random(4));
  plan.tensors = 1 + static_cast<int>(Random(2));
  plan.settings = Random(Settings().size());
  plan.keep = Random(2) == 0;
  plan.goes_on = Random(3) == 0;
  plan.updates = Random(2) == 0;
  plan.parameters = 1 + Random(6000);
  // Some partitions of a failing operation have to wait in the queue.
  if (plan.goes_on && plan.updates) {
    plan.settings |= 1;
    plan.parameters += kPartitionBytes / sizeof(float);
  }
  if (Random(4) == 0) plan.on_gpu = static_cast<int>(Random(plan.workers));
  plan.disturbed = Random(2) == 0;
  for (int i = 0; i < plan.tensors; ++i) plan.counts.push_back(1 + Random(6000));
  // A third of the jobs have no fault, most others have one.
  const uint64_t dice = Random(6);
  const int faults = dice < 2 ? 0 : dice < 5 ? 1 : 2;
  for (int i = 0; i < faults; ++i) plan.faults.push_back(MakeFault(plan, i));
  plan.returns = !plan.keep && Random(3) == 0;
  for (uint64_t deaths = plan.returns ? 1 + Random(2) : 0; deaths > 0; --deaths) {
    Fault fault = MakeFault(plan, 0);
    fault.kind = Fault::kKill;
    fault.node = 0;
    if (Random(3) == 0) fault.at_probe = static_cast<int>(ps::Probe::kSaysGoodbye);
    plan.faults.push_back(fault);
  }
  // More rounds than a server keeps for a worker that is ahead.
  if (Random(100) == 0) plan.burst = 2100;
  plan.releases = Random(2) == 0;
  return plan;
}

Plan MakeBackupPlan() {
  Plan plan;
  plan.backups = plan.updates = true;
  plan.workers = 1 + static_cast<int>(Random(3));
  plan.servers = 2 + static_cast<int>(Random(2));
  plan.rounds = 2 + static_cast<int>(Random(7));
  plan.tensors = 1;
  plan.settings = Random(BackupSettings(plan.servers, false).size());
  plan.parameters = 1 + Random(6000);
  plan.disturbed = Random(2) == 0;
  plan.counts.push_back(1 + Random(3000));
  for (uint64_t faults = Random(4); faults > 0; --faults) {
    Fault fault;
    const uint64_t kind = Random(10);
    fault.kind = kind < 6   ? Fault::kKill
                 : kind < 8 ? Fault::kReset
                 : kind < 9 ? Fault::kPause
                            : Fault::kDelay;
    fault.at_s = static_cast<double>(Random(60'000)) * 1e-6;
    const uint64_t when = Random(4);
    if (when < 1) fault.at_reached = 1 + static_cast<int>(Random(200));
    if (when == 1 || when == 2) fault.at_probe = static_cast<int>(Random(kNumProbes));
    fault.node = 1 + static_cast<int>(Random(plan.servers));
    fault.peer = 1 + static_cast<int>(Random(plan.servers + plan.workers));
    if (fault.peer == fault.node) fault.peer = 1 + plan.servers;
    fault.seconds = static_cast<double>(1 + Random(60)) * (Random(2) ? 0.002 : 0.1);
    plan.faults.push_back(fault);
  }
  plan.releases = Random(2) == 0;
  return plan;
}

}  // namespace simulation
}  // namespace byteps
