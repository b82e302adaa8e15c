// longjmp switches stacks here, which the checked version forbids.
#undef _FORTIFY_SOURCE
#include <cxxabi.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "world.h"

namespace byteps {
namespace simulation {
namespace {

constexpr size_t kStackBytes = 256 << 10;
constexpr int64_t kNever = INT64_MAX;
constexpr int64_t kSecond = 1'000'000'000;
constexpr auto kHeldUp = static_cast<int64_t>(kHeldUpS * kSecond);
// Time at the beginning of a simulation: so late that a timestamp of 0 is long ago.
constexpr int64_t kBegin = 3'600 * kSecond;

struct Fiber {
  int number = 0;
  std::string name;
  void* (*entry)(void*) = nullptr;
  void* argument = nullptr;
  void* result = nullptr;
  char* stack = nullptr;
  ucontext_t first;
  jmp_buf place;
  bool begun = false;
  bool done = false;
  bool detached = false;
  bool goes_first = false;
  int node = -1;
  const void* waits_for = nullptr;  // a lock, a condition or a fiber; null: it can run
  const char* waits_how = "";
  int64_t deadline = kNever;
  std::multimap<int64_t, Fiber*>::iterator timer;  // valid unless deadline is kNever
  bool timed_out = false;
  void* exceptions[2] = {nullptr, nullptr};  // the C++ runtime's state per thread
};

class World {
 public:
  explicit World(uint64_t seed) : random_(seed) {}
  ~World() {
    for (char* stack : stacks_) munmap(stack, kStackBytes);
  }

  Outcome Go(double limit_s, const std::function<void()>& body);
  Fiber* Start(void* (*entry)(void*), void* argument);
  // Makes the running fiber wait until Wake(what) or the deadline. Returns false at the deadline.
  bool Wait(const void* what, const char* how, int64_t deadline = kNever);
  // Does the same as Wait, but first reports the wait to the listener.
  bool ReachWait(const void* what, const char* how, int64_t deadline, bool for_condition);
  void WakeAll(const void* what);
  void WakeOne(const void* what);
  // May let another fiber run.
  void MaybeYield();
  void Release(Fiber* fiber);

  Fiber* running() { return running_; }
  int64_t now() const { return now_; }
  uint64_t Random(uint64_t below) { return random_() % below; }
  void Listen(std::function<Waking(const simulation::Wait&)> reach) { reach_ = std::move(reach); }
  void Note(uint64_t number) { fingerprint_ = (fingerprint_ ^ number) * 1099511628211ull; }

 private:
  static void Begin();
  void Switch();  // to the scheduler; returns when this fiber runs again
  void Enter(Fiber* fiber);
  void MakeReady(Fiber* fiber);
  void AdvanceTime();
  std::string Describe() const;

