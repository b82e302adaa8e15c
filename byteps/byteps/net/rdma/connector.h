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
  // All in the connector's thread.
  virtual uint8_t Role() = 0;
  // A worker's, and a server's for another server; -1 where the scheduler is to choose it.
  virtual int32_t Rank(int peer) = 0;
  // What names the job; 0 while it is not known.
  virtual uint64_t Job() = 0;
  // What one is told that is admitted.
  virtual uint64_t JobTold(const ConnectRequest& request) = 0;
  // The endpoint to which the request, which is of our version, shall lead: a new one, or that
  // which it resumes.  Null, with the reason, refuses it.
  virtual std::shared_ptr<Endpoint> OnRequest(const ConnectRequest& request,
                                              const std::string& address, Refusal* refusal) = 0;
  // Who was asked has taken the endpoint.  A reason is returned to give it up.
  virtual std::string OnReply(Endpoint* endpoint, const ConnectReply& reply) = 0;
};

class Connector {
 public:
  Connector(ConnectorOwner* owner, const Settings& settings, uint64_t token);
  // Closes every connection.
  ~Connector();
  Connector(const Connector&) = delete;
  Connector& operator=(const Connector&) = delete;

  // Listens at `hosts` ("" alone: every address) and `port` (0: the kernel chooses), and returns
  // the port.  Throws Error with the reason if it cannot at the first; another one where it cannot
  // is left out.
  int Listen(const std::vector<std::string>& hosts, int port);
  // Instead of Listen: connects by the devices that have these addresses, and listens nowhere.
  // Throws Error as Listen does.
  void UseDevicesOf(const std::vector<std::string>& hosts);
  // Begins to serve; after one of these.
  void Run();

  // Connects `endpoint` to who listens at `port`, over the first of `pairs` that works; goes back
  // to the first one when that works again.  Tries again while nobody listens, for as long as
  // BYTEPS_START_TIMEOUT_S; then the endpoint fails.  Any thread.
  // `receiver` is the token of the process that is meant, 0 if unknown.
  void Connect(std::shared_ptr<Endpoint> endpoint, const std::vector<NicPair>& pairs, int port,
               uint64_t receiver);
  // There are other paths, as good as the first.  Any thread.
  void AddPairs(std::shared_ptr<Endpoint> endpoint, std::vector<NicPair> pairs);

  // The endpoint's connection broke.  Who had connected connects again, as soon as nothing is
  // left of it; the other waits for that.  Has it give up in time.  Any thread.
  // `elsewhere`: over another pair of NICs first.
  void Reconnect(std::shared_ptr<Endpoint> endpoint, bool elsewhere);

  // Closes the endpoint's connection.  Any thread.
  void Disconnect(std::shared_ptr<Endpoint> endpoint);
  // Has it fail if it is not closed by then.  Any thread.
  void FailLater(std::shared_ptr<Endpoint> endpoint, std::chrono::seconds after);

  // Null until devices are known: when no address says which, the first connection does.
  std::shared_ptr<Transport> transport();

 private:
  using Clock = AwakeClock;

  // After the first attempt to connect that failed, and at most.
  static constexpr std::chrono::milliseconds kFirstPause{50};
  static constexpr std::chrono::milliseconds kLongestPause{1000};

  // A connection, made or being made.
  struct Link {
    std::shared_ptr<Endpoint> endpoint;
    Owned<rdma_cm_id> id;
    bool active = false;
    bool established = false;
    // Of an active one:
    bool resumes = false;
    // Of the connection that broke.  The other end hears of its end from the kernel, as it does
    // when this process ends: so only when there is another one, or none any more.
    Owned<rdma_cm_id> last_id;
    Clock::time_point attempt_deadline;
    DialPlan dial{kFirstPause, kLongestPause};
    uint64_t receiver = 0;
    std::string challenge;  // empty: none yet
    std::string said;       // what this end has said, and the challenge
    Clock::time_point next_try;
    // When it is away from its first pair of NICs, and tries whether that works.
    Clock::time_point look_at = Clock::time_point::max();

    // Whether an attempt ends before the connection manager gives it up.
    bool is_timed() const { return !established && (resumes || dial.has_several_pairs()); }
    bool may_move() const { return active && dial.has_several_pairs(); }
  };
  using LinkPtr = std::unique_ptr<Link>;
  // Whether a request passes over the first pair of a link.
  struct Probe {
    Owned<rdma_cm_id> id;
    std::weak_ptr<Endpoint> endpoint;  // the link's
    Clock::time_point deadline;
  };

