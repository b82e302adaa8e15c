// Van over RDMA, with a control plane and a data plane.
//
// Connections: nodes connect as in net/link/admission.h, each with a control endpoint. Between a
// worker and a server there are also BYTEPS_CONNECTIONS data endpoints, by default as many as use
// all NICs of both. Workers do not listen. Each endpoint has a pair of NICs, as over TCP
// (net/link/dial_plan.h). Pushes, pulls and their answers use the data plane, and everything else
// uses the control plane, so a heartbeat or a declaration never waits behind values. With
// BYTEPS_RDMA_DATA_PLANE=0 one endpoint carries both.
//
// Threads: one polling thread for the control plane, and one per device for the data plane, handle
// completions and call the data handler. The connector's thread makes connections, and the
// registrar's thread registers memory. Van's receiving thread handles membership messages and lost
// peers. Idle polling threads sleep, unless BYTEPS_RDMA_BUSY_POLL=1.
//
// Memory: values are sent from their own memory. They are received at their destination
// (Handlers::place_for), or in registered memory that is reused when the last copy of the SArray is
// gone. A registration lasts for a message, except for pooled memory and the registration cache
// (net/link/registration_cache.h).
//
// Identity: both ends of a connection prove that they have the job's secret. The scheduler makes a
// number for the job and its generation, and tells it to nodes that connect. Servers accept only
// connections of that generation. A node's token, a random number in Node::endpoint_name, tells to
// which process a connection belongs, even before the node has an id. The sender that a message
// names is ignored, because the connection determines the sender.
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

// Makes the descriptor non-blocking. Throws Error.
void DontBlock(int fd);
// Returns whether the port of a connection is active. The connection may have ended.
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

  // Listens on the NICs of `node`, at the node's host, or at the address that the settings choose.
  // Returns the port. A worker does not listen, and returns 0. Throws Error with address and
  // reason.
  int Bind(const Node& node, int max_retry) override;

 private:
  friend class LinkVan<RdmaVan, rdma::Endpoint>;

  // Called by LinkVan.
  void Transmit(const Message& msg);
  void OnLinkLost(int id, const LinkEnding& ending);
  void Dial(const Node& node);
  std::shared_ptr<rdma::Endpoint> LinkTo(const Node& node);
  void NamePeer(const Node& node);
  void LearnPairs(const Node& scheduler);

  // Returns memory for an answer, to offer it to the peer. Empty if the memory is not registered
  // yet.
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
  // Returns the candidate pairs of NICs of each endpoint to a node.
  std::vector<std::vector<NicPair>> PairsWith(const Node& node, int count);

  rdma::Settings settings_;  // with the depths lowered to fit
  std::unique_ptr<rdma::Connector> connector_;
};

}  // namespace ps

#endif  // BYTEPS_NET_RDMA_VAN_H_
