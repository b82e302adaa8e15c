#include "byteps/engine/worker.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "byteps/base/error.h"
#include "byteps/base/log.h"
#include "byteps/base/thread_name.h"
#include "ps/internal/postoffice.h"

namespace byteps {
namespace core {
namespace {

// The servers give up on a late operation first, since they know whom it lacks;
// the worker does so itself when none of them says anything.
constexpr double kGraceSeconds = 5.0;

std::string Seconds(double s) {
  char text[32];
  snprintf(text, sizeof(text), "%.1f s", s);
  return text;
}

uint32_t WholePages(uint64_t bytes) {
  const uint64_t page = sysconf(_SC_PAGESIZE);
  return static_cast<uint32_t>((bytes + page - 1) / page * page);
}

}  // namespace

Worker::~Worker() { Stop(false); }

void Worker::Start(const Config& config, const Launch& launch, int num_servers,
                   std::unique_ptr<Channel> channel) {
  if (started_) return;
  launch_ = launch;
  num_servers_ = num_servers;
  smallest_partition_ = WholePages(config.Int("BYTEPS_MIN_PARTITION_BYTES"));
  largest_partition_ = WholePages(config.Int("BYTEPS_PARTITION_BYTES"));
  hash_ = ParseKeyHash(config.String("BYTEPS_KEY_HASH_FN"));
  op_timeout_s_ = config.Float("BYTEPS_OP_TIMEOUT_S");
  peer_timeout_s_ = config.Float("BYTEPS_PEER_TIMEOUT_S");
  credit_limit_ = config.Int("BYTEPS_SCHEDULING_CREDIT");
  fused_ = config.Bool("BYTEPS_FUSED_PUSH_PULL");
  {
    std::lock_guard<std::mutex> lock(mu_);
    failed_ = stopping_ = false;
    failure_.clear();
  }
  {
    std::lock_guard<std::mutex> lock(mu_);
    pull_queue_ = std::make_unique<BlockingQueue<Received>>();
  }
  tracer_ = Tracer::Make(config);
  const MetricsSource source{Role::kWorker, [rank = launch.rank] { return rank; },
                             [this] { return Metrics(); }};
  auto metrics_server = MetricsServer::Make(config, launch.local_rank, source);
  channel_ = std::move(channel);
  channel_->Start(this);
  const long loops = config.Int("BYTEPS_PUSH_THREAD");
  for (long i = 0; i < loops; ++i) {
    threads_.emplace_back([this, i, track = AddTrack("push loop", i)] {
      NameThisThread("push", i);
      PushLoop(track);
    });
    threads_.emplace_back([this, i, track = AddTrack("pull loop", i)] {
      NameThisThread("pull", i);
      PullLoop(track);
    });
  }
  threads_.emplace_back([this] {
    NameThisThread("watch");
    WatchLoop();
  });
  metrics_server_ = std::move(metrics_server);
  started_ = true;
}

void Worker::Stop(bool suspend) {
  if (!started_) return;
  bool failed = false;
  {
    std::unique_lock<std::mutex> lock(mu_);
    const auto limit = std::chrono::duration<double>(peer_timeout_s_);
    done_cond_.wait_for(lock, limit, [this] { return failed_ || running_.empty(); });
    failed = failed_;
  }
  if (!failed) channel_->Leave(suspend);
  Fail("byteps was shut down");
  {
    std::lock_guard<std::mutex> lock(mu_);
    stopping_ = true;
  }
  push_cond_.notify_all();
  pull_queue_->Close();
  for (auto& thread : threads_) thread.join();
  threads_.clear();
  channel_->Stop();
  metrics_server_.reset();
  std::lock_guard<std::mutex> lock(mu_);
  tensors_.clear();
  operations_.clear();
  push_queue_.clear();
  pending_.clear();
  declaration_replies_.clear();
  in_transport_ = 0;
  started_ = false;
}

std::vector<Metric> Worker::Metrics() {
  WorkerGauges gauges;
  {
    std::lock_guard<std::mutex> lock(mu_);
    gauges.declared_tensors = tensors_.size();
    gauges.running_operations = running_.size();
    gauges.push_queue = push_queue_.size();
    gauges.in_transport = in_transport_;
    gauges.unanswered = pending_.size();
    gauges.pull_queue = pull_queue_ ? pull_queue_->Size() : 0;
  }
  return Tell(counters_, gauges);
}

bool Worker::failed() {
  std::lock_guard<std::mutex> lock(mu_);
  return failed_;
}

void Worker::ThrowIfFailed() {
  std::lock_guard<std::mutex> lock(mu_);
  if (failed_) throw Error(failure_);
}

// ------------------------------------------------------------- declarations

uint32_t Worker::PartitionBytes(uint64_t bytes) const {
  return core::PartitionBytes(bytes, num_servers_, smallest_partition_, largest_partition_);
}

Declaration Worker::MakeDeclaration(const PushPullRequest& request) const {
  Declaration d;
  d.name = request.name;
  d.dtype = request.dtype;
  d.average = request.average;
  d.fused = fused_;
  d.bytes = request.bytes;
  d.partition_bytes = PartitionBytes(d.bytes);
  d.group = request.group;
  if (d.group.empty()) {
    for (int rank = 0; rank < launch_.size; ++rank) d.group.push_back(rank);
  }
  d.placement = request.has_placement ? request.placement : d.Key() >> kPartitionBits;
  if (d.MemberIndex(launch_.rank) < 0) {
    throw UsageError("rank " + std::to_string(launch_.rank) + " is no member of the group of '" +
                     d.name + "': " + d.Describe());
  }
  if (static_cast<int>(d.group.back()) >= launch_.size) {
    throw UsageError("the group of '" + d.name + "' has rank " + std::to_string(d.group.back()) +
                     ", there are " + std::to_string(launch_.size) + " workers");
  }
  if (d.NumPartitions() > kMaxPartitions) {
    throw UsageError("'" + d.name + "' of " + std::to_string(d.bytes) + " bytes has " +
                     std::to_string(d.NumPartitions()) + " partitions, at most " +
                     std::to_string(kMaxPartitions) +
                     " are possible: raise BYTEPS_PARTITION_BYTES");
  }
  return d;
}

std::vector<uint64_t> Worker::BytesPerServer(const PushPullRequest& request) const {
  const Declaration d = MakeDeclaration(request);
  const uint64_t key = d.Key();
  std::vector<uint64_t> bytes(num_servers_);
  for (uint64_t i = 0; i < d.NumPartitions(); ++i) {
    bytes[ServerOf(hash_, key, d.placement, i, num_servers_)] += d.PartitionSize(i);
  }
  return bytes;
}

Worker::Tensor* Worker::Declare(const PushPullRequest& request) {
  const Declaration declaration = MakeDeclaration(request);
  const std::string id = std::to_string(declaration.group.front()) + "/" + request.name;
  Tensor* tensor = nullptr;
  {
    std::lock_guard<std::mutex> lock(mu_);
    auto& slot = tensors_[id];
    if (!slot) {
      slot = std::make_unique<Tensor>();
      slot->declaration = declaration;
      slot->key = declaration.Key();
    }
    tensor = slot.get();
  }
  if (!(tensor->declaration == declaration)) {
    throw UsageError("'" + request.name + "' was " + tensor->declaration.Describe() +
                     " before and is " + declaration.Describe() +
                     " now: give different tensors different names");
  }
  std::lock_guard<std::mutex> lock(tensor->mu);
  if (!tensor->declared) {
    SendDeclaration(tensor);
    tensor->declared = true;
  }
  return tensor;
}

void Worker::SendDeclaration(Tensor* tensor) {
  // To every server, also to those that will get none of its partitions: members
  // that disagree on the placement would otherwise wait at different servers.
  std::vector<uint64_t> requests;
  for (int server = 0; server < num_servers_; ++server) {
    Pending pending;
    pending.server = server;
    requests.push_back(Remember(std::move(pending)));
    ps::Message msg = MakeRequest(kDeclare, ps::Postoffice::ServerRankToID(server), tensor->key,
                                  requests.back(), tensor->declaration.Pack());
    channel_->Send(&msg);
  }
  std::unique_lock<std::mutex> lock(mu_);
  const auto limit = std::chrono::duration<double>(op_timeout_s_);
  auto answered = [&] {
    return std::all_of(requests.begin(), requests.end(),
                       [&](uint64_t r) { return declaration_replies_.count(r) > 0; });
  };
  const bool in_time = done_cond_.wait_for(lock, limit, [&] { return failed_ || answered(); });
  std::string error;
  if (failed_) {
    error = failure_;
  } else if (!in_time) {
    for (uint64_t r : requests) {
      auto it = pending_.find(r);
      if (it == pending_.end()) continue;
      error = "declaring '" + tensor->declaration.name +
              "' timed out: " + channel_->NameOfServer(it->second.server) +
              " did not answer within " + Seconds(op_timeout_s_) + " (BYTEPS_OP_TIMEOUT_S)";
    }
  }
  for (uint64_t r : requests) {
    auto it = declaration_replies_.find(r);
    if (it != declaration_replies_.end()) {
      if (error.empty()) error = it->second;
      declaration_replies_.erase(it);
    }
    pending_.erase(r);
  }
  if (!error.empty()) throw Error(error);
}

// --------------------------------------------------------------- operations

int64_t Worker::PushPull(const PushPullRequest& request) {
  ThrowIfFailed();
  if (request.pull_begin > std::min(request.pull_end, request.bytes)) {
    throw UsageError("the wanted part of '" + request.name + "' ends before it begins");
  }
  auto operation = std::make_shared<Operation>();
  operation->request = request;
  operation->started = Clock::now();
  if (request.bytes == 0) {  // nothing to sum, nobody to ask
    std::lock_guard<std::mutex> lock(mu_);
    operation->handle = ++last_handle_;
    operation->done = true;
    operations_[operation->handle] = operation;
    counters_.operations.Add();
    return operation->handle;
  }
  if (request.device != kCpu)
    operation->ready = std::make_unique<ReadyEvent>(request.device, request.stream);
  Tensor* tensor = Declare(request);
  operation->tensor = tensor;
  const uint64_t partitions = tensor->declaration.NumPartitions();
  operation->partitions_left = partitions;

  std::lock_guard<std::mutex> lock(mu_);
  if (failed_) throw Error(failure_);
  if (request.device != kCpu) {
    // The tensor's pinned buffer serves one round; another that starts before the
    // first is through brings its own.
    if (tensor->staging) {
      operation->own_staging = std::move(tensor->staging);
    } else {
      operation->own_staging = std::make_unique<StagingBuffer>(request.device, request.bytes);
    }
    operation->staging = operation->own_staging->data();
  }
  operation->handle = ++last_handle_;
  operation->round = tensor->rounds++;
  StartTrace(operation.get(), partitions);
  operations_[operation->handle] = operation;
  running_.insert(operation);
  for (uint64_t i = 0; i < partitions; ++i) {
    push_queue_[PushOrder{request.priority, sequence_++}] = Task{operation, i};
  }
  push_cond_.notify_all();
  if (running_.size() == 1) watch_cond_.notify_all();
  return operation->handle;
}

bool Worker::Poll(int64_t handle) {
  std::lock_guard<std::mutex> lock(mu_);
  auto it = operations_.find(handle);
  if (it == operations_.end()) {
    throw UsageError("there is no handle " + std::to_string(handle) +
                     "; was it synchronized already?");
  }
  return it->second->done;
}

void Worker::Wait(int64_t handle) {
  std::unique_lock<std::mutex> lock(mu_);
  auto it = operations_.find(handle);
  if (it == operations_.end()) {
    throw UsageError("there is no handle " + std::to_string(handle) +
                     "; was it synchronized already?");
  }
  OperationPtr operation = it->second;
  operations_.erase(it);
  done_cond_.wait(lock, [&] { return operation->done; });
  if (!operation->error.empty()) throw Error(operation->error);
}

void Worker::FinishPartition(const OperationPtr& operation) {
  if (operation->partitions_left.fetch_sub(1) != 1) return;
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (operation->done) return;
    operation->done = true;
    // Before anybody learns of the end, who may then ask for the figures.
    const std::chrono::nanoseconds took = Clock::now() - operation->started;
    speed_.Record(operation->request.bytes, operation->started);
    counters_.operations.Add();
    counters_.operation_seconds.Observe(took.count());
    if (operation->own_staging && !operation->tensor->staging) {
      operation->tensor->staging = std::move(operation->own_staging);
    }
    running_.erase(operation);
  }
  done_cond_.notify_all();
}

void Worker::FailOperation(const OperationPtr& operation, const std::string& error) {
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (operation->done) return;
    operation->done = true;
    operation->error = error;
    counters_.failed_operations.Add();
    running_.erase(operation);
  }
  done_cond_.notify_all();
}

