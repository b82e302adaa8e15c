#include "byteps/base/process.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "byteps/base/stall_watch.h"

namespace ps {
namespace {

using std::chrono::milliseconds;

}  // namespace

namespace {

constexpr int kBits = 64;
// The kernel's default limit per process (fs.nr_open).
constexpr int kFiles = 1 << 20;

// One bit per descriptor. The table needs no allocation, and a signal handler may read it.
std::atomic<uint64_t> files[kFiles / kBits];
std::atomic<int> words_used{0};
std::atomic<int> count{0};
std::atomic<bool> is_forked_copy{false};
// Threads that create or close descriptors hold this lock for reading; a thread that forks holds it
// for writing.
pthread_rwlock_t forks = PTHREAD_RWLOCK_INITIALIZER;

void BeforeFork() { pthread_rwlock_wrlock(&forks); }

void InParent() { pthread_rwlock_unlock(&forks); }

// Runs in the child of a fork. Like a signal handler it may only close files and write to static
// memory.
void InChild() {
  if (count > 0) is_forked_copy = true;
  const int words = words_used;
  for (int word = 0; word < words; ++word) {
    const uint64_t bits = files[word].exchange(0);
    for (int bit = 0; bit < kBits; ++bit) {
      if ((bits >> bit & 1) != 0) close(word * kBits + bit);
    }
  }
  count = 0;
  // The lock is made anew: to the C library, another thread than the child's has locked it.
  pthread_rwlock_init(&forks, nullptr);
}

// The handlers are registered before a transport starts its first thread.
const int registered = pthread_atfork(BeforeFork, InParent, InChild);

uint64_t Bit(int fd) { return uint64_t{1} << (fd % kBits); }

}  // namespace

bool IsForkedCopy() { return is_forked_copy; }

HoldForks::HoldForks() { pthread_rwlock_rdlock(&forks); }
HoldForks::~HoldForks() { pthread_rwlock_unlock(&forks); }

void CloseInChild(int fd) {
  if (fd < 0 || fd >= kFiles || registered != 0) return;
  const int word = fd / kBits;
  int used = words_used;
  while (used <= word && !words_used.compare_exchange_weak(used, word + 1)) {
  }
  if ((files[word].fetch_or(Bit(fd)) & Bit(fd)) == 0) ++count;
}

void KeepInChild(int fd) {
  if (fd < 0 || fd >= kFiles) return;
  if ((files[fd / kBits].fetch_and(~Bit(fd)) & Bit(fd)) != 0) --count;
}

}  // namespace ps
