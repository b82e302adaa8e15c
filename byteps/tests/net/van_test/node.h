// Tries a transport: one scheduler, servers and workers, each a process, that exchange
// messages whose every byte is checked.  Values come back from where they were received, as
// they do from a BytePS server.
//
//   van_test [--transport tcp|ibverbs] [--host ADDRESS] [--workers N] [--servers K]
//            [--rounds R] [--sizes BYTES,BYTES...] [--window MESSAGES] [--ping-ms MS]
//            [--places cached|plain] [--abandon ROUND] [--stall ROUND] [--refused N]
//            [--kill ROLE:RANK:ROUND] [--break PLANE:ROUND[:EVERY]] [--expect TEXT] [--timeout S]
//
//   --window   requests of a worker in flight
//   --ping-ms  each worker also sends control messages at this pace, and tells their delay
//   --places   workers say where answers belong, with the request and when asked: in the memory of
//              the request, which is in the registration cache, or not
//   --abandon  in that round workers give up all that they wait for, and write to its memory
//   --stall    worker 0 gives up a value of 64 MiB in that round, while server 0 does nothing
//   --refused  as many processes want to join that the scheduler refuses, and stay
//   --kill     that worker ends by SIGKILL in that round; or server, told by worker 0
//   --break    worker 0 breaks its first endpoint of that plane to server 0 in that round, and
//              amid the messages of each EVERY-th from then on, several times in a row, once
//              the last ones are fixed; with PLANE "served", server 0 breaks its end of that
//              worker's data
//   --expect   every survivor must fail, with this in its error
//   --timeout  for the whole run; who is not done by then is killed and has failed
//
// Exit status: 0 all went as expected; 1 not; 2 bad usage.  Other settings come from the
// environment, as for byteps-server.
#ifndef PS_TESTS_NET_VAN_TEST_NODE_H_
#define PS_TESTS_NET_VAN_TEST_NODE_H_

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ps/internal/message.h"

namespace van_test {

using Clock = std::chrono::steady_clock;

inline double Seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

struct Options {
  std::string transport = "tcp";
  std::string host = "127.0.0.1";
  int workers = 1;
  int servers = 1;
  int rounds = 10;
  std::vector<size_t> sizes = {0, 1, 1000, 4096, 4097, 65536, 1000000};
  size_t window = 16;
  int ping_ms = 0;
  std::string places;
  int abandon_round = -1;
  int stall_round = -1;
  int refused = 0;
  std::string kill_role;
  int kill_rank = -1;
  int kill_round = -1;
  std::string break_plane;
  int break_round = -1;
  int break_every = 0;
  std::string expect;
  double timeout_s = 60;
};

// Of this process, as Parse has them.
extern Options options;

// Exits with status 2 for a bad command line.
void Parse(int argc, char** argv);

// ----- the values that go round, of which every byte is known

// What a server does to every word.
constexpr uint64_t kMark = 0x5a5a5a5a5a5a5a5aull;

// Another value for each seed.
void Fill(char* data, size_t bytes, uint64_t seed);
void Mark(char* data, size_t bytes);
// The place of the first byte that is not as it should be, or -1.
int64_t FirstWrong(const char* data, size_t bytes, uint64_t seed, uint64_t mark = kMark);

// What a worker's values lie in.
class Memory {
 public:
  explicit Memory(size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* data() { return bytes_.get(); }

 private:
  std::unique_ptr<char[]> bytes_;
  uint64_t number_ = 0;
};

// ----- what a process tells of itself

// What the kernel says of this process: pinned and resident KiB, and open files.
std::string Resources();

// A line for each endpoint, with what went through it.
std::vector<std::string> EndpointLines();

std::string SpeedLine(uint64_t bytes, double seconds);

// Of the times in seconds that pings took, which are sorted.
std::string DelayLine(std::vector<double>* delays);

// ----- what a node is asked for, and how it answers

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

// ----- One process of the job.

// Plays a role to its end, and says what became of it; 0: as a job should end.  The scheduler
// writes the port at which it listens into `port_pipe`; others are given it, and -1.
int RunNode(const std::string& role, int rank, int port, int port_pipe);

}  // namespace van_test

#endif  // PS_TESTS_NET_VAN_TEST_NODE_H_
