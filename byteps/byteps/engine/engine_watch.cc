// What becomes of operations that nobody answers.
#include <set>

#include "byteps/base/error.h"
#include "byteps/base/mutex.h"
#include "byteps/base/probe.h"
#include "byteps/base/text.h"
#include "byteps/engine/engine.h"

namespace byteps {
namespace core {
namespace {

constexpr double kLookEverySeconds = 1.0;

// In which this process ran: answers that came while it stood still are not read yet.
double SecondsSince(ps::AwakeClock::time_point then) {
  return std::chrono::duration<double>(ps::AwakeClock::now() - then).count();
}

std::string NamesOf(const std::set<int>& servers, Channel* channel) {
  std::string names;
  for (const int server : servers) {
    names += (names.empty() ? "" : ", ") + channel->NameOfServer(server);
  }
  return names;
}

}  // namespace

void Engine::Watch() {
  while (context_.operations.AwaitWork()) {
    if (!context_.operations.Sleep(kLookEverySeconds)) break;
    for (const auto& operation : context_.operations.Running()) {
      const std::string verdict = Verdict(operation);
      if (!verdict.empty()) context_.operations.Fail(operation, verdict);
    }
    EndFailedStreams();
  }
  // At once after a failure too, the process may be killed soon: but with all that failed.
  {
    ps::MutexLock lock(&failing_mu_);
    context_.trace->Write();
  }
  EndFailedStreams();
}

void Engine::EndFailedStreams() {
  for (const auto& operation : context_.streamed.TakeFailed()) {
    // Its wait has returned already.  So the job fails, before the stream goes on: the next call of
    // the host raises.
    if (operation->streamed->is_awaited() && !failed()) Fail(operation->error());
    operation->AwaitWriters();
    for (uint64_t i = 0; i < operation->tensor->declaration.NumPartitions(); ++i) {
      const uint64_t bytes = operation->Wanted(i).bytes;
      if (bytes > 0) context_.channel->Abandon(operation->Target(i), bytes);
    }
    operation->streamed->Fail();
  }
}

std::string Engine::Verdict(const OperationPtr& operation) {
  try {
    // Callbacks of a device that failed never come.  While a stream waits for a sum, a driver may
    // hold up who asks it anything.
    if (operation->on_gpu() && context_.streamed.empty())
      DeviceCopies::Of(operation->request.tensor.device)->Check();
  } catch (const Error& e) {
    return "push_pull of '" + operation->name() + "' failed: " + e.what();
  }
  const double age = SecondsSince(operation->awaited_since);
  if (age <= context_.op_timeout_s + context_.channel->seconds_to_explain()) return "";
  if (context_.channel->lacks_scheduler()) return "";
  PS_PROBE(kNobodyAnswered);
  return "push_pull of '" + operation->name() + "' timed out: no answer from " +
         Silence(operation) + " after " + Seconds(age) +
         " (BYTEPS_OP_TIMEOUT_S=" + std::to_string(context_.op_timeout_s) + ")";
}

std::string Engine::Silence(const OperationPtr& operation) {
  std::set<int> silent;
  for (const Request& request : context_.requests.All()) {
    if (request.operation == operation) silent.insert(request.server);
  }
  const bool was_asked = !silent.empty();
  if (!was_asked) silent = context_.scheduler->ServersOf(operation.get());
  const std::string names = NamesOf(silent, context_.channel.get());
  if (was_asked) return names;
  // Its window is full of what was to be sent before.
  if (!names.empty()) return names + ", which does not take what was sent to it before,";
  try {
    const bool is_ready = operation->streamed ? operation->streamed->has_copied()
                                              : DeviceCopies::IsDone(operation->ready);
    if (!is_ready) {
      return "the GPU, which still computes its values,";
    }
  } catch (const Error&) {
  }
  // Its answers have come just now, and are being taken in.
  for (uint64_t i = 0; i < operation->tensor->declaration.NumPartitions(); ++i) {
    if (!operation->IsThrough(i)) silent.insert(operation->tensor->layout.servers[i]);
  }
  if (silent.empty()) return "the push queue";
  return NamesOf(silent, context_.channel.get()) + " in time";
}

}  // namespace core
}  // namespace byteps
