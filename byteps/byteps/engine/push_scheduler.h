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

// Decides which partition is pushed next, and when.
//
// Each server has a queue of partitions, ordered by priority, then by arrival. It also has a
// window: the number of bytes that may be in flight to the server. The first partition whose server
// has room goes next, so a slow server does not block partitions of other servers. A partition
// leaves the window when the transport knows that it has arrived (over RDMA: that it was written).
// It does not wait for the server's answer, which comes only after all workers have pushed: workers
// with full windows would then wait for each other for ever.
//
// The window is BYTEPS_SERVER_WINDOW_BYTES. If that is 0, the window is the larger of
// - two partitions per NIC of this worker. Two keep a link busy while a completion is in flight,
//   and a partition uses one link;
// - the server's share of what all servers take in 5 ms, 16 MiB at most. This matters for small
//   partitions: a busy server takes about 600 us to acknowledge, or longer if it waits for a core.
//   (16 MiB cover 600 us at 200 Gbit/s.) The share is computed from 16 MiB until the rate is known.
//   Over RDMA it always is: a NIC divides the link equally among queue pairs, and each partition
//   takes a round trip before it is written, so two partitions cannot keep a slow link busy.
//
// Larger windows delay urgent partitions. They also let ranks that share a link drift apart: a rank
// with more bytes in the link's queue gets more of the link. If that is the first rank on one host
// and the second on another, the sums of both wait.
//
// Equal windows do not prevent the drift for long. So a worker that is ahead of others sends less.
// If more than half a window of its values wait on a server for the values of other workers, its
// window shrinks to a quarter, and the other ranks of its host get more of the link.
//
// If nothing is in flight to a server, a partition of any size has room. Thread-safe.
class PushScheduler {
 public:
  // `window`: bytes per server; 0: computed as above.
  PushScheduler(int num_servers, uint64_t window);

  // Makes windows independent of the measured rate.
  void IgnoreRate();
  // Sets the number of NICs over which partitions are spread. Call before the first Add.
  void SetNics(int nics);

  // Queues tasks of one priority, in this order.
  void Add(int priority, std::vector<Task> tasks);
  // Queues a task, unless its server has room now. In that case returns true: the task counts in
  // the window, and the caller must send the task.
  bool AddOrTake(int priority, Task task);
  // Puts a taken task back, once it is ready for its next stage.
  void Resume(Task task);

  // Blocks until there is a task, and returns true. Returns false after Close.
  bool Take(Task* task);

  // Records that `bytes` taken for `server` have arrived. From now on they wait for other workers'
  // values.
  void Deliver(int server, uint64_t bytes);
  // Records that `server` has answered pushes of `bytes`. May be called before their Deliver.
  void Answer(int server, uint64_t bytes);
  // Removes `bytes` taken for `server` from all counts, because they will never arrive, or because
  // their answer no longer matters.
  void Return(int server, uint64_t bytes);

  // Empties the queues, and returns their tasks. Tasks that were taken are not affected.
  std::vector<Task> Clear();
  void Close();

  // Returns the servers for which partitions of this operation are queued.
  std::set<int> ServersOf(const Operation* operation);
  size_t queued();
  // Number of partitions that were taken and have not left their window.
  size_t under_way();

 private:
  // Orders tasks by priority, then by arrival.
  struct Order {
    int priority;
    uint64_t sequence;
    bool operator<(const Order& o) const {
      return priority != o.priority ? priority > o.priority : sequence < o.sequence;
    }
  };
  // Tasks of equal priority are not ordered.
  struct HigherFirst {
    bool operator()(int a, int b) const { return a > b; }
  };

  struct Server {
    std::map<Order, Task> queue;
    uint64_t under_way = 0;       // bytes in flight
    int64_t waiting = 0;          // bytes delivered and not answered
    std::optional<Order> listed;  // order of the server's first task, if that task is in going_
  };

  // Returns the window of a server. `bytes`: size of partitions; `all`: size of all windows
  // together.
  uint64_t WindowFor(uint64_t bytes, uint64_t all) const PS_REQUIRES(mu_);
  // Returns the sum of all windows, unless two partitions per NIC need more.
  uint64_t WindowOfAll() const PS_REQUIRES(mu_);
  bool HasRoom(const Server& server, uint64_t bytes) const PS_REQUIRES(mu_);
  // Lists the server in going_ if and only if its first task may go.
  void Update(int number) PS_REQUIRES(mu_);
  Task TakeFirst() PS_REQUIRES(mu_);
  void Count(const Task& task) PS_REQUIRES(mu_);
  // Returns whether to wake a thread for this server's first task. A little room in a large window
  // does not wake a thread for each partition: the next partition that leaves the window asks
  // again.
  bool IsWorthWaking(const Server& server) const PS_REQUIRES(mu_);
  // Removes bytes from the window. Returns whether to wake a thread for the server's next task.
  bool Leave(int server, uint64_t bytes) PS_REQUIRES(mu_);

  const uint64_t window_;

  ps::Mutex mu_;
  ps::CondVar cond_;  // notified when a task may be available
  std::vector<Server> servers_ PS_GUARDED_BY(mu_);
  std::set<std::pair<Order, int>> going_ PS_GUARDED_BY(mu_);  // first tasks of servers with room
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
