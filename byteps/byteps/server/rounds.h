// Rounds: the rounds of the partitions that one thread serves, and what becomes of their sums.
#ifndef BYTEPS_SERVER_ROUNDS_H_
#define BYTEPS_SERVER_ROUNDS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "byteps/recovery/server/copies.h"
#include "byteps/recovery/server/copy_record.h"
#include "byteps/server/accumulator.h"
#include "byteps/server/declared_tensor.h"
#include "byteps/server/partition.h"
#include "byteps/server/round.h"
#include "byteps/server/scratch.h"
#include "byteps/server/server_context.h"

namespace byteps {
namespace core {

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
// Members of a replica that was removed are absent (docs/design/replicas.md): rounds close without
// those pushes of theirs that had not come, and nobody waits to hear what they want of a step.

// Not thread-safe: a SumThread calls it with its lock held.  Requests have the form that their
// tensor's declaration lets them have (sum_server.h).
class Rounds {
 public:
  using Clock = Round::Clock;

  using Freed = std::function<void(const Partition&)>;

  // `track`: of the timeline.
  Rounds(ServerContext* context, int track, Freed freed)
      : context_(context), track_(track), freed_(std::move(freed)) {}

  // ----- requests

  void Push(Partition* partition, Message* message, int64_t received);
  // The round that a member has pushed, if it may be told more of it now; null: it was refused.
  Round* FindPushed(Partition* partition, const Message& message);
  // Whether a member's replica was removed: then the request is refused, since it `did` this.
  bool RefuseAbsent(Partition* partition, const Message& message, const std::string& did);
  // Answers those who wait for a round's sum; gives it up once every member has it.
  void Deliver(Partition* partition, Round* round);
  // A member has the sum of a round, or its part of it, from a server that is lost, and gives it.
  void Give(Partition* partition, Message* message);
  // All members have ended the rounds of this tensor before this one.
  void Resume(const DeclaredTensor* tensor, uint32_t first_round);
  // The member of `rank` will ask for nothing more of this tensor: rounds fail that lack its push.
  void Release(const DeclaredTensor* tensor, int rank);
  // Frees the partitions of a tensor that every member has released.  `freed` is called with
  // each that is gone, now or once its backup has answered.
  void Free(const std::vector<std::shared_ptr<Partition>>& partitions);
  // Those at the front that nobody needs any more.
  void DropDone(Partition* partition);

  // ----- copies of the state (copies.cc)

  // The backup is told with this pass from now on, and knows nothing; 0: there is none.  The
  // partitions that need not wait for another one any more.
  std::vector<Partition*> SetBackup(uint64_t pass);
  // Tells the backup the next state that it does not know, or that it knows them all.
  void CopyNext();
  // Of a member's STEP or LOAD_STATE, or of a READ_STATE that says what becomes of a step that was
  // tried: who joins reads what follows from it, and has nothing to say itself.  True: it is
  // served, or goes on, by GoOn, once the backup knows of it.
  bool CopyStep(Partition* partition, const Message& message, int64_t received);
  bool CopyVerdict(Partition* partition, const Message& message, const UpdateStep& step,
                   int64_t received);
  bool CopyLoad(Partition* partition, const Message& message, int64_t received);
  // The backup has what a partition waited for.
  void GoOn(Partition* partition, const Copying& what);
  // Fails the round or the request that waited for an answer that came to an error.
  void FailCopied(Partition* partition, const Copying& what, const std::string& reason);
  // A partition has the state of a server that is lost.
  void Adopt(Partition* partition);

  // ----- failures

  // All of this tensor that are open.
  void FailAll(const DeclaredTensor* tensor, const std::string& reason);
  // Those that lack the push of this worker, which will push nothing more; now and later.
  void FailWithout(int rank, const std::string& reason);
  // Workers of these ranks take part in no round from now on, all others in each that begins.  What
  // one of them has pushed counts; what it has not, no round waits for.
  void SetAbsent(const std::set<int>& ranks);
  // Those whose deadline was before `as_of`.  Of those that began before `grace_until` the error
  // says for how long this process stood still.
  void FailLate(Clock::time_point as_of, Clock::time_point grace_until,
                Clock::duration stood_still);
  // Serving a request came to an error in its midst: fails all that is open of its partition.
  void FailPartition(Partition* partition, const Message& message, const std::string& error);
  // There was no memory for a request: fails its round, if it is a push.
  void FailRoundOf(Partition* partition, const Message& message, const std::string& reason);