void Worker::Fail(const std::string& reason) {
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (failed_) return;
    failed_ = true;
    failure_ = reason;
    counters_.failed_operations.Add(running_.size());
    TraceUnfinished();
    for (const auto& operation : running_) {
      operation->done = true;
      operation->error = reason;
    }
    running_.clear();
    push_queue_.clear();
    pending_.clear();
  }
  done_cond_.notify_all();
  push_cond_.notify_all();
  watch_cond_.notify_all();
}

// -------------------------------------------------------------------- loops

void Worker::PushLoop(int track) {
  DeviceCopier copier;
  while (true) {
    Task task;
    {
      std::unique_lock<std::mutex> lock(mu_);
      push_cond_.wait(lock, [this] {
        const bool credit = credit_limit_ == 0 || in_transport_ < credit_limit_;
        return stopping_ || (credit && !push_queue_.empty());
      });
      if (stopping_) return;
      task = push_queue_.begin()->second;
      push_queue_.erase(push_queue_.begin());
      ++in_transport_;
    }
    Times* times = TimesOf(task);
    if (times != nullptr) times->taken = SteadyNs();
    try {
      PushPartition(&copier, task);
      if (times != nullptr) {
        tracer_->AddSlice(Traced(task), track, "push", times->taken, TraceArrow::kBegins);
      }
    } catch (const Error& e) {
      TraceRow(task, 0);
      ReturnCredit();
      FailOperation(task.operation, e.what());
    }
  }
}

