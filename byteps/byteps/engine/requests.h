// The requests about partitions: which goes next, which are not answered yet, and what the timeline
// is told of them.
#ifndef BYTEPS_ENGINE_REQUESTS_H_
#define BYTEPS_ENGINE_REQUESTS_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/engine/operation.h"
#include "byteps/observe/trace.h"

namespace byteps {
namespace core {

// At what rate servers take what a worker pushes.

// The highest rate of late: what the link and the servers can take.  It falls only while partitions
// wait to be pushed, by a half within some seconds: a worker that has little to push knows as much
// as before.  Times in ns of any clock.  One thread at a time.
class DeliveryRate {
 public:
  // Something is in flight, after nothing was.
  void Begin(int64_t now) {
    begin_ = now;
    bytes_ = 0;
    always_waited_ = true;
  }

  // So many bytes have arrived.  `more_wait`: others could have been in flight.
  void Add(uint64_t bytes, bool more_wait, int64_t now) {
    bytes_ += bytes;
    always_waited_ &= more_wait;
    if (now - begin_ < kSpanNs) return;
    const double rate = static_cast<double>(bytes_) / static_cast<double>(now - begin_);
    const double kept = always_waited_ ? kKept : 1.0;
    if (rate_ || always_waited_) rate_ = std::max(rate, kept * rate_.value_or(0.0));
    Begin(now);
  }

  // What arrives in so many ns; nothing while the rate is unknown.
  std::optional<uint64_t> BytesIn(int64_t ns) const {
    if (!rate_) return std::nullopt;
    return static_cast<uint64_t>(*rate_ * static_cast<double>(ns));
  }

 private:
  // Long compared with the time in which a server tells that something has arrived.
  static constexpr int64_t kSpanNs = 20'000'000;
  static constexpr double kKept = 0.99;

  int64_t begin_ = 0;
  uint64_t bytes_ = 0;
  bool always_waited_ = true;
  std::optional<double> rate_;  // bytes per ns
};

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

// The requests about partitions that no server has answered yet.
struct Request {
  OperationPtr operation;
  uint64_t index = 0;
  int server = 0;
  int64_t sent = 0;   // SteadyNs
  PinnedBlock block;  // into which the answer is being received

  PartitionTimes* times() const {
    return operation->times.empty() ? nullptr : &operation->times[index];
  }
};

// Any thread may call anything.
class Requests {
 public:
  // Returns its number, by which the answer will name it.
  uint64_t Remember(Request request);
  // Takes it out.  False when there is none of this number after Clear; throws Error before that.
  bool Take(uint64_t number, Request* request);
  // As Take, and leaves it in.
  bool Peek(uint64_t number, Request* request);
  // Keeps the memory that the answer is received into.  False when there is no such request.
  bool KeepBlock(uint64_t number, PinnedBlock block);

  // From now on it is known of each server what it has answered.
  void Track() { tracks_ = true; }
  // The first request to this server that it has not answered, or the next one to any.
  uint64_t FirstOpen(int server);
  bool HasOpen(int server);

  // Takes those out that this server has not answered, by number; what it answers to them later is
  // for nobody.
  std::vector<Request> TakeBack(int server);

  std::vector<Request> All();
  size_t size();
  void Clear();

 private:
  ps::Mutex mu_;
  uint64_t last_ PS_GUARDED_BY(mu_) = 0;
  bool cleared_ PS_GUARDED_BY(mu_) = false;
  std::unordered_map<uint64_t, Request> by_number_ PS_GUARDED_BY(mu_);
  std::unordered_set<uint64_t> taken_back_ PS_GUARDED_BY(mu_);
  bool tracks_ = false;
  std::map<int, std::set<uint64_t>> open_ PS_GUARDED_BY(mu_);  // by server, where it is known
};

// What a worker tells the timeline.

// Any thread may call anything.  Nothing happens for operations that are not traced.
class OperationTrace {
 public:
  // Without a tracer nothing is traced.
  OperationTrace(std::unique_ptr<Tracer> tracer, int rank);

  // A track for the slices of one thread.
  int AddTrack(const std::string& name);

  // Of an operation that has its round, and that nobody else has yet: whether to trace it.
  void Begin(Operation* operation);

  // Work on a partition, from `begin` until now.
  void Slice(const Operation& operation, uint64_t index, int track, const char* name, int64_t begin,
             TraceArrow arrow);
  // A copy begins, of which CopySlice will tell.
  void BeginCopy(const Operation& operation) { Expect(operation); }
  // It is not made after all.
  void DropCopy(const Operation& operation) { Told(operation); }
  // A copy of one of the GPU's two directions, done now.  It began when it was enqueued, or when
  // the one before it was done.
  void CopySlice(const Operation& operation, uint64_t index, bool to_host, int64_t enqueued);
  // The whole way of a partition.  `done` is when its sum was there; 0: it failed.
  void Row(const Operation& operation, uint64_t index, int64_t done);

  // Waits a little for what has begun, and writes the file.
  void Write();

  // While it lives, a slice is still to come: what it is of may be over before it is told.
  class Pending {
   public:
    Pending(OperationTrace* trace, const Operation& operation)
        : trace_(trace), operation_(operation) {
      trace_->Expect(operation_);
    }
    ~Pending() { trace_->Told(operation_); }
    Pending(const Pending&) = delete;
    Pending& operator=(const Pending&) = delete;

   private:
    OperationTrace* const trace_;
    const Operation& operation_;
  };

 private:
  struct Copies {
    const char* name = "";
    std::once_flag made;
    int track = 0;
    std::atomic<int64_t> last_done{0};
  };

  TracedPartition Traced(const Operation& operation, uint64_t index) const;
  void Expect(const Operation& operation);
  void Told(const Operation& operation);

  const std::unique_ptr<Tracer> tracer_;
  const int rank_;
  Copies to_host_;
  Copies to_device_;

  ps::Mutex mu_;
  ps::CondVar cond_;                     // something was told
  int expected_ PS_GUARDED_BY(mu_) = 0;  // and not told yet
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_ENGINE_REQUESTS_H_
