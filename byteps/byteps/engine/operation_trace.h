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

// Writes a worker's operations into the timeline. Does nothing for operations that are not traced.
//
// Thread-safe.
class OperationTrace {
 public:
  // `tracer`: the timeline, or null to trace nothing.
  OperationTrace(std::unique_ptr<Tracer> tracer, int rank);

  // Adds a track for the slices of one thread.
  int AddTrack(const std::string& name);

  // Decides whether to trace an operation. Call when the operation has its round, and before other
  // threads see it.
  void Begin(Operation* operation);

  // Records work on a partition, from `begin` until now.
  void Slice(const Operation& operation, uint64_t index, int track, const char* name, int64_t begin,
             TraceArrow arrow);
  // Announces a copy that CopySlice will record.
  void BeginCopy(const Operation& operation) { Expect(operation); }
  // Withdraws the announcement of a copy that is not made.
  void DropCopy(const Operation& operation) { Told(operation); }
  // Records a copy that is done now. Its slice begins when the copy was enqueued (`enqueued`), or
  // when the previous copy in this direction was done, if that was later.
  void CopySlice(const Operation& operation, uint64_t index, bool to_host, int64_t enqueued);
  // Records all stages of a partition. `done`: time at which the partition's sum was there; 0 if
  // the partition failed.
  void Row(const Operation& operation, uint64_t index, int64_t done);

  // Waits up to a second for announced slices, then writes the file.
  void Write();

  // Announces a slice that may be recorded after its operation has ended.
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
  ps::CondVar cond_;                     // a slice was recorded or dropped
  int expected_ PS_GUARDED_BY(mu_) = 0;  // number of slices announced and not recorded yet
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_ENGINE_OPERATION_TRACE_H_
