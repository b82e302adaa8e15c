// A van over TCP (ZeroMQ) that sleeps when it has nothing to do.
//
// Sockets.  Each node binds one ROUTER.  It connects one DEALER to the scheduler
// and, as a worker, one to every server; the scheduler connects one back to each
// node.  A peer to which no DEALER leads is answered through the ROUTER, along
// the connection that it opened.  Heartbeats and gradients thus never share a
// connection: the first go to the scheduler, the second to the servers.
//
// Threads.  ZeroMQ's sockets belong to one thread at a time.  Here they belong
// to the thread that calls RecvMsg (Van's receiving thread): it polls them all
// and an eventfd.  SendMsg may be called by any thread; it queues the message and
// wakes that thread.  ZeroMQ's own I/O threads move the bytes.
//
// Memory.  Message data is sent from where it lies (the SArray's owner is kept
// until ZeroMQ is done with it) and handed out where it was received.
#ifndef PS_TCP_VAN_H_
#define PS_TCP_VAN_H_

#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "ps/internal/van.h"

namespace ps {

class TcpVan : public Van {
 public:
  TcpVan() = default;
  ~TcpVan() override;

  std::string GetType() const override { return "tcp"; }

 protected:
  void Start(int customer_id, bool standalone) override;
  void Stop() override;

  // Listens on `node`'s host, the scheduler on its port (0: the kernel chooses),
  // every other node on one that the kernel chooses.  Returns the port.  Throws dmlc::Error naming
  // the address and the reason.
  int Bind(const Node& node, int max_retry) override;

  // Called before the receiving thread starts, or in it.
  void Connect(const Node& node) override;

  // Queues `msg`; never blocks.  Returns its size in bytes, or -1 after Stop.
  int SendMsg(Message& msg) override;

  // Blocks until a message is there; returns its size in bytes.
  int RecvMsg(Message* msg) override;

 private:
  struct Link {
    void* socket = nullptr;   // DEALER
    void* monitor = nullptr;  // PAIR that tells of closed connections
  };

  void* NewSocket(int type);
  void CloseLink(Link* link);
  void FlushOutbox();
  void Transmit(Message* msg);
  // False when the socket did not take the frame; the reason is logged.
  bool SendFrame(void* socket, const SArray<char>& frame, bool more, int peer);
  void WaitForTraffic();
  // Reads the messages waiting in `socket`, at most kBurst of them.
  void Drain(void* socket, bool is_router);
  bool ReceiveFrame(void* socket, SArray<char>* frame, bool* more);
  void ParseMessage(std::vector<SArray<char>>* frames, bool is_router);
  void ReadMonitor(int node_id, void* monitor);

  void* context_ = nullptr;
  void* router_ = nullptr;
  int wake_fd_ = -1;
  std::map<int, Link> links_;                     // node id -> DEALER
  std::unordered_map<int, SArray<char>> routes_;  // node id -> ROUTER identity
  uint64_t monitors_made_ = 0;
  bool standalone_ = false;

  std::mutex outbox_mu_;
  std::vector<Message> outbox_;  // guarded by outbox_mu_
  bool stopped_ = true;          // guarded by outbox_mu_
  std::atomic<bool> stop_requested_{false};

  std::deque<std::pair<Message, int>> inbox_;  // received, with sizes in bytes
};

}  // namespace ps
#endif  // PS_TCP_VAN_H_
