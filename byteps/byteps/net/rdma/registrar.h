#ifndef BYTEPS_NET_RDMA_REGISTRAR_H_
#define BYTEPS_NET_RDMA_REGISTRAR_H_

#include <deque>
#include <functional>
#include <thread>

#include "byteps/base/mutex.h"

namespace ps {
namespace rdma {

// Thread that allocates, registers and frees memory, because this takes too long for the polling
// threads.
//
// Thread-safe.
class Registrar {
 public:
  using Task = std::function<void()>;

  Registrar();
  ~Registrar();
  Registrar(const Registrar&) = delete;
  Registrar& operator=(const Registrar&) = delete;

  // Runs the task in the thread. After Stop the task is dropped.
  void Post(Task task);
  // Ends the thread and drops waiting tasks.
  void Stop();

 private:
  void Run();

  Mutex mu_;
  CondVar cond_;
  std::deque<Task> tasks_ PS_GUARDED_BY(mu_);
  bool stop_ PS_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace rdma
}  // namespace ps
#endif  // BYTEPS_NET_RDMA_REGISTRAR_H_
