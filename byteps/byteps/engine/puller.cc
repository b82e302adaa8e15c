#include "byteps/engine/puller.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/process.h"
#include "byteps/base/protocol.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/base/wire.h"
#include "byteps/engine/engine_context.h"
#include "byteps/engine/staged_sum.h"

namespace byteps {
namespace core {
namespace {

// Limit in bytes of values that the receiving thread itself copies or hands to the GPU: waking
// another thread would take longer. Larger values are copied by other threads, so that the
// receiving thread can go on receiving.
constexpr uint64_t kFew = 64 << 10;

}  // namespace

Puller::Puller(EngineContext* context)
    : context_(context),
      receive_track_(context->trace->AddTrack("receive")),
      queue_(std::make_shared<Queue>()) {}

char* Puller::PlaceFor(const MessageHead& head, size_t bytes) {
  Request request;
  // The sum must not be received into the caller's memory if this worker keeps it. If a server can
  // be replaced, its loss must not leave half a sum there either.
  if (head.failed || bytes == 0 || context_->losses->keeps_sums()) return nullptr;
  if (!context_->requests.Peek(head.number, &request)) return nullptr;
  Operation& operation = *request.operation;
  // The values must not be received into memory of an ended operation: Wait has already abandoned
  // the memory, and does not know about later uses.
  if (operation.is_done() || operation.Wanted(request.index).bytes != bytes) return nullptr;
  if (!operation.output_on_gpu()) return operation.Target(request.index);
  if (!request.block) {
    request.block = context_->pool->TryTake(bytes);
    if (!request.block) PS_PROBE(kReceivedElsewhere);
    if (!request.block || !context_->requests.KeepBlock(head.number, request.block)) return nullptr;
  }
  return request.block.get();
}

void Puller::OnAnswer(Message* message) {
  Request request;
  // A request that is not found was given up already.
  if (!context_->losses->TakeRequest(message, &request)) return;
  const Request request_to_fail = request;
  try {
    HandleAnswer(message, std::move(request));
  } catch (const std::exception& e) {
    Fail(request_to_fail, e.what());
  }
}

void Puller::HandleAnswer(Message* message, Request request) {
  context_->scheduler->Answer(request.server, request.operation->Sent(request.index).bytes);
  if (message->failed) {
    context_->counters->failed_requests.Add();
    return Fail(request, message->body);
  }
  request.operation->Move(request.index, Operation::Stage::kAnswered);
  OnSum(message, std::move(request));
}

std::string Puller::Refusal(const Message& message, const Request& request) {
  const uint64_t wanted = request.operation->Wanted(request.index).bytes;
  const uint64_t got = message.values.size();
  const bool has_sums = request.operation->request.op == kPushTry;
  if (has_sums && message.body.size() < sizeof(GradientSums)) {
    return "the answer of " + context_->channel->NameOfServer(request.server) + " about '" +
           request.operation->name() + "' has no sum of squares";
  }
  if (message.sent_bytes == wanted && got == wanted) return "";
  if (got == 0 && message.sent_bytes == wanted) {  // the values were dropped
    return "this worker is out of memory: it wanted " + std::to_string(wanted) +
           " bytes for the answer of " + context_->channel->NameOfServer(request.server) +
           " to a push_pull of '" + request.operation->name() + "'";
  }
  return "the answer of " + context_->channel->NameOfServer(request.server) +
         " to a push_pull of '" + request.operation->name() + "' has " + std::to_string(got) +
         " bytes instead of " + std::to_string(wanted);
}

void Puller::KeepSums(const Message& message, const Request& request) {
  Operation& operation = *request.operation;
  if (operation.request.op != kPushTry || !operation.BeginWriting()) return;
  memcpy(operation.request.sums + request.index, message.body.data(), sizeof(GradientSums));
  operation.EndWriting();
}

void Puller::NoteMissing(const Message& message, const Request& request) {
  const size_t begin = request.operation->request.op == kPushTry ? sizeof(GradientSums) : 0;
  if (message.body.size() <= begin) return;
  const auto& group = request.operation->tensor->declaration.group;
  for (const size_t member : UnpackMembers(message.body.substr(begin), group.size())) {
    context_->missing.Add(static_cast<int>(group[member]));
  }
}

void Puller::OnSum(Message* message, Request request) {
  const std::string refusal = Refusal(*message, request);
  if (!refusal.empty()) return Fail(request, refusal);
  KeepSums(*message, request);
  NoteMissing(*message, request);
  const int64_t now = SteadyNs();
  const uint64_t bytes = request.operation->Wanted(request.index).bytes;
  if (PartitionTimes* times = request.times()) times->answered = now;
  WorkerCounters* const counters = context_->counters;
  counters->partition_seconds.Observe(now - request.sent);
  counters->pulled_partitions.Add();
  counters->pulled_bytes.Add(bytes);

  Arrived arrived;
  arrived.request = std::move(request);
  const bool on_gpu = arrived.request.operation->output_on_gpu();
  if (on_gpu) arrived.request.operation->CountArrival();
  const char* place = on_gpu ? arrived.request.block.get()
                             : arrived.request.operation->Target(arrived.request.index);
  const bool landed = bytes == 0 || message->values.data() == place;
  if (landed) {
    counters->placed_bytes.Add(bytes);
  } else {
    arrived.values = std::move(message->values);
    arrived.request.block.reset();
  }
  const bool is_coded = arrived.request.operation->is_coded();
  if (bytes <= kFew || (landed && !on_gpu && !is_coded)) return Handle(&arrived, receive_track_);
  if (landed && on_gpu && LeaveCopy(arrived.request)) return;
  queue_->Push(std::move(arrived));
}

void Puller::Fail(const Request& request, const std::string& error) {
  context_->trace->Row(*request.operation, request.index, 0);
  context_->operations.Fail(request.operation, error);
}

void Puller::Loop(int track) {
  Arrived arrived;
  while (queue_->Pop(&arrived)) {
    Handle(&arrived, track);
    arrived = Arrived();
  }
}

void Puller::Handle(Arrived* arrived, int track) {
  const Request& request = arrived->request;
  PartitionTimes* const times = request.times();
  if (times != nullptr && times->pulling == 0) times->pulling = SteadyNs();
  if (request.operation->output_on_gpu() && (request.block || !arrived->values.empty())) {
    return MoveToDevice(arrived, track);
  }
  if (!CopyToOutput(*arrived)) return;
  context_->trace->Slice(*request.operation, request.index, track, "pull",
                         times == nullptr ? 0 : times->pulling, TraceArrow::kEnds);
  context_->trace->Row(*request.operation, request.index, SteadyNs());
  try {
    if (request.operation->staged) request.operation->staged->Arrive(request.index);
    Count(request);
  } catch (const std::exception& e) {
    Fail(request, e.what());
  }
}

void Puller::Count(const Request& request) {
  const OperationPtr& operation = request.operation;
  if (!operation->CountPartition(request.index)) return;
  DeviceMoment landed;
  if (operation->is_copying()) {
    landed = DeviceCopies::Of(operation->request.tensor.device)->CopiedToDevice();
  }
  context_->operations.Finish(operation, std::move(landed));
}

bool Puller::CopyToOutput(const Arrived& arrived) {
  Operation& operation = *arrived.request.operation;
  const uint64_t index = arrived.request.index;
  const bool landed = arrived.values.empty();
  if (landed && !operation.is_coded()) return true;
  if (!operation.BeginWriting()) {  // the operation failed meanwhile
    PS_PROBE(kEndedBeforeSum);
    return false;
  }
  if (operation.is_coded()) {
    operation.Decode(index, landed ? operation.Target(index) : arrived.values.data());
  } else {
    memcpy(operation.Target(index), arrived.values.data(), arrived.values.size());
    context_->counters->copied_bytes.Add(arrived.values.size());
  }
  operation.EndWriting();
  return true;
}

void Puller::MoveToDevice(Arrived* arrived, int track) {
  Request& request = arrived->request;
  if (!request.block) {
    request.block = context_->pool->TakeOrCall(
        arrived->values.size(), [waiting = *arrived, queue = queue_](PinnedBlock block) {
          Arrived ready = waiting;
          ready.request.block = std::move(block);
          queue->Push(std::move(ready));
        });
    if (!request.block) return PS_PROBE(kSumAwaitsPinned);
  }
  if (!arrived->values.empty()) {
    memcpy(request.block.get(), arrived->values.data(), arrived->values.size());
    context_->counters->copied_bytes.Add(arrived->values.size());
  }
  if (!request.operation->BeginWriting()) return PS_PROBE(kEndedBeforeSum);
  QueueOf(request)->Add(CopyOf(request, track));
}

bool Puller::LeaveCopy(const Request& request) {
  Operation& operation = *request.operation;
  if (!operation.BeginWriting()) {  // the operation failed meanwhile
    PS_PROBE(kEndedBeforeSum);
    return true;
  }
  CopyQueue::Entry copy = CopyOf(request, receive_track_);
  if (QueueOf(request)->Leave(&copy)) return true;
  context_->trace->DropCopy(operation);
  if (PartitionTimes* times = request.times()) times->pulling = 0;
  operation.EndWriting();
  return false;
}

CopyQueue* Puller::QueueOf(const Request& request) {
  return context_->copies.Of(request.operation->request.tensor.device, CopyLane::kToDevice);
}

CopyQueue::Entry Puller::CopyOf(const Request& request, int track) {
  Operation& operation = *request.operation;
  const Copy copy = {operation.Target(request.index), request.block.get(),
                     operation.Wanted(request.index).bytes};
  const int64_t begin = SteadyNs();
  const auto& trace = context_->trace;
  PartitionTimes* const times = request.times();
  if (times != nullptr && times->pulling == 0) times->pulling = begin;
  trace->BeginCopy(operation);
  auto begun = [this, request, track, begin](const std::string& error) {
    if (error.empty()) {
      Begun(request, track, begin);
    } else {
      Keep(request.block);
      Fail(request, error);
    }
    request.operation->EndWriting();
  };
  auto done = [request, begin, trace] {
    request.operation->CountCopyDone();
    trace->Row(*request.operation, request.index, SteadyNs());
    trace->CopySlice(*request.operation, request.index, false, begin);
  };
  return {copy, std::move(begun), std::move(done)};
}

void Puller::Begun(const Request& request, int track, int64_t begin) {
  context_->trace->Slice(*request.operation, request.index, track, "pull", begin,
                         TraceArrow::kEnds);
  request.operation->CountCopyBegun();
  try {
    Count(request);
  } catch (const std::exception& e) {
    Fail(request, e.what());
  }
}

}  // namespace core
}  // namespace byteps
