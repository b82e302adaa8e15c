// The server: adds what the workers push and answers with the sums.
//
// The channel's threads check each request.  Each partition belongs to an engine, which serves one
// request at a time: in its thread or, if the partition is small and nothing waits for the engine,
// in the channel's thread that has the request, since to wake another takes longer.  Pushes are
// added from where they were received, and the sum is sent to all from where one of them was
// received.  Where there are more than two of a half type or of fp32, they meet in a wider
// accumulator and are rounded once (reducer.h).
//
// Rounds.  A worker numbers its pushes of a tensor.  A round is complete when every
// member of the tensor's group has pushed it; rounds never mix, however far one
// worker is ahead of another.
//
// An operation may fail at one worker alone, before all of its partitions were pushed.  Each push
// therefore says which rounds have ended at its worker (PushHeader::oldest).  What that worker has
// left open of these is given up, in GiveUpBefore and nowhere else: the others are told, and
// nothing is kept of it but the reason, for who comes later.
//
// Parameters.  Of a tensor with an UpdateRule the server keeps the parameters and their moments
// (optimizer/): when a round is complete it updates them, and answers with them.  Members that
// ask for different steps in one round get an error; the state is as it was.
//
// A step that is tried (PUSH_TRY) changes nothing: parameters are computed from the state and sent,
// and the gradients are kept.  The round stays until each member has said what becomes of the step.
// The first one who does so has it made, or dropped; who says something else gets an error.
#ifndef BYTEPS_SERVER_SUM_SERVER_H_
#define BYTEPS_SERVER_SUM_SERVER_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "byteps/base/blocking_queue.h"
#include "byteps/base/config.h"
#include "byteps/base/mutex.h"
#include "byteps/base/protocol.h"
#include "byteps/base/stall_watch.h"
#include "byteps/cluster/channel.h"
#include "byteps/observe/lateness.h"
#include "byteps/observe/metrics.h"
#include "byteps/observe/trace.h"
#include "byteps/server/optimizer/partition_state.h"
#include "byteps/server/optimizer/state_memory.h"
#include "byteps/server/scratch.h"
#include "ps/internal/message.h"

namespace byteps {
namespace core {

class Server {
 public:
  // Answers by `channel`, which outlives this.
  Server(const Config& config, Channel* channel);
  // Joins the engine threads; what they had not answered stays unanswered.  Writes the
  // timeline.
  ~Server();

  // Its rank among the servers, once it is known; -1 until then.  Any thread.
  void SetRank(int rank) { rank_ = rank; }
  int rank() const { return rank_; }

  // What was counted so far, and what is under way now.  Any thread.
  std::vector<Metric> Metrics();

  // For the scheduler: a packed StatusRecord.  Tells of late workers since the last call.
  std::string Report();

  // How many sums some members have pushed and others have not.  Any thread.
  uint64_t OpenRounds() const;

  // Whether a request, of which the meta has come, may have values of so many bytes.  Those of
  // others need no memory (net/link/nowhere.h): they will be refused.  Any thread.
  bool Expects(const ps::Meta& meta, size_t bytes);

  // Takes a request over.  Any thread, several at a time; does not block.  Where there is no memory
  // for it, it is refused, and so is its round.
  void OnMessage(ps::Message* msg);

  // The worker of `rank` will push nothing more: rounds that lack its push fail,
  // now and later, for `reason`.  Any thread.
  void OnWorkerGone(int rank, const std::string& reason);

 private:
  using Clock = std::chrono::steady_clock;

  struct Tensor {
    Declaration declaration;
    int declared_by = 0;
    std::string refusal;  // why its operations fail; empty as long as they do not
  };

  // To whom an answer is owed, and what part of the sum, in bytes.
  struct Caller {
    int rank;
    uint64_t request;
    int op;  // that it asked by
    uint32_t offset = 0;
    uint32_t bytes = 0;
    // When its push came, its engine took it, and it was added, in SteadyNs.
    int64_t received = 0;
    int64_t taken = 0;
    int64_t added = 0;
  };

