#include "byteps/net/membership/heartbeat_thread.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <utility>

#include "byteps/base/stall_watch.h"
#include "byteps/net/link/net_address.h"

namespace ps {

double HeartbeatSeconds(double peer_timeout_s) {
  return std::min(std::max(peer_timeout_s / 6, 0.05), 5.0);
}

HeartbeatThread::HeartbeatThread(double heartbeat_s, Tasks tasks)
    : heartbeat_s_(heartbeat_s), tasks_(std::move(tasks)) {}

void HeartbeatThread::Start() {
  thread_ = std::thread(&HeartbeatThread::Run, this);
  pthread_setname_np(thread_.native_handle(), "bps-members");
}

void HeartbeatThread::Wake() {
  {
    MutexLock lock(&mu_);
    woken_ = true;
  }
  cond_.NotifyAll();
}

void HeartbeatThread::Stop() {
  {
    MutexLock lock(&mu_);
    stopped_ = true;
  }
  cond_.NotifyAll();
  // The thread was told to stop, so this wait is ended by its return; deadline: none.
  if (thread_.joinable()) thread_.join();
}

void HeartbeatThread::Run() {
  StallWatch::Feeder feeder(heartbeat_s_);
  const auto awake = [this]() PS_REQUIRES(mu_) { return woken_ || stopped_; };
  // The next heartbeat is due on the steady clock, because peers also count time in which this
  // process stood still.
  auto next = std::chrono::steady_clock::now() + ToDuration(heartbeat_s_);
  while (true) {
    {
      MutexLock lock(&mu_);
      if (stopped_) return;
      woken_ = false;
    }
    const auto due = tasks_.next_due();
    if (!due) {
      feeder.Rest();
      MutexLock lock(&mu_);
      // The wait is ended by Wake or Stop; deadline: none, there is nothing to do.
      cond_.Wait(&mu_, awake);
      continue;
    }
    feeder.Tick();
    const auto now = Clock::now();
    const auto until_next = next - std::chrono::steady_clock::now();
    const auto wake = std::min(now + until_next, *due);
    if (now < wake) {
      MutexLock lock(&mu_);
      // The wait is ended by Wake or Stop; deadline: the next heartbeat or task.
      cond_.WaitUntil(&mu_, feeder.SleepUntil(wake), awake);
      continue;
    }
    if (now >= *due) tasks_.on_due(now);
    if (until_next > Clock::duration::zero()) continue;
    tasks_.on_beat(now);
    next = std::chrono::steady_clock::now() + ToDuration(heartbeat_s_);
  }
}

std::string StoodStill(const std::string& self, double peer_timeout_s) {
  const auto limit = ToDuration(peer_timeout_s);
  const auto pause = StallWatch::Get()->StoodStill(limit, std::chrono::steady_clock::now());
  // Peers do not call this process lost after a shorter pause.
  if (pause < limit / 3) return "";
  char text[64];
  snprintf(text, sizeof(text), " stood still for %.1f s; ",
           std::chrono::duration<double>(pause).count());
  return self + text;
}

}  // namespace ps