Worker::Part Worker::WantedPart(const Task& task) {
  const PushPullRequest& request = task.operation->request;
  const Declaration& d = task.operation->tensor->declaration;
  const uint64_t start = task.index * d.partition_bytes;
  const uint64_t end = start + d.PartitionSize(task.index);
  const uint64_t from = std::min(std::max(request.pull_begin, start), end);
  const uint64_t to = std::max(std::min(request.pull_end, end), from);
  return {from - start, to - from};
}

void Worker::PushPartition(DeviceCopier* copier, const Task& task) {
  const Operation& operation = *task.operation;
  const Declaration& d = operation.tensor->declaration;
  const uint64_t offset = task.index * d.partition_bytes;
  const uint64_t size = d.PartitionSize(task.index);
  const char* source = static_cast<const char*>(operation.request.input) + offset;
  if (operation.staging != nullptr) {
    copier->ToHost(*operation.ready, operation.staging + offset, source, size);
    source = operation.staging + offset;
  }
  const int64_t now = SteadyNs();
  Times* times = TimesOf(task);
  if (times != nullptr) times->copied = now;
  const int server = ServerOf(hash_, operation.tensor->key, d.placement, task.index, num_servers_);
  ps::Message msg = MakePartitionRequest(fused_ ? kPushPull : kPush, Pending{task, server, now});
  // Until the transport has sent the message, it holds a credit, and the operation
  // with its staging memory.  Not until the answer: that waits for other workers,
  // who might hold all of their credits for partitions of which this one's wait.
  ps::SArray<char> values;
  OperationPtr keep = task.operation;
  values.reset(const_cast<char*>(source), size, [this, keep, times](char*) {
    if (times != nullptr) times->sent = SteadyNs();
    ReturnCredit();
  });
  AddValues(&msg, values);
  BPS_LOG(DEBUG) << "PUSH '" << d.name << "' partition " << task.index << " round "
                 << operation.round << " to server " << server << ", " << size
                 << " bytes, priority " << operation.request.priority;
  counters_.pushed_partitions.Add();
  counters_.pushed_bytes.Add(size);
  channel_->Send(&msg);
}

