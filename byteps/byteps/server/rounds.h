// Rounds: open rounds of the partitions of one thread, and their outcome.
#ifndef BYTEPS_SERVER_ROUNDS_H_
#define BYTEPS_SERVER_ROUNDS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "byteps/server/accumulator.h"
#include "byteps/server/declared_tensor.h"
#include "byteps/server/partition.h"
#include "byteps/server/round.h"
#include "byteps/server/round_loss_policy.h"
#include "byteps/server/scratch.h"
#include "byteps/server/server_context.h"

namespace byteps {
namespace core {

class ServerLossPolicy;
class SumThread;

// The rounds of the partitions that one thread serves.
//
// A worker numbers its pushes of a tensor. A round is complete when every member of the tensor's
// group has pushed it. A round never gets values of another one, however far a worker is ahead of
// others.
//
// An operation may fail on a single worker before all its partitions were pushed. So every push
// says which rounds have ended at its worker (PushHeader::oldest). If the worker has not pushed
// such a round, GiveUpBefore fails the round; no other function does. Members that have pushed get
// an error, and the error is kept for members that push later.
//
// A RoundLossPolicy decides about rounds when a node is lost.
//
// Not thread-safe: a SumThread calls it with its lock held. Requests have passed HasForm
// (request_form.h).
class Rounds {
 public:
  using Clock = Round::Clock;

  using Freed = std::function<void(const Partition&)>;

  // `track`: track in the timeline. `freed`: called with each freed partition. `thread`: the thread
  // that calls this object. `losses`: makes the loss policy.
  Rounds(ServerContext* context, int track, Freed freed, SumThread* thread,
         ServerLossPolicy* losses);

  RoundLossPolicy* losses() { return losses_.get(); }

  // ----- requests

  void Push(Partition* partition, Message* message, int64_t received);
  // Answers the callers of a round. Frees the sum when every member has it.
  void Deliver(Partition* partition, Round* round);
  // Handles a release of a tensor by a member. Open rounds that this member has not pushed fail.
  void Release(const DeclaredTensor* tensor, int rank);
  // Frees the partitions of a tensor that all members have released. Calls `freed` with each
  // partition: now or, if the partition is held, later.
  void Free(const std::vector<std::shared_ptr<Partition>>& partitions);
  // Drops the oldest rounds of a partition as long as they are finished.
  void DropDone(Partition* partition);

  // ----- failures

  // Fails all open rounds of a tensor.
  void FailAll(const DeclaredTensor* tensor, const std::string& reason);
  // Fails rounds whose deadline was before `as_of`. If a round began before `grace_until`, its
  // error says how long this process stood still (`stood_still`).
  void FailLate(Clock::time_point as_of, Clock::time_point grace_until,
                Clock::duration stood_still);
  // Fails all open rounds of a partition, because a request for it has failed half-way.
  void FailPartition(Partition* partition, const Message& message, const std::string& error);
  // Handles a lack of memory for a request. If the request is a push, fails its round.
  void FailRoundOf(Partition* partition, const Message& message, const std::string& reason);

  void Fail(Partition* partition, Round* round, const std::string& reason);
  // Answers with `reason` every member that has no answer yet. Other members may have got the sum.
  void FailUnanswered(Partition* partition, Round* round, const std::string& reason);

  // Returns the earliest deadline of an open round, or time_point::max().
  Clock::time_point FirstDeadline() const;
  void Postpone(Partition* partition, Round* round, Clock::time_point deadline);

  // ----- for the loss policy

  // Partitions of this thread, which were pushed, or which List has added.
  const std::vector<Partition*>& partitions() const { return partitions_; }
  std::vector<Partition*> WithOpenRounds() const;
  // Adds a partition to this thread's.
  void List(Partition* partition);
  // Returns a round, and begins it if it has not begun. Returns null if the round is out of reach
  // (round_errors.h).
  Round* FindOrBegin(Partition* partition, const PushHeader& header);
  // Completes a round without the missing pushes. Drops no round.
  void EndShort(Partition* partition, Round* round);
  // Updates the parameters by the summed gradients, as the pushes asked. Drops no round.
  void Update(Partition* partition, Round* round);
  // Completes a round with a given sum, and answers the callers.
  void EndWith(Partition* partition, Round* round, SharedBytes sum);
  // Frees the memory of pushes.
  void Clear(Round* round) { round->accumulator.Clear(&scratch_); }
  // Handles the releases that arrived while the partition was held, unless it is held again. Call
  // when the partition is no longer held.
  void LetGo(Partition* partition);

 private:
  // Order of open rounds: by deadline, then by partition and round, so that the order does not
  // depend on addresses.
  using Deadline = std::tuple<Clock::time_point, uint64_t, uint32_t>;
  static Deadline DeadlineOf(const Partition& partition, const Round& round) {
    return {round.deadline, partition.key, round.number};
  }

  // Returns the round of a push. Returns null if the push may not be added; it was refused then.
  Round* Admit(Partition* partition, const Message& message);
  Round Begin(Partition* partition, uint32_t number, uint32_t timeout_ms) const;
  void Add(Partition* partition, Round* round, size_t member, SharedBytes values);
  // Ends a round in which all expected pushes have been added.
  void EndSummed(Partition* partition, Round* round);
  void Finish(Partition* partition, Round* round);
  AdditionRule RuleOf(Partition* partition, Round* round, Chance* chance) const;
  // Fails rounds before `number` that the member of `rank` has not pushed. They have failed at this
  // member, which will neither push them nor ask for them again. Keeps all rounds.
  void GiveUpBefore(Partition* partition, int rank, uint32_t number);
  // Refuses a push of a tensor that another member has released. Returns false if no member has
  // released the tensor.
  bool RefuseReleased(const Partition& partition, const Message& message);
  void Release(Partition* partition, int rank);
  // Frees everything that a partition holds.
  void EndFreed(Partition* partition);
  // Checks that a member has not been answered yet.
  static void CheckUntold(const Partition& partition, const Round& round, int member);
  // Removes a round from open_. Its callers were answered.
  void Close(const Partition& partition, const Round& round);

  ServerContext* const context_;
  const int track_;
  const Freed freed_;
  std::vector<Partition*> partitions_;   // partitions that were pushed
  std::map<Deadline, Partition*> open_;  // partitions of rounds without an outcome, by deadline
  const std::unique_ptr<RoundLossPolicy> losses_;
  Scratch scratch_;
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_SERVER_ROUNDS_H_
