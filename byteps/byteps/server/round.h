// Round: one sum of one partition, who pushed it, and who waits for it.
#ifndef BYTEPS_SERVER_ROUND_H_
#define BYTEPS_SERVER_ROUND_H_

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "byteps/base/protocol.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/cluster/channel.h"
#include "byteps/recovery/server/confirmations.h"
#include "byteps/server/accumulator.h"
#include "byteps/server/optimizer/round_update.h"

namespace byteps {
namespace core {

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

// What the parts of one server share.
class BackupLink;

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_SERVER_ROUND_H_
