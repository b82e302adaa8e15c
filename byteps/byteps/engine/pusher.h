#ifndef BYTEPS_ENGINE_PUSHER_H_
#define BYTEPS_ENGINE_PUSHER_H_

#include <string>
#include <vector>

#include "byteps/engine/engine_context.h"
#include "byteps/engine/operation.h"

namespace byteps {
namespace core {

// Pushes partitions to their servers.
//
//   Add ─▶ [values are computed] ─▶ scheduler ─▶ push loop ─▶ server
//                                     ▲   │ take: get pinned memory, or wait for it
//                                     │   │ copy: enqueue the copy, go on with another partition
//                                     └───┘ send: when the copy is done
//
// A GPU tensor enters the scheduler when its values are ready, because a tensor that is still being
// computed must not occupy a window or the copy stream. A CPU tensor is sent from its own memory. A
// streamed sum is sent from pinned memory, to which the calling thread has enqueued the copies.

class Pusher {
 public:
  // `context` outlives this.
  explicit Pusher(EngineContext* context);

  // Queues all partitions of an operation. May send a small one before it returns. Throws Error if
  // the device fails.
  void Add(const OperationPtr& operation);

  // Runs a push loop, in one of BYTEPS_PUSH_THREAD threads. Returns when the scheduler is closed.
  void Loop(int track);

 private:
  // Queues or sends partitions whose values are ready.
  void AddReady(const OperationPtr& operation, std::vector<Task> tasks);
  // Takes a task through as many stages as possible now. If a stage throws, fails the operation;
  // does not throw.
  void Advance(Task task, int track);
  void PrepareFromDevice(Task task, int track);
  void StartCopy(Task task, int track);
  void Send(const Task& task, int track);
  // Returns whether requests may tell servers the destinations of sums in advance.
  bool OffersPlaces(const Operation& operation) const;
  // Records a request. Sends it if `is_there`, which is false if the server is lost. Returns an
  // error or "".
  std::string SendNow(const Task& task, int track, bool is_there);
  void Fail(const Task& task, const std::string& error);
  void Drop(const Task& task);

  EngineContext* const context_;
  const int callers_track_;  // timeline track of sends by callers
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_ENGINE_PUSHER_H_
