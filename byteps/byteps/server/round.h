// One sum of one partition: who pushed it, who waits for it, and what there is of it; and what all
// parts of one server share.
#ifndef BYTEPS_SERVER_ROUND_H_
#define BYTEPS_SERVER_ROUND_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/block_codec.h"
#include "byteps/base/config.h"
#include "byteps/base/invariant.h"
#include "byteps/base/protocol.h"
#include "byteps/cluster/channel.h"
#include "byteps/cluster/vacancies.h"
#include "byteps/observe/metrics.h"
#include "byteps/observe/status.h"
#include "byteps/observe/trace.h"
#include "byteps/server/confirmations.h"
#include "byteps/server/optimizer/partition_state.h"

namespace byteps {
namespace core {

// Memory for accumulators, used again instead of being asked of the system anew.

// A stack of blocks that are not in use.  One thread's own.
class Scratch {
 public:
  // Uninitialised bytes, or nothing.  A block that was moved from is empty.
  class Block {
   public:
    Block() = default;
    explicit Block(size_t size) : bytes_(NewBytes(size)), size_(size) {}
    Block(Block&& other) noexcept
        : bytes_(std::move(other.bytes_)), size_(std::exchange(other.size_, 0)) {}
    Block& operator=(Block&& other) noexcept {
      bytes_ = std::move(other.bytes_);
      size_ = std::exchange(other.size_, 0);
      return *this;
    }
    char* data() { return bytes_.get(); }
    size_t size() const { return size_; }

   private:
    std::unique_ptr<char[]> bytes_;
    size_t size_ = 0;
  };

  // At least `size` bytes.  Throws OutOfMemory.
  Block Take(size_t size) {
    while (!spare_.empty()) {
      Block block = std::move(spare_.back());
      spare_.pop_back();
      kept_ -= block.size();
      BPS_INVARIANT("a scratch block has its memory", block.data() != nullptr,
                    "a block of " + std::to_string(block.size()) + " bytes has none");
      if (block.size() >= size) return block;  // else it is too small now: let it go
    }
    return Block(size);
  }

  // Gives a block back, or lets it go when enough are spare.
  void Return(Block block) {
    if (block.size() == 0 || kept_ + block.size() > kMaxKept) return;
    const size_t size = block.size();
    try {
      spare_.push_back(std::move(block));
      kept_ += size;
    } catch (const std::bad_alloc&) {
      // It goes, which is what is wanted where there is no memory.
    }
  }

 private:
  // What a few partitions in flight need; all keys' worth would double a server.
  static constexpr size_t kMaxKept = 64 << 20;

  std::vector<Block> spare_;
  size_t kept_ = 0;
};

// The sum of one round, as its pushes come.

// How pushes are added.
struct AdditionRule {
  bool in_order = false;      // of ranks, however they come
  bool wide_float32 = true;   // more than two of fp32 meet in fp64
  bool keeps_memory = false;  // of one push, for TakeSpare
  // Of blocks with feedback: what rounding lost of the sum before, for each value.
  uint16_t* lost = nullptr;
  const Chance* chance = nullptr;  // of blocks that are rounded by it
};

// Pushes are added from where they were received.  Where there are more than two of a half type or
// of fp32, they meet in a wider accumulator and are rounded once (reducer.h).  Blocks of few bits
// wait for each other, and are added several at a time (base/block_codec.h): a sum of up to
// kAtOnce pushes needs no accumulator.  Where servers update by them, their sum stays fp32.
class Accumulator {
 public:
  // Takes the push of a member over: adds it now or, in order, once those before it were added.
  void Take(const Declaration& declaration, const AdditionRule& rule, size_t member,
            SharedBytes values, Scratch* scratch);

  // No more pushes will come, and at least one did: makes the sum of those that have.  An average
  // is of so many, and a sum is scaled as if all members had pushed (reducer.h).
  void Close(const Declaration& declaration, const AdditionRule& rule, Scratch* scratch);

  // Instead of adding: what another server has added up.
  void Put(SharedBytes sum, Scratch* scratch);

  // Pushes that were added.
  size_t added() const { return added_; }
  // The sum, once all were added: in the memory of one of them.  What replaces it is sent instead.
  SharedBytes& sum() { return sum_; }
  // The memory of another push, or nothing.
  SharedBytes TakeSpare() { return std::move(spare_); }
  // Lets go of all memory; what was added still counts.
  void Clear(Scratch* scratch);

