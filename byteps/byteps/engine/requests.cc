#include "byteps/engine/requests.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/base/process.h"

namespace byteps {
namespace core {
namespace {

// Of all servers together.
constexpr uint64_t kMost = 16 << 20;
constexpr int64_t kCoveredNs = 5'000'000;
// A worker is ahead of the others where so much of its window waits for them, and keeps so much.
constexpr int64_t kAhead = 2;
constexpr uint64_t kStepBack = 4;
// A thread that is woken pushes so many partitions, unless few are in flight.
constexpr uint64_t kAtOnce = 4;

}  // namespace

PushScheduler::PushScheduler(int num_servers, uint64_t window)
    : window_(window), servers_(num_servers) {}

void PushScheduler::IgnoreRate() {
  ps::MutexLock lock(&mu_);
  follows_rate_ = false;
}

void PushScheduler::SetNics(int nics) {
  ps::MutexLock lock(&mu_);
  nics_ = nics;
}

uint64_t PushScheduler::WindowFor(uint64_t bytes, uint64_t all) const {
  return window_ > 0 ? window_ : std::max(2 * nics_ * bytes, all / servers_.size());
}

uint64_t PushScheduler::WindowOfAll() const {
  return follows_rate_ ? std::min(kMost, rate_.BytesIn(kCoveredNs).value_or(kMost)) : kMost;
}

bool PushScheduler::HasRoom(const Server& server, uint64_t bytes) const {
  if (server.under_way == 0) return true;
  uint64_t window = WindowFor(bytes, WindowOfAll());
  if (server.waiting * kAhead > static_cast<int64_t>(window)) {
    PS_PROBE(kStepsBack);
    window /= kStepBack;
  }
  return server.under_way + bytes <= window;
}

bool PushScheduler::IsWorthWaking(const Server& server) const {
  const uint64_t next = server.queue.begin()->second.bytes;
  return server.under_way < 2 * nics_ * next ||
         server.under_way + kAtOnce * next <= WindowFor(next, WindowOfAll());
}

void PushScheduler::Update(int number) {
  Server& server = servers_[number];
  if (server.listed) going_.erase({*server.listed, number});
  server.listed.reset();
  if (server.queue.empty()) return;
  const auto& first = *server.queue.begin();
  if (!HasRoom(server, first.second.bytes)) return PS_PROBE(kWindowFull);
  server.listed = first.first;
  going_.insert({first.first, number});
}

void PushScheduler::Count(const Task& task) {
  Server& server = servers_[task.server];
  // The rate may have changed since the task was chosen; what a window may ever be has not.
  const uint64_t most = WindowFor(task.bytes, kMost);
  BPS_INVARIANT_NOTED("a window is within its limit",
                      server.under_way == 0 || server.under_way + task.bytes <= most,
                      std::to_string(server.under_way) + " bytes were in flight to server " +
                          std::to_string(task.server) + ", " + std::to_string(task.bytes) +
                          " more were taken, and the limit is " + std::to_string(most));
  server.under_way += task.bytes;
  if (under_way_++ == 0) rate_.Begin(SteadyNs());
}

void PushScheduler::Add(int priority, std::vector<Task> tasks) {
  {
    ps::MutexLock lock(&mu_);
    std::set<int> touched;
    for (auto& task : tasks) {
      const int server = task.server;
      touched.insert(server);
      servers_[server].queue.emplace(Order{priority, sequence_++}, std::move(task));
      ++queued_;
    }
    for (const int server : touched) Update(server);
  }
  cond_.NotifyAll();
}

bool PushScheduler::AddOrTake(int priority, Task task) {
  {
    ps::MutexLock lock(&mu_);
    const int number = task.server;
    Server& server = servers_[number];
    const Order order{priority, sequence_++};
    const bool is_first = going_.empty() || order < going_.begin()->first;
    const bool overtakes = server.queue.empty() || order < server.queue.begin()->first;
    if (is_first && overtakes && HasRoom(server, task.bytes)) {
      PS_PROBE(kSentByCaller);
      Count(task);
      Update(number);
      return true;
    }
    PS_PROBE(kCallerQueued);
    server.queue.emplace(order, std::move(task));
    ++queued_;
    Update(number);
  }
  cond_.NotifyOne();
  return false;
}

void PushScheduler::Resume(Task task) {
  {
    ps::MutexLock lock(&mu_);
    const int priority = task.operation ? task.operation->request.priority : 0;
    resumed_.emplace(priority, std::move(task));
  }
  cond_.NotifyOne();
}

Task PushScheduler::TakeFirst() {
  const int number = going_.begin()->second;
  auto& queue = servers_[number].queue;
  Task task = std::move(queue.begin()->second);
  queue.erase(queue.begin());
  BPS_INVARIANT_NOTED("partitions queued are those of the queues", queued_ > 0,
                      "a partition was taken where none was counted");
  --queued_;
  Count(task);
  Update(number);
  return task;
}

bool PushScheduler::Take(Task* task) {
  ps::MutexLock lock(&mu_);
  // Ended by a task or Close; deadline: none, an idle thread's.
  cond_.Wait(&mu_,
             [this]() PS_REQUIRES(mu_) { return closed_ || !going_.empty() || !resumed_.empty(); });
  if (closed_) return false;
  // New ones first: to begin a copy takes no time, and it goes on while another one is sent.
  if (!going_.empty()) {
    *task = TakeFirst();
  } else {
    *task = std::move(resumed_.begin()->second);
    resumed_.erase(resumed_.begin());
  }
  // To push to one server takes one thread.
  if (going_.size() > 1 || !resumed_.empty()) cond_.NotifyOne();
  return true;
}

void PushScheduler::Deliver(int server, uint64_t bytes) {
  {
    ps::MutexLock lock(&mu_);
    servers_[server].waiting += static_cast<int64_t>(bytes);
    rate_.Add(bytes, queued_ > 0, SteadyNs());
    if (!Leave(server, bytes)) return;
  }
  cond_.NotifyOne();
}

void PushScheduler::Return(int server, uint64_t bytes) {
  {
    ps::MutexLock lock(&mu_);
    if (!Leave(server, bytes)) return;
  }
  cond_.NotifyOne();
}

bool PushScheduler::Leave(int server, uint64_t bytes) {
  uint64_t& under_way = servers_[server].under_way;
  const bool was_taken = under_way_ > 0 && under_way >= bytes;
  BPS_INVARIANT_NOTED("a window is never below zero", was_taken,
                      std::to_string(bytes) + " bytes left the window of server " +
                          std::to_string(server) + ", which held " + std::to_string(under_way));
  if (!was_taken) return false;
  under_way -= bytes;
  --under_way_;
  Update(server);
  return servers_[server].listed.has_value() && IsWorthWaking(servers_[server]);
}

void PushScheduler::Answer(int number, uint64_t bytes) {
  {
    ps::MutexLock lock(&mu_);
    Server& server = servers_[number];
    server.waiting -= static_cast<int64_t>(bytes);
    if (server.listed) return;
    Update(number);
    if (!server.listed) return;
  }
  cond_.NotifyOne();
}

std::vector<Task> PushScheduler::Clear() {
  std::vector<Task> tasks;
  ps::MutexLock lock(&mu_);
  for (auto& server : servers_) {
    for (auto& entry : server.queue) tasks.push_back(std::move(entry.second));
    server.queue.clear();
    server.listed.reset();
  }
  BPS_INVARIANT_NOTED("partitions queued are those of the queues", queued_ == tasks.size(),
                      std::to_string(queued_) + " were counted, and the queues held " +
                          std::to_string(tasks.size()));
  going_.clear();
  queued_ = 0;
  return tasks;
}

void PushScheduler::Close() {
  {
    ps::MutexLock lock(&mu_);
    closed_ = true;
  }
  cond_.NotifyAll();
}

std::set<int> PushScheduler::ServersOf(const Operation* operation) {
  std::set<int> numbers;
  ps::MutexLock lock(&mu_);
  for (size_t i = 0; i < servers_.size(); ++i) {
    for (const auto& entry : servers_[i].queue) {
      if (entry.second.operation.get() == operation) numbers.insert(static_cast<int>(i));
    }
  }
  return numbers;
}

size_t PushScheduler::queued() {
  ps::MutexLock lock(&mu_);
  return queued_;
}

size_t PushScheduler::under_way() {
  ps::MutexLock lock(&mu_);
  return under_way_;
}

uint64_t Requests::Remember(Request request) {
  ps::MutexLock lock(&mu_);
  if (tracks_) open_[request.server].insert(last_ + 1);
  const bool is_new = by_number_.emplace(++last_, std::move(request)).second;
  BPS_INVARIANT("a request has a number of its own", is_new, "number " + std::to_string(last_));
  return last_;
}

bool Requests::Take(uint64_t number, Request* request) {
  ps::MutexLock lock(&mu_);
  const auto it = by_number_.find(number);
  if (it == by_number_.end()) {
    if (taken_back_.erase(number) > 0) return false;
    // None is given up before its answer, but all of them when the job ends.
    BPS_INVARIANT("a request is answered once", cleared_,
                  "request " + std::to_string(number) + " of " + std::to_string(last_) +
                      " was answered without being open");
    return false;
  }
  *request = std::move(it->second);
  by_number_.erase(it);
  if (tracks_) open_[request->server].erase(number);
  return true;
}

uint64_t Requests::FirstOpen(int server) {
  ps::MutexLock lock(&mu_);
  const std::set<uint64_t>& open = open_[server];
  return open.empty() ? last_ + 1 : *open.begin();
}

bool Requests::HasOpen(int server) {
  ps::MutexLock lock(&mu_);
  return !open_[server].empty();
}

bool Requests::Peek(uint64_t number, Request* request) {
  ps::MutexLock lock(&mu_);
  const auto it = by_number_.find(number);
  if (it == by_number_.end()) return false;
  *request = it->second;
  return true;
}

bool Requests::KeepBlock(uint64_t number, PinnedBlock block) {
  ps::MutexLock lock(&mu_);
  const auto it = by_number_.find(number);
  if (it == by_number_.end()) return false;
  it->second.block.swap(block);
  return true;
}

std::vector<Request> Requests::TakeBack(int server) {
  std::map<uint64_t, Request> taken;
  {
    ps::MutexLock lock(&mu_);
    for (auto it = by_number_.begin(); it != by_number_.end();) {
      if (it->second.server != server) {
        ++it;
        continue;
      }
      taken_back_.insert(it->first);
      if (tracks_) open_[server].erase(it->first);
      taken[it->first] = std::move(it->second);
      it = by_number_.erase(it);
    }
  }
  std::vector<Request> requests;
  for (auto& entry : taken) requests.push_back(std::move(entry.second));
  return requests;
}

std::vector<Request> Requests::All() {
  std::vector<Request> all;
  ps::MutexLock lock(&mu_);
  for (const auto& entry : by_number_) all.push_back(entry.second);
  return all;
}

size_t Requests::size() {
  ps::MutexLock lock(&mu_);
  return by_number_.size();
}

void Requests::Clear() {
  std::unordered_map<uint64_t, Request> gone;  // goes without the lock
  ps::MutexLock lock(&mu_);
  cleared_ = true;
  gone.swap(by_number_);
}

namespace {

// A GPU that has not done its copies by then will not do them.
constexpr auto kPatience = std::chrono::seconds(1);

}  // namespace

OperationTrace::OperationTrace(std::unique_ptr<Tracer> tracer, int rank)
    : tracer_(std::move(tracer)), rank_(rank) {
  if (!tracer_) return;
  to_host_.name = "copies from the GPU";
  to_device_.name = "copies to the GPU";
}

int OperationTrace::AddTrack(const std::string& name) {
  return tracer_ ? tracer_->AddThread(name) : 0;
}

void OperationTrace::Begin(Operation* operation) {
  if (!tracer_ || !operation->tensor || !tracer_->Wants(operation->round)) return;
  operation->times = std::vector<PartitionTimes>(operation->tensor->declaration.NumPartitions());
  const int64_t now = SteadyNs();
  for (PartitionTimes& times : operation->times) times.queued = now;
}

TracedPartition OperationTrace::Traced(const Operation& operation, uint64_t index) const {
  const Tensor& tensor = *operation.tensor;
  return {tensor.declaration.name,
          tensor.key + index,
          index,
          operation.round,
          rank_,
          tensor.declaration.PartitionSize(index)};
}

void OperationTrace::Slice(const Operation& operation, uint64_t index, int track, const char* name,
                           int64_t begin, TraceArrow arrow) {
  if (operation.times.empty()) return;
  tracer_->AddSlice(Traced(operation, index), track, name, begin, arrow);
}

void OperationTrace::Expect(const Operation& operation) {
  if (operation.times.empty()) return;
  ps::MutexLock lock(&mu_);
  ++expected_;
}

void OperationTrace::Told(const Operation& operation) {
  if (operation.times.empty()) return;
  ps::MutexLock lock(&mu_);
  --expected_;
  cond_.NotifyAll();
}

void OperationTrace::CopySlice(const Operation& operation, uint64_t index, bool to_host,
                               int64_t enqueued) {
  if (operation.times.empty()) return;
  Copies& copies = to_host ? to_host_ : to_device_;
  const int64_t before = copies.last_done.exchange(SteadyNs());
  // A worker of CPU tensors has no such track.
  std::call_once(copies.made, [&] { copies.track = AddTrack(copies.name); });
  tracer_->AddSlice(Traced(operation, index), copies.track, "copy", std::max(enqueued, before),
                    TraceArrow::kNone);
  Told(operation);
}

void OperationTrace::Row(const Operation& operation, uint64_t index, int64_t done) {
  if (operation.times.empty()) return;
  const PartitionTimes& times = operation.times[index];
  std::vector<TraceStage> stages;
  if (operation.on_gpu()) stages.push_back({"compute", times.ready});
  if (operation.is_copied_by_caller()) stages.push_back({"copy from GPU", times.ready});
  stages.push_back({"queue", times.taken});
  if (operation.on_gpu()) stages.push_back({"copy from GPU", times.copied});
  // The transport may drop a sent message later than its answer comes.
  const int64_t sent = times.sent;
  const bool told_late = times.answered != 0 && (sent == 0 || sent > times.answered);
  stages.push_back({"push", told_late ? times.answered : sent});
  stages.push_back({"server", times.answered});
  stages.push_back({"pull queue", times.pulling});
  stages.push_back({operation.on_gpu() ? "copy to GPU" : "pull", done});
  tracer_->AddRow(Traced(operation, index), times.queued, stages);
}

void OperationTrace::Write() {
  if (!tracer_) return;
  {
    ps::MutexLock lock(&mu_);
    // Ended by the last slice; deadline: kPatience.
    cond_.WaitFor(&mu_, kPatience, [this]() PS_REQUIRES(mu_) { return expected_ == 0; });
  }
  tracer_->Write(Role::kWorker, rank_);
}

}  // namespace core
}  // namespace byteps
