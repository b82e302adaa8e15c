#ifndef BYTEPS_NET_RDMA_REGISTRAR_H_
#define BYTEPS_NET_RDMA_REGISTRAR_H_

#include <deque>
#include <functional>
#include <thread>

#include "byteps/base/mutex.h"

namespace ps {
namespace rdma {

// A thread for what takes long: allocating memory and registering it, and letting it go.
//
// Any thread may call anything.
class Registrar {
 public:
  using Task = std::function<void()>;

  Registrar();
  ~Registrar();
  Registrar(const Registrar&) = delete;
  Registrar& operator=(const Registrar&) = delete;

  // Has the thread do it.  Once stopped, drops the task at once.
  void Post(Task task);
  // Ends the thread; tasks that wait are dropped.
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
