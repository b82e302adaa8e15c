// Stands between two ends of TCP connections, and damages what they say.
#ifndef BYTEPS_TESTS_NET_TCP_CONNECTION_RELAY_H_
#define BYTEPS_TESTS_NET_TCP_CONNECTION_RELAY_H_

#include <chrono>
#include <list>
#include <string>
#include <thread>
#include <vector>

#include "byteps/base/mutex.h"

namespace connection_test {

struct Damage {
  enum class Kind { kNone, kFlip, kInsert, kCut, kDelay };

  Kind kind = Kind::kNone;
  bool to_listener = true;  // in what the end that connects says
  size_t place = 0;         // as many bytes pass before
  unsigned char bits = 1;   // kFlip: those that change.  kInsert: the byte that comes in between
  std::chrono::milliseconds delay{0};
};

// One thread carries the bytes of all routes.  Any thread may call.
class Relay {
 public:
  Relay();
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  // Opens a port that leads to `port` of this host.  Returns the route's number.
  int AddRoute(int port) { return AddRoute(port, 1, 0); }
  // The same at 127.0.0.`host`, as another NIC, and at the port `own`; 0: any.
  int AddRoute(int port, int host, int own);
  // Resets the connections of the route and refuses others, or takes them again.
  void SetDown(int route, bool down);
  // Where to connect.
  int PortOf(int route);

  // Resets the connections of the route, and damages the next one once.
  void Reset(int route, const Damage& damage);
  // Whether that has happened.
  bool damaged(int route);
  // What has come over the route's last connection.
  size_t CarriedBy(int route, bool to_listener);

 private:
  using Clock = std::chrono::steady_clock;

  // One direction of a connection.
  struct Flow {
    int from = -1;
    int to = -1;
    size_t carried = 0;
    std::string pending;  // read, and not written yet
    std::string held;     // behind a delay
    Clock::time_point until;
    bool ended = false;
  };
  struct Pair {
    int route = 0;
    Flow flows[2];  // by to_listener
    bool over = false;
  };
  struct Route {
    int listener = -1;
    int host = 1;       // 127.0.0.1
    int port = 0;       // its own
    int leads_to = 0;   // the other one
    Damage damage;      // of the next connection, or of the last until it has happened
    bool done = false;  // it has
    bool reset = false;
    Pair* last = nullptr;
  };

  static void Listen(Route* route);
  void Loop();
  void Accept(int route) PS_REQUIRES(mu_);
  void Carry(Pair* pair, bool to_listener) PS_REQUIRES(mu_);
  void Take(Pair* pair, Flow* flow, bool to_listener, std::string bytes) PS_REQUIRES(mu_);
  static void End(Pair* pair, bool by_reset);
  void Wake();

  int wake_ = -1;
  ps::Mutex mu_;
  bool stop_ PS_GUARDED_BY(mu_) = false;
  std::vector<Route> routes_ PS_GUARDED_BY(mu_);
  std::list<Pair> pairs_ PS_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace connection_test
#endif  // BYTEPS_TESTS_NET_TCP_CONNECTION_RELAY_H_
