#include "byteps/engine/staged_sum.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <set>
#include <string>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/base/mutex.h"
#include "byteps/engine/engine.h"
#include "byteps/engine/streamed_sums.h"

namespace byteps {
namespace core {
namespace {

// Length of the first and the last chunk. While these two are copied, in 0.3 ms, no link is busy.
constexpr uint64_t kEnd = 16 << 20;
static_assert(StagedSum::kSmall <= kEnd, "a small sum is one chunk");
// Growth of chunks, from either end to the middle. While links carry one chunk, the next one is
// copied; at 100 Gbit/s a link takes four times as long as the copy. Few chunks need few driver
// calls.
constexpr uint64_t kGrowth = 4;
// Length of a memory block that several partitions share, so that one driver call copies them all.
constexpr uint64_t kBlock = 64 << 20;
// Limit for sends in flight after a failure. Sends that are still in flight then may send NaN.
constexpr auto kMostToSend = std::chrono::seconds(1);
constexpr int kNotANumber = 0xff;  // a byte that makes NaN in every floating-point type

// Appends a copy, or extends the last copy if both its ends continue there: each copy is a driver
// call. A copy must not cross two blocks of pinned memory.
void Append(const Copy& copy, bool same_block, std::vector<Copy>* copies) {
  if (same_block && !copies->empty()) {
    Copy& last = copies->back();
    if (static_cast<char*>(last.to) + last.bytes == copy.to &&
        static_cast<const char*>(last.from) + last.bytes == copy.from) {
      last.bytes += copy.bytes;
      return;
    }
  }
  copies->push_back(copy);
}

// Lengths of the chunks of a tensor.
std::vector<uint64_t> ChunkLengths(uint64_t bytes) {
  if (bytes <= kEnd) return {bytes};
  std::vector<uint64_t> ends;
  for (uint64_t end = std::min(kEnd, bytes / 2); bytes >= 2 * end; end *= kGrowth) {
    ends.push_back(end);
    bytes -= 2 * end;
  }
  std::vector<uint64_t> lengths = ends;
  if (bytes < kEnd) {
    lengths.back() += bytes;
  } else {
    lengths.push_back(bytes);
  }
  lengths.insert(lengths.end(), ends.rbegin(), ends.rend());
  return lengths;
}

// Returns whether two partitions lie in the same block of the pool.
bool AreOfOneBlock(const PinnedBlock& a, const PinnedBlock& b) {
  return !a.owner_before(b) && !b.owner_before(a);
}

}  // namespace

uint64_t StagedSum::LargestBlock(uint64_t limit, uint64_t largest_partition) {
  return std::max(largest_partition, std::min(kBlock, limit / 4));
}

StagedSum::StagedSum(const Operation& operation, std::vector<uint32_t> order)
    : device_(operation.request.tensor.device),
      input_(static_cast<const char*>(operation.request.input)),
      output_(static_cast<char*>(operation.request.output)),
      order_(std::move(order)),
      partitions_(order_.size()) {
  for (size_t i = 0; i < partitions_.size(); ++i) {
    partitions_[i].whole = operation.Whole(i);
    partitions_[i].wanted = operation.Wanted(i);
  }
  Cut(operation.request.tensor.bytes);
}

void StagedSum::Cut(uint64_t bytes) {
  const std::vector<uint64_t> lengths = ChunkLengths(bytes);
  auto next = lengths.begin();
  uint64_t have = 0;
  uint64_t end = 0;  // end of the chunk
  for (size_t i = 0; i < order_.size(); ++i) {
    Partition& partition = partitions_[order_[i]];
    have += partition.whole.bytes;
    if (chunks_.empty() || have > end) {
      // A partition may be longer than a chunk.
      while (end < have && next != lengths.end()) end += *next++;
      chunks_.emplace_back().begin = i;
    }
    partition.chunk = chunks_.size() - 1;
    chunks_.back().end = i + 1;
    ++chunks_.back().left;
  }
}

std::shared_ptr<StagedSum> StagedSum::TryMake(const Operation& operation, PinnedPool* pool) {
  std::shared_ptr<StagedSum> sum(
      new StagedSum(operation, operation.tensor->layout.order));  // the constructor is private
  const CurrentDevice current(operation.request.tensor.device);
  const auto take = [&](uint64_t bytes) {
    return pool->TakeOrPin(bytes, operation.request.tensor.bytes);
  };
  sum->words_ = take(sum->chunks_.size() * sizeof(DeviceWord));
  if (!sum->words_) return nullptr;
  char* at = sum->words_.get();
  for (Chunk& chunk : sum->chunks_) {
    chunk.summed = new (at) DeviceWord(0);
    at += sizeof(DeviceWord);
  }
  for (const Chunk& chunk : sum->chunks_) {
    if (!sum->TakeMemory(chunk, operation.request.tensor.bytes, pool)) return nullptr;
  }
  return sum;
}

bool StagedSum::TakeMemory(const Chunk& chunk, uint64_t bytes, PinnedPool* pool) {
  const std::vector<uint32_t> indices = InPlace(chunk);
  for (auto begin = indices.begin(); begin != indices.end();) {
    auto end = begin;
    uint64_t length = 0;
    uint64_t joined = 0;
    // Neighbours share a block, whose size is a power of two, as long as at most a quarter of it is
    // unused.
    for (auto at = begin; at != indices.end() && *at == *begin + (at - begin); ++at) {
      joined += partitions_[*at].whole.bytes;
      if (joined > pool->largest() && at != begin) break;
      if (at != begin && joined < pool->SizeFor(joined) / 4 * 3) continue;
      end = at + 1;
      length = joined;
    }
    const PinnedBlock block = pool->TakeOrPin(length, bytes);
    if (!block) return false;
    for (char* at = block.get(); begin != end; ++begin) {
      partitions_[*begin].memory = PinnedBlock(block, at);
      at += partitions_[*begin].whole.bytes;
    }
  }
  return true;
}

std::vector<uint32_t> StagedSum::InPlace(const Chunk& chunk) const {
  std::vector<uint32_t> indices(order_.begin() + chunk.begin, order_.begin() + chunk.end);
  std::sort(indices.begin(), indices.end());
  return indices;
}

template <typename CopyOf>
std::vector<Copy> StagedSum::CopiesOf(const Chunk& chunk, CopyOf copy_of) const {
  std::vector<Copy> copies;
  PinnedBlock last;
  for (const uint32_t index : InPlace(chunk)) {
    const Partition& partition = partitions_[index];
    const Copy copy = copy_of(partition);
    if (copy.bytes == 0) continue;
    Append(copy, AreOfOneBlock(last, partition.memory), &copies);
    last = partition.memory;
  }
  return copies;
}

std::vector<Copy> StagedSum::CopiesToHost(const Chunk& chunk) const {
  return CopiesOf(chunk, [this](const Partition& p) -> Copy {
    return {p.memory.get(), input_ + p.whole.offset, p.whole.bytes};
  });
}

std::vector<Copy> StagedSum::CopiesToDevice(const Chunk& chunk) const {
  return CopiesOf(chunk, [this](const Partition& p) -> Copy {
    return {output_ + p.wanted.offset, Wanted(p), p.wanted.bytes};
  });
}

void StagedSum::CopyToHost(const DeviceMoment& ready,
                           const std::function<void(size_t, size_t)>& copied) {
  constexpr CopyLane kLane = CopyLane::kWholeToHost;
  DeviceCopies* const device = DeviceCopies::Of(device_);
  device->MakeWait(kLane, ready);
  for (size_t number = 0; number < chunks_.size(); ++number) {
    const Chunk& chunk = chunks_[number];
    device->CallAfter(kLane, device->Enqueue(kLane, CopiesToHost(chunk)),
                      [this, number, copied, begin = chunk.begin, end = chunk.end] {
                        OnCopied(number);
                        copied(begin, end);
                      });
  }
}

bool StagedSum::CopyToHostNow(const std::function<void()>& copied) {
  constexpr CopyLane kLane = CopyLane::kFewToHost;
  DeviceCopies* const device = DeviceCopies::Of(device_);
  const auto done = [this, copied] {
    OnCopied(0);
    copied();
  };
  try {
    const DeviceMoment made = device->Enqueue(kLane, CopiesToHost(chunks_.front()));
    if (!device->AwaitOrCallAfter(kLane, made, done)) return false;
  } catch (const Error&) {  // the copy may happen all the same
    KeepMemory();
    throw;
  }
  OnCopied(0);
  return true;
}

void StagedSum::OnCopied(size_t number) {
  has_copied_ = true;
  ps::MutexLock lock(&mu_);
  Chunk& chunk = chunks_[number];
  chunk.is_copied = true;
  if (has_failed_) Spoil(chunk);
}

void StagedSum::Arrive(uint64_t index) {
  Chunk& chunk = chunks_[partitions_[index].chunk];
  const size_t left = chunk.left.fetch_sub(1);
  BPS_INVARIANT("a chunk has as many partitions as were counted", left > 0,
                "partition " + std::to_string(index) + " arrived again");
  if (left == 1) chunk.summed->store(1, std::memory_order_release);
}

char* StagedSum::Wanted(const Partition& partition) const {
  return partition.memory.get() + (partition.wanted.offset - partition.whole.offset);
}

Landing StagedSum::CopyToDevice(const OperationPtr& operation, DeviceStream stream) {
  if (is_awaited_.exchange(true)) return {device_, nullptr};
  DeviceCopies* const device = DeviceCopies::Of(device_);
  // The stream also waits for the copies of unwanted parts, because the caller may change the input
  // afterwards.
  for (const Chunk& chunk : chunks_) {
    device->CopyOnceSet(stream, chunk.summed, CopiesToDevice(chunk));
  }
  // The callback keeps the memory until the copies are done; if the device fails, it keeps the
  // memory for ever.
  const DeviceMoment made = device->Now(stream);
  device->CallAfter(made, stream, [operation] {});
  return {device_, made};
}

DeviceMoment StagedSum::CopyBack(DeviceStream stream) {
  try {
    return DeviceCopies::Of(device_)->CopyIn(stream, CopiesToDevice(chunks_.front()));
  } catch (const Error&) {  // the copy may happen all the same
    KeepMemory();
    throw;
  }
}

std::shared_ptr<void> StagedSum::BeginSend() {
  {
    ps::MutexLock lock(&mu_);
    if (has_failed_) return nullptr;
    ++sending_;
  }
  return {this, [self = shared_from_this()](void*) { self->EndSend(); }};
}

void StagedSum::EndSend() {
  {
    ps::MutexLock lock(&mu_);
    --sending_;
  }
  sent_.NotifyAll();
}

void StagedSum::KeepMemory() const {
  for (const Partition& partition : partitions_) Keep(partition.memory);
}

void StagedSum::BeginFail() {
  ps::MutexLock lock(&mu_);
  has_failed_ = true;
}

void StagedSum::Fail(std::chrono::steady_clock::time_point deadline) {
  ps::MutexLock lock(&mu_);
  // The wait is ended by the transport; deadline: kMostToSend for all failed operations together.
  sent_.WaitUntil(&mu_, deadline, [this]() PS_REQUIRES(mu_) { return sending_ == 0; });
  for (const Chunk& chunk : chunks_) {
    if (chunk.is_copied) Spoil(chunk);  // otherwise the copy would overwrite the NaN
  }
}

void StagedSum::Spoil(const Chunk& chunk) const {
  for (size_t i = chunk.begin; i < chunk.end; ++i) {
    const Partition& partition = partitions_[order_[i]];
    memset(Wanted(partition), kNotANumber, partition.wanted.bytes);
  }
  chunk.summed->store(1, std::memory_order_release);
}

// -------------------------------------- fails operations that get no answer

namespace {

constexpr double kLookEverySeconds = 1.0;

// Counts only time in which this process ran: after a pause, answers may be unread.
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
    context_.losses->OnTick();
  }
  // After a failure the timeline is written at once, since the process may be killed soon. With the
  // lock held, all failed operations are in it.
  {
    ps::MutexLock lock(&failing_mu_);
    context_.trace->Write();
  }
  EndFailedStreams();
}

void Engine::EndFailedStreams() {
  const std::vector<OperationPtr> ended = context_.streamed.TakeFailed();
  for (const auto& operation : ended) {
    operation->staged->BeginFail();
    // No host thread waits for this sum, only a stream. So the job fails before the stream
    // continues, and the next call of the host throws.
    if (operation->staged->is_awaited() && !failed()) Fail(operation->error());
  }
  // All operations share one deadline.
  const auto deadline = std::chrono::steady_clock::now() + kMostToSend;
  for (const auto& operation : ended) {
    operation->AwaitWriters();
    AbandonPlaces(*operation);
    operation->staged->Fail(deadline);
  }
}

std::string Engine::Verdict(const OperationPtr& operation) {
  try {
    // A failed device runs no callbacks, so this thread asks for its error. It does not ask while a
    // stream waits for a sum, because the driver may block the caller.
    const int device = operation->request.tensor.device;
    if (device != kCpu && context_.streamed.empty()) DeviceCopies::Of(device)->Check();
  } catch (const Error& e) {
    return "push_pull of '" + operation->name() + "' failed: " + e.what();
  }
  const auto now = Vacancies::Clock::now();
  const std::chrono::duration<double> whole = now - context_.vacancies.Last(now);
  const double age = std::min(SecondsSince(operation->awaited_since), whole.count());
  if (age <= context_.op_timeout_s + context_.channel->seconds_to_explain()) return "";
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
  const Tensor& tensor = *operation->tensor;
  if (!was_asked && !tensor.window.Admits(operation->round)) {
    return "round " + std::to_string(tensor.oldest) + ", which has to end before round " +
           std::to_string(operation->round) + " is pushed (a worker has at most " +
           std::to_string(tensor.declaration.MostRoundsOpen()) + " rounds of it open),";
  }
  if (!was_asked) silent = context_.scheduler->ServersOf(operation.get());
  const std::string names = NamesOf(silent, context_.channel.get());
  if (was_asked) return names;
  // The windows of these servers are full of earlier partitions that they do not read.
  if (!names.empty()) return names + ", which does not take what was sent to it before,";
  try {
    const bool is_ready = operation->staged ? operation->staged->has_copied()
                                            : DeviceCopies::IsDone(operation->ready);
    if (!is_ready) {
      return "the GPU, which still computes its values,";
    }
  } catch (const Error&) {
  }
  // If all requests are answered, this node is still processing the answers.
  for (uint64_t i = 0; i < operation->tensor->declaration.NumPartitions(); ++i) {
    if (!operation->IsThrough(i)) silent.insert(operation->tensor->layout.servers[i]);
  }
  if (silent.empty()) return "the push queue";
  return NamesOf(silent, context_.channel.get()) + " in time";
}

}  // namespace core
}  // namespace byteps
