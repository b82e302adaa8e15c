// Declarations: the tensors that a worker sums, from declaration to release, and the servers that
// know them.
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

// A worker's progress with the name of a tensor.
struct Progress {
  uint32_t releases = 0;  // number of times that the worker has released the name
  uint32_t rounds = 0;    // number of rounds that the worker has begun since then
  bool operator==(const Progress&) const = default;
};
// Progress by id of a name. An id consists of the group's lowest rank and the name.
using ProgressByTensor = std::map<std::string, Progress>;

class LossPolicy;

// Thread-safe. Holds no lock while it sends messages.
class Declarations {
 public:
  // The arguments outlive this.
  Declarations(const Plan* plan, Channel* channel, const Vacancies* vacancies, LossPolicy* losses,
               double timeout_s);

  // Returns whether this object has made `tensor` (a tensor may be from an earlier job), and the
  // tensor is not released.
  bool Own(const Tensor& tensor) const { return tensor.job == job_ && !tensor.is_released; }

  // Returns the tensors of these specs, in order. Declares new tensors to every server, all in one
  // message per server, and blocks until all servers have answered. Throws UsageError if a name has
  // another declaration, and Error if a server refuses or does not answer in time.
  std::vector<TensorPtr> Declare(const std::vector<TensorSpec>& specs);

  // Handles a server's answer to declaration message `number`. `error`: its refusal, or "".
  void OnAnswer(uint64_t number, const std::string& error);

  // Releases the names of tensors whose groups have this lowest rank. From now on the names can be
  // declared anew, with any shape. Servers free a tensor when all members have released it. This
  // worker frees it when its operations have ended. A release counts even if the name was never
  // declared, because members declare the same tensor if they have released its name equally often.
  //
  // Keeps the number of releases of each name that was ever released.
  void Release(const std::vector<std::string>& names, uint32_t lowest_rank);
  // Tells the servers that this worker's last operation on these tensors has ended.
  void GiveBack(const std::vector<TensorPtr>& tensors);
  // Records that a server has freed the tensors of release message `number`.
  void OnReleased(uint64_t number);
  // Repeats the releases that a lost server has not answered. Called when its successor has this
  // worker's declarations and sums.
  void ReleaseAgain(int server);

  // Declares all tensors to the successor of a lost server. The thread that receives the answer
  // calls `then`: with the reason if the successor refused, otherwise with "".
  void TellAgain(int server, std::function<void(const std::string&)> then);
  // Returns, by key, the oldest round that has not ended, for every tensor that has begun a round.
  std::map<uint64_t, uint32_t> OldestRounds();
  // Returns the name of any tensor that servers update, or "".
  std::string AnyUpdated();

  // Rejects all further declarations.
  void Fail(const std::string& reason);

  // Returns this worker's progress with each name.
  ProgressByTensor Rounds();
  // Returns the names of which this worker has not begun the given round.
  std::vector<std::string> NotBegun(const std::map<std::string, uint32_t>& rounds);
  // Adopts the progress of another worker, for names that will be declared, or that are declared
  // but have begun no round. Releases tensors whose number of releases differs from the adopted
  // one.
  void SetRounds(const ProgressByTensor& progress);

  size_t size();
  // Number of messages that servers have not answered.
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
    std::function<void(const std::string&)> then;  // see TellAgain; null: a thread waits in Declare
  };

  // Tensors that one message to each server has released.
  struct Releasing {
    std::vector<TensorPtr> tensors;
    std::string body;
    size_t unanswered = 0;
  };

  EntryPtr Find(const TensorSpec& spec);
  // Returns the entries that no thread has declared or is declaring. Marks them as being declared.
  std::vector<EntryPtr> ClaimNew(const std::vector<EntryPtr>& entries);
  void Tell(const std::vector<EntryPtr>& entries);
  // Begins the use of all these tensors. If another thread has released one in between, throws
  // UsageError and begins no use.
  void BeginUse(const std::vector<EntryPtr>& entries);
  void EndUse(const std::vector<EntryPtr>& entries);
  void Send(const std::shared_ptr<Exchange>& exchange, const std::vector<EntryPtr>& entries);
  void AwaitAnswers(const std::shared_ptr<Exchange>& exchange);
  void SetState(const std::vector<EntryPtr>& entries, State state);
  // Waits until no other thread declares any of these entries. Returns whether all are declared.
  bool AwaitOthers(const std::vector<EntryPtr>& entries);
  // Counts a release of this id. Returns its tensor if no operation uses the tensor, otherwise
  // null.
  TensorPtr ReleaseId(const std::string& id) PS_REQUIRES(mu_);

  const uint64_t job_;
  const Plan* const plan_;
  Channel* const channel_;
  const Vacancies* const vacancies_;
  LossPolicy* const losses_;
  const double timeout_s_;

  ps::Mutex mu_;
  ps::CondVar cond_;  // an answer came, a state changed, or the job failed
  std::string failure_ PS_GUARDED_BY(mu_);
  std::map<std::string, EntryPtr> entries_ PS_GUARDED_BY(mu_);   // by id
  std::map<uint64_t, Told> told_ PS_GUARDED_BY(mu_);             // by key, until freed
  std::map<std::string, uint32_t> releases_ PS_GUARDED_BY(mu_);  // by id; zeros are left out
  // Rounds that tensors have begun which are not declared yet (SetRounds), by id.
  std::map<std::string, uint32_t> rounds_ PS_GUARDED_BY(mu_);
  std::unordered_map<uint64_t, std::pair<std::shared_ptr<Exchange>, int>> messages_
      PS_GUARDED_BY(mu_);  // declaration messages and their servers, by number
  // Release messages and their servers, by number, until they are answered.
  std::map<uint64_t, std::pair<std::shared_ptr<Releasing>, int>> releasing_ PS_GUARDED_BY(mu_);
  uint64_t last_message_ PS_GUARDED_BY(mu_) = 0;
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_ENGINE_DECLARATIONS_H_
