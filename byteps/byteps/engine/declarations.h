// The tensors that a worker sums, and what servers were told of them, from declaration to release.
#ifndef BYTEPS_ENGINE_DECLARATIONS_H_
#define BYTEPS_ENGINE_DECLARATIONS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/cluster/channel.h"
#include "byteps/cluster/vacancies.h"
#include "byteps/engine/plan.h"
#include "byteps/engine/tensor.h"

namespace byteps {
namespace core {

// A worker's place in the life of a name: how often it has released it, and how many rounds it has
// begun since.
struct Progress {
  uint32_t life = 0;
  uint32_t rounds = 0;
  bool operator==(const Progress&) const = default;
};
// By the names' ids: lowest rank of the group, and name.
using ProgressByTensor = std::map<std::string, Progress>;

class LossPolicy;

// Any thread may call anything.  No lock is held while anything is sent.
class Declarations {
 public:
  // What is pointed to outlives this.
  Declarations(const Plan* plan, Channel* channel, const Vacancies* vacancies, LossPolicy* losses,
               double timeout_s);

  // Whether a tensor is one of these, and neither of a job before nor released.
  bool Own(const Tensor& tensor) const { return tensor.job == job_ && !tensor.is_released; }

  // The tensors of these specs, in their order.  What the servers do not know yet is told to
  // them by one message to each; blocks until all have answered.  Throws UsageError when a name
  // was declared otherwise, Error when the servers refuse or do not answer in time.
  std::vector<TensorPtr> Declare(const std::vector<TensorSpec>& specs);

  // A server answered message `number`; `error` says why it refused, if it did.
  void OnAnswer(uint64_t number, const std::string& error);

  // Names of tensors whose groups have this lowest rank.  They stand for other tensors from now on,
  // of any shape.  Servers give up what they have of these once no member holds them, this worker
  // until what it has begun of them has ended.  Names that were not declared count as released,
  // too: the next life of a name is that of the members that have released it as often.
  //
  // Keeps a number for each name that was ever released.
  void Release(const std::vector<std::string>& names, uint32_t lowest_rank);
  // The last use of these has ended: tells the servers.
  void GiveBack(const std::vector<TensorPtr>& tensors);
  // A server has freed what message `number` has released.
  void OnReleased(uint64_t number);
  // Another server has all that this worker had for it: it is told what was released.
  void ReleaseAgain(int server);

  // Another server has the place of this one: it is told of all tensors; `then` gets why it refused
  // them, or nothing, on the thread that has its answer.
  void TellAgain(int server, std::function<void(const std::string&)> then);
  // Of each tensor of which a round was begun, by its key: the first one that has not ended.
  std::map<uint64_t, uint32_t> OldestRounds();
  // The name of a tensor whose optimizer state servers have; empty: there is none.
  std::string AnyUpdated();

  // Nothing more can be declared.
  void Fail(const std::string& reason);

  // This worker's place in the life of each name.
  ProgressByTensor Rounds();
  // Those of these tensors, by name, of which the given round, or an earlier one, is the next.
  std::vector<std::string> NotBegun(const std::map<std::string, uint32_t>& rounds);
  // Says that it is so far, with tensors of which it has begun no rounds, or that it will declare:
  // it goes on where another worker is.  What it has declared in another life is given back.
  void SetRounds(const ProgressByTensor& progress);

  size_t size();
  // Answers that are awaited.
  size_t unanswered();

 private:
  enum class State { kNew, kAsked, kDeclared };
  struct Entry {
    TensorPtr tensor;
    State state = State::kNew;
  };
  using EntryPtr = std::shared_ptr<Entry>;
  // A tensor that servers may have.
  struct Told {
    TensorPtr tensor;
    bool is_refused = false;
  };
  // One list, in flight to all servers.
  struct Exchange {
    std::string first_name;
    size_t count = 0;
    size_t unanswered = 0;
    std::string error;
    std::string body;
    uint64_t key = 0;                              // of the first
    std::function<void(const std::string&)> then;  // null: a caller waits
  };

  // Tensors that were released by one message to each server.
  struct Releasing {
    std::vector<TensorPtr> tensors;
    std::string body;
    size_t unanswered = 0;
  };

  EntryPtr Find(const TensorSpec& spec);
  // Of these, the ones that nobody has told the servers of; they count as asked from now on.
  std::vector<EntryPtr> ClaimNew(const std::vector<EntryPtr>& entries);
  void Tell(const std::vector<EntryPtr>& entries);
  // All or none of them are used by it.  Throws UsageError where one was released meanwhile.
  void BeginUse(const std::vector<EntryPtr>& entries);
  void EndUse(const std::vector<EntryPtr>& entries);
  void Send(const std::shared_ptr<Exchange>& exchange, const std::vector<EntryPtr>& entries);
  void AwaitAnswers(const std::shared_ptr<Exchange>& exchange);
  void SetState(const std::vector<EntryPtr>& entries, State state);
  // Whether all are declared, once nobody is telling the servers of any of them.
  bool AwaitOthers(const std::vector<EntryPtr>& entries);
  // The name stands for another tensor.  The one that it stood for, if that was its last use.
  TensorPtr EndLife(const std::string& id) PS_REQUIRES(mu_);

  const uint64_t job_;
  const Plan* const plan_;
  Channel* const channel_;
  const Vacancies* const vacancies_;
  LossPolicy* const losses_;
  const double timeout_s_;

  ps::Mutex mu_;
  ps::CondVar cond_;  // an answer came, a state changed, or all failed
  std::string failure_ PS_GUARDED_BY(mu_);
  std::map<std::string, EntryPtr> entries_ PS_GUARDED_BY(mu_);  // by lowest rank and name
  std::map<uint64_t, Told> told_ PS_GUARDED_BY(mu_);            // by key, until it is given back
  std::map<std::string, uint32_t> lives_ PS_GUARDED_BY(mu_);    // by id; those that are not 0
  std::map<std::string, uint32_t> rounds_ PS_GUARDED_BY(mu_);   // of tensors to come, by id
  std::unordered_map<uint64_t, std::pair<std::shared_ptr<Exchange>, int>> messages_
      PS_GUARDED_BY(mu_);  // and server
  // By the number of a message that was not answered, and its server.
  std::map<uint64_t, std::pair<std::shared_ptr<Releasing>, int>> releasing_ PS_GUARDED_BY(mu_);
  uint64_t last_message_ PS_GUARDED_BY(mu_) = 0;
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_ENGINE_DECLARATIONS_H_
