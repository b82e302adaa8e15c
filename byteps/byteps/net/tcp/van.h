// A van over TCP, and its threads.
#ifndef BYTEPS_NET_TCP_VAN_H_
#define BYTEPS_NET_TCP_VAN_H_

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "byteps/net/link/link_van.h"
#include "byteps/net/membership/van_settings.h"
#include "byteps/net/tcp/connection.h"
#include "byteps/net/tcp/fd.h"
#include "byteps/net/tcp/greeter.h"
#include "byteps/net/tcp/listener.h"
#include "byteps/net/tcp/pending_peers.h"
#include "byteps/net/tcp/poller.h"
#include "byteps/net/tcp/pollers.h"
#include "byteps/net/tcp/settings.h"
#include "byteps/net/tcp/stream.h"

namespace ps {
namespace tcp {}  // namespace tcp

// A van over TCP.
//
// Connections.  The scheduler and each server listen, at one port each, on all NICs that they use.
// Everybody connects to the scheduler, and a worker to each server, by BYTEPS_CONNECTIONS
// connections, or as many as the link wants and the NICs of both; who was connected to answers
// along the same connections.  So do servers that keep each other's state (net/link/admission.h); a
// message to one that has yet to connect waits.  Nobody else is connected, and a worker listens
// nowhere.  A message takes the connection on which the fewest bytes wait, of those that are not
// broken.
//
// Threads.  BYTEPS_IO_THREADS pollers read, and write what senders could not, each next to the NICs
// that it serves (Pollers); a thread that waits for a small sum reads as well.  Data messages are
// handed to the data handler by the poller that read them; control messages, and the news of lost
// peers, by Van's receiving thread.
//
// Who is who.  Who connects proves that it has the job's secret (greeter.h), and so does who is
// connected to.  The scheduler makes a number that names the job and its generation, and tells it
// to who connects; servers take connections of that generation alone.  A node's token, a random
// number in Node::endpoint_name, tells which process a connection belongs to.  What a message says
// of its sender is not looked at: the connection knows.

namespace tcp {

// Connections of a worker that exchanges `gbps`, Gbit/s each way, with all servers together, with
// each of them.  No more than it has threads, each of which serves one of them.
int ConnectionsFor(double gbps, int servers, int threads);

}  // namespace tcp

class TcpVan : public LinkVan<TcpVan, tcp::Connection>, public tcp::ConnectionOwner {
 public:
  TcpVan(const VanSettings& settings, const tcp::Settings& tcp);
  ~TcpVan() override;

  std::string GetType() const override { return "tcp"; }
  void Abandon(const void* begin, size_t bytes) override;
  void ReceiveReady() override;
  void Disconnect(int node_id) override;
  std::string DialError(int node_id) override;
  bool IsBroken(int node_id) override;

 protected:
  void Start(int customer_id, bool standalone) override;
  void Stop() override;

  // Listens, but on a worker.  Returns the port, 0 on a worker.  Throws Error naming the
  // address and the reason.
  int Bind(const Node& node, int max_retry) override;

 private:
  friend class LinkVan<TcpVan, tcp::Connection>;

  // By LinkVan.
  void Transmit(const Message& msg);
  void OnLinkLost(int id, const LinkEnding& ending);
  void Dial(const Node& node);
  tcp::ConnectionPtr LinkTo(const Node& node);
  void NamePeer(const Node& node);
  void LearnPairs(const Node& scheduler);

  // In poller threads.
  std::string OnChallenge(const tcp::ConnectionPtr& connection,
                          const tcp::Challenge& challenge) override;
  char* PlaceFor(const Meta& meta, size_t bytes) override;
  void OnMessage(tcp::Connection* connection, Message* msg, size_t bytes) override;
  tcp::Poller::Clock::duration Patience(tcp::Connection* connection, LinkFault fault) override;
  void OnResumed(tcp::Connection* connection, tcp::Poller::Clock::duration after,
                 size_t again) override;
  void OnClosed(const tcp::ConnectionPtr& connection, const LinkEnding& ending) override;
  void OnAccepted(tcp::Fd fd, const Address& address);
  std::string Admit(const tcp::StreamPtr& socket, const tcp::Hello& hello);
  // How many are made with it.
  int ConnectionsWith(const Node& node);
  // Between which NICs each of them goes.
  std::vector<std::vector<NicPair>> PairsWith(const Node& node, int count);
  // At each of these addresses that nobody listens at yet, and at the first one at least.
  void ListenAt(const std::vector<Address>& addresses, int* port);
  // Over the NIC with this address; empty: it is not known.
  tcp::ConnectionPtr NewConnection(const std::string& address);
  // Pollers run next to the NICs of this node.
  void PlacePollers(const Node& self);
  bool MeansScheduler(const tcp::Hello& hello) const;
  // Whether a peer that connects, and says this, has to come again: the scheduler's word on it is
  // in flight.
  bool MustWait(const tcp::Hello& hello);

  const tcp::Settings tcp_;
  tcp::ConnectionSettings settings_;
  tcp::Greeter::Host host_;
  std::unique_ptr<tcp::Pollers> pollers_;
  std::vector<std::shared_ptr<tcp::Listener>> listeners_;
  // Those that have not proved anything yet.  Of the first poller's thread.
  std::unique_ptr<tcp::PendingPeers> pending_;
};

}  // namespace ps

#endif  // BYTEPS_NET_TCP_VAN_H_
