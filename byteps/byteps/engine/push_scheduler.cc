#include "byteps/engine/push_scheduler.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/base/process.h"

namespace byteps {
namespace core {
namespace {

// Default limit of all windows together.
constexpr uint64_t kMost = 16 << 20;
constexpr int64_t kCoveredNs = 5'000'000;
// This worker is ahead of the others if more than 1/kAhead of its window waits at a server for the
// others' values. Its window is then divided by kStepBack.
constexpr int64_t kAhead = 2;
constexpr uint64_t kStepBack = 4;
// Number of partitions that a woken thread may push at once, unless few are in flight.
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
  // The rate may have changed since the task was chosen, so the check uses the upper limit.
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
  // The wait is ended by a task or Close; deadline: none, the thread is idle.
  cond_.Wait(&mu_,
             [this]() PS_REQUIRES(mu_) { return closed_ || !going_.empty() || !resumed_.empty(); });
  if (closed_) return false;
  // New tasks come first: starting a copy takes no time, and the copy overlaps with a send.
  if (!going_.empty()) {
    *task = TakeFirst();
  } else {
    *task = std::move(resumed_.begin()->second);
    resumed_.erase(resumed_.begin());
  }
  // One thread is enough for the tasks of a single server.
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

}  // namespace core
}  // namespace byteps