 private:
  void Add(const Declaration& declaration, const AdditionRule& rule, SharedBytes values,
           Scratch* scratch);
  // `divisor`: of the sum, which this push completes; 0: it does not.
  void AddBlocks(DType t, float divisor, const AdditionRule& rule, SharedBytes values,
                 Scratch* scratch);
  // The same, where the sum is fp32.
  void AddGradients(DType t, int divisor, SharedBytes values);
  // Those of them that wait, to sum_.
  void FlushGradients(DType t, int divisor);
  // Those that wait, to sum_.
  void EndBlocks(DType t, float divisor, const AdditionRule& rule, Scratch* scratch);
  // The blocks that wait, to be added to `wide`, which `begun` says to hold a sum.
  BlockSum Waiting(DType t, const void** in, float* wide, bool begun) const;

  static constexpr size_t kAtOnce = 8;

  std::vector<SharedBytes> waiting_;  // by member index: not yet their turn
  std::vector<SharedBytes> blocks_;   // that were counted, and are still to be added
  size_t added_ = 0;
  size_t bytes_ = 0;  // of each push
  SharedBytes sum_;   // the first push, then the sum
  SharedBytes spare_;
  Scratch::Block wide_;  // or the sum, while it is accumulated in a wider type
};

// One sum of one partition: who pushed it, who waits for it, and what there is of it.

// A debt to a worker that has released tensors: an answer, once all of them are freed.
struct Releasing {
  int rank = 0;
  uint64_t request = 0;
  uint64_t key = 0;
  size_t left = 0;  // tensors that are not freed
};

// A tensor as its first worker declared it.
struct DeclaredTensor {
  Declaration declaration;
  int declared_by = 0;
  uint32_t first_round = 0;  // rounds before it were ended at a server that is lost
  std::string refusal;       // why its operations fail; empty as long as they do not
  std::vector<bool> holds;   // by member index: it has declared it, and neither released nor left
  size_t holders = 0;        // so many of them
  std::vector<std::shared_ptr<Releasing>> releasing;  // who has released it
  std::atomic<int> released_by{-1};                   // the last of them; any thread may read it

  // Sets whether a rank holds the tensor; nothing happens if it is no member.
  void SetHold(int rank, bool has) {
    const int member = declaration.MemberIndex(rank);
    if (member < 0) return;
    holds.resize(declaration.group.size());
    if (holds[member] == has) return;
    holds[member] = has;
    has ? ++holders : --holders;
  }
};

// A worker to which an answer is owed, and the part of the sum that it wants, in bytes.
struct Caller {
  int rank;
  uint64_t request;
  int op;  // of the request
  uint32_t offset = 0;
  uint32_t bytes = 0;
  bool keeps = false;  // it keeps the sum until all have it
  // When its push came, when a thread took it, and when it was added, in SteadyNs.
  int64_t received = 0;
  int64_t taken = 0;
  int64_t added = 0;
};

// Of a request that has a header.
Caller CallerOf(const Message& message, int64_t received);
PushHeader HeaderOf(const Message& message);

// What became of the gradients of a round: the last one that was complete.
struct UpdatedRound {
  uint32_t number = 0;
  std::unique_ptr<RoundUpdate> update;
  SharedBytes sum;            // the gradients, or what was made of them
  std::vector<bool> excused;  // see Round
};

struct Round {
  using Clock = std::chrono::steady_clock;

  uint32_t number = 0;
  std::vector<Caller> callers;  // who wait for the sum
  std::vector<bool> pushed;     // by member index
  std::vector<bool> told;       // by member index: of the sum, or why there is none
  // By member index: it will not push this round, since its replica was removed before it did.
  // Empty: nobody is excused.
  std::vector<bool> excused;
  // Of a server that was lost: a member has given the sum; and so many had their part of it, and
  // cannot give the whole.
  bool is_given = false;
  size_t parts_had = 0;
  Confirmations::Hold receipt;  // of a sum that members keep
  uint32_t ended = UINT32_MAX;  // rounds before it have ended at all members that have pushed
  Accumulator accumulator;
  Clock::time_point started;
  Clock::time_point deadline;  // when it is looked at next
  // How far those who have not pushed were waited for (Patience).
  enum class Waits { kFirst, kQuorum, kAwaited, kSeveral, kLate } waits = Waits::kFirst;
  Clock::time_point quorum_since;
  Clock::time_point excused_until;  // those who have not pushed could wait for a server until then
  double timeout_s = 0;
  int64_t first_taken = 0;  // SteadyNs
  int64_t last_added = 0;
  std::unique_ptr<RoundUpdate> update;  // null of a tensor that is summed, and no more
  // Of a server that was lost: its update was restored, and members may ask for its answer again.
  bool is_restored = false;
  bool forgets_lost = false;  // of blocks with feedback: by the sums before
  bool done = false;          // there is a sum, or there will be none
  std::string failure;        // why there will be none

