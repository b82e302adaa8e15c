#ifndef BYTEPS_ENGINE_PUSHER_H_
#define BYTEPS_ENGINE_PUSHER_H_

#include <string>
#include <vector>

#include "byteps/engine/engine_context.h"
#include "byteps/engine/operation.h"

namespace byteps {
namespace core {

// The way of a partition to its server.
//
//   Add ─▶ [the GPU has computed it] ─▶ scheduler ─▶ push loop ─▶ server
//                                         ▲   │ take: pinned memory, or wait for some
//                                         │   │ copy: enqueue it, and go on with another
//                                         └───┘ send: when it is copied
//
// A tensor on a GPU enters the scheduler when its values are there, so that one that is still
// computed holds neither a window nor the stream of copies.  A tensor on the CPU is sent from
// where it lies, and one whose sum streams wait for from its copy, which its caller has enqueued.

class Pusher {
 public:
  // `context` outlives this.
  explicit Pusher(EngineContext* context);

  // Queues all partitions of an operation that has begun.  One that is small may be sent before
  // this returns.  Throws Error when the device fails.
  void Add(const OperationPtr& operation);

  // One of BYTEPS_PUSH_THREAD loops; returns when the scheduler is closed.
  void Loop(int track);

 private:
  // Of an operation whose values, or those of these partitions, are there.
  void AddReady(const OperationPtr& operation, std::vector<Task> tasks);
  // Takes a task one or more stages further.  Never throws: the operation fails instead.
  void Advance(Task task, int track);
  void PrepareFromDevice(Task task, int track);
  void StartCopy(Task task, int track);
  void Send(const Task& task, int track);
  // Whether its server may be told where its sums belong before they come.
  bool OffersPlaces(const Operation& operation) const;
  // Without its server the request is remembered and not sent.  Returns why it could not be sent.
  std::string SendNow(const Task& task, int track, bool is_there);
  void Fail(const Task& task, const std::string& error);
  void Drop(const Task& task);

  EngineContext* const context_;
  const int callers_track_;  // of the timeline: what callers send themselves
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_ENGINE_PUSHER_H_
