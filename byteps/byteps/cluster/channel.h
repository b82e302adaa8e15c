// Channel: the connection of a worker or server to the other nodes of its job.
//
// Worker and server know neither transport nor membership: they get a Channel, and implement
// ChannelUser. Session is the channel of real jobs; tests have others.
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

// Returns the node id of a rank. Node ids address messages in ps-lite (session.cc).

int WorkerId(int rank);
int ServerId(int rank);

// Returns the rank of a node id that WorkerId or ServerId has returned.
int RankOf(int node_id);
bool IsWorker(int node_id);

// Head of a message: everything but body and values. Messages are requests of workers, answers of
// servers (base/protocol.h), and messages between servers.
struct MessageHead {
  int op = 0;  // an Op
  bool is_request = true;
  bool failed = false;  // whether the request failed; the body of the answer then says why
  // Whether both ends are servers (BYTEPS_BACKUP_STATE). Each of them sends requests and answers.
  bool between_servers = false;
  // Rank of the other end: a server's rank on workers and between servers, otherwise a worker's.
  int peer = -1;
  uint64_t key = 0;
  uint64_t number = 0;  // the worker's number of the request, also in the answer
};

struct Message : MessageHead {
  std::string body;
  SharedBytes values;
  // Number of bytes of values that the peer has sent. It is more than `values` has if the values
  // were dropped, because ChannelUser::PlaceFor refused them or memory was short. kInPieces if
  // there were several values, which no valid request or answer has.
  uint64_t sent_bytes = 0;
  static constexpr uint64_t kInPieces = UINT64_MAX;
  // Buffer for the values of the answer to a request, and its size in bytes. Null if the buffer is
  // not known yet. The transport may tell the server the buffer, so that the server need not ask
  // for it. The buffer must stay valid like one from ChannelUser::PlaceFor.
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

// Makes an answer. A non-empty `error` means that the request failed.
inline Message MakeAnswer(int op, int worker, uint64_t key, uint64_t number, std::string error) {
  Message message = MakeRequest(op, worker, key, number, std::move(error));
  message.is_request = false;
  message.failed = !message.body.empty();
  return message;
}

// Callbacks of a channel. The channel's threads call them concurrently. No callback may block.
class ChannelUser {
 public:
  virtual ~ChannelUser() = default;

  // Handles a message that has arrived. May move from `*message`. Messages of a
  // node may overtake each other.
  virtual void OnMessage(Message* message) = 0;

  // Returns the buffer for the `bytes` bytes of values that follow `head`. OnMessage then gets the
  // message with these values. Null: use memory of the channel. ps::Nowhere(): drop the values
  // (net/link/registration_cache.h), which RDMA channels may ignore. The buffer must stay valid
  // until OnMessage was called for the message, or until Abandon or Stop has returned.
  virtual char* PlaceFor(const MessageHead& /*head*/, size_t /*bytes*/) { return nullptr; }

  // Handles an event of the job.
  virtual void OnEvent(const ps::MembershipEvent& event) = 0;

  // Returns this process's report for the scheduler, which is a packed StatusRecord. Called at each
  // heartbeat.
  virtual std::string Report() { return ""; }
};

class Channel {
 public:
  virtual ~Channel() = default;

  // Joins the job. Blocks until every node has joined; on the scheduler, only until it listens.
  // `user` must outlive the channel. On failure, throws Error and leaves nothing started.
  virtual void Start(ChannelUser* user) = 0;

  // Leaves the job, as a worker that will send nothing more. `farewell` gives the reason; see
  // ps::NodeMembership::Leave.
  virtual void Leave(const ps::Farewell& farewell) = 0;

  // Closes all connections. After the return the user is not called any more.
  virtual void Stop() = 0;

  // Sends a message. Never blocks. The channel may read the message's values until it destroys its
  // copy of them. A message to a lost node is dropped; OnEvent reports the loss.
  virtual void Send(const Message& message) = 0;

  // Receives messages that have arrived, in the calling thread, unless a thread of the channel is
  // receiving. A thread that waits for an answer calls this, because waking another thread takes
  // longer. Never blocks.
  virtual void ReceiveReady() {}

  // Stops receiving into these bytes (see PlaceFor). Values in flight are received elsewhere. After
  // the return, nothing writes to the bytes.
  virtual void Abandon(const void* begin, size_t bytes) = 0;

  // Returns whether memory is registered with a device before it is sent: see
  // net/link/registration_cache.h.
  virtual bool RegistersMemory() const = 0;

  // On a worker, after Start: rate of the slowest worker's NIC, in Gbit/s each way; 0 if the rate
  // of any worker's NIC is unknown. Equal on all workers.
  virtual double link_gbps() const = 0;

  // On a worker, after Start: number of NICs that the worker uses, at least 1.
  virtual int num_nics() const { return 1; }

  // On a worker, after Start: whether this worker's replica joins a running job
  // (docs/design/replicas.md). Such a worker calls SayReady when it can take part. The other
  // workers then call AskToAdmit with the replica's ready epoch, when all of them are between two
  // steps.
  virtual bool is_late() const { return false; }
  virtual void SayReady() {}
  virtual void AskToAdmit(int /*replica*/, int /*ready_epoch*/) {}

  // Called on a server. SayAwaited tells the worker of `rank` that other workers wait for its push
  // of round `round` of the tensor `name`. SayLate asks the scheduler to remove this worker's
  // replica. `why` completes a sentence that begins with "the worker", as in "had not pushed ...".
  virtual void SayAwaited(int /*rank*/, const std::string& /*name*/, uint32_t /*round*/) {}
  virtual void SayLate(int /*rank*/, const std::string& /*why*/) {}

  // Seconds that a worker waits after an operation's limit (BYTEPS_OP_TIMEOUT_S) for an explanation
  // of the missing answer. Servers and scheduler know which worker is missing, or why a connection
  // is gone.
  virtual double seconds_to_explain() const { return 5; }

  // Returns whether no scheduler can remove a node now: the scheduler has died and may return, or
  // it has just returned and waits for the other nodes.
  virtual bool lacks_scheduler() const { return false; }

  // This node's rank within its role, after Start.
  virtual int rank() const = 0;

  // Returns text such as "server 0 (10.0.0.2:40123)".
  virtual std::string NameOfServer(int rank) = 0;
  virtual std::string NameOfWorker(int rank) = 0;
  // Returns text such as "10.0.0.2"; "" if the host is unknown.
  virtual std::string HostOfServer(int /*rank*/) { return ""; }
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_CLUSTER_CHANNEL_H_
