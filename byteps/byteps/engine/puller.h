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

// Pulls sums from the servers.
//
// The values of a CPU tensor are received straight into the tensor; the receiving thread then only
// counts the partition. The values of a GPU tensor are received into pinned memory, and a pull loop
// copies them to the GPU. Only one loop at a time copies to a GPU. A pull loop also copies values
// that were received into other memory, because the transport could not place them or no pinned
// memory was free.

class Puller {
 public:
  // `context` outlives this.
  explicit Puller(EngineContext* context);

  // Called by the channel for each answer of a server, except answers to declarations: PlaceFor
  // returns where to receive its values, and OnAnswer takes it when it has arrived.
  char* PlaceFor(const MessageHead& head, size_t bytes);
  void OnAnswer(Message* message);

  // Runs a pull loop, in one of BYTEPS_PUSH_THREAD threads. Returns when the queue is closed and
  // empty.
  void Loop(int track);
  void Close() { queue_->Close(); }

  size_t queued() { return queue_->Size(); }

 private:
  struct Arrived {
    Request request;
    SharedBytes values;  // empty if the values are in request.block
  };
  using Queue = BlockingQueue<Arrived>;

  // Stores the GradientSums of an answer to PUSH_TRY.
  static void KeepSums(const Message& message, const Request& request);
  // Records the members whose values are missing in the sum.
  void NoteMissing(const Message& message, const Request& request);
  // Returns why an answer cannot be used, or "".
  std::string Refusal(const Message& message, const Request& request);
  // Handles the answer to a request that was open until now. Throws Error.
  void HandleAnswer(Message* message, Request request);
  void OnSum(Message* message, Request request);
  void Fail(const Request& request, const std::string& error);
  void Handle(Arrived* arrived, int track);
  // Copies or decodes the values of a CPU tensor into the output. If the operation has failed,
  // writes nothing and returns false.
  bool CopyToOutput(const Arrived& arrived);
  // Enqueues the copy of a GPU tensor's values to the GPU, when there is pinned memory.
  void MoveToDevice(Arrived* arrived, int track);
  // Leaves the copy from pinned memory to the thread that is handing copies to the GPU now. Returns
  // false if there is none; a pull loop must then copy.
  bool LeaveCopy(const Request& request);
  CopyQueue::Entry CopyOf(const Request& request, int track);
  CopyQueue* QueueOf(const Request& request);
  // Records that a copy to the GPU was enqueued.
  void Begun(const Request& request, int track, int64_t begin);
  // Counts a completed partition. Ends the operation after the last one. Throws Error.
  void Count(const Request& request);

  EngineContext* const context_;
  const int receive_track_;             // timeline track of sums that need no pull loop
  const std::shared_ptr<Queue> queue_;  // shared with callbacks that wait for pinned memory
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_ENGINE_PULLER_H_
