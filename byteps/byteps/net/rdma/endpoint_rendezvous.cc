// The endpoint's part that finds memory for values, and takes it back.
#include <algorithm>
#include <thread>
#include <utility>

#include "byteps/base/log.h"
#include "byteps/base/mutex.h"
#include "byteps/net/rdma/endpoint.h"
#include "byteps/net/rdma/message_parts.h"

namespace ps {
namespace rdma {
namespace {

// How long a device may take to give requests back once its queue pair was stopped.
constexpr auto kLastCompletions = std::chrono::seconds(2);
constexpr auto kLook = std::chrono::microseconds(100);
constexpr int kBatch = 32;

}  // namespace

// ---------------------------------------------------------- finding memory

bool Endpoint::MayClear() const {
  return state_ == State::kOpen && inbox_.MayClear(settings_.receive_window_bytes);
}

void Endpoint::ClearWaiting() {
  while (true) {
    {
      MutexLock lock(&mu_);
      if (!MayClear()) return;
      inbox_.BeginClearing();
    }
    if (ClearFirst(false)) continue;
    // It is still being cleared: the others wait behind it.
    auto self = shared_from_this();
    return resources_.registrar->Post([self] { self->ClearSlowly(); });
  }
}

void Endpoint::ClearSlowly() {
  try {
    ClearFirst(true);
  } catch (const std::exception& e) {
    return Fail(e.what());
  }
  ClearWaiting();
}

bool Endpoint::ClearFirst(bool may_block) {
  Turn turn;
  while (true) {
    Incoming* first = nullptr;
    char* place = nullptr;
    {
      MutexLock place_lock(&place_mu_);
      MutexLock lock(&mu_);
      first = inbox_.first();
      if (!first->asked) {
        const bool one = first->sizes.size() == 1 && first->meta_in_region == 0;
        lock.Unlock();  // the owner may hold its own lock while it sends
        if (one) place = owner_->PlaceFor(this, first->parts.msg.meta, first->value_bytes);
        lock.Lock();
        first->asked = true;
        first->place = place;
      }
      place = first->place;
    }
    Memory memory;
    const Region* region = nullptr;
    if (!FindMemory(*first, place, may_block, &memory, &region)) return false;
    MutexLock lock(&mu_);
    if (memory.region && first->place == nullptr) continue;  // abandoned meanwhile
    memory.rkey = region->rkey(*connection_->device);        // which stays while this is cleared
    inbox_.EndClearing(std::move(memory));
    Pump(&turn);
    break;
  }
  Finish(&turn);
  return true;
}

bool Endpoint::FindMemory(const Incoming& incoming, char* place, bool may_block, Memory* memory,
                          const Region** region) {
  if (place != nullptr) {
    memory->region = RegionToReceive(place, incoming.value_bytes, may_block, resources_.devices);
    if (memory->region) {
      memory->bytes.reset(place, incoming.value_bytes, [](char*) {});
      *region = memory->region.get();
      return true;
    }
    if (!may_block) return false;
  }
  Pool::Buffer buffer;
  if (may_block) {
    buffer = resources_.pool->Take(incoming.bytes());
  } else if (!resources_.pool->TakeIdle(incoming.bytes(), &buffer)) {
    return false;
  }
  memory->bytes = buffer.bytes;
  *region = buffer.region;
  return true;
}

// ------------------------------------------------------------ giving it up

// Clang cannot see that mu_ is the lock that done() requires.
template <typename Done>
bool Endpoint::Await(Clock::time_point deadline, Done done) PS_NO_THREAD_SAFETY_ANALYSIS {
  // The polling thread waits for what nobody else hears of.  What it hears is handed on when
  // it is back: the owner, which called it, is not called meanwhile.
  const bool polls = std::this_thread::get_id() == polling_thread_;
  while (!done()) {
    if (Clock::now() >= deadline) return false;
    if (!polls) {
      cond_.WaitUntil(&mu_, deadline);
      continue;
    }
    int count = 0;
    if (connection_) {
      ibv_wc completions[kBatch];
      count = ibv_poll_cq(connection_->cq.get(), kBatch, completions);
      for (int i = 0; i < count; ++i) Complete(completions[i], &later_);
      Pump(&later_);
      LetGoIfDrained();
    }
    cond_.NotifyAll();
    if (count > 0) continue;
    mu_.Unlock();
    std::this_thread::sleep_for(kLook);
    mu_.Lock();
  }
  return true;
}

void Endpoint::Abandon(const void* begin, size_t bytes, Clock::time_point deadline) {
  const char* first = static_cast<const char*>(begin);
  MutexLock place_lock(&place_mu_);
  MutexLock lock(&mu_);
  place_lock.Unlock();  // a thread that asks from now on knows that they are given up
  const bool moved = inbox_.Abandon(first, bytes);
  if (moved) {
    lock.Unlock();
    ClearWaiting();
    lock.Lock();
  }
  const auto done = [&]() PS_REQUIRES(mu_) {
    return !inbox_.IsWrittenTo(first, bytes) || Finished();
  };
  if (Await(deadline, done)) return;
  Turn turn;
  BreakOff("a value in flight to memory that was given up did not come in time", LinkFault::kBroken,
           &turn);
  lock.Unlock();
  Finish(&turn);
  lock.Lock();
  if (Await(Clock::now() + kLastCompletions, done)) return;
  BPS_LOG(WARNING) << "an RDMA device keeps receives after their end";
}

}  // namespace rdma
}  // namespace ps