ps::Message Worker::MakePartitionRequest(int op, Pending pending) {
  const Operation& operation = *pending.task.operation;
  const Part wanted = WantedPart(pending.task);
  const PushHeader header{
      operation.round, static_cast<uint32_t>(std::min(op_timeout_s_ * 1000, 4e9)),
      static_cast<uint32_t>(wanted.offset), static_cast<uint32_t>(wanted.bytes)};
  const int server = ps::Postoffice::ServerRankToID(pending.server);
  const uint64_t key = operation.tensor->key + pending.task.index;
  return MakeRequest(op, server, key, Remember(std::move(pending)),
                     std::string(reinterpret_cast<const char*>(&header), sizeof(header)));
}

void Worker::PullLoop(int track) {
  DeviceCopier copier;
  Received received;
  while (pull_queue_->Pop(&received)) {
    const OperationPtr operation = received.task.operation;
    Times* times = TimesOf(received.task);
    if (times != nullptr) times->pulling = SteadyNs();
    try {
      PullPartition(&copier, &received);
      if (times != nullptr) {
        tracer_->AddSlice(Traced(received.task), track, "pull", times->pulling, TraceArrow::kEnds);
        TraceRow(received.task, SteadyNs());
      }
      received = Received();
      FinishPartition(operation);
    } catch (const Error& e) {
      TraceRow(received.task, 0);
      FailOperation(operation, e.what());
    }
  }
}

