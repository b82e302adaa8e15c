#ifndef BYTEPS_ENGINE_LOSS_POLICY_H_
#define BYTEPS_ENGINE_LOSS_POLICY_H_

#include <cstdint>
#include <functional>
#include <string>

#include "byteps/cluster/channel.h"

namespace byteps {
namespace core {

class Declarations;
struct EngineContext;
struct PushHeader;
struct Request;
struct Tensor;

// Decides what a worker does about a server that is lost. This one ends the job; recovery/worker
// has one that goes on with another server.
//
// Any thread may call anything after Attach.
class LossPolicy {
 public:
  using Fail = std::function<void(const std::string& reason)>;

  virtual ~LossPolicy() = default;

  // Gives the policy its engine: called once, before anything else. All of it outlives this.
  // `fail` ends the job.
  void Attach(EngineContext* context, Declarations* declarations, Fail fail);

  // ----- on a partition's path

  // Whether sums stay with this worker after they were answered. Answers are then not received into
  // the caller's memory.
  virtual bool keeps_sums() const { return false; }
  // Completes the header of a push-pull's partition for `server`.
  virtual void Complete(PushHeader* header, int server);
  // Calls `send`, which remembers a request to `server` and, if given true, sends it. Returns its
  // error; empty: there is none.
  virtual std::string Send(int server, const std::function<std::string(bool is_there)>& send);
  // Takes out the request that `answer` belongs to. False: nobody waits for it any more.
  virtual bool TakeRequest(Message* answer, Request* request);

  // ----- on the path of declarations

  // Whether a server's place is vacant. What is released meanwhile is sent to its successor by
  // Declarations::ReleaseAgain.
  virtual bool IsVacant(int server);
  // `server` has freed what it had of a released tensor.
  virtual void OnReleased(int server, const Tensor& tensor);

  // ----- news

  virtual void OnServerLost(int server, const std::string& reason);
  virtual void OnServerReplaced(int server);
  // Whether the message is an answer to a request of the policy's own, and was handled.
  virtual bool OnAnswer(const Message& message);
  // Called each second while operations are in flight.
  virtual void OnTick();

  // Bytes of the sums that stay with this worker.
  virtual uint64_t kept_bytes();

 protected:
  EngineContext* context_ = nullptr;
  Declarations* declarations_ = nullptr;
  Fail fail_;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_ENGINE_LOSS_POLICY_H_
