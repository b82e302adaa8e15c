#include "byteps/engine/operation.h"

#include <algorithm>
#include <utility>

namespace byteps {
namespace core {

namespace {

// Of as many elements, in fp32.
uint64_t StateBytes(uint64_t bytes, DType dtype) { return bytes / SizeOf(dtype) * sizeof(float); }

}  // namespace

uint64_t PushPullRequest::OfferedBytes() const {
  return op == kReadState ? StateBytes(tensor.bytes, tensor.dtype) : tensor.bytes;
}

Operation::Operation(PushPullRequest what, TensorPtr which)
    : request(std::move(what)),
      tensor(std::move(which)),
      partitions_left_(tensor ? tensor->declaration.NumPartitions() : 0) {}

Operation::Part Operation::Whole(uint64_t index) const {
  const Declaration& d = tensor->declaration;
  return {index * d.partition_bytes, d.PartitionSize(index)};
}

Operation::Part Operation::State(uint64_t index) const {
  const Part whole = Whole(index);
  const DType dtype = request.tensor.dtype;
  return {StateBytes(whole.offset, dtype), StateBytes(whole.bytes, dtype)};
}

Operation::Part Operation::Offered(uint64_t index) const {
  return request.op == kReadState ? State(index) : Whole(index);
}

Operation::Part Operation::Sent(uint64_t index) const {
  if (request.op == kLoadState) return State(index);
  if (request.op == kReadState || request.op == kStep) return {0, 0};
  return Whole(index);
}

Operation::Part Operation::Wanted(uint64_t index) const {
  if (request.op == kLoadState) return {0, 0};
  if (request.op == kPushNorm) return {index * sizeof(GradientSums), sizeof(GradientSums)};
  const Part all = Offered(index);
  const uint64_t end = all.offset + all.bytes;
  const uint64_t from = std::min(std::max(request.pull_begin, all.offset), end);
  const uint64_t to = std::max(std::min(request.pull_end, end), from);
  return {from, to - from};
}

char* Operation::Target(uint64_t index) const {
  return static_cast<char*>(request.output) + Wanted(index).offset;
}

Operation::Part Operation::WantedOutput() const {
  if (request.op == kLoadState) return {0, 0};
  if (request.op == kPushNorm)
    return {0, tensor->declaration.NumPartitions() * sizeof(GradientSums)};
  const uint64_t end = std::min(request.pull_end, request.OfferedBytes());
  return {request.pull_begin, end - std::min(end, request.pull_begin)};
}

bool Operation::is_done() {
  ps::MutexLock lock(&mu_);
  return done_;
}

std::string Operation::error() {
  ps::MutexLock lock(&mu_);
  return error_;
}

void Operation::End(const std::string& error, DeviceMoment moment) {
  {
    ps::MutexLock lock(&mu_);
    done_ = true;
    error_ = error;
    landed_ = std::move(moment);
  }
  cond_.NotifyAll();
}

bool Operation::AwaitEnd(std::chrono::nanoseconds limit) {
  ps::MutexLock lock(&mu_);
  return cond_.WaitFor(&mu_, limit, [this]() PS_REQUIRES(mu_) { return done_; });
}

bool Operation::BeginWriting() {
  ps::MutexLock lock(&mu_);
  if (done_) return false;
  ++writers_;
  return true;
}

void Operation::EndWriting() {
  {
    ps::MutexLock lock(&mu_);
    --writers_;
  }
  cond_.NotifyAll();
}

void Operation::AwaitWriters() {
  ps::MutexLock lock(&mu_);
  cond_.Wait(&mu_, [this]() PS_REQUIRES(mu_) { return writers_ == 0; });
}

DeviceMoment Operation::landed() {
  ps::MutexLock lock(&mu_);
  return landed_;
}

void Operation::SetUnsent(int server) {
  ps::MutexLock lock(&mu_);
  if (unsent_ >= 0) return;
  unsent_ = server;
  unsent_since_ = Clock::now();
}

int Operation::unsent(std::chrono::nanoseconds* since) {
  ps::MutexLock lock(&mu_);
  *since = Clock::now() - unsent_since_;
  return unsent_;
}

}  // namespace core
}  // namespace byteps
