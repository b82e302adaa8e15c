#include "answers.h"

#include <signal.h>
#include <unistd.h>

#include <utility>

#include "ps/internal/postoffice.h"
#include "values.h"
#ifdef BYTEPS_WITH_RDMA
#include "byteps/net/rdma/van.h"
#endif

namespace van_test {

void Answer(ps::Message* request) {
  if (request->meta.head == kDie) kill(getpid(), SIGKILL);
#ifdef BYTEPS_WITH_RDMA
  auto* van = dynamic_cast<ps::RdmaVan*>(ps::Postoffice::Get()->van());
  if (request->meta.head == kBreak && van != nullptr) {
    van->BreakEndpoint(request->meta.sender, ps::rdma::Plane::kData, 0);
  }
#endif
  ps::Message answer;
  answer.meta = request->meta;
  answer.meta.request = false;
  answer.meta.recver = request->meta.sender;
  for (auto& value : request->data) Mark(value.data(), value.size());
  answer.data = request->data;
  ps::Postoffice::Get()->van()->Send(answer);
}

Engine::Engine(std::function<void(ps::Message*)> handle)
    : handle_(std::move(handle)), thread_([this] { Loop(); }) {}

void Engine::Take(ps::Message message) {
  std::lock_guard<std::mutex> lock(mu_);
  received_.push_back(std::move(message));
  cond_.notify_one();
}

void Engine::Stop() {
  {
    std::lock_guard<std::mutex> lock(mu_);
    stop_ = true;
    cond_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

void Engine::Loop() {
  std::unique_lock<std::mutex> lock(mu_);
  while (true) {
    cond_.wait(lock, [this] { return stop_ || !received_.empty(); });
    if (stop_) return;
    ps::Message message = std::move(received_.front());
    received_.pop_front();
    lock.unlock();
    handle_(&message);
    message = ps::Message();
    lock.lock();
  }
}

}  // namespace van_test