  // The first deadline of a round that is not done; time_point::max() where there is none.
  Clock::time_point FirstDeadline() const;

 private:
  // By deadline; then by partition, and by round, so that the order is the same in each process.
  using Deadline = std::tuple<Clock::time_point, uint64_t, uint32_t>;
  static Deadline DeadlineOf(const Partition& partition, const Round& round) {
    return {round.deadline, partition.key, round.number};
  }

  void TakeGiven(Partition* partition, Message* message);
  // Answers a push whose round has a sum that another member has given.  False: it has none.
  bool AnswerFromGiven(Partition* partition, const Message& message, int64_t received);
  // Answers a push by the round of a lost server that was restored.  False: there is none.
  bool AnswerAgain(Partition* partition, const Message& message, int64_t received);
  // There is the sum of all pushes that a round will get.
  void EndSummed(Partition* partition, Round* round);
  // Does what a round's gradients were pushed for.  Drops no round.
  void Update(Partition* partition, Round* round);
  // True: once the backup has the gradients.
  bool CopyRound(Partition* partition, Round* round);
  bool HasCopy(const Partition& partition) const;
  // Tells the backup, for which the partition waits then.  If it throws, nothing has changed.
  void Tell(Partition* partition, Copying&& what, CopyRecord record, SharedBytes values);
  // That this step is made, or dropped, as a member's request says.
  void TellDecision(Partition* partition, Copying::Kind kind, const Message& message,
                    std::string step, int64_t received);
  void TellAll(Partition* partition, Copying&& what);
  // A partition that waited for its backup waits no more, or again: what came meanwhile.
  void EndCopying(Partition* partition);
  void TellFreed(const Partition& partition);
  static LastRound LastOf(Partition* partition);
  // The last update of a partition, of which its backup may have to be told; null: there is none.
  static RoundUpdate* LastUpdate(Partition* partition);
  // The round of a push, if it may be added; null: it was refused.
  Round* Admit(Partition* partition, const Message& message);
  // The round, made if it is new; null if it is out of reach.
  Round* FindOrBegin(Partition* partition, const PushHeader& header);
  // The pushes that were to come have come: ends the round, if it can be.
  void EndIfAll(Partition* partition, Round* round);
  Round Begin(Partition* partition, uint32_t number, uint32_t timeout_ms) const;
  void Add(Partition* partition, Round* round, size_t member, SharedBytes values);
  void Finish(Partition* partition, Round* round);
  AdditionRule RuleOf(Partition* partition, Round* round, Chance* chance) const;
  // The round will get no more pushes, and lacks those of some members.
  void CloseShort(Partition* partition, Round* round);
  // A member that has not been told all of it will not be there any more.
  void Excuse(Partition* partition, Round* round, int rank);
  // Ends rounds that wait for nobody but those who are absent.
  void EndWithoutAbsent(Partition* partition);
  // What the member of `rank` has left open of the rounds before this number failed there, and it
  // will neither push nor ask again.  Drops no round.
  void GiveUpBefore(Partition* partition, int rank, uint32_t number);
  // Whether another member has released the tensor: then the push is refused.
  bool RefuseReleased(const Partition& partition, const Message& message);
  void Release(Partition* partition, int rank);
  // Lets go of all that it has.
  void EndFreed(Partition* partition);
  // Once it waits for its backup no more.
  void FreeLater(Partition* partition, const Copying& what);
  // Replicas of which all members of the group have pushed, and of which some have not.
  struct Standing {
    std::set<uint32_t> pushed, late;
    size_t replicas = 0;  // in the group, also those that are excused
    bool anew = false;    // one that is late has pushed no round of this partition yet
  };
  Standing StandingOf(const Partition& partition, const Round& round) const;
  // A push came that completes a quorum, perhaps: the others have so long now.
  void BeginGrace(Partition* partition, Round* round);
  // What a round does at its deadline.  False: it fails.
  bool WaitOn(Partition* partition, Round* round, Clock::time_point as_of);
  // Whether those that are late may wait for a server that is lost: the round is looked at later.
  bool AreExcused(Partition* partition, Round* round, Clock::time_point as_of);
  void Postpone(Partition* partition, Round* round, Clock::time_point deadline);
  // Asks the scheduler to remove the replicas that have not pushed.
  void Accuse(const Partition& partition, const Round& round, Clock::time_point as_of);
  // Fails a round that lacks the push of a worker that is gone.
  void FailWithoutThoseGone(Partition* partition, Round* round);
  void Fail(Partition* partition, Round* round, const std::string& reason);
  // Of one that may have its sum, and have answered some with it: those who have no answer get
  // this.
  void FailUnanswered(Partition* partition, Round* round, const std::string& reason);
  // That this member has not been answered yet.
  static void CheckUntold(const Partition& partition, const Round& round, int member);
  // A round that is done, once its callers were answered: nothing waits for it any more.
  void Close(const Partition& partition, const Round& round);