  std::mt19937_64 random_;
  int64_t now_ = kBegin;
  uint64_t switches_ = 0;
  uint64_t waits_ = 0;
  std::function<Waking(const simulation::Wait&)> reach_;
  uint64_t fingerprint_ = 14695981039346656037ull;
  int numbers_ = 0;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> ready_;
  std::multimap<int64_t, Fiber*> timers_;
  std::vector<char*> stacks_;
  static std::vector<char*> spare_stacks_;
  Fiber* running_ = nullptr;
  jmp_buf scheduler_;
  ucontext_t home_;
  void* exceptions_[2] = {nullptr, nullptr};
};

std::vector<char*> World::spare_stacks_;
World* world = nullptr;

void SwapExceptions(void** out, void** in) {
  void* const globals = abi::__cxa_get_globals();
  memcpy(out, globals, 2 * sizeof(void*));
  memcpy(globals, in, 2 * sizeof(void*));
}

void World::Begin() {
  Fiber* const fiber = world->running_;
  fiber->result = fiber->entry(fiber->argument);
  fiber->done = true;
  world->WakeAll(fiber);
  world->Switch();
}

Fiber* World::Start(void* (*entry)(void*), void* argument) {
  auto made = std::make_unique<Fiber>();
  Fiber* const fiber = made.get();
  fiber->number = numbers_++;
  fiber->node = running_ == nullptr ? -1 : running_->node;
  fiber->entry = entry;
  fiber->argument = argument;
  if (spare_stacks_.empty()) {
    void* const memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
    if (memory == MAP_FAILED) abort();
    spare_stacks_.push_back(static_cast<char*>(memory));
  }
  fiber->stack = spare_stacks_.back();
  spare_stacks_.pop_back();
  fibers_.push_back(std::move(made));
  ready_.push_back(fiber);
  return fiber;
}

void World::Release(Fiber* fiber) {
  spare_stacks_.push_back(fiber->stack);
  for (auto& entry : fibers_) {
    if (entry.get() != fiber) continue;
    std::swap(entry, fibers_.back());
    fibers_.pop_back();
    return;
  }
}

void World::Switch() {
  if (_setjmp(running_->place) == 0) _longjmp(scheduler_, 1);
}

void World::Enter(Fiber* fiber) {
  ++switches_;
  Note(fiber->number);
  running_ = fiber;
  SwapExceptions(exceptions_, fiber->exceptions);
  if (_setjmp(scheduler_) == 0) {
    if (fiber->begun) _longjmp(fiber->place, 1);
    fiber->begun = true;
    getcontext(&fiber->first);
    fiber->first.uc_stack.ss_sp = fiber->stack;
    fiber->first.uc_stack.ss_size = kStackBytes;
    fiber->first.uc_link = nullptr;
    makecontext(&fiber->first, &World::Begin, 0);
    swapcontext(&home_, &fiber->first);
  }
  SwapExceptions(running_->exceptions, exceptions_);
  running_ = nullptr;
}

bool World::Wait(const void* what, const char* how, int64_t deadline) {
  Fiber* const fiber = running_;
  fiber->waits_for = what;
  fiber->waits_how = how;
  fiber->deadline = deadline;
  fiber->timed_out = false;
  if (deadline != kNever) fiber->timer = timers_.emplace(deadline, fiber);
  Switch();
  return !fiber->timed_out;
}

bool World::ReachWait(const void* what, const char* how, int64_t deadline, bool for_condition) {
  Waking waking = Waking::kUsual;
  if (reach_ && running_->node >= 0) {
    const int64_t left = deadline == kNever ? 0 : deadline - now_;
    const double limit_s = static_cast<double>(left) / kSecond;
    waking = reach_({waits_++, running_->node, for_condition, limit_s});
  }
  if (waking == Waking::kAtOnce) {
    ready_.push_back(running_);
    Switch();
    return true;
  }
  const bool woken = Wait(what, how, deadline);
  if (waking == Waking::kLate) Wait(&kHeldUp, "is held up", std::min(deadline, now_ + kHeldUp));
  return woken;
}

void World::MakeReady(Fiber* fiber) {
  if (fiber->deadline != kNever) timers_.erase(fiber->timer);
  fiber->deadline = kNever;
  fiber->waits_for = nullptr;
  ready_.push_back(fiber);
}

void World::WakeAll(const void* what) {
  for (const auto& fiber : fibers_) {
    if (fiber->waits_for == what) MakeReady(fiber.get());
  }
}

void World::WakeOne(const void* what) {
  Fiber* chosen = nullptr;
  uint64_t waiting = 0;
  for (const auto& fiber : fibers_) {
    if (fiber->waits_for == what && Random(++waiting) == 0) chosen = fiber.get();
  }
  if (chosen != nullptr) MakeReady(chosen);
}

void World::MaybeYield() {
  if (ready_.empty() || Random(4) != 0) return;
  ready_.push_back(running_);
  Switch();
}

void World::AdvanceTime() {
  if (timers_.empty()) return;
  now_ = std::max(now_, timers_.begin()->first);
  while (!timers_.empty() && timers_.begin()->first <= now_) {
    Fiber* const fiber = timers_.begin()->second;
    fiber->timed_out = true;
    MakeReady(fiber);
  }
}

std::string World::Describe() const {
  std::string text;
  for (const auto& fiber : fibers_) {
    if (fiber->done) continue;
    char line[160];
    snprintf(line, sizeof(line), "\n  thread %d '%s' %s", fiber->number, fiber->name.c_str(),
             fiber->waits_for == nullptr ? "can run" : fiber->waits_how);
    text += line;
    if (fiber->waits_for != nullptr && fiber->deadline != kNever) {
      snprintf(line, sizeof(line), ", until %.3f s",
               static_cast<double>(fiber->deadline - kBegin) / kSecond);
      text += line;
    }
  }
  return text;
}

Outcome World::Go(double limit_s, const std::function<void()>& body) {
  const auto entry = [](void* argument) -> void* {
    (*static_cast<const std::function<void()>*>(argument))();
    return nullptr;
  };
  Fiber* const first = Start(entry, const_cast<std::function<void()>*>(&body));
  first->name = "test";
  const int64_t limit = kBegin + static_cast<int64_t>(limit_s * kSecond);
  Outcome outcome;
  while (true) {
    if (ready_.empty()) AdvanceTime();
    if (ready_.empty()) break;
    if (now_ > limit) {
      outcome.hang = "still at work after " + std::to_string(limit_s) + " s:" + Describe();
      break;
    }
    size_t pick = Random(ready_.size());
    for (size_t i = 0; i < ready_.size(); ++i) {
      if (ready_[i]->goes_first) pick = i;
    }
    std::swap(ready_[pick], ready_.back());
    Fiber* const fiber = ready_.back();
    ready_.pop_back();
    Enter(fiber);
    if (fiber->done && fiber->detached) Release(fiber);
  }
  if (outcome.hang.empty() && !first->done) outcome.hang = "nobody can go on:" + Describe();
  if (outcome.hang.empty()) {
    for (const auto& fiber : fibers_) {
      if (!fiber->done) outcome.hang = "threads were left:" + Describe();
    }
  }
  if (outcome.hang.empty()) Release(first);
  outcome.seconds = static_cast<double>(now_ - kBegin) / kSecond;
  outcome.switches = switches_;
  outcome.fingerprint = fingerprint_;
  return outcome;
}

}  // namespace

Outcome Run(uint64_t seed, double limit_s, const std::function<void()>& body) {
  World made(seed);
  world = &made;
  Outcome outcome = made.Go(limit_s, body);
  world = nullptr;
  return outcome;
}

uint64_t Random(uint64_t below) { return world->Random(below); }
void Note(uint64_t number) { world->Note(number); }
void ListenToWaits(std::function<Waking(const Wait&)> reach) { world->Listen(std::move(reach)); }
void BelongTo(int node) { world->running()->node = node; }
void GoFirst() { world->running()->goes_first = true; }

namespace {

// ------------------------------------------------------------- memory of locks
//
// The simulation uses the C library's memory of a lock. All zeros, its initial value: free.

struct Lock {
  int owner;    // number of a fiber, plus one; 0: none
  int readers;  // readers of a read-write lock
};
static_assert(sizeof(Lock) <= sizeof(pthread_mutex_t));
static_assert(sizeof(Lock) <= sizeof(pthread_rwlock_t));

Lock* In(void* lock) { return static_cast<Lock*>(lock); }

int Acquire(void* where, bool exclusive, bool patient) {
  if (world == nullptr || world->running() == nullptr) return 0;
  world->MaybeYield();
  Lock* const lock = In(where);
  while (lock->owner != 0 || (exclusive && lock->readers > 0)) {
    if (!patient) return EBUSY;
    if (lock->owner == world->running()->number + 1) {
      fprintf(stderr, "a thread takes a lock that it holds\n");
      abort();
    }
    world->Wait(where, "waits for a lock");
  }
  if (exclusive) {
    lock->owner = world->running()->number + 1;
  } else {
    ++lock->readers;
  }
  return 0;
}

int Unlock(void* where) {
  if (world == nullptr || world->running() == nullptr) return 0;
  Lock* const lock = In(where);
  if (lock->owner != 0) {
    lock->owner = 0;
  } else if (lock->readers > 0) {
    --lock->readers;
  }
  world->WakeAll(where);
  world->MaybeYield();
  return 0;
}

int WaitOn(void* condition, void* mutex, const timespec* until) {
  if (world == nullptr || world->running() == nullptr) abort();
  In(mutex)->owner = 0;
  world->WakeAll(mutex);
  const int64_t deadline = until == nullptr ? kNever : until->tv_sec * kSecond + until->tv_nsec;
  const bool woken = world->ReachWait(condition, "waits for a condition", deadline, true);
  Acquire(mutex, true, true);
  return woken ? 0 : ETIMEDOUT;
}

int SleepUntil(int64_t deadline) {
  static const char kSleep = 0;
  world->ReachWait(&kSleep, "sleeps", deadline, false);
  return 0;
}

}  // namespace

bool IsPlayed() { return world != nullptr && world->running() != nullptr; }

}  // namespace simulation
}  // namespace byteps

