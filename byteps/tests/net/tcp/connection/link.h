// Both ends of TCP connections in one process, with a relay between them that damages data.
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
  bool to_listener = true;  // damage the data from the connecting end
  size_t place = 0;         // bytes that pass before the damage
  unsigned char bits = 1;   // kFlip: the bits to flip. kInsert: the byte to insert
  std::chrono::milliseconds delay{0};
};

// Relays the bytes of all routes in one thread. Thread-safe.
class Relay {
 public:
  Relay();
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  // Opens a port that leads to `port` of this host. Returns the route's number.
  int AddRoute(int port) { return AddRoute(port, 1, 0); }
  // Opens the port at 127.0.0.`host`, like another NIC, with the port `own` of another route; 0:
  // any port.
  int AddRoute(int port, int host, int own);
  // Resets the route's connections and refuses new ones. If not `down`, accepts them again.
  void SetDown(int route, bool down);
  // Returns the route's port.
  int PortOf(int route);

  // Resets the route's connections, and damages the next one once.
  void Reset(int route, const Damage& damage);
  // Returns whether the damage has happened.
  bool damaged(int route);
  // Bytes relayed over the route's last connection.
  size_t CarriedBy(int route, bool to_listener);

 private:
  using Clock = std::chrono::steady_clock;

  // One direction of a connection.
  struct Flow {
    int from = -1;
    int to = -1;
    size_t carried = 0;
    std::string pending;  // read, but not written yet
    std::string held;     // delayed
    Clock::time_point until;
    bool ended = false;
  };
  struct Pair {
    int route = 0;
    Flow flows[2];  // by to_listener
    bool over = false;
  };
  struct Route {
    int reserved = -1;  // keeps the port at each address while there is no listener
    int listener = -1;
    int host = 1;       // 127.0.0.1
    int port = 0;       // its own
    int leads_to = 0;   // port of the destination
    Damage damage;      // for the next connection, or the last until it has happened
    bool done = false;  // it has happened
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

// Shared by a test's links.
struct Hub {
  explicit Hub(bool encrypts);
  ~Hub();

  ps::tcp::ConnectionSettings settings;
  // This member precedes the poller, so that it outlives the poller's thread, which uses it.
  std::unique_ptr<ps::tcp::PendingPeers> pending;
  std::shared_ptr<ps::tcp::MemoryPool> pool;
  std::shared_ptr<ps::tcp::Poller> connects;
  std::shared_ptr<ps::tcp::Poller> listens;
  Relay relay;
};

// Owner of one end of a connection. It records all events of that end.
class End : public ps::tcp::ConnectionOwner {
 public:
  // `seen` records everything, and must outlive this end. Null: this end has a recorder of its own.
  explicit End(const Hub* hub, contract::Seen* seen = nullptr)
      : hub_(hub), seen_(seen == nullptr ? &own_ : seen) {}

  std::vector<std::string> texts();
  // Returns why the connection has closed; "" while it is open.
  std::string ending();
  int times_resumed();
  size_t sent_again();
  // Sets the buffer for values of messages from now on.
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

// The low bits are the generation.
constexpr uint64_t kJob = (0x5678 << 16) + 2;

class Link {
 public:
  // Connects at once. Each end has `nics` NICs, 1 or 2.
  explicit Link(Hub* hub, uint64_t listeners_job = kJob, contract::Seen* connecting = nullptr,
                contract::Seen* listening = nullptr, int nics = 1);
  ~Link();

  End connecting;
  End listening;
  int route = 0;        // over the first NIC
  int other_route = 0;  // over the second

  // Sends from the connecting end to the listener, or back. The sending end must be connected.
  void Send(bool to_listener, const std::string& text);
  void Send(bool to_listener, const ps::SArray<char>& value);
  // Returns whether the ends have received exactly these texts.
  bool Has(const std::vector<std::string>& at_listener, const std::vector<std::string>& back);
  // Returns the end that sends to the listener, or the listener's end; null until it is connected.
  ps::tcp::ConnectionPtr EndOf(bool to_listener);
  ps::tcp::ConnectionPtr connection() { return EndOf(true); }
  // The listening end's port.
  int port() const { return port_; }
  // Describes the state of both ends.
  std::string Text();
  // Makes the listener refuse to resume from now on, as after its own deadline.
  void GiveUp();
  // Makes the listener belong to this job from now on.
  void BelongTo(uint64_t job);
  // Makes the listener use another secret from now on.
  void ForgetTheSecret();

 private:
  std::string Admit(const ps::tcp::StreamPtr& socket, const ps::tcp::Hello& hello);

  Hub* const hub_;
  ps::tcp::Greeter::Host host_;
  const ps::auth::Secret other_secret_;
  const std::shared_ptr<const ps::tls::Context> other_tls_;
  // Used by the listening poller's thread.
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
