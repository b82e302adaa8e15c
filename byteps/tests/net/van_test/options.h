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
//   --places   workers say where answers belong: in the memory of the request, which is in
//              the registration cache, or not
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
#ifndef PS_TESTS_VAN_TEST_OPTIONS_H_
#define PS_TESTS_VAN_TEST_OPTIONS_H_

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

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

}  // namespace van_test
#endif  // PS_TESTS_VAN_TEST_OPTIONS_H_