  struct Round {
    uint32_t number = 0;
    std::vector<Caller> callers;            // who wait for the sum
    std::vector<bool> pushed;               // by member index
    std::vector<bool> told;                 // by member index: of the sum, or why there is none
    std::vector<ps::SArray<char>> waiting;  // by member index: not yet their turn
    size_t added = 0;
    ps::SArray<char> sum;    // the first push, then the sum
    ps::SArray<char> spare;  // of PUSH_TRY: the memory of a push that was added
    Scratch::Block wide;     // or the sum, while it is accumulated in a wider type
    Clock::time_point started;
    Clock::time_point deadline;
    double timeout_s = 0;
    int64_t first_taken = 0;  // SteadyNs
    int64_t last_added = 0;
    // Of a tensor with a rule: what the members ask for, as the first one said it; its rank, and
    // the operation.
    std::string step;
    int step_of = -1;
    int step_op = 0;
    ps::SArray<char> sums;  // GradientSums, for who waits for them before the update
    // Of PUSH_TRY: the step, once it was tried; what is sent; and whether a LOAD_STATE came, after
    // which it does not matter what becomes of the step.
    std::string tried;
    ps::SArray<char> parameters;
    bool overtaken = false;
    bool updated = false;  // the state is what became of the round
    bool done = false;     // there is a sum, or there will be none
    std::string failure;   // why there will be none

    bool all_told() const { return std::find(told.begin(), told.end(), false) == told.end(); }
  };

  struct Partition {
    const Tensor* tensor = nullptr;
    uint64_t key = 0;
    uint64_t index = 0;
    size_t engine = 0;
    // Guarded by its engine's mu:
    std::unique_ptr<PartitionState> state;  // null of a tensor that is summed, and no more
    uint32_t first_round = 0;
    std::deque<Round> rounds;
    // Why the last rounds before the first one failed, by number, for members that come later.
    std::map<uint32_t, std::string> failures;
  };

  struct Task {
    enum Kind { kRequest, kGone, kRefuse, kLook } kind = kRequest;
    Partition* partition = nullptr;
    ps::Message msg;                 // kRequest
    int64_t received = 0;            // when, in SteadyNs
    int rank = 0;                    // kGone
    const Tensor* tensor = nullptr;  // kRefuse
    std::string reason;
  };

  // By deadline; then by partition, and by round, so that the order is the same in each process.
  using Deadline = std::tuple<Clock::time_point, uint64_t, uint32_t>;

  struct Engine {
    BlockingQueue<Task> queue;
    // Tasks that were queued and not done yet.
    std::atomic<size_t> waiting{0};
    std::atomic<size_t> open_rounds{0};  // how many are in `open`
    int track = 0;                       // of the timeline
    std::thread thread;
    ps::Mutex mu;  // held by who serves
    std::vector<Partition*> partitions PS_GUARDED_BY(mu);
    std::map<Deadline, Partition*> open PS_GUARDED_BY(mu);  // the rounds that are not done
    std::map<int, std::string> gone PS_GUARDED_BY(mu);      // rank -> why
    Scratch scratch PS_GUARDED_BY(mu);
    // When the thread looks what is late, if nothing is queued before.
    Clock::time_point looks_at PS_GUARDED_BY(mu) = Clock::time_point::max();
    // The last one that was known when a round was late.
    ps::StallWatch::Stall stall PS_GUARDED_BY(mu);
  };