void Worker::PullPartition(DeviceCopier* copier, Received* received) {
  const Operation& operation = *received->task.operation;
  const Declaration& d = operation.tensor->declaration;
  const Part wanted = WantedPart(received->task);
  const uint64_t offset = received->task.index * d.partition_bytes + wanted.offset;
  const uint64_t size = wanted.bytes;
  if (received->values.size() != size) {
    throw Error("the answer to a push_pull of '" + d.name + "' has " +
                std::to_string(received->values.size()) + " bytes instead of " +
                std::to_string(size));
  }
  {
    // A caller who was told of a failure may have given the memory back.
    std::lock_guard<std::mutex> lock(mu_);
    if (operation.done) return;
  }
  if (size == 0) return;
  char* target = static_cast<char*>(operation.request.output) + offset;
  if (operation.staging == nullptr) {
    memcpy(target, received->values.data(), size);
    return;
  }
  memcpy(operation.staging + offset, received->values.data(), size);
  copier->ToDevice(operation.request.device, target, operation.staging + offset, size);
}

void Worker::WatchLoop() {
  const auto limit = std::chrono::duration<double>(op_timeout_s_ + kGraceSeconds);
  std::unique_lock<std::mutex> lock(mu_);
  while (!failed_) {
    if (running_.empty()) {
      watch_cond_.wait(lock, [this] { return failed_ || !running_.empty(); });
      continue;
    }
    watch_cond_.wait_for(lock, std::chrono::seconds(1), [this] { return failed_; });
    const auto now = Clock::now();
    std::vector<OperationPtr> late;
    for (const auto& operation : running_) {
      if (now - operation->started > limit) late.push_back(operation);
    }
    for (const auto& operation : late) {
      std::set<int> silent;
      for (const auto& entry : pending_) {
        if (entry.second.task.operation == operation) silent.insert(entry.second.server);
      }
      lock.unlock();
      std::string servers;
      for (int server : silent)
        servers += (servers.empty() ? "" : ", ") + channel_->NameOfServer(server);
      FailOperation(operation,
                    "push_pull of '" + operation->request.name + "' timed out: no answer from " +
                        (servers.empty() ? "the push queue" : servers) + " after " +
                        Seconds(std::chrono::duration<double>(now - operation->started).count()) +
                        " (BYTEPS_OP_TIMEOUT_S=" + std::to_string(op_timeout_s_) + ")");
      lock.lock();
    }
  }
  lock.unlock();
  // At once after a failure too: the process may be killed soon.
  if (tracer_) tracer_->Write(Role::kWorker, launch_.rank);
}

// --------------------------------------------------------- receiving thread

uint64_t Worker::Remember(Pending pending) {
  std::lock_guard<std::mutex> lock(mu_);
  const uint64_t request = ++last_request_;
  pending_[request] = std::move(pending);
  return request;
}

void Worker::ReturnCredit() {
  {
    std::lock_guard<std::mutex> lock(mu_);
    --in_transport_;
  }
  push_cond_.notify_one();
}

void Worker::OnMessage(ps::Message* msg) {
  if (msg->meta.request) return;
  Pending pending;
  {
    std::lock_guard<std::mutex> lock(mu_);
    auto it = pending_.find(msg->meta.addr);
    if (it == pending_.end()) return;  // given up already
    pending = std::move(it->second);
    pending_.erase(it);
    if (!pending.task.operation) declaration_replies_[msg->meta.addr] = msg->meta.body;
  }
  if (msg->meta.option != 0) counters_.failed_requests.Add();
  if (!pending.task.operation) {
    done_cond_.notify_all();
    return;
  }
  if (msg->meta.option != 0) {
    TraceRow(pending.task, 0);
    FailOperation(pending.task.operation, msg->meta.body);
    return;
  }
  if (msg->meta.head == kPush) {  // it was added: ask for the sum
    ps::Message pull = MakePartitionRequest(kPull, std::move(pending));
    channel_->Send(&pull);
    return;
  }
  const int64_t now = SteadyNs();
  if (Times* times = TimesOf(pending.task)) times->answered = now;
  counters_.partition_seconds.Observe(now - pending.sent);
  counters_.pulled_partitions.Add();
  counters_.pulled_bytes.Add(WantedPart(pending.task).bytes);
  if (msg->data.size() != (WantedPart(pending.task).bytes > 0 ? 1 : 0)) {
    FailOperation(pending.task.operation,
                  "an answer from " + channel_->NameOfServer(pending.server) +
                      " to a push_pull of '" + pending.task.operation->request.name +
                      "' does not parse");
    return;
  }
  Received received;
  received.task = std::move(pending.task);
  if (!msg->data.empty()) received.values = std::move(msg->data[0]);
  pull_queue_->Push(std::move(received));
}

void Worker::OnEvent(const ps::MembershipEvent& event) {
  if (event.kind == ps::MembershipEvent::kFailed) Fail(event.reason);
}

}  // namespace core
}  // namespace byteps
