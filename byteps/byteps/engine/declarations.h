// The tensors that a worker sums: how they are cut, what servers were told of them, and what is
// left of them where a server is lost.
#ifndef BYTEPS_ENGINE_DECLARATIONS_H_
#define BYTEPS_ENGINE_DECLARATIONS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "byteps/base/config.h"
#include "byteps/base/mutex.h"
#include "byteps/base/protocol.h"
#include "byteps/cluster/channel.h"
#include "byteps/cluster/vacancies.h"
#include "byteps/device/device.h"
#include "byteps/engine/round_window.h"

namespace byteps {
namespace core {

// What a worker decides about a tensor before anything is sent: how it is cut, and which
// server sums which partition.

// A tensor as its owner describes it.
struct TensorSpec {
  std::string name;
  DType dtype = DType::kFloat32;
  uint64_t bytes = 0;
  uint64_t piece_of = 0;  // bytes of the tensor that this one is a piece of, if it is one
  bool average = true;
  bool in_order = false;                             // see Declaration
  bool feedback = false;                             // of blocks: see Declaration
  RankGroup group;                                   // ranks that sum; empty: all workers
  std::optional<uint64_t> placement;                 // none: from the key
  int device = kCpu;                                 // where it lies
  std::shared_ptr<const UpdateRule> rule = nullptr;  // how servers update it, if they do
};

// Any thread, once the link is set; from then on it does not change.
class Plan {
 public:
  Plan(const Config& config, const Launch& launch, int num_servers);

  // Gbit/s each way of the slowest worker's NIC, to which cores copy; the same on all
  // workers.  0: not known.
  void SetLink(double gbps) { link_bytes_per_s_ = gbps * 1e9 / 8; }

  int num_servers() const { return num_servers_; }
  const Launch& launch() const { return launch_; }
  // Bytes of the largest partition that any tensor can have.
  uint32_t largest_partition() const { return largest_partition_; }

  // Bytes of the partitions of a tensor of `bytes` bytes.  Those of a piece are as long as those of
  // the tensor that it is a piece of: each has a cost of its own, and a server has many of all
  // pieces together.
  uint32_t PartitionBytes(DType dtype, uint64_t bytes, uint64_t piece_of = 0,
                          bool updated = false) const;

  // What this worker tells the servers.  Throws UsageError when the tensor cannot be summed.
  Declaration Declare(const TensorSpec& spec) const;

  // Where the partitions go, and when.
  struct Layout {
    int rank = 0;                 // this worker's
    std::vector<int> servers;     // by partition
    std::vector<uint32_t> order;  // in which this worker pushes them
  };

  // Among the partitions that one round of dealing gives to the servers, each worker begins
  // with a server of its own: else all would send to the same one at once.
  Layout LayOut(const Declaration& declaration) const;

  std::vector<uint64_t> BytesPerServer(const TensorSpec& spec) const;

 private:
  const Launch launch_;
  const RankGroup all_;  // workers
  const int num_servers_;
  const uint32_t smallest_partition_;
  const uint32_t largest_partition_;
  const bool stochastic_;
  const Patience patience_;
  const KeyHash hash_;
  double link_bytes_per_s_ = 0;
};

// The tensors that this worker sums, and what it told the servers of them.

// A name that is summed.  Of what follows only the atomics change, and `running`.
struct Tensor {
  uint64_t job = 0;  // of the Declarations that made it
  Declaration declaration;
  uint64_t key = 0;
  Plan::Layout layout;
  std::atomic<uint32_t> rounds{0};    // that this worker has begun
  std::atomic<uint32_t> oldest{0};    // of the rounds that have not ended, or the next one
  std::atomic<bool> has_room{false};  // in pinned memory, for a tensor on a GPU
  std::set<uint32_t> running;         // the rounds that have not ended; of Operations, by its lock
  RoundWindow window{&oldest};
};
using TensorPtr = std::shared_ptr<Tensor>;

// Any thread may call anything.  No lock is held while anything is sent.
class Declarations {
 public:
  // What is pointed to outlives this.
  Declarations(const Plan* plan, Channel* channel, const Vacancies* vacancies, double timeout_s);

  // Whether a tensor is one of these, and not of a job before.
  bool Own(const Tensor& tensor) const { return tensor.job == job_; }

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

  const uint64_t job_;
  const Plan* const plan_;
  Channel* const channel_;
  const Vacancies* const vacancies_;
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

// What a worker has in hand where the job may go on without a server, until another one has its
// place (docs/design/replicas.md): the sums that other members may lack, and which servers nothing
// is sent to meanwhile.

// The sum of a partition, as this worker was answered.
struct KeptSum {
  TensorPtr tensor;
  uint64_t index = 0;
  uint32_t round = 0;
  SharedBytes values;  // empty: this worker wanted a part of it alone
  std::string lacks;   // PackMembers of those that it lacks
};

// Any thread may call anything.
class KeptSums {
 public:
  explicit KeptSums(int num_servers) : servers_(num_servers) {}

  void Keep(int server, KeptSum sum);
  // All members have ended the rounds of this partition before this one.
  void Drop(int server, const Tensor& tensor, uint64_t index, uint32_t before);
  // Those of a server's partitions, the older ones of each first.
  std::vector<KeptSum> Of(int server);
  uint64_t bytes();

 private:
  using Key = std::pair<uint64_t, uint32_t>;  // of the partition, and the round

  ps::Mutex mu_;
  std::vector<std::map<Key, KeptSum>> servers_ PS_GUARDED_BY(mu_);
  uint64_t bytes_ PS_GUARDED_BY(mu_) = 0;
};

struct ServerLoss {
  ServerLoss(bool keeps, bool has_backups, int num_servers)
      : keeps(keeps),
        has_backups(has_backups),
        held(num_servers),
        turns(num_servers),
        gifts(num_servers),
        kept(num_servers) {}

  // Whether a server may be replaced.  If not, nothing of this is used.
  const bool keeps;
  // Whether another server has a copy of its state for optimizers.
  const bool has_backups;
  // To read: from before a request is remembered until it is sent, or not; and while an answer is
  // taken and kept.  So who holds it to write sees each partition in one place.
  ps::SharedMutex mu;
  std::vector<bool> held PS_GUARDED_BY(mu);  // by server: what is sent to it would be lost
  // By server that has come: the number of the requests by which it is told where this worker goes
  // on; and how many of the sums that it was given it has not answered.
  std::vector<uint64_t> turns PS_GUARDED_BY(mu);
  std::vector<size_t> gifts PS_GUARDED_BY(mu);
  uint64_t last_turn PS_GUARDED_BY(mu) = 0;
  // To which these requests go; -1: to one that is lost by now.
  int ServerOf(uint64_t turn) const PS_REQUIRES_SHARED(mu);
  KeptSums kept;
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_ENGINE_DECLARATIONS_H_
