// Round: one sum of one partition, with its pushes and the workers that wait for it.
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

// Worker that waits for an answer, and the range of the sum that it wants, in bytes.
struct Caller {
  int rank;
  uint64_t request;
  int op;  // the request's Op
  uint32_t offset = 0;
  uint32_t bytes = 0;
  bool keeps = false;  // whether the worker keeps the sum until all members have it
  // Times (SteadyNs) at which the push arrived, a thread took it, and its values were added.
  int64_t received = 0;
  int64_t taken = 0;
  int64_t added = 0;
};

// HeaderOf returns the header of a request, which must have one; CallerOf returns the caller to
// answer.
PushHeader HeaderOf(const Message& message);
Caller CallerOf(const Message& message, int64_t received);

// Notes of a loss policy about a round or a partition.
struct LossNotes {
  virtual ~LossNotes() = default;
};

struct Round {
  using Clock = std::chrono::steady_clock;

  uint32_t number = 0;
  std::vector<Caller> callers;  // members that wait for the sum
  std::vector<bool> pushed;     // members that have pushed; by index
  std::vector<bool> told;       // members that have got the sum or the error; by index
  Accumulator accumulator;
  Clock::time_point started;
  Clock::time_point deadline;  // time of the next check whether the round is late
  double timeout_s = 0;
  // Times (SteadyNs) at which a thread took the first push, and had added the last one.
  int64_t first_taken = 0;
  int64_t last_added = 0;
  std::unique_ptr<RoundUpdate> update;  // null if the tensor has no rule
  // For blocks with feedback: whether to drop the rounding errors of earlier sums.
  bool forgets_lost = false;
  bool done = false;    // whether the sum is complete, or the round has failed
  std::string failure;  // the error, if the round failed
  std::unique_ptr<LossNotes> notes;

  // Calls `answer` for each caller, and removes the callers. If `answer` throws, callers without an
  // answer stay, and still wait.
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
