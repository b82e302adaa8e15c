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
  int rank = 0;  // rank of a worker
  int num_workers = 1;
  int num_servers = 1;
  bool rejoin = false;  // whether this is a server that outlived its last job
  std::string gpu;      // PCI bus id of a worker's GPU, "0000:1b:00.0"; "": unknown
  // Makes the scheduler's policy for losses. Null: a loss ends the job.
  std::unique_ptr<ps::RosterPolicy> (*make_roster_policy)(ps::SchedulerMembership*,
                                                          ps::ScheduledJob*) = nullptr;
};

// Thrown if the job failed before all nodes had joined, after the scheduler had admitted this node.
struct JobFailedError : public Error {
  using Error::Error;
};

// Thrown if nothing answers at the scheduler's address.
struct NoSchedulerError : public Error {
  using Error::Error;
};

// Thrown on a server that waited for a lost server's rank, if the job ended without such a loss.
struct NotNeededError : public Error {
  using Error::Error;
};

// Channel of a real job. It wraps ps-lite, which has global state, so only one session may be
// started at a time.
//
// The session owns its van and membership until it is destroyed. So any thread may call any method
// even after Stop: then the method sends nothing, and returns names, ranks and rates of the last
// job.
class Session : public Channel {
 public:
  Session(const Config& config, const SessionOptions& options);
  ~Session() override;

  void Start(ChannelUser* user) override;
  // Does everything that Start does, except joining. Call it instead of Start. Returns the
  // scheduler's answer if the scheduler would admit `count` nodes like this one. Returns "" on the
  // scheduler itself. Throws UsageError, NoSchedulerError, or Error for any other failure.
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
  void AskToAdmit(int replica, int ready_epoch) override;
  void SayAwaited(int rank, const std::string& name, uint32_t round) override;
  void SayLate(int rank, const std::string& why) override;
  int rank() const override;
  std::string NameOfServer(int rank) override;
  std::string HostOfServer(int rank) override;
  std::string NameOfWorker(int rank) override;

  // Stops a server or the scheduler: see ps::Membership::StopByOrder.
  void StopByOrder(const std::string& how);

  // Returns whether the job has begun and has workers.
  bool HasWorkers() const;

  // Returns whether peers have received all messages that this node has sent.
  bool AllArrived() const;

  // Returns the state of the job, on the scheduler.
  ps::JobView View();

  // Host and port at which this node listens.
  std::string host() const;
  int port() const;

 private:
  // Takes over the van for the next attempt to join, with its new membership.
  void Adopt(std::shared_ptr<ps::Van> van);
  // The latest van; null before Start.
  std::shared_ptr<ps::Van> van() const;
  // Returns the result of `ask` for this node's membership; a default value before Start and on the
  // scheduler.
  template <typename Ask>
  auto AskNode(Ask ask) const;
  std::string NameOfNode(int node_id) const;
  ps::Node node() const;
  // Checks the settings, and installs the handlers in ps-lite. `probe`: see MembershipSettings.
  ps::NetSettings Prepare(ChannelUser* user, int probe);
  // Reads the network's settings. Throws UsageError.
  ps::NetSettings ReadSettings() const;
  // Joins the job. Retries for BYTEPS_START_TIMEOUT_S while the scheduler may admit this node
  // later. If lost servers are replaced, a surplus server waits as long as the job lasts, to
  // replace a lost one. When the job has ended, throws NotNeededError.
  void Join(ChannelUser* user, ps::NetSettings settings);

  const Config config_;
  const SessionOptions options_;
  EarlyMessages early_;
  mutable ps::Mutex van_mu_;
  std::shared_ptr<ps::Van> van_ PS_GUARDED_BY(van_mu_);
  bool started_ = false;
  bool waits_ = false;  // whether this server waits for the rank of a lost server
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_CLUSTER_SESSION_H_
