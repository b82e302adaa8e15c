// The tensors that a worker sums, and what the servers know of them, from declaration to release.
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

// A worker's progress with a name: how often it released the name, and how many rounds it has begun
// since then.
struct Progress {
  uint32_t life = 0;
  uint32_t rounds = 0;
  bool operator==(const Progress&) const = default;
};
// By id of the name: the group's lowest rank, and the name.
using ProgressByTensor = std::map<std::string, Progress>;

class LossPolicy;

// Thread-safe. Holds no lock while anything is sent.
class Declarations {
 public:
  // The arguments outlive this.
  Declarations(const Plan* plan, Channel* channel, const Vacancies* vacancies, LossPolicy* losses,
               double timeout_s);

  // Whether `tensor` is from this object (not from an earlier job) and not released.
  bool Own(const Tensor& tensor) const { return tensor.job == job_ && !tensor.is_released; }

  // Returns the tensors of these specs, in order. Declares new ones to every server, all in one
  // message per server, and blocks until all servers have answered. Throws UsageError if a name has
  // another declaration, Error if a server refuses or does not answer in time.
  std::vector<TensorPtr> Declare(const std::vector<TensorSpec>& specs);

  // A server answered message `number`. `error`: why it refused, or "".
  void OnAnswer(uint64_t number, const std::string& error);

  // Releases the names of tensors whose groups have this lowest rank. From now on they can be
  // declared anew, with any shape. Servers free a tensor when all members have released it; this
  // worker does when its operations have ended. A name that was never declared counts as released,
  // too, because members that have released a name equally often declare the same life of it.
  //
  // Keeps a number for each name that was ever released.
  void Release(const std::vector<std::string>& names, uint32_t lowest_rank);
  // The last use of these tensors has ended: tells the servers.
  void GiveBack(const std::vector<TensorPtr>& tensors);
  // A server has freed the tensors of release message `number`.
  void OnReleased(uint64_t number);
  // A server was replaced, and its successor has this worker's data: repeats open releases.
  void ReleaseAgain(int server);

  // A server was replaced: declares all tensors to its successor. `then` gets the reason if it
  // refused, or "", on the thread that receives the answer.
  void TellAgain(int server, std::function<void(const std::string&)> then);
  // By key, the oldest round that has not ended, of every tensor that has begun a round.
  std::map<uint64_t, uint32_t> OldestRounds();
  // Name of a tensor that servers update, or "".
  std::string AnyUpdated();

  // Rejects all further declarations.
  void Fail(const std::string& reason);

  // This worker's progress with each name.
  ProgressByTensor Rounds();
  // Names whose next round is at most the given one.
  std::vector<std::string> NotBegun(const std::map<std::string, uint32_t>& rounds);
  // Adopts the progress of another worker, for names that are declared (without a round begun) or
  // that will be. Gives back tensors of other lives.
  void SetRounds(const ProgressByTensor& progress);

  size_t size();
  // Number of open messages.
  size_t unanswered();

 private:
  enum class State { kNew, kAsked, kDeclared };
  struct Entry {
    TensorPtr tensor;
    State state = State::kNew;
  };
  using EntryPtr = std::shared_ptr<Entry>;
  // A tensor that servers may hold.
  struct Told {
    TensorPtr tensor;
    bool is_refused = false;
  };
  // A list of declarations in flight to all servers.
  struct Exchange {
    std::string first_name;
    size_t count = 0;
    size_t unanswered = 0;
    std::string error;
    std::string body;
    uint64_t key = 0;                              // key of the first tensor
    std::function<void(const std::string&)> then;  // null: a caller waits
  };

  // Tensors that were released by one message to each server.
  struct Releasing {
    std::vector<TensorPtr> tensors;
    std::string body;
    size_t unanswered = 0;
  };

  EntryPtr Find(const TensorSpec& spec);
  // Returns the entries that are new, and marks them as asked.
  std::vector<EntryPtr> ClaimNew(const std::vector<EntryPtr>& entries);
  void Tell(const std::vector<EntryPtr>& entries);
  // All or none. Throws UsageError if a tensor was released meanwhile.
  void BeginUse(const std::vector<EntryPtr>& entries);
  void EndUse(const std::vector<EntryPtr>& entries);
  void Send(const std::shared_ptr<Exchange>& exchange, const std::vector<EntryPtr>& entries);
  void AwaitAnswers(const std::shared_ptr<Exchange>& exchange);
  void SetState(const std::vector<EntryPtr>& entries, State state);
  // Waits until no other thread declares any of them. Returns whether all are declared.
  bool AwaitOthers(const std::vector<EntryPtr>& entries);
  // Starts the name's next life. Returns the tensor of the ended life if that was its last use.
  TensorPtr EndLife(const std::string& id) PS_REQUIRES(mu_);

  const uint64_t job_;
  const Plan* const plan_;
  Channel* const channel_;
  const Vacancies* const vacancies_;
  LossPolicy* const losses_;
  const double timeout_s_;

  ps::Mutex mu_;
  ps::CondVar cond_;  // an answer came, a state changed, or the job failed
  std::string failure_ PS_GUARDED_BY(mu_);
  std::map<std::string, EntryPtr> entries_ PS_GUARDED_BY(mu_);  // by id
  std::map<uint64_t, Told> told_ PS_GUARDED_BY(mu_);            // by key, until freed
  std::map<std::string, uint32_t> lives_ PS_GUARDED_BY(mu_);    // by id; zeros are left out
  std::map<std::string, uint32_t> rounds_ PS_GUARDED_BY(mu_);  // by id, of tensors not declared yet
  std::unordered_map<uint64_t, std::pair<std::shared_ptr<Exchange>, int>> messages_
      PS_GUARDED_BY(mu_);  // by number, with the server
  // By message number, with the server; until answered.
  std::map<uint64_t, std::pair<std::shared_ptr<Releasing>, int>> releasing_ PS_GUARDED_BY(mu_);
  uint64_t last_message_ PS_GUARDED_BY(mu_) = 0;
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_ENGINE_DECLARATIONS_H_
