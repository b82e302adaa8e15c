// Rounds: the rounds of the partitions that one thread serves, and what becomes of their sums.
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
// A worker numbers its pushes of a tensor.  A round is complete when every member of the tensor's
// group has pushed it; rounds never mix, however far one worker is ahead of another.
//
// An operation may fail at one worker alone, before all of its partitions were pushed.  Each push
// therefore says which rounds have ended at its worker (PushHeader::oldest).  What that worker has
// left open of these is given up, in GiveUpBefore and nowhere else: the others are told, and
// nothing is kept of it but the reason, for those who come later.
//
// What becomes of rounds when something is lost is for a RoundLossPolicy to decide.
//
// Not thread-safe: a SumThread calls it with its lock held.  Requests have the form that their
// tensor's declaration lets them have (request_form.h).
class Rounds {
 public:
  using Clock = Round::Clock;

  using Freed = std::function<void(const Partition&)>;

  // `track`: of the timeline.  `thread` is the one that calls this.  `losses` decides about its
  // rounds.
  Rounds(ServerContext* context, int track, Freed freed, SumThread* thread,
         ServerLossPolicy* losses);

  RoundLossPolicy* losses() { return losses_.get(); }

  // ----- requests

  void Push(Partition* partition, Message* message, int64_t received);
  // Answers those who wait for a round's sum; gives it up once every member has it.
  void Deliver(Partition* partition, Round* round);
  // The member of `rank` will ask for nothing more of this tensor: rounds fail that lack its push.
  void Release(const DeclaredTensor* tensor, int rank);
  // Frees the partitions of a tensor that every member has released.  `freed` is called with
  // each that is gone, now or once it is no longer held.
  void Free(const std::vector<std::shared_ptr<Partition>>& partitions);
  // Those at the front that nobody needs any more.
  void DropDone(Partition* partition);

  // ----- failures

  // All of this tensor that are open.
  void FailAll(const DeclaredTensor* tensor, const std::string& reason);
  // Those whose deadline was before `as_of`.  Of those that began before `grace_until` the error
  // says for how long this process stood still.
  void FailLate(Clock::time_point as_of, Clock::time_point grace_until,
                Clock::duration stood_still);
  // Serving a request came to an error in its midst: fails all that is open of its partition.
  void FailPartition(Partition* partition, const Message& message, const std::string& error);
  // There was no memory for a request: fails its round, if it is a push.
  void FailRoundOf(Partition* partition, const Message& message, const std::string& reason);

  void Fail(Partition* partition, Round* round, const std::string& reason);
  // Answers with `reason` every member that has no answer yet. The round may have its sum, and have
  // answered others with it.
  void FailUnanswered(Partition* partition, Round* round, const std::string& reason);

  // The first deadline of a round that is not done; time_point::max() where there is none.
  Clock::time_point FirstDeadline() const;
  void Postpone(Partition* partition, Round* round, Clock::time_point deadline);

  // ----- for the policy of losses

  // Partitions that were pushed, or wait for something, by key.
  const std::vector<Partition*>& partitions() const { return partitions_; }
  std::vector<Partition*> WithOpenRounds() const;
  // A partition belongs to those of this thread.
  void List(Partition* partition);
  // The round, made if it is new; null if it is out of reach.
  Round* FindOrBegin(Partition* partition, const PushHeader& header);
  // No more pushes will come: there is the sum of those that have.  Drops no round.
  void EndShort(Partition* partition, Round* round);
  // Does what a round's gradients were pushed for.  Drops no round.
  void Update(Partition* partition, Round* round);
  // The sum of a round is this one, and is answered to those who wait for it.
  void EndWith(Partition* partition, Round* round, SharedBytes sum);
  // Lets go of the memory of pushes.
  void Clear(Round* round) { round->accumulator.Clear(&scratch_); }
  // A partition that was held is not, unless it is again: its releases are made up for.
  void LetGo(Partition* partition);

 private:
  // By deadline; then by partition, and by round, so that the order is the same in each process.
  using Deadline = std::tuple<Clock::time_point, uint64_t, uint32_t>;
  static Deadline DeadlineOf(const Partition& partition, const Round& round) {
    return {round.deadline, partition.key, round.number};
  }

  // The round of a push, if it may be added; null: it was refused.
  Round* Admit(Partition* partition, const Message& message);
  Round Begin(Partition* partition, uint32_t number, uint32_t timeout_ms) const;
  void Add(Partition* partition, Round* round, size_t member, SharedBytes values);
  // There is the sum of all pushes that a round will get.
  void EndSummed(Partition* partition, Round* round);
  void Finish(Partition* partition, Round* round);
  AdditionRule RuleOf(Partition* partition, Round* round, Chance* chance) const;
  // What the member of `rank` has left open of the rounds before this number failed there, and it
  // will neither push nor ask again.  Drops no round.
  void GiveUpBefore(Partition* partition, int rank, uint32_t number);
  // Whether another member has released the tensor: then the push is refused.
  bool RefuseReleased(const Partition& partition, const Message& message);
  void Release(Partition* partition, int rank);
  // Lets go of all that it has.
  void EndFreed(Partition* partition);
  // That this member has not been answered yet.
  static void CheckUntold(const Partition& partition, const Round& round, int member);
  // A round that is done, once its callers were answered: nothing waits for it any more.
  void Close(const Partition& partition, const Round& round);

  ServerContext* const context_;
  const int track_;
  const Freed freed_;
  std::vector<Partition*> partitions_;   // those that were pushed
  std::map<Deadline, Partition*> open_;  // the rounds that are not done
  const std::unique_ptr<RoundLossPolicy> losses_;
  Scratch scratch_;
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_SERVER_ROUNDS_H_
