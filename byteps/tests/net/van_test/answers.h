// What a node is asked for, and how it answers.
#ifndef PS_TESTS_VAN_TEST_ANSWERS_H_
#define PS_TESTS_VAN_TEST_ANSWERS_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "ps/internal/message.h"

namespace van_test {

enum Op : int { kPing = 1, kEcho = 2, kDie = 3, kStall = 4, kBreak = 5 };

// Does what a request asks for, and answers it.
void Answer(ps::Message* request);

// A thread that looks at values, as a BytePS server's engine does: a ping must not wait for that.
class Engine {
 public:
  explicit Engine(std::function<void(ps::Message*)> handle);
  ~Engine() { Stop(); }

  void Take(ps::Message message);
  // Once it has returned nothing is handled any more.
  void Stop();
  // Lets go of what was not handled.  After Stop.
  void Drop() { received_.clear(); }

 private:
  void Loop();

  const std::function<void(ps::Message*)> handle_;
  std::mutex mu_;
  std::condition_variable cond_;
  std::deque<ps::Message> received_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace van_test
#endif  // PS_TESTS_VAN_TEST_ANSWERS_H_
