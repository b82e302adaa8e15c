// Requests: what was sent to servers about partitions and is not answered yet.
#ifndef BYTEPS_ENGINE_REQUESTS_H_
#define BYTEPS_ENGINE_REQUESTS_H_

#include <cstdint>
#include <map>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/engine/operation.h"

namespace byteps {
namespace core {

// The requests about partitions that no server has answered yet.
struct Request {
  OperationPtr operation;
  uint64_t index = 0;
  int server = 0;
  int64_t sent = 0;   // SteadyNs
  PinnedBlock block;  // into which the answer is being received

  PartitionTimes* times() const {
    return operation->times.empty() ? nullptr : &operation->times[index];
  }
};

// Any thread may call anything.
class Requests {
 public:
  // Returns its number, by which the answer will name it.
  uint64_t Remember(Request request);
  // Takes it out.  False when there is none of this number after Clear; throws Error before that.
  bool Take(uint64_t number, Request* request);
  // As Take, and leaves it in.
  bool Peek(uint64_t number, Request* request);
  // Keeps the memory that the answer is received into.  False when there is no such request.
  bool KeepBlock(uint64_t number, PinnedBlock block);

  // From now on it is known of each server what it has answered.
  void Track() { tracks_ = true; }
  // The first request to this server that it has not answered, or the next one to any.
  uint64_t FirstOpen(int server);
  bool HasOpen(int server);

  // Takes those out that this server has not answered, by number; what it answers to them later is
  // for nobody.
  std::vector<Request> TakeBack(int server);

  std::vector<Request> All();
  size_t size();
  void Clear();

 private:
  ps::Mutex mu_;
  uint64_t last_ PS_GUARDED_BY(mu_) = 0;
  bool cleared_ PS_GUARDED_BY(mu_) = false;
  std::unordered_map<uint64_t, Request> by_number_ PS_GUARDED_BY(mu_);
  std::unordered_set<uint64_t> taken_back_ PS_GUARDED_BY(mu_);
  bool tracks_ = false;
  std::map<int, std::set<uint64_t>> open_ PS_GUARDED_BY(mu_);  // by server, where it is known
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_ENGINE_REQUESTS_H_
