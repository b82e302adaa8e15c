#ifndef BYTEPS_NET_RDMA_CONNECTOR_H_
#define BYTEPS_NET_RDMA_CONNECTOR_H_

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/net/link/dial_plan.h"
#include "byteps/net/rdma/endpoint.h"
#include "byteps/net/rdma/transport.h"

namespace ps {
namespace rdma {

class ConnectorOwner {
 public:
  virtual ~ConnectorOwner() = default;
  // Only the connector's thread calls these functions.
  virtual uint8_t Role() = 0;
  // Returns this node's rank, for a request to node `peer`: the rank of a worker, or of a server
  // that connects to another server. Returns -1 if the scheduler chooses the rank.
  virtual int32_t Rank(int peer) = 0;
  // Returns the job's number, or 0 while this node does not know it.
  virtual uint64_t Job() = 0;
  // Returns the job number that an admitted peer is told.
  virtual uint64_t JobTold(const ConnectRequest& request) = 0;
  // Returns the endpoint for a request with this protocol version: a new one, or the one that the
  // request resumes. To refuse the request, returns null and sets `refusal` to the reason.
  virtual std::shared_ptr<Endpoint> OnRequest(const ConnectRequest& request,
                                              const std::string& address, Refusal* refusal) = 0;
  // Called when the peer has accepted the endpoint. Returns a reason to give it up, or "".
  virtual std::string OnReply(Endpoint* endpoint, const ConnectReply& reply) = 0;
};

class Connector {
 public:
  Connector(ConnectorOwner* owner, const Settings& settings, uint64_t token);
  // Closes all connections.
  ~Connector();
  Connector(const Connector&) = delete;
  Connector& operator=(const Connector&) = delete;

  // Listens at `hosts` (a single "" means all addresses) and `port` (0: the kernel chooses).
  // Returns the port. Throws Error if listening at the first host fails. Leaves out other hosts
  // that fail.
  int Listen(const std::vector<std::string>& hosts, int port);
  // Alternative to Listen: uses the devices with these addresses to connect, without listening.
  // Throws Error as Listen does.
  void UseDevicesOf(const std::vector<std::string>& hosts);
  // Starts the thread. Call after Listen or UseDevicesOf.
  void Run();

  // Connects `endpoint` to `port` over the first pair of NICs that works. Later returns to the
  // first pair of the list, when that works again. While no process listens, retries for
  // BYTEPS_START_TIMEOUT_S; then the endpoint fails. `receiver`: token of the process to reach, 0
  // if unknown. Thread-safe.
  void Connect(std::shared_ptr<Endpoint> endpoint, const std::vector<NicPair>& pairs, int port,
               uint64_t receiver);
  // Adds pairs of NICs, which are as good as the first pair. Thread-safe.
  void AddPairs(std::shared_ptr<Endpoint> endpoint, std::vector<NicPair> pairs);

  // Handles a broken connection. The side that made it reconnects when the old connection is gone;
  // the other side waits for the new connection. When the deadline passes, the endpoint closes.
  // `elsewhere`: whether to try another pair of NICs first. Thread-safe.
  void Reconnect(std::shared_ptr<Endpoint> endpoint, bool elsewhere);

  // Closes the endpoint's connection. Thread-safe.
  void Disconnect(std::shared_ptr<Endpoint> endpoint);
  // Makes the endpoint fail if it is not closed within this time. Thread-safe.
  void FailLater(std::shared_ptr<Endpoint> endpoint, std::chrono::seconds after);

  // Returns the resources on this process's devices, or null until the devices are known. If no
  // address determines the devices, the first connection does.
  std::shared_ptr<Transport> transport();

 private:
  using Clock = AwakeClock;

  // Pause after the first failed attempt, and the longest pause.
  static constexpr std::chrono::milliseconds kFirstPause{50};
  static constexpr std::chrono::milliseconds kLongestPause{1000};

  // A connection, established or being made.
  struct Link {
    std::shared_ptr<Endpoint> endpoint;
    Owned<rdma_cm_id> id;
    bool active = false;
    bool established = false;
    // Whether this link resumes a broken one. Used on the side that makes connections.
    bool resumes = false;
    // Id of the broken connection. If it were destroyed, the peer would see the same as at the end
    // of this process. So it is kept until there is a new connection, or until the endpoint closes.
    Owned<rdma_cm_id> last_id;
    Clock::time_point attempt_deadline;
    DialPlan dial{kFirstPause, kLongestPause};
    uint64_t receiver = 0;
    std::string challenge;  // the listener's challenge; "" before it arrives
    std::string said;       // claims of this end, and the challenge, which both sides' proofs cover
    Clock::time_point next_try;
    // Time of the next probe of the first pair of NICs, while the link uses another pair.
    Clock::time_point look_at = Clock::time_point::max();

    // Returns whether the current attempt has a deadline that is earlier than the connection
    // manager's own timeout.
    bool is_timed() const { return !established && (resumes || dial.has_several_pairs()); }
    bool may_move() const { return active && dial.has_several_pairs(); }
  };
  using LinkPtr = std::unique_ptr<Link>;
  // Test whether a request passes over a link's first pair of NICs.
  struct Probe {
    Owned<rdma_cm_id> id;
    std::weak_ptr<Endpoint> endpoint;  // endpoint of the tested link
    Clock::time_point deadline;
  };

  // `data` is borrowed.
  static rdma_conn_param Parameters(const std::string& data, uint32_t queue_pair);

