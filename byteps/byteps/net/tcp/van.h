// A van over TCP.
//
// Connections.  The scheduler and each server listen, at one port each.  Everybody connects to
// the scheduler, and a worker to each server, by BYTEPS_TCP_CONNECTIONS connections, or as many as
// the link wants; who was connected to answers along the same connections.  Nobody else is
// connected, and a worker listens nowhere.  A message takes the connection on which the fewest
// bytes wait, of those that are not broken.
//
// Threads.  BYTEPS_IO_THREADS pollers read, and write what senders could not.  Data messages
// are handed to the data handler by the poller that read them; control messages, and the news
// of lost peers, by Van's receiving thread.
//
// Who is who.  Who connects proves that it has the job's secret (greeter.h), and so does who is
// connected to.  The scheduler makes a number that names the job and its incarnation, and tells it
// to who connects; servers take connections of that incarnation alone.  A node's token, a random
// number in Node::endpoint_name, tells which process a connection belongs to.  What a message says
// of its sender is not looked at: the connection knows.
#ifndef BYTEPS_NET_TCP_VAN_H_
#define BYTEPS_NET_TCP_VAN_H_

#include <atomic>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/net/link/node_token.h"
#include "byteps/net/link/van_inbox.h"
#include "byteps/net/tcp/connection.h"
#include "byteps/net/tcp/greeter.h"
#include "byteps/net/tcp/listener.h"
#include "byteps/net/tcp/memory_pool.h"
#include "byteps/net/tcp/pending_peers.h"
#include "byteps/net/tcp/poller.h"
#include "ps/internal/van.h"

namespace ps {

namespace tcp {

// Connections of a worker that exchanges `gbps`, Gbit/s each way, with all servers together, with
// each of them.  No more than it has threads, each of which serves one of them.
int ConnectionsFor(double gbps, int servers, int threads);

// Of these, which may be null, the one for the next message: that on which the fewest bytes wait,
// and one that is broken only where all are.  Null: none is there.
ConnectionPtr BestOf(const std::vector<ConnectionPtr>& connections);

}  // namespace tcp

class TcpVan : public Van, public tcp::ConnectionOwner {
 public:
  TcpVan() = default;
  ~TcpVan() override;

  std::string GetType() const override { return "tcp"; }
  void SetNode(const Node& node) override;
  void Abandon(const void* begin, size_t bytes) override;
  bool AllArrived() override;
  void Disconnect(int node_id) override;
  void SetIncarnation(int incarnation) override { job_ = WithIncarnation(job_, incarnation); }

 protected:
  void Start(int customer_id, bool standalone) override;
  void Stop() override;

  // Listens, but on a worker.  Returns the port, 0 on a worker.  Throws dmlc::Error naming the
  // address and the reason.
  int Bind(const Node& node, int max_retry) override;
  void Connect(const Node& node) override;

  // Never blocks.  Returns the message's size in bytes, or -1 after Stop.
  int SendMsg(Message& msg) override;
  int RecvMsg(Message* msg) override;

 private:
  // SendMsg, while Stop waits for it.
  int Dispatch(const Message& msg);

  // A process at the other end of connections.
  struct Peer {
    int id = Node::kEmpty;
    std::vector<tcp::ConnectionPtr> connections;  // by index; null: not there
  };
  using PeerPtr = std::shared_ptr<Peer>;

  // What the receiving thread has to do: hand on a message, or hear of a loss.
  struct Event {
    Message msg;
    size_t bytes = 0;
    tcp::ConnectionPtr from;  // null: a message to itself, or a loss
    bool is_loss = false;
    int lost_id = Node::kEmpty;
    PeerPtr lost;  // null: one that had gone before it was named
    tcp::Ending ending;
  };

  // In poller threads.
  std::string OnChallenge(const tcp::ConnectionPtr& connection,
                          const tcp::Challenge& challenge) override;
  char* PlaceFor(const Meta& meta, size_t bytes) override;
  void OnMessage(tcp::Connection* connection, Message* msg, size_t bytes) override;
  tcp::Poller::Clock::duration Patience(tcp::Connection* connection, LinkFault fault) override;
  void OnResumed(tcp::Connection* connection, tcp::Poller::Clock::duration after,
                 size_t again) override;
  void OnClosed(const tcp::ConnectionPtr& connection, const tcp::Ending& ending) override;
  void OnAccepted(tcp::Fd fd, const tcp::Address& address);
  std::string Admit(const tcp::StreamPtr& socket, const tcp::Hello& hello);
  // Empty: it may connect.
  std::string ReasonToRefuse(const tcp::Hello& hello) const;

  // How many are made with it.
  int ConnectionsWith(const Node& node);
  // The next poller's, in turn.
  tcp::ConnectionPtr NewConnection();
  static bool IsEmpty(const Peer& peer);
  void NamePeer(const Node& node);
  // Null when there is none.
  tcp::ConnectionPtr Choose(int node_id);
  std::vector<tcp::ConnectionPtr> AllConnections();
  void HandleLoss(const Event& event);
  void FlushConnections();

  tcp::ConnectionSettings settings_;
  tcp::Greeter::Host host_;
  double start_timeout_s_ = 0;
  int connections_per_server_ = 0;  // 0: as many as the link wants
  uint64_t token_ = 0;
  std::atomic<uint64_t> job_{0};
  std::atomic<int> my_id_{Node::kEmpty};
  std::shared_ptr<tcp::MemoryPool> pool_;
  std::vector<std::shared_ptr<tcp::Poller>> pollers_;
  std::vector<std::shared_ptr<tcp::Listener>> listeners_;
  std::atomic<size_t> next_poller_{0};
  // Those that have not proved anything yet.  Of the first poller's thread.
  std::unique_ptr<tcp::PendingPeers> pending_;

  Mutex peers_mu_;
  std::unordered_map<uint64_t, PeerPtr> peers_by_token_ PS_GUARDED_BY(peers_mu_);
  std::unordered_map<int, PeerPtr> peers_ PS_GUARDED_BY(peers_mu_);  // by node id
  bool stopping_ PS_GUARDED_BY(peers_mu_) = false;

  VanInbox<Event> inbox_;
};

}  // namespace ps
#endif  // BYTEPS_NET_TCP_VAN_H_