  // The channel's threads (sum_server_requests.cc).
  void Dispatch(ps::Message* msg);
  void OnDeclare(const ps::Message& msg);
  // Takes what the worker of `rank` declares.  Why the tensor cannot be summed; empty if it can.
  std::string Declare(int rank, const Declaration& declaration);
  // All others.
  void OnRequest(ps::Message* msg);
  // Why it cannot be served; empty if it can.
  std::string Refusal(const ps::Message& msg, const Tensor* tensor, uint64_t index) const;
  // Bytes of values that a request comes with, or came with before they were dropped.
  static uint64_t ValueBytes(const ps::Message& msg);
  // Bytes of values that a request of this operation has; none of an operation that is not the
  // tensor's.
  static std::optional<uint64_t> ValueBytes(int op, const Declaration& declaration, uint64_t index);
  // Whether the values and the header are those that `declaration` lets it have.
  static bool HasForm(const ps::Message& msg, const Declaration& declaration, uint64_t index);
  static bool HasFormOfUpdate(const ps::Message& msg, const Declaration& declaration,
                              uint64_t index);
  Partition* FindOrMake(const Tensor& tensor, uint64_t key) PS_REQUIRES(mu_);
  void Refuse(const ps::Message& request, const std::string& error);
  // For the engine's thread.
  static void Queue(Engine* engine, Task task);

