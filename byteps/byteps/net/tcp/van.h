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

// Van over TCP.
//
// Connections: the scheduler and each server listen at one port on all their NICs. All nodes
// connect to the scheduler. Workers connect to each server with BYTEPS_CONNECTIONS connections, by
// default as many as the link and the NICs of both nodes need. Answers use the same connections.
// Neighboring servers also connect if they keep each other's state (net/link/admission.h); a
// message to a neighbor that has not connected yet waits. Workers do not listen. A message takes
// the working connection with the fewest queued bytes.
//
// Threads: BYTEPS_IO_THREADS pollers read, and write what senders could not write at once. A poller
// runs on the NUMA node of the NICs that it serves (Pollers). A thread that waits for a small
// all-reduce also reads. The poller that reads a data message calls the data handler. Van's
// receiving thread handles control messages and lost peers.
//
// Identity: both ends of a connection prove that they have the job's secret (greeter.h). The
// scheduler makes a number for the job and its generation, and tells it to nodes that connect.
// Servers accept only connections of that generation. A node's token, a random number in
// Node::endpoint_name, tells to which process a connection belongs. The sender of a message is
// taken from its connection, not from the message.

namespace tcp {

// Returns the number of connections to each server, for a worker that exchanges `gbps` (Gbit/s each
// way) with all servers together. The number is at most `threads`, because one thread serves a
// connection.
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

  // Listens, and returns the port. A worker does not listen, and returns 0. Throws Error with
  // address and reason.
  int Bind(const Node& node, int max_retry) override;

 private:
  friend class LinkVan<TcpVan, tcp::Connection>;

  // Called by LinkVan.
  void Transmit(const Message& msg);
  void OnLinkLost(int id, const LinkEnding& ending);
  void Dial(const Node& node);
  tcp::ConnectionPtr LinkTo(const Node& node);
  void NamePeer(const Node& node);
  void LearnPairs(const Node& scheduler);

  // Called by poller threads.
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
  // Returns the number of connections to make to this node.
  int ConnectionsWith(const Node& node);
  // Returns the candidate pairs of NICs of each connection.
  std::vector<std::vector<NicPair>> PairsWith(const Node& node, int count);
  // Listens at each address at which this node does not listen yet. If the first address fails,
  // throws Error. Other addresses that fail are left out.
  void ListenAt(const std::vector<Address>& addresses, int* port);
  // Makes a connection over the NIC with this address. "" if the NIC is unknown.
  tcp::ConnectionPtr NewConnection(const std::string& address);
  // Moves pollers to the NUMA nodes of this node's NICs.
  void PlacePollers(const Node& self);
  bool MeansScheduler(const tcp::Hello& hello) const;
  // Returns whether a connecting peer must retry, because the scheduler's announcement of it is
  // still in flight.
  bool MustWait(const tcp::Hello& hello);

  const tcp::Settings tcp_;
  tcp::ConnectionSettings settings_;
  tcp::Greeter::Host host_;
  std::unique_ptr<tcp::Pollers> pollers_;
  std::vector<std::shared_ptr<tcp::Listener>> listeners_;
  // Unauthenticated peers. Only the first poller's thread uses them.
  std::unique_ptr<tcp::PendingPeers> pending_;
};

}  // namespace ps

#endif  // BYTEPS_NET_TCP_VAN_H_
