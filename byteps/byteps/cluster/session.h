// This process's membership in a cluster of scheduler, servers and workers.
#ifndef BYTEPS_CLUSTER_SESSION_H_
#define BYTEPS_CLUSTER_SESSION_H_

#include <memory>
#include <string>

#include "byteps/base/config.h"
#include "byteps/base/invariant.h"
#include "byteps/base/mutex.h"
#include "byteps/cluster/channel.h"
#include "byteps/cluster/early_messages.h"

namespace ps {
class RosterPolicy;
struct ScheduledJob;
class SchedulerMembership;
class Van;
struct NetSettings;
}  // namespace ps

namespace byteps {
namespace core {

struct SessionOptions {
  Role role = Role::kWorker;
  int rank = 0;  // of a worker
  int num_workers = 1;
  int num_servers = 1;
  bool rejoin = false;  // of a server that outlived its last job
  std::string gpu;      // of a worker: the PCI bus id, "0000:1b:00.0"; empty: not known
  // Makes a scheduler's policy of losses; null: a loss ends the job.
  std::unique_ptr<ps::RosterPolicy> (*make_roster_policy)(ps::SchedulerMembership*,
                                                          ps::ScheduledJob*) = nullptr;
};

// The job failed before all nodes had come, after the scheduler had admitted this one.
struct JobFailedError : public Error {
  using Error::Error;
};

// Nobody answered at the scheduler's address.
struct NoSchedulerError : public Error {
  using Error::Error;
};

// A server waited for the place of one that is lost, and the job has ended without it.
struct NotNeededError : public Error {
  using Error::Error;
};

// The channel of a real job.  It wraps ps-lite, whose state is one per process: one session
// may be started at a time.
//
// The session owns its van, and with it the membership, until it is destroyed.  So every method
// answers, whatever thread calls it: after Stop nothing is sent, and names, ranks and rates are
// those of the job that was.
class Session : public Channel {
 public:
  Session(const Config& config, const SessionOptions& options);
  ~Session() override;

  void Start(ChannelUser* user) override;
  // Instead of Start: tries all that Start does, but joins nothing.  Returns what the scheduler
  // says of `count` nodes like this one, which it would admit; "" on the scheduler.  Throws
  // UsageError, NoSchedulerError, or Error for whatever else Start would fail of.
  std::string Probe(ChannelUser* user, int count);
  void Leave(const ps::Farewell& farewell) override;
  void Stop() override;
  void Send(const Message& message) override;
  void ReceiveReady() override;
  void Abandon(const void* begin, size_t bytes) override;
  bool RegistersMemory() const override;
  double link_gbps() const override;
  int num_nics() const override;
  bool is_late() const override;
  bool lacks_scheduler() const override;
  void SayReady() override;
  void AskToAdmit(int replica, int life) override;
  void SayAwaited(int rank, const std::string& name, uint32_t round) override;
  void SayLate(int rank, const std::string& why) override;
  int rank() const override;
  std::string NameOfServer(int rank) override;
  std::string HostOfServer(int rank) override;
  std::string NameOfWorker(int rank) override;

  // Of a server or the scheduler that is told to end: see ps::Membership::StopByOrder.
  void StopByOrder(const std::string& how);

  // Whether workers of a job that has begun are in it.
  bool HasWorkers() const;

  // Whether the peers have received all that was sent to them.
  bool AllArrived() const;

  // Of the scheduler: who is in the job.
  ps::JobView View();

  // The address at which this node listens.
  std::string host() const;
  int port() const;

 private:
  // Takes the van of the next attempt to join, which knows its membership and has heard nothing.
  void Adopt(std::shared_ptr<ps::Van> van);
  // The last one; null before Start.
  std::shared_ptr<ps::Van> van() const;
  // What `ask` finds out from this node's membership.  Nothing can be asked before Start, and of
  // the scheduler: that gives Answer().
  template <typename Ask>
  auto AskNode(Ask ask) const;
  std::string NameOfNode(int node_id) const;
  ps::Node node() const;
  // Checks the settings, and hands the handlers to ps-lite.  `probe`: see MembershipSettings.
  ps::NetSettings Prepare(ChannelUser* user, int probe);
  // Settings for the network; throws UsageError.
  ps::NetSettings ReadSettings() const;
  // Joins; again and again as long as the scheduler may take this node later, up to
  // BYTEPS_START_TIMEOUT_S.  A server for which there is no place waits for one as long as the job
  // lasts, if lost servers are replaced; NotNeededError: until then.
  void Join(ChannelUser* user, ps::NetSettings settings);

  const Config config_;
  const SessionOptions options_;
  EarlyMessages early_;
  mutable ps::Mutex van_mu_;
  std::shared_ptr<ps::Van> van_ PS_GUARDED_BY(van_mu_);
  bool started_ = false;
  bool waits_ = false;  // for the place of a server that is lost
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_CLUSTER_SESSION_H_