// ------------------------------------------------------- functions of the C library

using byteps::simulation::Fiber;
using byteps::simulation::world;

// The C++ library must call these functions instead of the C library's when it starts threads or
// waits for conditions.
#pragma GCC visibility push(default)
extern "C" {

int pthread_create(pthread_t* thread, const pthread_attr_t*, void* (*entry)(void*),
                   void* argument) noexcept {
  if (!byteps::simulation::IsPlayed()) abort();
  *thread = reinterpret_cast<pthread_t>(world->Start(entry, argument));
  return 0;
}

int pthread_join(pthread_t thread, void** result) {
  auto* const fiber = reinterpret_cast<Fiber*>(thread);
  const auto how = "waits for a thread to end";
  while (!fiber->done) world->ReachWait(fiber, how, byteps::simulation::kNever, false);
  if (result != nullptr) *result = fiber->result;
  world->Release(fiber);
  return 0;
}

int pthread_detach(pthread_t thread) noexcept {
  reinterpret_cast<Fiber*>(thread)->detached = true;
  return 0;
}

pthread_t pthread_self() noexcept {
  return byteps::simulation::IsPlayed() ? reinterpret_cast<pthread_t>(world->running()) : 1;
}

int pthread_setname_np(pthread_t thread, const char* name) noexcept {
  if (byteps::simulation::IsPlayed()) reinterpret_cast<Fiber*>(thread)->name = name;
  return 0;
}

int pthread_mutex_lock(pthread_mutex_t* mutex) noexcept {
  return byteps::simulation::Acquire(mutex, true, true);
}
int pthread_mutex_trylock(pthread_mutex_t* mutex) noexcept {
  return byteps::simulation::Acquire(mutex, true, false);
}
int pthread_mutex_unlock(pthread_mutex_t* mutex) noexcept {
  return byteps::simulation::Unlock(mutex);
}

int pthread_rwlock_rdlock(pthread_rwlock_t* lock) noexcept {
  return byteps::simulation::Acquire(lock, false, true);
}
int pthread_rwlock_wrlock(pthread_rwlock_t* lock) noexcept {
  return byteps::simulation::Acquire(lock, true, true);
}
int pthread_rwlock_unlock(pthread_rwlock_t* lock) noexcept {
  return byteps::simulation::Unlock(lock);
}

int pthread_cond_wait(pthread_cond_t* condition, pthread_mutex_t* mutex) {
  return byteps::simulation::WaitOn(condition, mutex, nullptr);
}
int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                           const timespec* until) {
  return byteps::simulation::WaitOn(condition, mutex, until);
}
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t,
                           const timespec* until) {
  return byteps::simulation::WaitOn(condition, mutex, until);
}
int pthread_cond_signal(pthread_cond_t* condition) noexcept {
  if (byteps::simulation::IsPlayed()) world->WakeOne(condition);
  return 0;
}
int pthread_cond_broadcast(pthread_cond_t* condition) noexcept {
  if (byteps::simulation::IsPlayed()) world->WakeAll(condition);
  return 0;
}

