#ifndef BYTEPS_ENGINE_PULLER_H_
#define BYTEPS_ENGINE_PULLER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "byteps/base/mutex.h"
#include "byteps/cluster/channel.h"
#include "byteps/device/copy_queue.h"
#include "byteps/engine/engine_context.h"
#include "byteps/engine/requests.h"

namespace byteps {
namespace core {

// The way of a sum from its server.
//
// Values of a tensor on the CPU are received straight into it, and the thread that received them
// only counts; those of a tensor on a GPU are received into pinned memory, from which a pull loop
// has them copied: the one that does so already, or else another.  What was received elsewhere,
// since the transport cannot do better or no pinned memory was free, is copied by a pull loop.

class Puller {
 public:
  // `context` outlives this.
  explicit Puller(EngineContext* context);

  // As ChannelUser has them, of what is no declaration.
  char* PlaceFor(const MessageHead& head, size_t bytes);
  void OnAnswer(Message* message);

  // One of BYTEPS_PUSH_THREAD loops; returns when this is closed and nothing is left to do.
  void Loop(int track);
  void Close() { queue_->Close(); }

  size_t queued() { return queue_->Size(); }

 private:
  struct Arrived {
    Request request;
    SharedBytes values;  // empty when they are in request.block
  };
  using Queue = BlockingQueue<Arrived>;

  // Of a PUSH_TRY, the sums that come with the parameters.
  static void KeepSums(const Message& message, const Request& request);
  // Members whose values the sum lacks, as the answer says.
  void NoteMissing(const Message& message, const Request& request);
  // Why an answer cannot be used; empty if it can.
  std::string Refusal(const Message& message, const Request& request);
  // Of a request that was open until now.  Throws Error.
  void HandleAnswer(Message* message, Request request);
  void OnSum(Message* message, Request request);
  void Fail(const Request& request, const std::string& error);
  void Handle(Arrived* arrived, int track);
  // Of a tensor on the CPU: copies or decodes what came.  False when the operation failed, and
  // nothing may be written.
  bool CopyToOutput(const Arrived& arrived);
  // Of a tensor on a GPU: once there is pinned memory, enqueues the copy from there.
  void MoveToDevice(Arrived* arrived, int track);
  // Leaves the copy of what landed in pinned memory to the thread that gives copies to the GPU
  // now.  False: a pull loop has to.
  bool LeaveCopy(const Request& request);
  CopyQueue::Entry CopyOf(const Request& request, int track);
  CopyQueue* QueueOf(const Request& request);
  // That a copy to the GPU has been enqueued.
  void Begun(const Request& request, int track, int64_t begin);
  // That a partition is through; ends the operation behind its last one.  Throws Error.
  void Count(const Request& request);

  EngineContext* const context_;
  const int receive_track_;             // of the timeline: what needs no pull loop
  const std::shared_ptr<Queue> queue_;  // shared with those who wait for pinned memory
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_ENGINE_PULLER_H_
