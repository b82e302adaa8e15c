#include "byteps/net/rdma/poller.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/net/rdma/verbs.h"

namespace ps {
namespace rdma {
namespace {

// Number of batches of completions that are handled for one endpoint before other endpoints are
// served.
constexpr int kBatches = 8;
// Delay after which an idle endpoint learns that its last messages have arrived.
constexpr std::chrono::milliseconds kPause{1};

ibv_comp_channel* MakeChannel(const Device& device) {
  Owned<ibv_comp_channel> channel(ibv_create_comp_channel(device.context()));
  if (!channel) Throw("cannot make a completion channel", errno);
  const int flags = fcntl(channel->fd, F_GETFL);
  if (flags < 0 || fcntl(channel->fd, F_SETFL, flags | O_NONBLOCK) != 0) {
    Throw("cannot set up a completion channel", errno);
  }
  return channel.release();
}

}  // namespace

Poller::Channel::Channel(const Device& device)
    : device(&device), channel(MakeChannel(device)), in_child(channel->fd) {}

Poller::Poller(const Devices& devices, Plane plane, bool spin) : spin_(spin) {
  for (const auto& device : devices) channels_.emplace_back(*device);
  wake_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (wake_fd_ < 0) Throw("eventfd", errno);
  sources_.push_back({wake_fd_, POLLIN, 0});
  for (const Channel& channel : channels_) sources_.push_back({channel.channel->fd, POLLIN, 0});
  thread_ = std::thread(&Poller::Run, this);
  const char* name = plane == Plane::kData ? "bps-rdma-data" : "bps-rdma-ctl";
  pthread_setname_np(thread_.native_handle(), name);
}

Poller::~Poller() {
  stop_ = true;
  Wake();
  // The thread was told to stop, so this wait is ended by its return; deadline: none.
  thread_.join();
  endpoints_.clear();  // endpoints are destroyed before the channels of their queues
  close(wake_fd_);
}

bool Poller::RunOn(const std::set<int>& cores) { return ps::RunOn(&thread_, cores); }

ibv_comp_channel* Poller::channel(const Device& device) {
  for (const Channel& channel : channels_) {
    if (channel.device == &device) return channel.channel.get();
  }
  throw Error("no completion channel of " + device.name());
}

void Poller::Add(std::shared_ptr<Endpoint> endpoint) {
  {
    MutexLock lock(&mu_);
    Endpoint* key = endpoint.get();
    endpoints_[key] = std::move(endpoint);
  }
  Wake();  // an event may have come before the endpoint was known
}

size_t Poller::size() {
  MutexLock lock(&mu_);
  return endpoints_.size();
}

void Poller::Wake() {
  const uint64_t one = 1;
  const ssize_t written = write(wake_fd_, &one, sizeof(one));
  // EAGAIN: the counter is full, so the thread is awake already.
  if (written != sizeof(one) && errno != EAGAIN) ThrowErrno("eventfd");
}

void Poller::Run() {
  std::set<Endpoint*> ready;
  while (!stop_) {
    if (ready.empty() && !spin_) Sleep();
    TakeEvents(&ready);
    for (auto it = ready.begin(); it != ready.end();) {
      // The endpoint is looked up again, because it may be gone since the event.
      const auto endpoint = Find(*it);
      bool more = false;
      try {
        more = endpoint && Serve(endpoint);
      } catch (const std::exception& e) {  // only this endpoint is affected
        endpoint->Fail(e.what());
      }
      it = more ? std::next(it) : ready.erase(it);
    }
    if (!watched_.empty() && Endpoint::Clock::now() >= ask_at_) AskWatched();
  }
}

void Poller::Sleep() {
  const int limit = watched_.empty() ? -1 : static_cast<int>(kPause.count());
  // The wait is ended by a completion or Wake; deadline: kPause if anything is watched, else none.
  if (poll(sources_.data(), sources_.size(), limit) < 0 && errno != EINTR) ThrowErrno("poll");
}

void Poller::AskWatched() {
  for (Endpoint* watched : std::exchange(watched_, {})) {
    if (const auto endpoint = Find(watched)) endpoint->AskWhatArrived();
  }
}

void Poller::TakeEvents(std::set<Endpoint*>* ready) {
  ibv_cq* queue = nullptr;
  void* context = nullptr;
  for (const Channel& channel : channels_) {
    while (ibv_get_cq_event(channel.channel.get(), &queue, &context) == 0) {
      ibv_ack_cq_events(queue, 1);
      ready->insert(static_cast<Endpoint*>(context));
    }
  }
  uint64_t count = 0;
  const bool woken = read(wake_fd_, &count, sizeof(count)) > 0;
  if (!woken && !spin_) return;
  MutexLock lock(&mu_);
  for (const auto& entry : endpoints_) ready->insert(entry.first);
}

std::shared_ptr<Endpoint> Poller::Find(Endpoint* endpoint) {
  MutexLock lock(&mu_);
  auto it = endpoints_.find(endpoint);
  return it == endpoints_.end() ? nullptr : it->second;
}

bool Poller::Serve(const std::shared_ptr<Endpoint>& endpoint) {
  // The queue is armed before the last poll. So a completion after that poll makes an event.
  if (!spin_) {
    if (int error = endpoint->Arm()) {
      endpoint->Fail(std::string("its completion queue cannot be armed: ") + strerror(error));
    }
  }
  bool more = true;
  for (int batch = 0; batch < kBatches && more; ++batch) more = endpoint->Poll();
  if (!more && endpoint->Watch()) {
    if (watched_.empty()) ask_at_ = Endpoint::Clock::now() + kPause;
    watched_.insert(endpoint.get());
  }
  if (more || !endpoint->finished()) return more;
  MutexLock lock(&mu_);
  endpoints_.erase(endpoint.get());
  return false;
}

}  // namespace rdma
}  // namespace ps
