#include "byteps/net/rdma/registrar.h"

#include <pthread.h>

#include <exception>
#include <utility>

#include "byteps/base/log.h"

namespace ps {
namespace rdma {

Registrar::Registrar() : thread_(&Registrar::Run, this) {
  pthread_setname_np(thread_.native_handle(), "bps-rdma-mem");
}

Registrar::~Registrar() { Stop(); }

void Registrar::Post(Task task) {
  {
    MutexLock lock(&mu_);
    if (stop_) return;
    tasks_.push_back(std::move(task));
  }
  cond_.NotifyOne();
}

void Registrar::Stop() {
  std::deque<Task> dropped;  // destroyed without the lock, since that may take long
  {
    MutexLock lock(&mu_);
    stop_ = true;
    dropped.swap(tasks_);
  }
  cond_.NotifyOne();
  // The thread was told to stop, so this wait is ended by its return; deadline: none.
  if (thread_.joinable()) thread_.join();
}

void Registrar::Run() {
  MutexLock lock(&mu_);
  while (!stop_) {
    if (tasks_.empty()) {
      // The wait is ended by a task or Stop; deadline: none, an idle thread's.
      cond_.Wait(&mu_);
      continue;
    }
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.Unlock();
    try {
      task();
    } catch (const std::exception& e) {
      BPS_LOG(WARNING) << "RDMA memory: " << e.what();
    }
    task = nullptr;
    lock.Lock();
  }
}

}  // namespace rdma
}  // namespace ps