  // Runs the task in the connector's thread.
  void Post(std::function<void()> task);
  void Loop();
  int MillisecondsToWait();
  void RunTasks();
  void TryWaiting(Clock::time_point now);
  void EndOutages(Clock::time_point now);
  void FailAll(const std::string& reason);
  void Wake(const Endpoint& endpoint);
  void ReconnectHere(const std::shared_ptr<Endpoint>& endpoint, bool elsewhere);
  // Drops the endpoint's old connection. The endpoint may already have a new one.
  void Forget(const Endpoint* endpoint);
  void EndForgotten(rdma_cm_id* id, rdma_cm_event_type what);
  std::string LastError(const Endpoint* endpoint) const;
  void TakeEvents();
  Owned<rdma_cm_id> NewId() const;
  // Returns an id that is bound to the address. Adds its device to `devices`.
  Owned<rdma_cm_id> BindTo(const std::string& host, int port, Devices* devices);
  std::vector<Owned<rdma_cm_id>> BindToAll(const std::vector<std::string>& hosts, int port);
  void AddDevice(rdma_cm_id* id, const std::string& host, Devices* devices) const;
  void UseDevices(Devices devices);
  void ReadDeviceEvents(const Transport& shared);
  void OnDeviceEvent(const Device& device, ibv_async_event event);
  void OnEvent(const rdma_cm_event& event);
  void OnRequest(const rdma_cm_event& event);
  // Makes the endpoint ready for the new connection that its peer requests. If that is impossible
  // now, refuses the request.
  static void MakeReady(Endpoint* endpoint, Refusal* refusal);
  // Returns whether the request proves that it belongs to this job. If it does not, and `refusal`
  // stays empty, the connector has sent a challenge, which asks for a proof.
  bool IsProved(rdma_cm_id* id, const ConnectRequest& request, std::string* said,
                std::string* refusal);
  std::string ChallengeTo(const ConnectRequest& request, int64_t period) const;
  void Accept(rdma_cm_id* id, const ConnectRequest& request, const std::string& said,
              std::shared_ptr<Endpoint> endpoint);
  static void Refuse(rdma_cm_id* id, const Refusal& refusal);
  static void Reject(rdma_cm_id* id, const std::string& data);
  void OnResolved(Link* link, rdma_cm_event_type what);
  void OnResponse(Link* link, const rdma_cm_event& event);
  void OnRejected(Link* link, const rdma_cm_event& event);
  void OnDisconnected(Link* link);
  Link* LinkOf(const Endpoint* endpoint) const;

  // ----- connector.cc
  void OnEstablished(Link* link);
  void LeaveNic(const ibv_context* context, int port);
  void LookHome(Clock::time_point now);
  void StartProbe(Link* link);
  void OnProbeEvent(const rdma_cm_event& event);
  void EndProbe(rdma_cm_id* id, bool works);
  // Makes endpoints that wait for their peer notice a failed path.
  void AskIdle(Clock::time_point now);

  // ----- connector_handshake.cc
  void Try(LinkPtr link);
  void TryAgain(Link* link, const std::string& error, bool nobody_listens = false,
                bool again_soon = false);
  // Schedules another attempt for a link that has no id.
  void Postpone(LinkPtr link, const std::string& error, bool nobody_listens, bool again_soon);
  void Drop(Link* link);
  LinkPtr Take(rdma_cm_id* id);
  // Returns the request without a proof.
  ConnectRequest RequestOf(const Link& link);
  ConnectRequest MakeRequest(Link* link);
  void OnChallenge(Link* link, const Challenge& challenge);
  // Handles a failed greeting. If the endpoint had a connection before, only this attempt fails,
  // unless `proved`: then the peer itself has refused.
  void GreetingFailed(Link* link, const std::string& error, bool proved);
  // Returns whether `proof` shows that the prover has the job's secret. Returns true in a job
  // without a secret.
  bool Proves(const std::string& proof, const char* who, const std::string& said) const;
  // Makes the queue pair. Throws if the id belongs to an unknown device.
  void Prepare(const std::shared_ptr<Endpoint>& endpoint, rdma_cm_id* id, bool may_move);

  ConnectorOwner* const owner_;
  const Settings settings_;
  const uint64_t token_;
  // Secret of this process alone, by which it recognizes its own challenges.
  const auth::Secret challenges_{auth::NewNonce()};
  Owned<rdma_event_channel> channel_;
  std::optional<ClosedInChild> channel_in_child_;
  std::vector<Owned<rdma_cm_id>> listeners_;
  int wake_fd_ = -1;
  std::atomic<bool> stop_{false};

  Mutex mu_;
  std::vector<std::function<void()>> tasks_ PS_GUARDED_BY(mu_);
  std::shared_ptr<Transport> transport_ PS_GUARDED_BY(mu_);

  // Only the connector's thread uses the members from here on.
  std::map<rdma_cm_id*, LinkPtr> links_;
  // Ids of accepted endpoints that broke early. They are disconnected when it is known whether the
  // peer considers the connection established.
  std::map<rdma_cm_id*, Owned<rdma_cm_id>> forgotten_;
  std::vector<LinkPtr> waiting_;  // links that wait for their next attempt
  std::map<rdma_cm_id*, Probe> probes_;
  Clock::time_point ask_at_;
  std::map<std::string, int64_t> used_proofs_;  // by period; each proof is valid once
  // Endpoints that fail if they are not closed by a deadline (FailLater).
  std::vector<std::pair<Clock::time_point, std::shared_ptr<Endpoint>>> failing_;
  // Endpoints that broke; some may be connected again.
  std::vector<std::shared_ptr<Endpoint>> broken_;
  std::thread thread_;
};

}  // namespace rdma
}  // namespace ps
#endif  // BYTEPS_NET_RDMA_CONNECTOR_H_
