// A van over RDMA with a plane for control and one for data.
//
// Connections.  Each node listens.  A node connects to the scheduler, and a worker to every
// server: one control endpoint each, and to a server BYTEPS_RDMA_DATA_ENDPOINTS data
// endpoints.  Who was connected to answers along the same connections.  Pushes, pulls and
// what answers them go by the data plane, everything else by the control plane; so a
// heartbeat or a declaration never waits behind values.  BYTEPS_RDMA_DATA_PLANE=0 leaves
// one endpoint for both.
//
// Threads.  One for each plane handles completions; one makes connections and hears of
// their end; Van's receiving thread hands messages on, control messages first.  All sleep
// while there is nothing to do (unless BYTEPS_RDMA_BUSY_POLL=1).
//
// Memory.  Values are sent from where they lie and received into registered memory, which
// is reused when the last copy of the SArray is gone.  A registration is for one message,
// but for those of the pool's own memory and of memory that lasts (ps/lasting_memory.h).
//
// Who is who.  A node's token, a random number in Node::endpoint_name, tells which process
// a connection belongs to, also before it has an id.
#ifndef PS_RDMA_VAN_H_
#define PS_RDMA_VAN_H_

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "./connector.h"
#include "./endpoint.h"
#include "ps/internal/van.h"

namespace ps {

class RdmaVan : public Van, public rdma::EndpointOwner, public rdma::ConnectorOwner {
 public:
  RdmaVan() = default;
  ~RdmaVan() override;

  std::string GetType() const override { return "ibverbs"; }
  void SetNode(const Node& node) override;

  // Breaks an endpoint to `node_id`, as a fault of the network would.  For tests.
  bool BreakEndpoint(int node_id, rdma::Plane plane, int index);

 protected:
  void Start(int customer_id, bool standalone) override;
  void Stop() override;

  // Listens on `node`'s host, or the address that the settings choose.  Returns the port.
  // Throws dmlc::Error naming the address and the reason.
  int Bind(const Node& node, int max_retry) override;
  void Connect(const Node& node) override;

  // Never blocks.  Returns the message's size in bytes, or -1 after Stop.
  int SendMsg(Message& msg) override;
  int RecvMsg(Message* msg) override;

 private:
  struct Peer {
    int id = Node::kEmpty;
    std::shared_ptr<rdma::Endpoint> control;
    std::vector<std::shared_ptr<rdma::Endpoint>> data;
  };
  using PeerPtr = std::shared_ptr<Peer>;

  // What the receiving thread has to do: hand on a message, or hear of a loss.
  struct Event {
    Message msg;
    int bytes = 0;
    PeerPtr lost;  // null: a message
    int peer = Node::kEmpty;
    rdma::Plane plane = rdma::Plane::kControl;
    std::string reason;
    bool orderly = false;
    bool closed = false;
  };

  int32_t NodeId() override { return my_id_; }
  std::shared_ptr<rdma::Endpoint> OnRequest(const rdma::ConnectRequest& request,
                                            const std::string& address,
                                            std::string* refusal) override;
  void OnMessage(rdma::Endpoint* endpoint, rdma::Received received) override;
  void OnClosed(rdma::Endpoint* endpoint, const rdma::Ending& ending) override;

  std::shared_ptr<rdma::Endpoint> NewEndpoint(rdma::Plane plane, int index, int peer_id,
                                              bool active);
  std::shared_ptr<rdma::Endpoint>* SlotOf(Peer* peer, rdma::Plane plane, int index);
  // Null when there is none.
  std::shared_ptr<rdma::Endpoint> Choose(int node_id, rdma::Plane plane);
  std::vector<std::shared_ptr<rdma::Endpoint>> AllEndpoints();
  void NamePeer(uint64_t token, int node_id);
  int Transmit(const Message& msg);
  void Put(rdma::Plane plane, Event event);
  void HandleLoss(const Event& event);
  void FlushEndpoints();

  rdma::Settings settings_;
  uint64_t token_ = 0;
  std::atomic<int> my_id_{Node::kEmpty};
  std::unique_ptr<rdma::Connector> connector_;

  std::mutex peers_mu_;
  // Guarded by peers_mu_:
  std::unordered_map<uint64_t, PeerPtr> peers_by_token_;
  std::unordered_map<int, PeerPtr> peers_;  // by node id
  bool stopping_ = false;

  std::mutex inbox_mu_;
  std::condition_variable inbox_cond_;
  // Guarded by inbox_mu_:
  std::deque<Event> inbox_[2];  // by plane
  bool stopped_ = true;
  bool stop_requested_ = false;
  int senders_ = 0;  // in SendMsg
};

}  // namespace ps
#endif  // PS_RDMA_VAN_H_