  // `data` is borrowed.
  static rdma_conn_param Parameters(const std::string& data, uint32_t queue_pair);

  // Has the thread do it.
  void Post(std::function<void()> task);
  void Loop();
  int MillisecondsToWait();
  void RunTasks();
  void TryWaiting(Clock::time_point now);
  void EndOutages(Clock::time_point now);
  void FailAll(const std::string& reason);
  void Wake(const Endpoint& endpoint);
  void ReconnectHere(const std::shared_ptr<Endpoint>& endpoint, bool elsewhere);
  // The connection that there was; the endpoint may have another one already.
  void Forget(const Endpoint* endpoint);
  void EndForgotten(rdma_cm_id* id, rdma_cm_event_type what);
  std::string LastError(const Endpoint* endpoint) const;
  void TakeEvents();
  Owned<rdma_cm_id> NewId() const;
  // Bound to the address of a device that is among `devices` then.
  Owned<rdma_cm_id> BindTo(const std::string& host, int port, Devices* devices);
  std::vector<Owned<rdma_cm_id>> BindToAll(const std::vector<std::string>& hosts, int port);
  void AddDevice(rdma_cm_id* id, const std::string& host, Devices* devices) const;
  void UseDevices(Devices devices);
  void ReadDeviceEvents(const Transport& shared);
  void OnDeviceEvent(const Device& device, ibv_async_event event);
  void OnEvent(const rdma_cm_event& event);
  void OnRequest(const rdma_cm_event& event);
  // The endpoint, whose peer asks for another connection, can have one; or it is refused for now.
  static void MakeReady(Endpoint* endpoint, Refusal* refusal);
  // False: the request has not proved that it is of this job.  Without a `refusal` it was
  // asked to.
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
  // So that an endpoint that waits for its peer notices that its path has failed.
  void AskIdle(Clock::time_point now);

  // ----- connector_handshake.cc
  void Try(LinkPtr link);
  void TryAgain(Link* link, const std::string& error, bool nobody_listens = false,
                bool again_soon = false);
  // The same before there was an id to connect with, or after it has gone.
  void Postpone(LinkPtr link, const std::string& error, bool nobody_listens, bool again_soon);
  void Drop(Link* link);
  LinkPtr Take(rdma_cm_id* id);
  // Without a proof.
  ConnectRequest RequestOf(const Link& link);
  ConnectRequest MakeRequest(Link* link);
  void OnChallenge(Link* link, const Challenge& challenge);
  // The greeting failed: on a link that was there before, one more attempt unless it is `proved`
  // that the peer has decided so.
  void GreetingFailed(Link* link, const std::string& error, bool proved);
  // Whether who said that has the secret.  True without one.
  bool Proves(const std::string& proof, const char* who, const std::string& said) const;
  // Makes the queue pair.  Throws when the id belongs to another device than those in use.
  void Prepare(const std::shared_ptr<Endpoint>& endpoint, rdma_cm_id* id, bool may_move);

  ConnectorOwner* const owner_;
  const Settings settings_;
  const uint64_t token_;
  // Known to this process alone: by it, it knows its challenges again.
  const auth::Secret challenges_{auth::NewNonce()};
  Owned<rdma_event_channel> channel_;
  std::optional<ClosedInChild> channel_in_child_;
  std::vector<Owned<rdma_cm_id>> listeners_;
  int wake_fd_ = -1;
  std::atomic<bool> stop_{false};

  Mutex mu_;
  std::vector<std::function<void()>> tasks_ PS_GUARDED_BY(mu_);
  std::shared_ptr<Transport> transport_ PS_GUARDED_BY(mu_);

  // The thread's own.
  std::map<rdma_cm_id*, LinkPtr> links_;
  // Of endpoints that have broken since they were accepted.  Only when it is known whether the
  // peer takes such a connection for whole can it be told that it is not.
  std::map<rdma_cm_id*, Owned<rdma_cm_id>> forgotten_;
  std::vector<LinkPtr> waiting_;  // for their next try
  std::map<rdma_cm_id*, Probe> probes_;
  Clock::time_point ask_at_;
  std::map<std::string, int64_t> used_proofs_;  // each is of use once; with its period
  std::vector<std::pair<Clock::time_point, std::shared_ptr<Endpoint>>> failing_;  // by then
  std::vector<std::shared_ptr<Endpoint>> broken_;  // without a connection, or were lately
  std::thread thread_;
};

}  // namespace rdma
}  // namespace ps
#endif  // BYTEPS_NET_RDMA_CONNECTOR_H_
