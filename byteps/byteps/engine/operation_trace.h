#ifndef BYTEPS_ENGINE_OPERATION_TRACE_H_
#define BYTEPS_ENGINE_OPERATION_TRACE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "byteps/base/mutex.h"
#include "byteps/engine/operation.h"
#include "byteps/observe/trace.h"

namespace byteps {
namespace core {

// What a worker tells the timeline.
//
// Any thread may call anything.  Nothing happens for operations that are not traced.
class OperationTrace {
 public:
  // Without a tracer nothing is traced.
  OperationTrace(std::unique_ptr<Tracer> tracer, int rank);

  // A track for the slices of one thread.
  int AddTrack(const std::string& name);

  // Of an operation that has its round, and that nobody else has yet: whether to trace it.
  void Begin(Operation* operation);

  // Work on a partition, from `begin` until now.
  void Slice(const Operation& operation, uint64_t index, int track, const char* name, int64_t begin,
             TraceArrow arrow);
  // A copy begins, of which CopySlice will tell.
  void BeginCopy(const Operation& operation) { Expect(operation); }
  // It is not made after all.
  void DropCopy(const Operation& operation) { Told(operation); }
  // A copy of one of the GPU's two directions, done now.  It began when it was enqueued, or when
  // the one before it was done.
  void CopySlice(const Operation& operation, uint64_t index, bool to_host, int64_t enqueued);
  // The whole way of a partition.  `done` is when its sum was there; 0: it failed.
  void Row(const Operation& operation, uint64_t index, int64_t done);

  // Waits a little for what has begun, and writes the file.
  void Write();

  // While it lives, a slice is still to come: what it is of may be over before it is told.
  class Pending {
   public:
    Pending(OperationTrace* trace, const Operation& operation)
        : trace_(trace), operation_(operation) {
      trace_->Expect(operation_);
    }
    ~Pending() { trace_->Told(operation_); }
    Pending(const Pending&) = delete;
    Pending& operator=(const Pending&) = delete;

   private:
    OperationTrace* const trace_;
    const Operation& operation_;
  };

 private:
  struct Copies {
    const char* name = "";
    std::once_flag made;
    int track = 0;
    std::atomic<int64_t> last_done{0};
  };

  TracedPartition Traced(const Operation& operation, uint64_t index) const;
  void Expect(const Operation& operation);
  void Told(const Operation& operation);

  const std::unique_ptr<Tracer> tracer_;
  const int rank_;
  Copies to_host_;
  Copies to_device_;

  ps::Mutex mu_;
  ps::CondVar cond_;                     // something was told
  int expected_ PS_GUARDED_BY(mu_) = 0;  // and not told yet
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_ENGINE_OPERATION_TRACE_H_