int clock_gettime(clockid_t clock, timespec* now) noexcept {
  if (!byteps::simulation::IsPlayed()) return syscall(SYS_clock_gettime, clock, now);
  now->tv_sec = world->now() / 1'000'000'000;
  now->tv_nsec = world->now() % 1'000'000'000;
  return 0;
}

int nanosleep(const timespec* time, timespec*) {
  if (!byteps::simulation::IsPlayed()) return syscall(SYS_nanosleep, time, nullptr);
  return byteps::simulation::SleepUntil(world->now() + time->tv_sec * 1'000'000'000 +
                                        time->tv_nsec);
}

int clock_nanosleep(clockid_t clock, int flags, const timespec* time, timespec* left) {
  if (flags == 0) return nanosleep(time, left);
  if (!byteps::simulation::IsPlayed())
    return syscall(SYS_clock_nanosleep, clock, flags, time, left);
  return byteps::simulation::SleepUntil(time->tv_sec * 1'000'000'000 + time->tv_nsec);
}

// Time has to pass: otherwise a thread that yields until a deadline would never reach it.
int sched_yield() noexcept {
  static const int64_t kTakes = 10'000;  // ns
  if (!byteps::simulation::IsPlayed()) return static_cast<int>(syscall(SYS_sched_yield));
  world->Wait(&kTakes, "yields", world->now() + kTakes);
  return 0;
}

}  // extern "C"
#pragma GCC visibility pop
