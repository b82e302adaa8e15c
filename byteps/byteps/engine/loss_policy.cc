#include "byteps/engine/loss_policy.h"

#include <string>
#include <utility>

#include "byteps/engine/engine_context.h"
#include "byteps/engine/requests.h"

namespace byteps {
namespace core {

void LossPolicy::Attach(EngineContext* context, Declarations* declarations, Fail fail) {
  context_ = context;
  declarations_ = declarations;
  fail_ = std::move(fail);
}

void LossPolicy::Complete(PushHeader* /*header*/, int /*server*/) {}

std::string LossPolicy::Send(int /*server*/, const std::function<std::string(bool)>& send) {
  return send(true);
}

bool LossPolicy::TakeRequest(Message* answer, Request* request) {
  return context_->requests.Take(answer->number, request);
}

bool LossPolicy::IsVacant(int /*server*/) { return false; }

void LossPolicy::OnReleased(int /*server*/, const Tensor& /*tensor*/) {}

void LossPolicy::OnServerLost(int /*server*/, const std::string& reason) {
  fail_(reason + "; this worker has kept no sums from which another server could go on: " +
        "set BYTEPS_REPLACE_SERVERS_S on all nodes");
}

void LossPolicy::OnServerReplaced(int /*server*/) {}

bool LossPolicy::OnAnswer(const Message& /*message*/) { return false; }

void LossPolicy::OnTick() {}

uint64_t LossPolicy::kept_bytes() { return 0; }

}  // namespace core
}  // namespace byteps
