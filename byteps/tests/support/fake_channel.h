// Servers without a network, which do what a test's script says.
//
// Each of several threads answers requests, as a transport's threads would.  A PUSH_PULL is
// answered with `ranks` times the values, as if so many ranks had pushed the same.
#ifndef BYTEPS_TESTS_SUPPORT_FAKE_CHANNEL_H_
#define BYTEPS_TESTS_SUPPORT_FAKE_CHANNEL_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "byteps/base/protocol.h"
#include "byteps/cluster/channel.h"

namespace byteps {
namespace core {

struct Script {
  int threads = 3;
  float ranks = 3;         // PUSH_PULL: what the values are multiplied by
  bool in_place = true;    // whether values are received where PlaceFor says
  bool shuffled = false;   // whether requests are answered in a random order
  size_t chunk = 1 << 30;  // values are received in pieces of so many bytes
  int chunk_us = 0;        // and each takes so long
  int linger_ms = 0;       // Send returns so long after the push has gone
  std::string refusal;     // of every declaration
  std::string failure;     // of every push
  bool drops_declarations = false;
  bool answers_twice = false;     // every push
  std::function<void()> on_push;  // called in Send, of a push; may throw
};

class FakeChannel : public Channel {
 public:
  explicit FakeChannel(Script script);
  ~FakeChannel() override;

  void Start(ChannelUser* user) override;
  void Leave(const ps::Farewell& farewell) override;
  void Stop() override;
  void Send(const Message& message) override;
  void Abandon(const void* begin, size_t bytes) override;
  bool RegistersMemory() const override { return false; }
  double link_gbps() const override { return 0; }
  double seconds_to_explain() const override { return 0.1; }
  int rank() const override { return 0; }
  std::string NameOfServer(int rank) override { return "server " + std::to_string(rank); }
  std::string NameOfWorker(int rank) override { return "worker " + std::to_string(rank); }

  // ----- the script goes on

  void Change(const std::function<void(Script*)>& change);
  // Pushes that this server gets are not answered, nor counted as sent when `unsent`, until
  // Release.  -1: any server.
  void HoldServer(int server, bool unsent);
  void Release();
  void FailJob(const std::string& reason);
  // The worker hears of that.  `drops`: what the server was sent, and has not answered, is gone.
  void LoseServer(int server, bool drops = true);
  // Another one is there.
  void ReplaceServer(int server);

  // ----- what was seen

  std::vector<std::vector<Declaration>> declarations(int server);
  // (tensor's key + partition, server), in the order in which they were sent.
  std::vector<std::pair<uint64_t, int>> pushes();
  // (tensor's key + partition, round) of the sums that were given.
  std::vector<std::pair<uint64_t, uint32_t>> gifts();
  // Blocks until so many pushes came; false when they do not come within 20 s.
  bool AwaitPushes(size_t count);
  bool AwaitHeld(size_t count);
  // Blocks until values are being received into a place of the user's.
  bool AwaitPlacing();
  int left() const { return left_; }

 private:
  struct Placing {
    char* begin;
    size_t bytes;
    bool abandoned;
  };

  void Run();
  bool TakeNext(Message* request);
  void Answer(Message request);
  std::string Fate(const Message& request);
  // `placed`: what the caller removes from placing_ once the answer has been handed on.
  SharedBytes Receive(const MessageHead& head, const std::vector<char>& values, Placing** placed);
  void ReceiveInPieces(const std::vector<char>& values, Placing* placing);

  std::mutex mu_;
  std::condition_variable cond_;
  Script script_;
  ChannelUser* user_ = nullptr;
  bool stopping_ = false;
  std::map<int, bool> held_servers_;  // and whether what is sent to them stays unsent
  std::deque<Message> held_;
  std::deque<Message> requests_;
  std::map<int, std::vector<std::vector<Declaration>>> declarations_;
  std::vector<std::pair<uint64_t, int>> pushes_;
  std::vector<std::pair<uint64_t, uint32_t>> gifts_;
  std::mt19937 random_{1};
  std::atomic<int> left_{0};

  std::mutex place_mu_;  // held while one piece is written, and while a place is asked for
  std::condition_variable place_cond_;
  std::list<Placing> placing_;
  std::vector<std::thread> threads_;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_TESTS_SUPPORT_FAKE_CHANNEL_H_
