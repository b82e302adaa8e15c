#ifndef BYTEPS_ENGINE_PUSH_SCHEDULER_H_
#define BYTEPS_ENGINE_PUSH_SCHEDULER_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/engine/delivery_rate.h"
#include "byteps/engine/operation.h"

namespace byteps {
namespace core {

// Which partition goes next, and when.
//
// Partitions wait in one queue for each server, by priority and then in the order in which they
// came.  A server may have so many bytes in flight to it, its window; the first of those
// partitions whose servers have room goes next, so that a slow server holds up nobody else's
// partitions.  A partition counts until the transport knows that it is there, over RDMA until it is
// written, not until its answer comes:
// answers wait for other workers, and workers that hold their windows for sums that wait for each
// other would never go on.
//
// The window of a server is BYTEPS_SERVER_WINDOW_BYTES.  If that is 0, it is twice the partition
// that wants to go, for each NIC that this worker uses, or a server's share of what all servers
// take in 5 ms, whichever is more.  The
// share is 16 MiB over all servers at most, and until the rate is known.  Over RDMA it is always
// that: a NIC gives each queue pair an equal part of the link, and a partition asks before it is
// written, so that two of them let a slow link run dry.
//
// Two partitions keep a link busy while a completion is in flight, and each goes over one link.
// The 5 ms are for small
// partitions: a busy server takes some 600 us to say what it has, longer if it waits for a
// core.  16 MiB cover 600 us of 200 Gbit/s.
//
// A larger window makes what is urgent wait.  It also lets ranks that share a link run apart: the
// rank that has more in the link's queue gets more of the link.  If that is the first rank on one
// host and the second on another, the sums of both wait.
//
// Equal windows do not make them equal for long.  So a worker that is ahead of the others steps
// back: while more than half a window of its values wait on a server for those of other workers,
// the window is a quarter, and the others of its host get more of the link.
//
// An idle server takes a partition of any size.
//
// Any thread may call anything.
class PushScheduler {
 public:
  // `window`: bytes for each server; 0: the rule above.
  PushScheduler(int num_servers, uint64_t window);

  // From now on no window follows the rate at which servers take what is pushed.
  void IgnoreRate();
  // Partitions are spread over so many NICs.  To be called before the first is added.
  void SetNics(int nics);

  // Queues tasks of one priority, in this order.
  void Add(int priority, std::vector<Task> tasks);
  // Queues one task, unless it could go at once: then it has its place in the server's window,
  // and the caller has to send it (true).
  bool AddOrTake(int priority, Task task);
  // Puts back a task that was taken and is now ready for its next stage.
  void Resume(Task task);

  // Blocks until there is a task to go on with (true), or Close was called (false).
  bool Take(Task* task);

  // So many bytes that were taken for this server are there, and wait for other workers' values.
  void Deliver(int server, uint64_t bytes);
  // The server has answered about so many bytes, which may be known before their delivery is.
  void Answer(int server, uint64_t bytes);
  // What was taken for this server will never leave, or is nothing to wait for.
  void Return(int server, uint64_t bytes);

  // Empties the queues; what was taken stays taken.
  std::vector<Task> Clear();
  void Close();

  // For which servers partitions of this operation are queued.
  std::set<int> ServersOf(const Operation* operation);
  size_t queued();
  // Partitions that were taken and have not left.
  size_t under_way();

 private:
  // By priority, then first come.
  struct Order {
    int priority;
    uint64_t sequence;
    bool operator<(const Order& o) const {
      return priority != o.priority ? priority > o.priority : sequence < o.sequence;
    }
  };
  // Those of one priority come in any order.
  struct HigherFirst {
    bool operator()(int a, int b) const { return a > b; }
  };

  struct Server {
    std::map<Order, Task> queue;
    uint64_t under_way = 0;       // bytes
    int64_t waiting = 0;          // bytes that were delivered and not answered
    std::optional<Order> listed;  // its first task is in going_
  };

  // Of each server, where partitions have so many bytes and all windows together `all`.
  uint64_t WindowFor(uint64_t bytes, uint64_t all) const PS_REQUIRES(mu_);
  // What all windows together hold, unless that is too little for a few partitions each.
  uint64_t WindowOfAll() const PS_REQUIRES(mu_);
  bool HasRoom(const Server& server, uint64_t bytes) const PS_REQUIRES(mu_);
  // Lists the server in going_ when its first task may go, and not otherwise.
  void Update(int number) PS_REQUIRES(mu_);
  Task TakeFirst() PS_REQUIRES(mu_);
  void Count(const Task& task) PS_REQUIRES(mu_);
  // Whether to wake a thread for a server whose first task may go: not for each partition of a
  // large window.  It is asked again when another one leaves.
  bool IsWorthWaking(const Server& server) const PS_REQUIRES(mu_);
  // What was taken is no longer in flight.  Whether a thread has to be woken for the server's next.
  bool Leave(int server, uint64_t bytes) PS_REQUIRES(mu_);

  const uint64_t window_;

  ps::Mutex mu_;
  ps::CondVar cond_;  // there may be something to take
  std::vector<Server> servers_ PS_GUARDED_BY(mu_);
  std::set<std::pair<Order, int>> going_
      PS_GUARDED_BY(mu_);  // the first tasks of servers that have room for them
  std::multimap<int, Task, HigherFirst> resumed_ PS_GUARDED_BY(mu_);
  bool closed_ PS_GUARDED_BY(mu_) = false;
  uint64_t nics_ PS_GUARDED_BY(mu_) = 1;
  uint64_t sequence_ PS_GUARDED_BY(mu_) = 0;
  size_t queued_ PS_GUARDED_BY(mu_) = 0;
  size_t under_way_ PS_GUARDED_BY(mu_) = 0;
  DeliveryRate rate_ PS_GUARDED_BY(mu_);
  bool follows_rate_ PS_GUARDED_BY(mu_) = true;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_ENGINE_PUSH_SCHEDULER_H_
