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

// The header of a request that has one, and who is to be answered.
PushHeader HeaderOf(const Message& message);
Caller CallerOf(const Message& message, int64_t received);

// A loss policy's notes on a round or on a partition.
struct LossNotes {
  virtual ~LossNotes() = default;
};

struct Round {
  using Clock = std::chrono::steady_clock;

  uint32_t number = 0;
  std::vector<Caller> callers;  // who wait for the sum
  std::vector<bool> pushed;     // by member index
  std::vector<bool> told;       // by member index: of the sum, or why there is none
  Accumulator accumulator;
  Clock::time_point started;
  Clock::time_point deadline;  // when it is looked at next
  double timeout_s = 0;
  int64_t first_taken = 0;  // SteadyNs
  int64_t last_added = 0;
  std::unique_ptr<RoundUpdate> update;  // null of a tensor that is summed, and no more
  bool forgets_lost = false;            // of blocks with feedback: by the sums before
  bool done = false;                    // there is a sum, or there will be none
  std::string failure;                  // why there will be none
  std::unique_ptr<LossNotes> notes;

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

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_SERVER_ROUND_H_