  ServerContext* const context_;
  const int track_;
  const Freed freed_;
  std::vector<Partition*> partitions_;   // those that were pushed
  std::map<Deadline, Partition*> open_;  // the rounds that are not done
  std::map<int, std::string> gone_;      // rank -> why
  std::set<int> absent_;                 // ranks
  std::set<uint32_t> accused_;           // replicas that the scheduler was asked to remove
  Scratch scratch_;
  uint64_t pass_ = 0;               // with which the backup is told; 0: there is none
  std::vector<Partition*> states_;  // those that have a state
};

// What rounding lost of the last sum of a partition, of blocks with feedback: a part of a job's
// state, read and loaded as that of an optimizer is (LOAD_STATE, READ_STATE), in fp32.

// Whether a request is LOAD_STATE or READ_STATE of such a tensor, which no server updates.
bool MovesFeedback(int op, const Declaration& declaration);

// Serves one that has its form.  A member reads after it was answered, and loads before it pushes:
// no sum is complete then that the values are not of.
void MoveFeedback(ServerContext* context, Partition* partition, const Message& message,
                  int64_t received);

// What the server does for tensors with an UpdateRule, of which it keeps the parameters and their
// moments (optimizer/).
//
// When a round is complete the parameters are updated, and the answer has them.  Members that ask
// for different steps in one round get an error; the state is as it was.
//
// A step that is tried (PUSH_TRY) changes nothing: parameters are computed from the state and sent,
// and the gradients are kept.  The round stays until each member has said what becomes of the step.
// The first one who does so has it made, or dropped; a member that says something else gets an
// error.

// Whether what follows a request's header is as the tensor's rule wants it.
bool HasFormOfUpdate(const Message& message, const Declaration& declaration, uint64_t index);

// All others are of requests that have this form.  Of a push: the packed UpdateStep that it asks
// for; "" where it wants the norm first.
std::string StepOf(const Message& message);

// Takes what a member says of the step that it tried in the round of this number, if it tried one.
// A push is its last word on it.  Why it cannot be, or "".
std::string SettleStep(Rounds* rounds, Partition* partition, const Message& message,
                       uint32_t number);

// STEP.  `is_copied`: the backup has been told of it.
void ServeStep(ServerContext* context, Rounds* rounds, Partition* partition, const Message& message,
               int64_t received, bool is_copied = false);
// LOAD_STATE and READ_STATE.  `is_copied`: the backup has been told what a READ_STATE says.
void MoveState(ServerContext* context, Rounds* rounds, Partition* partition, const Message& message,
               int64_t received, bool is_copied = false);

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_SERVER_ROUNDS_H_
