// The tensors that this worker sums, and what it told the servers of them.
#ifndef BYTEPS_ENGINE_DECLARATIONS_H_
#define BYTEPS_ENGINE_DECLARATIONS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/base/protocol.h"
#include "byteps/cluster/channel.h"
#include "byteps/engine/plan.h"

namespace byteps {
namespace core {

// A name that is summed.  Of what follows only the atomics change, and `running`.
struct Tensor {
  Declaration declaration;
  uint64_t key = 0;
  Plan::Layout layout;
  std::atomic<uint32_t> rounds{0};    // that this worker has begun
  std::atomic<uint32_t> oldest{0};    // of the rounds that have not ended, or the next one
  std::atomic<bool> has_room{false};  // in pinned memory, for a tensor on a GPU
  std::set<uint32_t> running;         // the rounds that have not ended; of Operations, by its lock
};
using TensorPtr = std::shared_ptr<Tensor>;

// Any thread may call anything.  No lock is held while anything is sent.
class Declarations {
 public:
  // `plan` and `channel` outlive this.
  Declarations(const Plan* plan, Channel* channel, double timeout_s);

  // The tensors of these specs, in their order.  What the servers do not know yet is told to
  // them by one message to each; blocks until all have answered.  Throws UsageError when a name
  // was declared otherwise, Error when the servers refuse or do not answer in time.
  std::vector<TensorPtr> Declare(const std::vector<TensorSpec>& specs);

  // A server answered message `number`; `error` says why it refused, if it did.
  void OnAnswer(uint64_t number, const std::string& error);

  // Another server has the place of this one: it is told of all tensors; `then` gets why it refused
  // them, or nothing, on the thread that has its answer.
  void TellAgain(int server, std::function<void(const std::string&)> then);
  // Of each tensor of which a round was begun, by its key: the first one that has not ended.
  std::map<uint64_t, uint32_t> OldestRounds();
  // The name of a tensor whose optimizer state servers have; empty: there is none.
  std::string AnyUpdated();

  // Nothing more can be declared.
  void Fail(const std::string& reason);

  // How many rounds of each tensor were begun, by its id: lowest rank and name.
  std::map<std::string, uint32_t> Rounds();
  // Those of these tensors, by name, of which the given round, or an earlier one, is the next.
  std::vector<std::string> NotBegun(const std::map<std::string, uint32_t>& rounds);
  // That so many were, of tensors that this worker has begun none of, or will declare: it goes on
  // where another worker is.
  void SetRounds(const std::map<std::string, uint32_t>& rounds);

  size_t size();
  // Answers that are awaited.
  size_t unanswered();

 private:
  enum class State { kNew, kAsked, kDeclared };
  struct Entry {
    TensorPtr tensor;
    State state = State::kNew;
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

  Entry* Find(const TensorSpec& spec);
  // Of these, the ones that nobody has told the servers of; they count as asked from now on.
  std::vector<Entry*> ClaimNew(const std::vector<Entry*>& entries);
  void Tell(const std::vector<Entry*>& entries);
  void Send(const std::shared_ptr<Exchange>& exchange, const std::vector<Entry*>& entries);
  void AwaitAnswers(const std::shared_ptr<Exchange>& exchange);
  void SetState(const std::vector<Entry*>& entries, State state);
  // Whether all are declared, once nobody is telling the servers of any of them.
  bool AwaitOthers(const std::vector<Entry*>& entries);

  const Plan* const plan_;
  Channel* const channel_;
  const double timeout_s_;

  ps::Mutex mu_;
  ps::CondVar cond_;  // an answer came, a state changed, or all failed
  std::string failure_ PS_GUARDED_BY(mu_);
  std::map<std::string, Entry> entries_
      PS_GUARDED_BY(mu_);  // by lowest rank and name; never erased
  std::map<std::string, uint32_t> rounds_ PS_GUARDED_BY(mu_);  // of tensors to come, by id
  std::unordered_map<uint64_t, std::pair<std::shared_ptr<Exchange>, int>> messages_
      PS_GUARDED_BY(mu_);  // and server
  uint64_t last_message_ PS_GUARDED_BY(mu_) = 0;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_ENGINE_DECLARATIONS_H_