  // Engine threads.
  void Run(Engine* engine);
  // Who serves: engine threads, and the channel's.
  //
  // Serves a request at once, if it is small and nothing waits for its engine.
  bool ServeHere(Engine* engine, Task* task);
  void Do(Engine* engine, Task* task) noexcept PS_REQUIRES(engine->mu);
  void Handle(Engine* engine, Task* task) PS_REQUIRES(engine->mu);
  // Ends what a task that found no memory has begun.
  void OnOutOfMemory(Engine* engine, const Task& task, const std::bad_alloc& error)
      PS_REQUIRES(engine->mu);
  // "server 0 is out of memory: ...", about what a request wanted to do.
  std::string NoMemoryFor(const ps::Message& msg, const std::bad_alloc& error);
  void Serve(Engine* engine, Task* task) PS_REQUIRES(engine->mu);
  // A task came to an error in its midst: fails all that is open of its request's partition.
  void ServingFailed(Engine* engine, const Task& task, const std::string& error)
      PS_REQUIRES(engine->mu);
  void Push(Engine* engine, Partition* partition, ps::Message* msg, int64_t received)
      PS_REQUIRES(engine->mu);
  // The round of a push of this worker, if it may be added; null: it was refused.
  Round* Admit(Engine* engine, Partition* partition, const ps::Message& msg, int rank)
      PS_REQUIRES(engine->mu);
  // Fails a round that lacks the push of a worker that is gone.
  void FailWithoutThoseGone(Engine* engine, Partition* partition, Round* round)
      PS_REQUIRES(engine->mu);
  // Adds a member's push now, or in the order of ranks once it is its turn.
  void AddInTurn(Engine* engine, const Declaration& declaration, Round* round, int member,
                 ps::SArray<char> values) PS_REQUIRES(engine->mu);
  void Pull(Partition* partition, const ps::Message& msg, int64_t received);
  // The member's round, if it may be told of it now; null: it was refused.
  Round* FindPushed(Partition* partition, const ps::Message& msg, const Caller& caller);
  // sum_server_state.cc: STEP; LOAD_STATE and READ_STATE.
  void Step(Partition* partition, const ps::Message& msg, int64_t received);
  void MoveState(Partition* partition, const ps::Message& msg, int64_t received);
  // Takes what a member says of the step that it tried in the round of this number, if it tried
  // one.  A push is its last word on it.  Why it cannot be, or "".
  std::string Settle(Partition* partition, const ps::Message& msg, uint32_t number);
  // What the member of `rank` has left open of the rounds before this number failed there, and it
  // will neither push nor ask again.  Drops no round.
  void GiveUpBefore(Engine* engine, Partition* partition, int rank, uint32_t number)
      PS_REQUIRES(engine->mu);
  // How this member wants another step than the first one does, or "".
  static std::string Agree(const Declaration& declaration, int rank, int op,
                           const std::string& step, Round* round);
  static std::string AgreeOnPush(const Declaration& declaration, const ps::Message& msg,
                                 Round* round);
  // Of a round with the sum: what its members pushed it for.  Why it cannot be, or "".
  std::string CompleteUpdate(Partition* partition, Round* round);
  // The same of round->step; makes it.
  std::string MakeStep(Partition* partition, Round* round);
  // What a member wants, after the squares; makes it unless it was made.  Why it cannot be, or "".
  std::string Decide(Partition* partition, int rank, const std::string& step, Round* round);
  // The caller and what it wants, from a request's header.
  static Caller CallerOf(const ps::Message& msg, int64_t received);
  // Why a push of this number comes to no round, where it does not.
  static std::string OutOfReach(const Partition& partition, int rank, uint32_t number);
  // How many rounds of a tensor a member may be ahead of the first one that is open.
  static uint32_t MaxRoundsAhead(const Declaration& declaration);
  // The round, made if it is new; null if it is out of reach.
  Round* FindRound(Engine* engine, Partition* partition, const PushHeader& header)
      PS_REQUIRES(engine->mu);
  // Adds the next push; after the last one, round->sum is what is answered.
  void Accumulate(Engine* engine, const Declaration& declaration, Round* round,
                  ps::SArray<char> values) PS_REQUIRES(engine->mu);
  bool AddsWide(DType t) const;
  void Finish(Engine* engine, Partition* partition, Round* round) PS_REQUIRES(engine->mu);
  static Deadline DeadlineOf(const Partition& partition, const Round& round);
  // A round that is done, once its callers were answered: nothing waits for it any more.
  static void Close(Engine* engine, const Partition& partition, const Round& round)
      PS_REQUIRES(engine->mu);
  // Sends the sum to those who wait for it; gives it up once every member has it.
  void Deliver(Partition* partition, Round* round);
  void FailRound(Engine* engine, Partition* partition, Round* round, const std::string& reason)
      PS_REQUIRES(engine->mu);
  // That this member has not been answered yet.
  static void CheckUntold(const Partition& partition, const Round& round, int member);
  void DropDoneRounds(Partition* partition);
  void FailRoundsWithout(Engine* engine, int rank, const std::string& reason)
      PS_REQUIRES(engine->mu);
  // Those whose deadline was before `as_of`, if all that came until then was served.
  void FailLateRounds(Engine* engine, Clock::time_point as_of) PS_REQUIRES(engine->mu);
  // Where this process stood still (base/stall_watch.h), what it waits for may lie in its sockets:
  // until then nothing is late.
  static Clock::time_point EndOfGrace(const ps::StallWatch::Stall& stall);
  // Looks whether there was another stall.
  void NoteStall(Engine* engine) PS_REQUIRES(engine->mu);
  static Clock::time_point NextLook(const Engine& engine) PS_REQUIRES(engine.mu);
  static TracedPartition Traced(const Partition& partition, const Round& round,
                                const Caller& caller);
  // Tells the timeline of a round's pushes, which were answered now or never.
  void TraceRound(const Partition& partition, const Round& round, bool answered);
  std::string MissingRanks(const Partition& partition, const Round& round) const;

  // `sums`: of a PUSH_TRY.
  void Answer(const Caller& caller, uint64_t key, const std::string& error,
              const ps::SArray<char>* values, const ps::SArray<char>* sums = nullptr);

  Channel* const channel_;
  const bool deterministic_;
  const bool wide_float32_;
  std::atomic<int> rank_{-1};
  ServerCounters counters_;
  Lateness lateness_;
  std::unique_ptr<Tracer> tracer_;  // null: nothing is traced
  ps::SharedMutex mu_;
  StateMemory state_memory_ PS_GUARDED_BY(mu_);
  // What they point to stays.  A tensor changes with mu_ held alone, a partition
  // with its engine's mu.
  std::unordered_map<uint64_t, std::unique_ptr<Tensor>> tensors_ PS_GUARDED_BY(mu_);  // by key
  std::unordered_map<uint64_t, std::unique_ptr<Partition>> partitions_ PS_GUARDED_BY(mu_);
  size_t next_engine_ PS_GUARDED_BY(mu_) = 0;
  std::vector<std::unique_ptr<Engine>> engines_;  // always the same
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_SUM_SERVER_H_