  // Whether no more pushes will come.
  bool has_all() const {
    for (size_t i = 0; i < pushed.size(); ++i) {
      if (!pushed[i] && (excused.empty() || !excused[i])) return false;
    }
    return true;
  }
  void Excuse(size_t member) {
    told[member] = true;
    if (pushed[member]) return;
    excused.resize(pushed.size());
    excused[member] = true;
  }
  // Answers each caller by `answer`.  If that throws, those that it has answered are gone, and the
  // others still wait.
  template <typename Answer>
  void AnswerCallers(const Answer& answer) {
    struct Answered {
      std::vector<Caller>* callers;
      size_t count = 0;
      ~Answered() { callers->erase(callers->begin(), callers->begin() + count); }
    } answered{&callers};
    for (const Caller& caller : callers) {
      answer(caller);
      ++answered.count;
    }
  }
  bool all_told() const { return std::find(told.begin(), told.end(), false) == told.end(); }
};

// What goes on once the backup has what it was told (backup_link.h).
struct Copying {
  enum Kind { kRound, kStep, kVerdict, kLoad, kAll } kind = kRound;
  uint64_t number = 0;   // of the request to the backup
  uint32_t round = 0;    // kRound
  Message request;       // kStep, kVerdict and kLoad: of a member
  int64_t received = 0;  // when that came
};

struct Partition : std::enable_shared_from_this<Partition> {
  std::shared_ptr<const DeclaredTensor> tensor;
  uint64_t key = 0;
  uint64_t index = 0;
  size_t thread = 0;  // number of the SumThread that it belongs to, whose lock guards what follows
  std::unique_ptr<PartitionState> state;  // null of a tensor that is summed, and no more
  std::vector<uint16_t> lost;             // by rounding the last sum, of blocks with feedback
  // By member index: it has pushed a round of this since its replica came.  Empty: nobody has.
  std::vector<bool> came;
  // Of a state of which another server has a copy.  What waits for the backup, and what came
  // meanwhile, with the time; the pass with which the backup knows the state; the last round that
  // was complete and that nobody here needs.
  std::optional<Copying> copying;
  std::deque<std::pair<Message, int64_t>> held;
  uint64_t pass = 0;
  std::optional<UpdatedRound> ended;
  std::shared_ptr<const Declaration> restored_declaration;  // of a state that was a copy
  bool has_state = false;                                   // is among those that have one

  bool is_freed = false;         // nobody holds its tensor: it goes, once `copying` is over
  std::vector<int> released_by;  // ranks, while `copying` is not over
  bool is_listed = false;        // among those of its thread
  uint32_t first_round = 0;
  std::deque<Round> rounds;
  // Why the last rounds before the first one failed, by number, for members that come later.
  std::map<uint32_t, std::string> failures;

  const Declaration& declaration() const { return tensor->declaration; }
  // Null: it is over, or has not begun.
  Round* Find(uint32_t number) {
    const uint32_t ahead = number - first_round;  // unsigned: one that is over is far ahead as well
    return ahead < rounds.size() ? &rounds[ahead] : nullptr;
  }
};

// What the parts of one server share.
class BackupLink;

// Any thread may call anything.
struct ServerContext {
  // Answers by `channel`, which outlives this.
  ServerContext(const Config& config, Channel* channel);

  // An answer with an `error` says that the request failed.  `values`: all of what the caller wants
  // a part of.  `note`: of a PUSH_TRY the sums of squares; of a sum PackMembers of those that it
  // lacks, if it lacks any.
  void Answer(const Caller& caller, uint64_t key, const std::string& error,
              const SharedBytes* values = nullptr, const SharedBytes* note = nullptr);
  void Refuse(const Message& request, const std::string& error);

  // Tells the timeline of a round's pushes, which were answered now or never.
  void TraceRound(const Partition& partition, const Round& round, bool answered);
  // Of one push: that it was added.
  void TraceAddition(const Partition& partition, const Round& round, const Caller& caller,
                     int track);

  Channel* const channel;
  Vacancies vacancies;
  BackupLink* backup = nullptr;  // the same as long as this lives
  const bool deterministic;
  const bool wide_float32;
  ServerCounters counters;
  Lateness lateness;
  Confirmations confirmations;
  std::atomic<size_t> open_rounds{0};    // that some members have pushed and others have not
  const std::unique_ptr<Tracer> tracer;  // null: nothing is traced
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_SERVER_ROUND_H_
