// Requests about partitions that were sent and are not answered yet.
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

// A request about a partition that its server has not answered.
struct Request {
  OperationPtr operation;
  uint64_t index = 0;
  int server = 0;
  int64_t sent = 0;   // SteadyNs
  PinnedBlock block;  // receives the answer

  PartitionTimes* times() const {
    return operation->times.empty() ? nullptr : &operation->times[index];
  }
};

// Thread-safe.
class Requests {
 public:
  // Adds a request and returns its number, which the answer carries.
  uint64_t Remember(Request request);
  // Removes a request. If there is no such request, throws Error; after Clear, returns false.
  bool Take(uint64_t number, Request* request);
  // Copies a request, and does not remove it. Returns false if there is no such request.
  bool Peek(uint64_t number, Request* request);
  // Makes the request hold the memory that receives the answer. Returns false if there is no such
  // request.
  bool KeepBlock(uint64_t number, PinnedBlock block);

  // Enables FirstOpen and HasOpen. Call before the first request.
  void Track() { tracks_ = true; }
  // Returns the number of the oldest request that `server` has not answered. If it has answered
  // all, returns the number of the next request.
  uint64_t FirstOpen(int server);
  bool HasOpen(int server);

  // Removes the requests that `server` has not answered, and returns them in the order of their
  // numbers. Later answers to them are ignored.
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
  std::map<int, std::set<uint64_t>> open_ PS_GUARDED_BY(mu_);  // by server; used if tracks_
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_ENGINE_REQUESTS_H_
