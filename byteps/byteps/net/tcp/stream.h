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

// A socket that is connected or being connected, and what encrypts it, if anything does.
class Stream {
 public:
  enum Side { kConnects, kListens };

  // Encrypted by `tls`, which outlives it, unless that is null.
  Stream(Fd fd, const tls::Context* tls, Side side);

  int fd() const { return fd_.get(); }
  // From now on what is read and written counts there.  Before other threads use it.
  void CountAt(NicCounters* counters) { counters_ = counters; }

  // One thread reads, one writes; both as readv and sendmsg with MSG_DONTWAIT do.  After EAGAIN
  // the next Write is given the same bytes once more.
  ssize_t Read(const iovec* vector, int count);
  ssize_t Write(const iovec* vector, int count);
  // The first bytes on a socket: the kernel has room for them.  That it is closed is read soon.
  void Say(const std::string& bytes);
  // What `error`, an errno of Read or Write, means.
  std::string Text(int error);
  // Whether what failed is what the other end said, so that to try again is of no use.
  bool Refused(int error) const { return tls_ && error == EPROTO; }

  bool encrypted() const { return tls_ != nullptr; }
  // Of an encrypted one, before all else; see tls::Session.
  tls::Session::Step Handshake() { return tls_->Handshake(); }
  // The other end does not encrypt, and is told so.
  void GoPlain() { tls_.reset(); }
  // Bytes that both ends of this connection know, and nobody else; "" unless encrypted.
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
