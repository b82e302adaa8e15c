#ifndef BYTEPS_NET_TCP_STREAM_H_
#define BYTEPS_NET_TCP_STREAM_H_

#include <sys/uio.h>

#include <cerrno>
#include <memory>
#include <string>

#include "byteps/net/link/counters.h"
#include "byteps/net/tcp/fd.h"
#include "byteps/net/tls/tls.h"

namespace ps {
namespace tcp {

// A socket, connected or connecting, with optional encryption.
class Stream {
 public:
  enum Side { kConnects, kListens };

  // `tls` encrypts, and must outlive this object. Null: no encryption.
  Stream(Fd fd, const tls::Context* tls, Side side);

  int fd() const { return fd_.get(); }
  // Counts bytes read and written in `counters`. Call before other threads use the stream.
  void CountAt(NicCounters* counters) { counters_ = counters; }

  // Read and Write behave like readv and sendmsg with MSG_DONTWAIT. One thread may read while
  // another writes. After EAGAIN the next Write must get the same bytes again.
  ssize_t Read(const iovec* vector, int count);
  ssize_t Write(const iovec* vector, int count);
  // Writes a part of the greeting, for which the kernel always has room. If the socket has closed,
  // the next read reports that.
  void Say(const std::string& bytes);
  // Describes `error`, an errno of Read or Write.
  std::string Text(int error);
  // Returns whether the peer caused the error deliberately, so that trying again is useless.
  bool Refused(int error) const { return tls_ && error == EPROTO; }

  bool encrypted() const { return tls_ != nullptr; }
  // Calls tls::Session::Handshake. Requires an encrypted stream, before the first Read or Write.
  tls::Session::Step Handshake() { return tls_->Handshake(); }
  // Stops encrypting, so that a peer that does not encrypt can be told why it is refused.
  void GoPlain() { tls_.reset(); }
  // Returns bytes that only the two ends of this encrypted connection know; "" without encryption.
  std::string binding() const { return tls_ ? tls_->binding() : ""; }

 private:
  ssize_t WritePlain(const iovec* vector, int count);

  Fd fd_;
  NicCounters* counters_ = nullptr;
  std::unique_ptr<tls::Session> tls_;
};
using StreamPtr = std::shared_ptr<Stream>;

}  // namespace tcp
}  // namespace ps
#endif  // BYTEPS_NET_TCP_STREAM_H_
