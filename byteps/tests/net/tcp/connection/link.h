// Both ends of TCP connections in one process, with a relay between them that damages what they
// say.
#ifndef BYTEPS_TESTS_NET_TCP_CONNECTION_LINK_H_
#define BYTEPS_TESTS_NET_TCP_CONNECTION_LINK_H_

#include <chrono>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/net/tcp/connection.h"
#include "byteps/net/tcp/greeter.h"
#include "byteps/net/tcp/listener.h"
#include "byteps/net/tcp/pending_peers.h"
#include "byteps/net/tcp/socket.h"
#include "link_pair.h"

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
  // The same at 127.0.0.`host`, as another NIC, and at the port `own` of another route; 0: any.
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
    int reserved = -1;  // keeps the port at every address while there is no listener
    int listener = -1;
    int host = 1;       // 127.0.0.1
    int port = 0;       // its own
    int leads_to = 0;   // the other one
    Damage damage;      // of the next connection, or of the last until it has happened
    bool done = false;  // it has
    bool reset = false;
    Pair* last = nullptr;
  };

  static int Bind(int host, int port);
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

// What the links of a test share.
struct Hub {
  explicit Hub(bool encrypts);
  ~Hub();

  ps::tcp::ConnectionSettings settings;
  // Before the poller whose thread uses it, so that it outlives that thread.
  std::unique_ptr<ps::tcp::PendingPeers> pending;
  std::shared_ptr<ps::tcp::MemoryPool> pool;
  std::shared_ptr<ps::tcp::Poller> connects;
  std::shared_ptr<ps::tcp::Poller> listens;
  Relay relay;
};

// The owner of one end: what has become of it.
class End : public ps::tcp::ConnectionOwner {
 public:
  // `seen`, which outlives it, hears of all; null: nobody else does.
  explicit End(const Hub* hub, contract::Seen* seen = nullptr)
      : hub_(hub), seen_(seen == nullptr ? &own_ : seen) {}

  std::vector<std::string> texts();
  // Why it has closed; "" while it has not.
  std::string ending();
  int times_resumed();
  size_t sent_again();
  // Where the values of messages are received, from now on.
  void ReceiveAt(char* place);

  std::string OnChallenge(const ps::tcp::ConnectionPtr& connection,
                          const ps::tcp::Challenge& challenge) override;
  char* PlaceFor(const ps::Meta& meta, size_t bytes) override;
  void OnMessage(ps::tcp::Connection* connection, ps::Message* msg, size_t bytes) override;
  ps::tcp::Poller::Clock::duration Patience(ps::tcp::Connection* connection,
                                            ps::LinkFault fault) override;
  void OnResumed(ps::tcp::Connection* connection, ps::tcp::Poller::Clock::duration after,
                 size_t again) override;
  void OnClosed(const ps::tcp::ConnectionPtr& connection, const ps::LinkEnding& ending) override;

 private:
  const Hub* const hub_;
  contract::Seen own_;
  contract::Seen* const seen_;
};

// Its low bits are the generation.
constexpr uint64_t kJob = (0x5678 << 16) + 2;

class Link {
 public:
  // Connects at once.  Both ends have so many NICs, 1 or 2.
  explicit Link(Hub* hub, uint64_t listeners_job = kJob, contract::Seen* connecting = nullptr,
                contract::Seen* listening = nullptr, int nics = 1);
  ~Link();

  End connecting;
  End listening;
  int route = 0;        // by the first NIC
  int other_route = 0;  // by the second

  // From the end that connects, or from the other one, which must be there.
  void Send(bool to_listener, const std::string& text);
  void Send(bool to_listener, const ps::SArray<char>& value);
  // Whether each end has got exactly these.
  bool Has(const std::vector<std::string>& at_listener, const std::vector<std::string>& back);
  // The end that connects, or the other one, which is null until it has been connected to.
  ps::tcp::ConnectionPtr EndOf(bool to_listener);
  ps::tcp::ConnectionPtr connection() { return EndOf(true); }
  // At which the other end listens.
  int port() const { return port_; }
  // In what state both are.
  std::string Text();
  // From now on the listener says that it has given the connection up.
  void GiveUp();
  // From now on it says that it is of this job.
  void BelongTo(uint64_t job);
  // From now on it proves with another secret.
  void ForgetTheSecret();

 private:
  std::string Admit(const ps::tcp::StreamPtr& socket, const ps::tcp::Hello& hello);

  Hub* const hub_;
  ps::tcp::Greeter::Host host_;
  const ps::auth::Secret other_secret_;
  const std::shared_ptr<const ps::tls::Context> other_tls_;
  // Of the listening poller's thread.
  std::list<std::shared_ptr<ps::tcp::Greeter>> greeters_;
  std::shared_ptr<ps::tcp::Listener> listener_;
  int port_ = 0;
  ps::tcp::ConnectionPtr connects_;
  ps::Mutex mu_;
  ps::tcp::ConnectionPtr listens_ PS_GUARDED_BY(mu_);
  bool given_up_ PS_GUARDED_BY(mu_) = false;
  uint64_t job_ PS_GUARDED_BY(mu_);
};

using contract::WaitUntil;

}  // namespace connection_test

#endif  // BYTEPS_TESTS_NET_TCP_CONNECTION_LINK_H_
