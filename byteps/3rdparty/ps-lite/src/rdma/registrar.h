// A thread for what takes long: allocating memory and registering it, and letting it go.
#ifndef PS_RDMA_REGISTRAR_H_
#define PS_RDMA_REGISTRAR_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace ps {
namespace rdma {

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

  std::mutex mu_;
  std::condition_variable cond_;
  // Guarded by mu_:
  std::deque<Task> tasks_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace rdma
}  // namespace ps
#endif  // PS_RDMA_REGISTRAR_H_
