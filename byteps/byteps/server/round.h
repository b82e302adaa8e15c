// One sum of one partition: who pushed it, who waits for it, and what there is of it.
#ifndef BYTEPS_SERVER_ROUND_H_
#define BYTEPS_SERVER_ROUND_H_

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/protocol.h"
#include "byteps/cluster/message.h"
#include "byteps/server/accumulator.h"
#include "byteps/server/optimizer/partition_state.h"
#include "byteps/server/optimizer/round_update.h"

namespace byteps {
namespace core {

// A tensor as its first worker declared it.
struct DeclaredTensor {
  Declaration declaration;
  int declared_by = 0;
  uint32_t first_round = 0;  // rounds before it were ended at a server that is lost
  std::string refusal;       // why its operations fail; empty as long as they do not
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
  SharedBytes sum;  // the gradients, or what was made of them
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
  uint32_t ended = UINT32_MAX;  // rounds before it have ended at all members that have pushed
  Accumulator accumulator;
  Clock::time_point started;
  Clock::time_point deadline;  // when it is looked at next
  // How far those who have not pushed were waited for (Patience).
  enum class Waits { kFirst, kQuorum, kAwaited, kSeveral, kLate } waits = Waits::kFirst;
  Clock::time_point quorum_since;
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
  bool all_told() const { return std::find(told.begin(), told.end(), false) == told.end(); }
};

// What goes on once the backup has what it was told (backup_link.h).
struct Copying {
  enum Kind { kRound, kStep, kLoad, kAll } kind = kRound;
  uint64_t number = 0;   // of the request to the backup
  uint32_t round = 0;    // kRound
  Message request;       // kStep and kLoad: of a member
  int64_t received = 0;  // when that came
};

struct Partition {
  const DeclaredTensor* tensor = nullptr;
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

  bool is_listed = false;  // among those of its thread
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

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_ROUND_H_
