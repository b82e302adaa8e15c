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

// Decides what a worker does when a server is lost. This base class ends the job; the policy in
// recovery/worker waits for another server.
//
// Thread-safe after Attach.
class LossPolicy {
 public:
  using Fail = std::function<void(const std::string& reason)>;

  virtual ~LossPolicy() = default;

  // Gives the policy the parts of its engine, which outlive the policy. Called once, before all
  // other functions. `fail` ends the job.
  void Attach(EngineContext* context, Declarations* declarations, Fail fail);

  // ----- on a partition's path

  // Returns whether this worker keeps each sum after it has received the sum, for a server that may
  // replace a lost one. If so, answers are not received into the caller's memory.
  virtual bool keeps_sums() const { return false; }
  // Completes the header of a partition's PUSH_PULL to `server`.
  virtual void Complete(PushHeader* header, int server);
  // Calls `send`, which records a request to `server`, and sends it if `is_there` is true. Returns
  // the error of `send`, or "".
  virtual std::string Send(int server, const std::function<std::string(bool is_there)>& send);
  // Removes the request that `answer` belongs to. Returns false if no operation waits for it.
  virtual bool TakeRequest(Message* answer, Request* request);

  // ----- on the path of declarations

  // Returns whether a server is lost and not replaced yet. If so, Declarations::ReleaseAgain later
  // sends releases to the server's successor.
  virtual bool IsVacant(int server);
  // Called when `server` has freed its part of a released tensor.
  virtual void OnReleased(int server, const Tensor& tensor);

  // ----- events

  virtual void OnServerLost(int server, const std::string& reason);
  virtual void OnServerReplaced(int server);
  // Handles an answer to a request that the policy has sent. Returns false if the answer is to
  // another request.
  virtual bool OnAnswer(const Message& message);
  // Called every second while operations are in flight.
  virtual void OnTick();

  // Returns the bytes of the sums that this worker keeps.
  virtual uint64_t kept_bytes();

 protected:
  EngineContext* context_ = nullptr;
  Declarations* declarations_ = nullptr;
  Fail fail_;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_ENGINE_LOSS_POLICY_H_
