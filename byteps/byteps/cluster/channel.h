// How a worker or a server reaches the other nodes of its job.
//
// Worker and server know nothing of transports and membership: they are handed a Channel, and
// hear through ChannelUser.  A Session is the real one; tests hand in others.
#ifndef BYTEPS_CLUSTER_CHANNEL_H_
#define BYTEPS_CLUSTER_CHANNEL_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "byteps/base/shared_bytes.h"
#include "byteps/net/membership/event.h"

namespace byteps {
namespace core {

// Ids of nodes, by which ps-lite addresses messages (session.cc), and their ranks.

int WorkerId(int rank);
int ServerId(int rank);

// Of an id that one of the two above returned.
int RankOf(int node_id);
bool IsWorker(int node_id);

// What a channel carries: the requests of workers and the answers of servers (base/protocol.h), and
// what servers send each other.

// All of a message but its body and its values.
struct MessageHead {
  int op = 0;  // an Op
  bool is_request = true;
  bool failed = false;  // of an answer: the body says why
  // Both ends are servers (BYTEPS_BACKUP_STATE): requests and answers go either way.
  bool between_servers = false;
  // Rank of the other end: on a worker a server's, on a server a worker's, unless it is a server's.
  int peer = -1;
  uint64_t key = 0;
  uint64_t number = 0;  // by which a worker knows its request, and the answer
};

struct Message : MessageHead {
  std::string body;
  SharedBytes values;
  // Bytes of values that the peer has sent.  More than `values` has, where they were dropped: they
  // had no place (ChannelUser::PlaceFor), or this process no memory for them.  kInPieces where
  // there was more than one piece of them, which no request or answer has.
  uint64_t sent_bytes = 0;
  static constexpr uint64_t kInPieces = UINT64_MAX;
  // Of a request: where the answer's values belong, so many bytes; null: nobody knows yet.  A
  // transport may tell the server, which then need not ask.  The memory must stay as one that
  // ChannelUser::PlaceFor returns.
  char* place = nullptr;
  uint64_t place_bytes = 0;

  void SetValues(SharedBytes bytes) {
    sent_bytes = bytes.size();
    values = std::move(bytes);
  }
};

inline Message MakeRequest(int op, int server, uint64_t key, uint64_t number, std::string body) {
  Message message;
  message.op = op;
  message.peer = server;
  message.key = key;
  message.number = number;
  message.body = std::move(body);
  return message;
}

// An answer with an `error` says that the request failed.
inline Message MakeAnswer(int op, int worker, uint64_t key, uint64_t number, std::string error) {
  Message message = MakeRequest(op, worker, key, number, std::move(error));
  message.is_request = false;
  message.failed = !message.body.empty();
  return message;
}

// Called by the channel's threads, several at a time.  No call may block.
class ChannelUser {
 public:
  virtual ~ChannelUser() = default;

  // A message came.  May move from it.  Messages from one node may overtake each other.
  virtual void OnMessage(Message* message) = 0;

  // Returns the buffer to receive the `bytes` bytes of values into that follow `head`; OnMessage
  // gets the message with them.  Null: the channel receives them into memory of its own.
  // ps::Nowhere(): it drops them (net/link/registration_cache.h), which an RDMA channel need not
  // do.  The buffer must stay until OnMessage was called for the message, or Abandon or Stop has
  // returned.
  virtual char* PlaceFor(const MessageHead& /*head*/, size_t /*bytes*/) { return nullptr; }

  // Something happened to the job.
  virtual void OnEvent(const ps::MembershipEvent& event) = 0;

  // What the scheduler is told of this process with each heartbeat: a packed StatusRecord.
  virtual std::string Report() { return ""; }
};

class Channel {
 public:
  virtual ~Channel() = default;

  // Joins the job; blocks until every node is there (the scheduler returns once it listens).
  // `user` outlives the channel.  Throws Error, and leaves nothing behind, when that fails.
  virtual void Start(ChannelUser* user) = 0;

  // A worker tells that it will send nothing more, and why.  See ps::NodeMembership::Leave.
  virtual void Leave(const ps::Farewell& farewell) = 0;

  // Closes all connections; the user is not called any more when it has returned.
  virtual void Stop() = 0;

  // Never blocks.  The values of the message are read until the channel has let go of its copy of
  // them.  A message to a node that is gone is dropped: OnEvent tells of the loss.
  virtual void Send(const Message& message) = 0;

  // Receives what is there, unless a thread of the channel does so now; calls the user as they do.
  // For who waits for an answer that is due: a thread that sleeps takes a while to wake.  Never
  // blocks.
  virtual void ReceiveReady() {}

  // Values in flight into these bytes (PlaceFor) are received elsewhere: when this has
  // returned, nothing is written there any more.
  virtual void Abandon(const void* begin, size_t bytes) = 0;

  // Whether what is sent is registered with a device first: see net/link/registration_cache.h.
  virtual bool RegistersMemory() const = 0;

  // Of a worker that has joined: Gbit/s each way of the slowest worker's NIC, the same on
  // all workers; 0 where one of them is not known.
  virtual double link_gbps() const = 0;

  // Of a worker that has joined: NICs that it uses, 1 at least.
  virtual int num_nics() const { return 1; }

  // Of a worker that has joined: whether its replica comes to a job that runs
  // (docs/design/replicas.md).  Such a worker says when it can take part; others ask the scheduler
  // to admit this life of a replica, which waits, while all of them are between two steps.
  virtual bool is_late() const { return false; }
  virtual void SayReady() {}
  virtual void AskToAdmit(int /*replica*/, int /*life*/) {}

  // Of a server, about a worker that others wait for in a round of `name`.  `why`: its replica is
  // to be removed, for it "had not pushed ...".
  virtual void SayAwaited(int /*rank*/, const std::string& /*name*/, uint32_t /*round*/) {}
  virtual void SayLate(int /*rank*/, const std::string& /*why*/) {}

  // For so long after its limit (BYTEPS_OP_TIMEOUT_S) servers and scheduler may still tell why an
  // operation has no answer.  They know whom it lacks, or why a connection is gone.
  virtual double seconds_to_explain() const { return 5; }

  // Whether nobody may decide who is removed: the scheduler has died and may return, or has just
  // returned and hears the others.
  virtual bool lacks_scheduler() const { return false; }

  // This node's rank among those of its role, once it has joined.
  virtual int rank() const = 0;

  // "server 0 (10.0.0.2:40123)"
  virtual std::string NameOfServer(int rank) = 0;
  virtual std::string NameOfWorker(int rank) = 0;
  // "10.0.0.2"; empty: not known.
  virtual std::string HostOfServer(int /*rank*/) { return ""; }
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_CLUSTER_CHANNEL_H_
