// A van over RDMA with a plane for control and one for data.
//
// Connections.  See net/link/admission.h: one control endpoint each, and from a worker to a server
// BYTEPS_CONNECTIONS data endpoints, or as many as it takes to use all NICs of both; a
// worker listens nowhere.  Each endpoint has a pair of NICs, as over TCP (net/link/dial_plan.h).
// Pushes, pulls and what answers them go by the data plane, everything else by the control plane;
// so a heartbeat or a declaration never waits behind values.  BYTEPS_RDMA_DATA_PLANE=0 leaves one
// endpoint for both.
//
// Threads.  One for the control plane, and one per device for the data plane, handle completions,
// and hand messages to the data handler;
// one makes connections and hears of their end; one registers memory.  Messages of
// membership, and the news of lost peers, are handed on by Van's receiving thread.  All
// sleep while there is nothing to do (unless BYTEPS_RDMA_BUSY_POLL=1).
//
// Memory.  Values are sent from where they lie and received where they belong
// (Handlers::place_for), or into registered memory that is reused when the last copy of the
// SArray is gone.  A registration is for one message, but for those of the pool's own memory
// and of memory in the registration cache (net/link/registration_cache.h).
//
// Who is who.  Who connects proves that it has the job's secret, and so does who is connected
// to.  The scheduler makes a number that names the job and its generation, and tells it to who
// connects; servers take connections of that generation alone.  A node's token, a random number in
// Node::endpoint_name, tells which process a connection belongs to, also before it has an
// id.  What a message says of its sender is not looked at: the connection knows.
#ifndef BYTEPS_NET_RDMA_VAN_H_
#define BYTEPS_NET_RDMA_VAN_H_

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "byteps/net/link/dial_plan.h"
#include "byteps/net/link/link_outage.h"
#include "byteps/net/link/link_van.h"
#include "byteps/net/membership/van_settings.h"
#include "byteps/net/rdma/connector.h"
#include "byteps/net/rdma/endpoint.h"
#include "byteps/net/rdma/settings.h"
#include "byteps/net/rdma/transport.h"

namespace ps {
namespace rdma {

// Throws Error.
void DontBlock(int fd);
// Whether the port by which a connection goes, or went, has a link.
bool IsActive(const rdma_cm_id& id);

}  // namespace rdma

class RdmaVan : public LinkVan<RdmaVan, rdma::Endpoint>,
                public rdma::EndpointOwner,
                public rdma::ConnectorOwner {
 public:
  RdmaVan(const VanSettings& settings, const rdma::Settings& rdma);
  ~RdmaVan() override;

  std::string GetType() const override { return "ibverbs"; }
  void Abandon(const void* begin, size_t bytes) override;
  void Disconnect(int node_id) override;

 protected:
  void Start(int customer_id, bool standalone) override;
  void Stop() override;

  // Listens, but on a worker, on the NICs of `node`, or at its host, or at the address that the
  // settings choose.
  // Returns the port, 0 on a worker.  Throws Error naming the address and the reason.
  int Bind(const Node& node, int max_retry) override;

 private:
  friend class LinkVan<RdmaVan, rdma::Endpoint>;

  // By LinkVan.
  void Transmit(const Message& msg);
  void OnLinkLost(int id, const LinkEnding& ending);
  void Dial(const Node& node);
  std::shared_ptr<rdma::Endpoint> LinkTo(const Node& node);
  void NamePeer(const Node& node);
  void LearnPairs(const Node& scheduler);

  // Memory for an answer, which the peer may be told of; none if it is not registered yet.
  rdma::Place PlaceOf(const SArray<char>& answer, const rdma::Transport& transport) const;

  uint8_t Role() override { return my_role_; }
  int32_t Rank(int peer) override;
  uint64_t Job() override { return job_.get(); }
  uint64_t JobTold(const rdma::ConnectRequest& request) override;
  std::shared_ptr<rdma::Endpoint> OnRequest(const rdma::ConnectRequest& request,
                                            const std::string& address,
                                            rdma::Refusal* refusal) override;
  std::string OnReply(rdma::Endpoint* endpoint, const rdma::ConnectReply& reply) override;
  char* PlaceFor(rdma::Endpoint* endpoint, const Meta& meta, size_t bytes) override;
  void OnMessage(rdma::Endpoint* endpoint, rdma::Received received) override;
  LinkOutage::Clock::duration Patience(rdma::Endpoint* endpoint, LinkFault fault) override;
  void OnBroken(rdma::Endpoint* endpoint, bool path_failed) override;
  void OnResumed(rdma::Endpoint* endpoint, LinkOutage::Clock::duration after,
                 size_t again) override;
  void OnClosed(rdma::Endpoint* endpoint, const LinkEnding& ending) override;

  std::shared_ptr<rdma::Endpoint> NewEndpoint(rdma::Plane plane, int index, int peer_id,
                                              bool active);
  // For each of so many endpoints to a node the pairs of NICs that it may take.
  std::vector<std::vector<NicPair>> PairsWith(const Node& node, int count);

  rdma::Settings settings_;  // with as many slots as fit
  std::unique_ptr<rdma::Connector> connector_;
};

}  // namespace ps

#endif  // BYTEPS_NET_RDMA_VAN_H_
